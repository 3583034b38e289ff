"""Hugging Face Nemotron and Minitron: layernorm1p, squared ReLU, half-rotated heads."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import (
    BIAS_KEYS,
    DenseDecoder,
    llama_keys,
    llama_names,
)

NEMOTRON_HUGGINGFACE = DenseDecoder(
    model_type="nemotron",
    model="NemotronForCausalLM",
    title="Nemotron",
    keys=llama_keys(*BIAS_KEYS, eps=("norm_eps", 1e-5), activation=("hidden_act", "relu2")),
    fixed={"norm_type": "layernorm", "norm_one_plus": True},
    names=llama_names({"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_h_to_4h_2": ""}),
    is_gated=False,
    bos=2,
    eos=3,
    rotary_fraction=0.5,
).mapping()
