"""Hugging Face Llama: every version, with any scaling of rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import RMS_KEYS, DenseDecoder
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.mapping.keys import key
from export_scripts.families.mapping.source_mapping import Facts

BIAS_KEYS = (
    key("has_qkv_bias", "attention_bias", kind="flag", default=False),
    key("has_mlp_bias", "mlp_bias", kind="flag", default=False),
)


def all_attention_biases(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bias of attention's output, which goes with those of queries, keys and values."""
    return {"has_attention_dense_bias": values["has_qkv_bias"]}


def _warnings(facts: Facts, _: DenseConfig) -> list[str]:
    window = facts.config.get("sliding_window")
    if window is None:
        return []
    return [f"config.json: sliding_window = {window} is left out: a Llama has none in transformers"]


LLAMA_HUGGINGFACE = DenseDecoder(
    model_type="llama",
    model="LlamaForCausalLM",
    title="Llama",
    keys=(*RMS_KEYS, *BIAS_KEYS),
    read=all_attention_biases,
    bos=1,
    eos=2,
    warnings=_warnings,
    warns_of_fp16=False,  # served in fp16 everywhere
).mapping()
