"""Megatron-core models with rotary positions and RMSNorm: how heads and halves are taken apart."""

from typing import Any

import pytest
import torch
import transformers

from tests.conversions import converted, folder_of, problems_of
from tests.json_files import read_json
from tests.tiny_megatron_core import core_state, write_core


def test_norms_fused_into_the_next_linear_are_found(tmp_path):
    state = core_state(fused_norms=True)
    reader = converted(write_core(tmp_path / "a.nemo", state), tmp_path / "out")
    found = reader.read("model.layers.1.post_attention_layernorm.weight")
    assert torch.equal(found, state["model.decoder.layers.1.mlp.linear_fc1.layer_norm_weight"])


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
        (
            {"apply_embedding_scaling": True, "softmax_scale": 0.25},
            {"embedding_scale": 24**0.5, "attention_scale": 0.25},
        ),
    ],
)  # fmt: skip
def test_settings_in_the_names_of_nemo_are_carried(tmp_path, settings, expected):
    source = write_core(tmp_path / "a.nemo", core_state(), **settings)
    config = converted(source, tmp_path / "out").config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"activation": "quick-gelu"}, "activation = quick-gelu cannot be represented"),
        ({"normalization": "low_precision_layernorm"}, "known: rmsnorm, layernorm"),
        ({"num_moe_experts": 4}, "is a mixture, which has no folder of shards"),
        ({"qk_layernorm": True}, "self_attention.q_layernorm.weight is missing"),
        ({"headscale": True}, "headscale = True: heads are scaled"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None"),
        ({"mcore_customization_config": {"attn_logit_softcapping": 50.0}}, "layers are changed"),
        ({"softmax_type": "off-by-one"}, "softmax_type = 'off-by-one'"),
        (
            {"scale_positional_embedding": True, "seq_len_interpolation_factor": 4},
            "divided by 4 (seq_len_interpolation_factor) and also",
        ),
        (
            {"scale_positional_embedding": True, "low_freq_factor": 4},
            "rotary_high_freq_factor = 4.0",
        ),
    ],
)
def test_megatron_core_models_that_the_layout_cannot_hold_are_refused(tmp_path, settings, words):
    source = write_core(tmp_path / "a.nemo", core_state(), **settings)
    assert words in problems_of(source, tmp_path)


def test_transformer_engine_fp8_state_is_ignored(tmp_path):
    state = core_state()
    state["model.decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(3)
    assert problems_of(write_core(tmp_path / "a.nemo", state), tmp_path) == ""


def _with(state: dict[str, torch.Tensor], **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return tensors with further ones in each layer, and a bias for each layernorm."""
    torch.manual_seed(5)
    layers = (f"model.decoder.layers.{layer}." for layer in range(2))
    further = {
        prefix + name.replace("__", "."): torch.randn(shape)
        for prefix in layers
        for name, shape in shapes.items()
    }
    return {**state, **further}


_NORM_BIASES = {"input_layernorm__bias": (24,), "pre_mlp_layernorm__bias": (24,)}
_FINAL_BIAS = {"model.decoder.final_layernorm.bias": torch.randn(24)}
# Model type in transformers -> settings, and tensors of each layer beyond a Llama's.
_TRAINED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "qwen3": (
        {"qk_layernorm": True},
        {f"self_attention__{part}_layernorm__weight": (8,) for part in "qk"},
    ),
    "nemotron": (
        {"normalization": "layernorm1p", "activation": "squared-relu", "rotary_percentage": 0.5},
        {"mlp__linear_fc1__weight": (56, 24), **_NORM_BIASES},
    ),
    "starcoder2": (
        {"normalization": "layernorm", "activation": "gelu", "bias": True, "kv_channels": 6},
        {
            "mlp__linear_fc1__weight": (56, 24), "mlp__linear_fc1__bias": (56,),
            "mlp__linear_fc2__bias": (24,), "self_attention__linear_qkv__weight": (48, 24),
            "self_attention__linear_qkv__bias": (48,), "self_attention__linear_proj__bias": (24,),
            "self_attention__linear_proj__weight": (24, 24), **_NORM_BIASES,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", _TRAINED)
def test_todays_decoders_leave_megatron_core_as_what_they_are(kind, tmp_path):
    settings, shapes = _TRAINED[kind]
    state = _with(core_state(), **shapes) | ({} if kind == "qwen3" else _FINAL_BIAS)
    source = write_core(tmp_path / "a.nemo", state, **settings)
    folder = folder_of(
        source, tmp_path, given=(("start_id", "1"), ("end_id", "2")), output_format="huggingface"
    )
    assert read_json(folder / "config.json")["model_type"] == kind
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    found = model.state_dict()
    norm = state["model.decoder.layers.1.input_layernorm.weight"]
    assert torch.equal(found["model.layers.1.input_layernorm.weight"], norm)
    rows = state["model.decoder.layers.1.self_attention.linear_qkv.weight"].reshape(2, 4, -1, 24)
    assert torch.equal(found["model.layers.1.self_attn.k_proj.weight"], rows[:, 2].reshape(-1, 24))
