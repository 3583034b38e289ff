"""The GPT layout from Hugging Face OPT."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from export_scripts.families.gpt.layout import GPT, HEAD, LAYER, GPTConfig
from export_scripts.families.gpt.opt_int8 import check_ranges, int8_weights
from export_scripts.families.mapping.keys import decoder_values, key, written_decoder
from export_scripts.families.mapping.prompts import with_prompts
from export_scripts.families.mapping.settings import head_is_tied, huggingface_settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Compute,
    Constant,
    Copy,
    Mapped,
    PerIndex,
    StackQKV,
    TensorSource,
    Transpose,
    View,
    same,
)
from export_scripts.families.mapping.tensors import float32

# OPT has no key for it; transformers takes torch's default.
LAYERNORM_EPS = 1e-5

# The table of positions begins with two unused rows.
POSITION_OFFSET = 2

EMBEDDING = "model.decoder.embed_tokens.weight"
PROJECT_IN = "model.decoder.project_in.weight"
PROJECT_OUT = "model.decoder.project_out.weight"
LM_HEAD = "lm_head.weight"


_KEYS = (
    key("head_num", "num_attention_heads"),
    key("hidden", "hidden_size"),
    key("inter_size", "ffn_dim"),
    key("num_layer", "num_hidden_layers"),
    key("vocab_size", "vocab_size"),
    key("max_pos_seq_len", "max_position_embeddings"),
    key("activation_type", "activation_function", kind="activation", default="relu"),
)


def _config(facts: Facts) -> GPTConfig:
    """Return the GPT config of an OPT.

    Its folder always holds a separate head, as NVIDIA's converter writes it.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    norm_before = settings.flag("do_layer_norm_before", default=True)
    removed = settings.flag("_remove_final_layer_norm", default=False)
    config = GPTConfig(
        **decoder_values(facts, settings, _KEYS, name="opt", bos=2, eos=2),
        layernorm_eps=LAYERNORM_EPS,
        layernorm_type="pre_layernorm" if norm_before else "post_layernorm",
        has_post_decoder_layernorm=norm_before and not removed,
        int8=facts.activation_ranges is not None,
        tie_word_embeddings=False,
    )
    settings.finish()
    if facts.activation_ranges is not None:
        check_ranges(facts.activation_ranges, config.num_layer)
    return config


def _written(config: GPTConfig, is_tied: bool) -> list[dict[str, Any]]:
    norm_before = config.layernorm_type == "pre_layernorm"
    return [
        written_decoder("opt", "OPTForCausalLM", _KEYS, config)
        | {
            "word_embed_proj_dim": config.hidden,
            "do_layer_norm_before": norm_before,
            "_remove_final_layer_norm": norm_before and not config.has_post_decoder_layernorm,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": is_tied,
        }
    ]


def _embed_in(_: GPTConfig, table: Any, project: Any) -> Any:
    """Return (V, hidden) of a narrower table (V, w) and project_in (hidden, w)."""
    return float32(table) @ float32(project).T


def _embed_out(_: GPTConfig, table: Any, project: Any) -> Any:
    """Return (V, hidden) of a narrower table (V, w) and project_out (w, hidden)."""
    return float32(table) @ float32(project)


def _without_offset(table: Any, _: GPTConfig) -> Any:
    return table[POSITION_OFFSET:]


def _with_offset(shape: tuple[int, ...]) -> View:
    rows, width = shape
    stored = (rows + POSITION_OFFSET, width)
    return dataclasses.replace(same(shape, stored=stored), zero_rows=POSITION_OFFSET)


_L = "model.decoder.layers.{layer}."
_NORMS = {
    LAYER + "input_layernorm": _L + "self_attn_layer_norm",
    LAYER + "post_attention_layernorm": _L + "final_layer_norm",
    "model.final_layernorm": "model.decoder.final_layer_norm",
}
_LINEAR = {
    "attention.dense": ("self_attn.out_proj", "hidden"),
    "mlp.dense_h_to_4h": ("fc1", "inter_size"),
    "mlp.dense_4h_to_h": ("fc2", "hidden"),
}


def _weights(facts: Facts, _: GPTConfig) -> Mapping[str, TensorSource | PerIndex]:
    """Return each GPT tensor's source."""
    bias = facts.config.get("enable_bias", True)
    affine = facts.config.get("layer_norm_elementwise_affine", True)
    q, k, v = (f"{_L}self_attn.{part}_proj." for part in "qkv")
    qkv = LAYER + "attention.query_key_value."
    return {
        **_embeddings(facts),
        **(int8_weights(facts.activation_ranges) if facts.activation_ranges is not None else {}),
        "model.wpe": Mapped(
            "model.decoder.embed_positions.weight", _without_offset, view=_with_offset
        ),
        **{
            f"{ours}.{kind}": Copy(f"{theirs}.{kind}") if affine else _neutral(kind)
            for ours, theirs in _NORMS.items()
            for kind in ("weight", "bias")
        },
        qkv + "weight": StackQKV(q + "weight", k + "weight", v + "weight"),
        qkv + "bias": StackQKV(q + "bias", k + "bias", v + "bias")
        if bias
        else Constant((3, "hidden")),
        **{f"{LAYER}{o}.weight": Transpose(f"{_L}{t}.weight") for o, (t, _) in _LINEAR.items()},
        **{
            f"{LAYER}{ours}.bias": Copy(f"{_L}{theirs}.bias") if bias else Constant((width,))
            for ours, (theirs, width) in _LINEAR.items()
        },
    }


def _is_tied(facts: Facts) -> bool:
    settings = huggingface_settings(facts.config)
    return head_is_tied(facts, settings, LM_HEAD, EMBEDDING, default=True)


def _embeddings(facts: Facts) -> dict[str, TensorSource]:
    """Return embedding and head; opt-350m stores both narrow, with a projection each."""
    head = EMBEDDING if _is_tied(facts) else LM_HEAD
    return {
        "model.wte": Compute(_embed_in, (EMBEDDING, PROJECT_IN))
        if facts.has(PROJECT_IN)
        else Copy(EMBEDDING),
        HEAD: Compute(_embed_out, (head, PROJECT_OUT)) if facts.has(PROJECT_OUT) else Copy(head),
    }


def _neutral(kind: str) -> TensorSource:
    """Return a neutral layernorm parameter, for models that store none."""
    return Constant(("hidden",)) if kind == "bias" else Constant(("hidden",), 1.0)


OPT_HUGGINGFACE = with_prompts(
    SourceMapping(
        name="huggingface-opt",
        title="Hugging Face OPT",
        family=GPT,
        format="huggingface",
        matches=lambda facts: facts.config.get("model_type") == "opt",
        config=_config,
        written=_written,
        weights=_weights,
        ignored=("*decoder.version",),
        copies=lambda facts, _: (LM_HEAD,) if _is_tied(facts) else (),
        prefix="model.",
        accepts=("activation_ranges",),
    )
)
