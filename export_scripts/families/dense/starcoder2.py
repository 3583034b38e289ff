"""Hugging Face StarCoder2: layernorms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import (
    DenseDecoder,
    llama_keys,
    llama_names,
    stated_window,
    window_fields,
)
from export_scripts.families.mapping.huggingface import key

_BIASES = ("has_mlp_bias", "has_attention_dense_bias", "has_qkv_bias")

STARCODER2_HUGGINGFACE = DenseDecoder(
    model_type="starcoder2",
    model="Starcoder2ForCausalLM",
    title="StarCoder2",
    keys=llama_keys(
        *(key(field, "use_bias", kind="flag", default=True) for field in _BIASES),
        eps=("norm_epsilon", 1e-5),
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
    fixed={"norm_type": "layernorm"},
    names=llama_names({"mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}),
    read=lambda settings, values: window_fields(
        settings, values["num_layer"], stated_window(settings)
    ),
    written=lambda config: {"sliding_window": config.sliding_window},
    is_gated=False,
    is_tied=True,
    bos=50256,
    eos=50256,
).mapping()
