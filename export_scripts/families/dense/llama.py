"""Hugging Face Llama: every version, with any scaling of rotary positions."""

from __future__ import annotations

from export_scripts.families.dense.huggingface import BIAS_KEYS, DenseDecoder, llama_keys
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.mapping.source_mapping import Facts


def _warnings(facts: Facts, _: DenseConfig) -> list[str]:
    window = facts.config.get("sliding_window")
    if window is None:
        return []
    return [f"config.json: sliding_window = {window} is left out: a Llama has none in transformers"]


LLAMA_HUGGINGFACE = DenseDecoder(
    model_type="llama",
    model="LlamaForCausalLM",
    title="Llama",
    keys=llama_keys(*BIAS_KEYS),
    bos=1,
    eos=2,
    warnings=_warnings,
    warns_of_fp16=False,  # served in fp16 everywhere
).mapping()
