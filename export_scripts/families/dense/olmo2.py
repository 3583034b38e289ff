"""Hugging Face OLMo 2: norms after attention and MLP, not before, and of queries and keys."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import (
    ATTENTION_BIAS_KEYS,
    DenseDecoder,
    llama_keys,
    llama_names,
)

OLMO2_HUGGINGFACE = DenseDecoder(
    model_type="olmo2",
    model="Olmo2ForCausalLM",
    title="OLMo 2",
    keys=llama_keys(*ATTENTION_BIAS_KEYS, eps=("rms_norm_eps", 1e-5)),
    fixed={"has_input_norms": False, "has_output_norms": True, "query_key_norm": "all"},
    names=llama_names(
        {
            "attention_output_layernorm": "post_attention_layernorm",
            "mlp_output_layernorm": "post_feedforward_layernorm",
        }
    ),
    eos=50279,
).mapping()
