"""Hugging Face Nemotron and Minitron: layernorm1p, squared ReLU, half-rotated heads."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import BIAS_KEYS, HF_LAYER, KEYS, NAMES, DenseDecoder
from export_scripts.families.mapping.keys import key
from export_scripts.families.mapping.names import in_layers

_NAMES = {
    **{name: theirs for name, theirs in NAMES.items() if not name.endswith("_2")},
    **in_layers(HF_LAYER, {"mlp.dense_h_to_4h": "mlp.up_proj"}),
}

NEMOTRON_HUGGINGFACE = DenseDecoder(
    model_type="nemotron",
    model="NemotronForCausalLM",
    title="Nemotron",
    keys=(
        *KEYS,
        *BIAS_KEYS,
        key("layernorm_eps", "norm_eps", kind="number", default=1e-5),
        key("activation_type", "hidden_act", kind="any_activation", default="relu2"),
    ),
    fixed={"norm_type": "layernorm", "norm_one_plus": True},
    names=_NAMES,
    is_gated=False,
    bos=2,
    eos=3,
    rotary_fraction=0.5,
).mapping()
