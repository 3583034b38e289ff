"""Llama-style models: which are taken, how heads are divided, and megatron-core's variants."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from export_scripts.convert import ConversionRequest, check_conversion, convert
from export_scripts.families.llama import LLAMA, LlamaConfig, llama_architecture
from tests.tiny import torch_bytes, write_tar
from tests.tiny_huggingface import converted

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 56, "vocab_size": 53,
    "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    h, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], h),
        "lm_head.weight": (config["vocab_size"], h),
        "model.norm.weight": (h,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (h,),
            prefix + "post_attention_layernorm.weight": (h,),
            prefix + "self_attn.q_proj.weight": (n * d, h),
            prefix + "self_attn.k_proj.weight": (k * d, h),
            prefix + "self_attn.v_proj.weight": (k * d, h),
            prefix + "self_attn.o_proj.weight": (h, n * d),
            prefix + "mlp.gate_proj.weight": (f, h),
            prefix + "mlp.up_proj.weight": (f, h),
            prefix + "mlp.down_proj.weight": (h, f),
        }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_llama(folder: Path, **changes: Any) -> Path:
    config = CONFIG | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors(config), folder / "model.safetensors")
    return folder


def problems_of(source: Path, tmp_path: Path, tp_size: int = 1) -> str:
    return "\n".join(check_conversion(ConversionRequest(source, tmp_path / "o", tp_size, "fp32")))


def config_for(tp_size: int, **changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "model_name": "x", "head_num": 12, "kv_head_num": 4, "size_per_head": 8, "hidden_size": 72,
        "inter_size": 96, "num_layer": 2, "vocab_size": 53, "max_pos_seq_len": 40, "start_id": 1,
        "end_id": 2, "layernorm_eps": 1e-5, "rotary_embedding": 8, "weight_data_type": "fp32",
        "tensor_para_size": tp_size,
    }  # fmt: skip
    return LlamaConfig(**values | changes)


@pytest.mark.parametrize(("tp_size", "stored"), [(1, 4), (2, 4), (4, 4), (12, 12)])
def test_every_rank_has_a_key_head(tp_size: int, stored: int) -> None:
    architecture = llama_architecture(config_for(tp_size))
    assert architecture.kv_head_num == stored
    assert architecture.kv_head_num % tp_size == 0


def test_ranks_that_neither_divide_nor_are_multiples_of_the_key_heads_are_refused(
    tmp_path: Path,
) -> None:
    source = write_llama(tmp_path / "s", num_attention_heads=12, num_key_value_heads=4)
    text = problems_of(source, tmp_path, tp_size=6)
    assert "does not divide kv_head_num=4" in text
    assert "use 1, 2 or 4" in text
    text = problems_of(source, tmp_path, tp_size=8)
    assert "does not divide head_num=12" in text


def test_fastertransformer_is_known_not_to_serve_it() -> None:
    assert not LLAMA.ft_backend


def test_the_configuration_is_read_back_as_written(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    source = write_llama(tmp_path / "s", rope_theta=5e5, rope_scaling=scaling)
    config = converted(source, tmp_path / "out", tp_size=2).config
    rotary = llama_architecture(config).rotary
    assert rotary is not None
    assert (rotary.base, rotary.dims) == (5e5, 8)
    assert dict(rotary.scaling) == {
        "type": "llama3", "factor": "8.0", "low_freq_factor": "1.0", "high_freq_factor": "4.0",
        "original_max_position_embeddings": "16",
    }  # fmt: skip
    assert (config.head_num, config.kv_head_num, config.hidden_size) == (4, 2, 24)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "without low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "of their own"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 cannot be represented"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu cannot be represented"),
        ({"num_key_value_heads": 3}, "4 does not divide by 3"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
             "max_window_layers": 1},
            "only some layers attend in a sliding window",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8,
             "layer_types": ["full_attention", "sliding_attention"]},
            "only some layers attend in a sliding window",
        ),
    ],
)  # fmt: skip
def test_what_the_layout_cannot_hold_is_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    assert words in problems_of(write_llama(tmp_path / "s", **settings), tmp_path)


def test_normalised_queries_are_unknown_tensors(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "s")
    state = tensors(CONFIG) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}
    safetensors.torch.save_file(state, source / "model.safetensors")
    assert "q_norm.weight [[8]] is an unknown tensor" in problems_of(source, tmp_path)


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, 8),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}, None),
        ({"model_type": "qwen2", "sliding_window": 8}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
          "max_window_layers": 2}, None),
    ],
)  # fmt: skip
def test_the_sliding_window_follows_the_kind_of_model(
    tmp_path: Path, settings: dict[str, Any], window: int | None
) -> None:
    source = write_llama(tmp_path / "s", **settings)
    assert converted(source, tmp_path / "out").config.sliding_window == window


@pytest.mark.parametrize(
    ("generation", "given", "expected"),
    [
        ({"bos_token_id": 4, "eos_token_id": [5, 6]}, (), (4, 5)),
        ({"eos_token_id": 5}, (), (5, 5)),
        ({}, (("start_id", "8"), ("end_id", "9")), (8, 9)),
    ],
)
def test_token_ids_set_to_null_are_looked_for_elsewhere(
    tmp_path: Path, generation: dict[str, Any], given: Any, expected: tuple[int, int]
) -> None:
    source = write_llama(tmp_path / "s", bos_token_id=None, eos_token_id=None)
    (source / "generation_config.json").write_text(json.dumps(generation))
    config = converted(source, tmp_path / "out", given=given).config
    assert (config.start_id, config.end_id) == expected


def test_unknown_token_ids_are_asked_for(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "s", model_type="qwen2", bos_token_id=None, eos_token_id=None)
    assert "state --set start_id=.. --set end_id=.." in problems_of(source, tmp_path)


@pytest.mark.parametrize(("kind", "warned"), [("qwen2", True), ("llama", False)])
def test_fp16_is_warned_about_where_it_is_known_to_overflow(
    tmp_path: Path, kind: str, warned: bool
) -> None:
    source = write_llama(tmp_path / "s", model_type=kind, torch_dtype="bfloat16")
    summary = convert(ConversionRequest(source, tmp_path / "out", 1, "fp16"))
    assert any("trained in bf16" in remark for remark in summary.remarks) is warned


def test_further_end_tokens_are_told(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "s", eos_token_id=[2, 7, 9])
    summary = convert(ConversionRequest(source, tmp_path / "out", 1, "fp32"))
    assert any("end_id is 2" in remark and "7, 9" in remark for remark in summary.remarks)


# --- megatron-core --------------------------------------------------------------------------

CORE: dict[str, Any] = {
    "mcore_gpt": True, "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 56,
    "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
    "max_position_embeddings": 40, "layernorm_epsilon": 1e-5, "normalization": "rmsnorm",
    "position_embedding_type": "rope", "activation": "fast-swiglu", "bias": False,
    "share_embeddings_and_output_weights": False, "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"},
}  # fmt: skip


def core_state(*, fused_norms: bool = False) -> dict[str, torch.Tensor]:
    """Return megatron-core's names; Transformer Engine fuses norms into the next linear."""
    norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    if fused_norms:
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embedding.word_embeddings.weight": (53, 24),
        "model.output_layer.weight": (53, 24),
        "model.decoder.final_layernorm.weight": (24,),
    }
    for layer in range(2):
        prefix = f"model.decoder.layers.{layer}."
        shapes |= {
            prefix + norms[0]: (24,),
            prefix + norms[1]: (24,),
            prefix + "self_attention.linear_qkv.weight": (2 * (2 + 2) * 8, 24),
            prefix + "self_attention.linear_proj.weight": (24, 32),
            prefix + "mlp.linear_fc1.weight": (112, 24),
            prefix + "mlp.linear_fc2.weight": (24, 56),
        }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_core(path: Path, state: dict[str, torch.Tensor], **changes: Any) -> Path:
    settings = json.dumps(CORE | changes).encode()
    members = {"model_config.yaml": settings, "model_weights.ckpt": torch_bytes(state)}
    return write_tar(path, members)


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
        ({"scale_positional_embedding": True}, {"rotary_scaling_type": "llama3"}),
        ({"window_size": [7, 0]}, {"sliding_window": 8}),
    ],
)
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
        ({"num_moe_experts": 4}, "4 experts"),
        ({"qk_layernorm": True}, "qk_layernorm = true"),
        ({"rotary_interleaved": True}, "rotary_interleaved = true"),
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
