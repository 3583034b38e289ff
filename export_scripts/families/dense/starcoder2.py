"""Hugging Face StarCoder2: layernorms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import (
    HF_LAYER,
    KEYS,
    NAMES,
    DenseDecoder,
    stated_window,
    window_fields,
)
from export_scripts.families.mapping.keys import key
from export_scripts.families.mapping.names import in_layers

_NAMES = {
    **NAMES,
    **in_layers(HF_LAYER, {"mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}),
}


STARCODER2_HUGGINGFACE = DenseDecoder(
    model_type="starcoder2",
    model="Starcoder2ForCausalLM",
    title="StarCoder2",
    keys=(
        *KEYS,
        key("layernorm_eps", "norm_epsilon", kind="number", default=1e-5),
        key("activation_type", "hidden_act", kind="activation", default="gelu_pytorch_tanh"),
        *(
            key(field, "use_bias", kind="flag", default=True)
            for field in ("has_mlp_bias", "has_attention_dense_bias", "has_qkv_bias")
        ),
    ),
    fixed={"norm_type": "layernorm"},
    names=_NAMES,
    read=lambda settings, values: window_fields(
        settings, values["num_layer"], stated_window(settings)
    ),
    written=lambda config: {"sliding_window": config.sliding_window},
    is_gated=False,
    is_tied=True,
    bos=50256,
    eos=50256,
).mapping()
