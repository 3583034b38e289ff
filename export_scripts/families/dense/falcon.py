"""Hugging Face Falcon: 7B, the decoder architecture of 40B and 180B, and RW with ALiBi.

Attention and MLP read the same input, through one norm (7B, 11B) or two (40B, 180B); RW is
sequential. Queries, keys and values are in one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import DenseDecoder
from export_scripts.families.dense.layout import LAYOUT, DenseConfig
from export_scripts.families.mapping.huggingface import key
from export_scripts.families.mapping.names import QUERY_KEY_VALUE, in_layers, named_sources
from export_scripts.families.mapping.settings import Settings

_LAYER = "transformer.h.{layer}."
_NAMES = {
    "model.wte": "transformer.word_embeddings",
    "model.final_layernorm": "transformer.ln_f",
    "model.lm_head": "lm_head",
    **in_layers(
        _LAYER,
        {
            "input_layernorm": "input_layernorm",
            **dict.fromkeys(QUERY_KEY_VALUE, "self_attention.query_key_value"),
            "attention.dense": "self_attention.dense",
            "post_attention_layernorm": "post_attention_layernorm",
            "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
        },
    ),
}
_TWO_NORMS = in_layers(_LAYER, {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"})


def _read(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    is_new = settings.flag("new_decoder_architecture", default=False)
    is_parallel = settings.flag("parallel_attn", default=True)
    norms = settings.integer("num_ln_in_parallel_attn", default=2 if is_new else 1)
    kv_heads, heads = values["head_num"], values["head_num"]
    if is_new:
        kv_heads = settings.integer("num_kv_heads", default=heads)
        settings.divide(heads, kv_heads, "num_attention_heads by num_kv_heads")
    elif settings.flag("multi_query", default=True):
        kv_heads = 1
    if is_new and not is_parallel:
        settings.note(
            "parallel_attn = false with new_decoder_architecture = true: "
            "transformers has no such model"
        )
    residual = ("parallel_shared", "parallel")[is_new and norms == 2]
    has_bias = settings.flag("bias", default=False)
    return {
        "kv_head_num": kv_heads,
        "residual": residual if is_new or is_parallel else "sequential",
        **dict.fromkeys(("has_qkv_bias", "has_attention_dense_bias", "has_mlp_bias"), has_bias),
    }


def _written(config: DenseConfig) -> dict[str, Any]:
    is_sequential = config.residual == "sequential"
    is_new = not is_sequential and config.kv_head_num > 1
    return {
        "head_dim": None,
        "new_decoder_architecture": is_new,
        "num_kv_heads": config.kv_head_num,
        "multi_query": config.kv_head_num == 1,
        "parallel_attn": not is_sequential,
        "num_ln_in_parallel_attn": (1 + (config.residual == "parallel")) if is_new else None,
        "bias": config.has_qkv_bias,
    }


FALCON_HUGGINGFACE = DenseDecoder(
    model_type="falcon",
    model="FalconForCausalLM",
    title="Falcon",
    keys=(
        key("head_num", "num_attention_heads", "n_head"),
        key("hidden_size", "hidden_size", "n_embed"),
        key("inter_size", "ffn_hidden_size", default=lambda known: 4 * known["hidden_size"]),
        key("num_layer", "num_hidden_layers", "n_layer"),
        key("vocab_size", "vocab_size"),
        key("max_pos_seq_len", "max_position_embeddings", default=2048),
        key("layernorm_eps", "layer_norm_epsilon", kind="number", default=1e-5),
        key("activation_type", "activation", kind="activation", default="gelu"),
    ),
    fixed={"norm_type": "layernorm"},
    expected={
        "alibi": ((False, None), "its scores are rounded to bf16 and scaled, unlike other ALiBi")
    },
    names=_NAMES,
    # Norms of attention and MLP have names of their own where both read the same input.
    sources=lambda _, config: (
        named_sources(_TWO_NORMS, LAYOUT) if config.residual == "parallel" else {}
    ),
    rows="groups",
    read=_read,
    written=_written,
    is_gated=False,
    is_tied=True,
    bos=11,
    eos=11,
    prefix="transformer.",
).mapping()
