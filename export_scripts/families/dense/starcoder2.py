"""Hugging Face StarCoder2: layernorms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    HF_LAYER,
    KEYS,
    NAMES,
    DenseDecoder,
    window_fields,
)
from export_scripts.families.mapping.keys import key
from export_scripts.families.mapping.names import in_layers
from export_scripts.families.mapping.settings import Settings

_NAMES = {
    **NAMES,
    **in_layers(HF_LAYER, {"mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}),
}


def _read(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    count, has_bias = values["num_layer"], values["has_qkv_bias"]
    in_use = settings.source.get("sliding_window") is not None
    window = settings.integer("sliding_window") if in_use else None
    return {
        "has_attention_dense_bias": has_bias,
        "has_mlp_bias": has_bias,
        **window_fields(settings, count, window, [True] * count),
    }


STARCODER2_HUGGINGFACE = DenseDecoder(
    model_type="starcoder2",
    model="Starcoder2ForCausalLM",
    title="StarCoder2",
    keys=(
        *KEYS,
        key("layernorm_eps", "norm_epsilon", kind="number", default=1e-5),
        key("activation_type", "hidden_act", kind="activation", default="gelu_pytorch_tanh"),
        key("has_qkv_bias", "use_bias", kind="flag", default=True),
    ),
    fixed={"norm_type": "layernorm"},
    names=_NAMES,
    read=_read,
    written=lambda config: {"sliding_window": config.sliding_window},
    is_gated=False,
    is_tied=True,
    bos=50256,
    eos=50256,
).mapping()
