"""Hugging Face Granite: a Llama with four constant factors."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import BIAS_KEYS, DenseDecoder, llama_keys
from export_scripts.families.mapping.huggingface import key, reciprocal

GRANITE_HUGGINGFACE = DenseDecoder(
    model_type="granite",
    model="GraniteForCausalLM",
    title="Granite",
    keys=llama_keys(
        *BIAS_KEYS,
        key("embedding_scale", "embedding_multiplier", kind="number", default=1.0),
        key("residual_scale", "residual_multiplier", kind="number", default=1.0),
        key("attention_scale", "attention_multiplier", kind="number", default=1.0),
        key("logit_scale", "logits_scaling", kind="number", default=1.0, inverse=reciprocal),
    ),
    bos=1,
    eos=2,
).mapping()
