"""Hugging Face Gemma, Gemma 2 and the text models of Gemma 3.

The two later ones normalise what attention and MLP add, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    ATTENTION_BIAS_KEYS,
    DenseDecoder,
    llama_keys,
    llama_names,
    window_fields,
    written_windows,
)
from export_scripts.families.mapping.huggingface import Setting, inverse_root, key
from export_scripts.families.mapping.settings import Settings

_NAMES = llama_names(
    {
        "attention_output_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_layernorm": "post_feedforward_layernorm",
    }
)
_FIXED = {"norm_one_plus": True, "embedding_scale": lambda known: math.sqrt(known["hidden_size"])}
_FIXED2 = {**_FIXED, "has_output_norms": True}


_GELU = "gelu_pytorch_tanh"


def _keys(logit_cap: float | None, attention_cap: float | None) -> tuple[Setting, ...]:
    return llama_keys(
        *ATTENTION_BIAS_KEYS,
        key(
            "attention_scale",
            "query_pre_attn_scalar",
            kind="number",
            default=256,
            inverse=inverse_root,
        ),
        key("logit_softcap", "final_logit_softcapping", kind="optional", default=logit_cap),
        key("attention_softcap", "attn_logit_softcapping", kind="optional", default=attention_cap),
        activation=("hidden_activation", _GELU),
    )


def _read(settings: Settings, values: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    """Return the window, of all layers but every `pattern`-th."""
    count = values["num_layer"]
    is_off = settings.source.get("sliding_window", 0) is None
    window = None if is_off else settings.integer("sliding_window", default=4096)
    usual = [bool((number + 1) % pattern) for number in range(count)]
    return window_fields(settings, count, window, usual)


_COMMON: dict[str, Any] = {
    "expected": {"use_bidirectional_attention": ((None, False), "attention is causal")},
    "head_dim": 256,
    "is_tied": True,
    "bos": 2,
    "eos": 1,
}

# Older files call its activation gelu, and mean the tanh form.
GEMMA_HUGGINGFACE = DenseDecoder(
    model_type="gemma",
    model="GemmaForCausalLM",
    title="Gemma",
    keys=llama_keys(*ATTENTION_BIAS_KEYS, activation=("hidden_act", _GELU)),
    fixed={**_FIXED, "exact_gelu": False},
    **_COMMON,
).mapping()

GEMMA2_HUGGINGFACE = DenseDecoder(
    model_type="gemma2",
    model="Gemma2ForCausalLM",
    title="Gemma 2",
    keys=_keys(30.0, 50.0),
    names=_NAMES,
    fixed=_FIXED2,
    read=lambda settings, values: _read(settings, values, 2),
    written=written_windows,
    **_COMMON,
).mapping()

GEMMA3_HUGGINGFACE = DenseDecoder(
    model_type="gemma3_text",
    model="Gemma3ForCausalLM",
    title="Gemma 3 text",
    keys=_keys(None, None),
    names=_NAMES,
    fixed={**_FIXED2, "query_key_norm": "head"},
    read=lambda settings, values: _read(
        settings, values, settings.integer("sliding_window_pattern", default=6)
    ),
    written=written_windows,
    rotary_base=1e6,
    rotary_local_base=1e4,
    **_COMMON,
).mapping()
