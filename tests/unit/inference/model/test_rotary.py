"""Rotary angles against the library whose models use them."""

import pytest
import torch

from export_scripts.families.layout.architecture import Rotary
from inference.model.rotary import RotaryTable, position_shift

POSITIONS = torch.tensor([0, 1, 7, 100, 1000])


def table(rotary: Rotary, *, interleaved: bool = False) -> RotaryTable:
    return RotaryTable(
        rotary, interleaved=interleaved, device=torch.device("cpu"), dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        (None, {}),
        ("linear", {"factor": 4.0}),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4, "truncate": False}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4, "truncate": True}),
    ],
)
def test_angles_equal_the_library(kind, scaling):
    llama = pytest.importorskip("transformers.models.llama")
    config = llama.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, "rope_type": kind or "default", **scaling},
    )
    embedding = llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), POSITIONS.unsqueeze(0))
    angles = table(Rotary(dims=16, kind=kind, scaling=scaling))(POSITIONS)
    torch.testing.assert_close(angles.cos[:, 0], cos[0])
    torch.testing.assert_close(angles.sin[:, 0], sin[0])


@pytest.mark.parametrize("length", [128, 129])
def test_longrope_has_other_factors_beyond_the_original_length(length):
    phi3 = pytest.importorskip("transformers.models.phi3")
    short, long = ([base + n / 8 for n in range(8)] for base in (1.0, 3.0))
    given = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 128}
    config = phi3.Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **given},
    )
    positions = torch.tensor([0, 5, length - 1])
    embedding = phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), positions.unsqueeze(0))
    rotary = Rotary(
        dims=16,
        kind="longrope",
        scaling={**given, "attention_factor": embedding.attention_scaling},
    )
    angles = table(rotary)(positions + position_shift(rotary, length))
    torch.testing.assert_close(angles.cos[:, 0], cos[0])
    torch.testing.assert_close(angles.sin[:, 0], sin[0])


def test_layers_without_longrope_pass_over_the_shift_of_those_with_it():
    scaling = {"original_max_position_embeddings": 4}
    shift = position_shift(Rotary(dims=16, kind="longrope", scaling=scaling), 5)
    plain = table(Rotary(dims=16))
    assert shift
    assert plain(POSITIONS + shift).cos.equal(plain(POSITIONS).cos)
