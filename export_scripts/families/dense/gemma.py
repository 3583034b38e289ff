"""Hugging Face Gemma 2 and the text models of Gemma 3: norms before and after each half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    ATTENTION_BIAS_KEYS,
    HF_LAYER,
    KEYS,
    NAMES,
    DenseDecoder,
    window_fields,
    written_windows,
)
from export_scripts.families.mapping.keys import inverse_root, key
from export_scripts.families.mapping.names import in_layers
from export_scripts.families.mapping.settings import Settings

_NAMES = {
    **NAMES,
    **in_layers(
        HF_LAYER,
        {
            "attention_output_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "mlp_output_layernorm": "post_feedforward_layernorm",
        },
    ),
}
_FIXED = {
    "norm_one_plus": True,
    "has_output_norms": True,
    "embedding_scale": lambda known: math.sqrt(known["hidden_size"]),
}


def _keys(logit_cap: float | None, attention_cap: float | None) -> tuple[Any, ...]:
    return (
        *KEYS,
        key("layernorm_eps", "rms_norm_eps", kind="number", default=1e-6),
        key(
            "activation_type",
            "hidden_activation",
            kind="activation",
            default="gelu_pytorch_tanh",
        ),
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
    )


def _read(settings: Settings, values: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    """Return the window, of all layers but every `pattern`-th."""
    count = values["num_layer"]
    window = settings.optional("sliding_window", default=4096)
    usual = [bool((number + 1) % pattern) for number in range(count)]
    return window_fields(settings, count, None if window is None else int(window), usual)


_COMMON: dict[str, Any] = {
    "names": _NAMES,
    "expected": {
        "use_bidirectional_attention": ((None, False), "attention is causal"),
    },
    "written": written_windows,
    "head_dim": 256,
    "is_tied": True,
    "bos": 2,
    "eos": 1,
}

GEMMA2_HUGGINGFACE = DenseDecoder(
    model_type="gemma2",
    model="Gemma2ForCausalLM",
    title="Gemma 2",
    keys=_keys(30.0, 50.0),
    fixed=_FIXED,
    read=lambda settings, values: _read(settings, values, 2),
    **_COMMON,
).mapping()

GEMMA3_HUGGINGFACE = DenseDecoder(
    model_type="gemma3_text",
    model="Gemma3ForCausalLM",
    title="Gemma 3 text",
    keys=_keys(None, None),
    fixed={**_FIXED, "query_key_norm": "head"},
    read=lambda settings, values: _read(
        settings, values, settings.integer("sliding_window_pattern", default=6)
    ),
    rotary_base=1e6,
    rotary_local_base=1e4,
    **_COMMON,
).mapping()
