"""Hugging Face OLMo 2: norms after attention and MLP, not before, and of queries and keys."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import (
    ATTENTION_BIAS_KEYS,
    HF_LAYER,
    KEYS,
    NAMES,
    DenseDecoder,
)
from export_scripts.families.mapping.keys import key
from export_scripts.families.mapping.names import in_layers

_NAMES = {
    **NAMES,
    **in_layers(
        HF_LAYER,
        {
            "attention_output_layernorm": "post_attention_layernorm",
            "mlp_output_layernorm": "post_feedforward_layernorm",
        },
    ),
}

OLMO2_HUGGINGFACE = DenseDecoder(
    model_type="olmo2",
    model="Olmo2ForCausalLM",
    title="OLMo 2",
    keys=(
        *KEYS,
        key("layernorm_eps", "rms_norm_eps", kind="number", default=1e-5),
        key("activation_type", "hidden_act", kind="activation", default="silu"),
        *ATTENTION_BIAS_KEYS,
    ),
    fixed={"has_input_norms": False, "has_output_norms": True, "query_key_norm": "all"},
    names=_NAMES,
    eos=50279,
).mapping()
