"""Megatron-core models with rotary positions and RMSNorm: how heads and halves are taken apart."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, check_conversion
from tests.tiny_huggingface import converted
from tests.tiny_megatron_core import core_state, write_core


def problems_of(source: Path, tmp_path: Path) -> str:
    return "\n".join(check_conversion(ConversionRequest(source, tmp_path / "o", 1, "fp32")))


def test_norms_fused_into_the_next_linear_are_found(tmp_path: Path) -> None:
    state = core_state(fused_norms=True)
    reader = converted(write_core(tmp_path / "a.nemo", state), tmp_path / "out")
    found = reader.read("model.layers.1.post_attention_layernorm.weight")
    assert torch.equal(found, state["model.decoder.layers.1.mlp.linear_fc1.layer_norm_weight"])


def test_scales_stored_around_zero_get_their_one(tmp_path: Path) -> None:
    state = core_state()
    source = write_core(tmp_path / "a.nemo", state, layernorm_zero_centered_gamma=True)
    found = converted(source, tmp_path / "out").read("model.final_layernorm.weight")
    assert torch.equal(found, state["model.decoder.final_layernorm.weight"] + 1)


def test_queries_keys_and_values_are_taken_from_each_group(tmp_path: Path) -> None:
    state = core_state()
    reader = converted(write_core(tmp_path / "a.nemo", state), tmp_path / "out", tp_size=2)
    rows = state["model.decoder.layers.0.self_attention.linear_qkv.weight"]
    second = rows.view(2, 4, 8, 24)[1]  # rank 1 of 2 owns the second group
    layer = "model.layers.0.attention."
    assert torch.equal(reader.read(layer + "query.weight", 1), second[:2].reshape(16, 24).t())
    assert torch.equal(reader.read(layer + "key.weight", 1), second[2].t())
    assert torch.equal(reader.read(layer + "value.weight", 1), second[3].t())


def test_qkv_biases_are_divided_like_their_weights(tmp_path: Path) -> None:
    name = "model.decoder.layers.{}.self_attention.linear_qkv.bias"
    state = core_state() | {name.format(i): torch.randn(64) for i in (0, 1)}
    source = write_core(tmp_path / "a.nemo", state, qkv_bias=True)
    reader = converted(source, tmp_path / "out", tp_size=4)
    groups = state[name.format(0)].view(2, 4, 8)
    assert torch.equal(reader.read("model.layers.0.attention.query.bias", 3), groups[1, 1])
    assert torch.equal(reader.read("model.layers.0.attention.key.bias", 3), groups[1, 2])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rotary_percentage": 0.5}, {"rotary_embedding": 4, "rotary_scaling_type": None}),
        ({"seq_len_interpolation_factor": 2}, {"rotary_scaling_type": "linear"}),
        (
            {"scale_positional_embedding": True},
            {"rotary_scaling_type": "llama3", "rotary_factor": 8.0,
             "rotary_original_max_position_embeddings": 8192},
        ),
        (
            {"scale_positional_embedding": True, "scale_factor": 32, "old_context_len": 4096},
            {"rotary_factor": 32.0, "rotary_original_max_position_embeddings": 4096},
        ),
        ({"window_size": [7, 0]}, {"sliding_window": 8}),
    ],
)  # fmt: skip
def test_settings_of_megatron_core_are_carried(
    tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    source = write_core(tmp_path / "a.nemo", core_state(), **settings)
    config = converted(source, tmp_path / "out").config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"activation": "gelu"}, "activation = gelu: expected a gated one"),
        ({"num_moe_experts": 4}, "mixture of experts"),
        ({"qk_layernorm": True}, "self_attention.q_layernorm.weight is missing"),
        ({"rotary_interleaved": True}, "rotary_interleaved = true"),
        ({"apply_embedding_scaling": True}, "the embedding is multiplied by sqrt(hidden_size)"),
        ({"mcore_customization_config": {"attn_logit_softcapping": 50.0}}, "layers are changed"),
        ({"softmax_type": "off-by-one"}, "softmax_type = off-by-one"),
    ],
)
def test_megatron_core_models_that_the_layout_cannot_hold_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    source = write_core(tmp_path / "a.nemo", core_state(), **settings)
    assert words in problems_of(source, tmp_path)


def test_megatron_lm_saves_the_same_tensors_with_arguments(tmp_path: Path) -> None:
    state = core_state()
    arguments = {
        "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56, "num_attention_heads": 4,
        "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8,
        "max_position_embeddings": 40, "norm_epsilon": 1e-5, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True, "rotary_base": 500000,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    }  # fmt: skip
    folder = tmp_path / "iter_0000007" / "mp_rank_00"
    folder.mkdir(parents=True)
    content = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "model": {name.removeprefix("model."): value for name, value in state.items()},
    }
    torch.save(content, folder / "model_optim_rng.pt")
    given = (("start_id", "1"), ("end_id", "2"))
    reader = converted(folder.parent, tmp_path / "out", given=given)
    assert reader.config.rotary_base == 500000
    gate = state["model.decoder.layers.1.mlp.linear_fc1.weight"][:56]
    assert torch.equal(reader.read("model.layers.1.mlp.dense_h_to_4h.weight"), gate.t())


def test_transformer_engine_fp8_state_is_ignored(tmp_path: Path) -> None:
    state = core_state()
    state["model.decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(3)
    assert problems_of(write_core(tmp_path / "a.nemo", state), tmp_path) == ""
