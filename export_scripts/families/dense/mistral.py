"""Hugging Face Mistral: the sliding window is in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import DenseDecoder, window_fields
from export_scripts.families.mapping.settings import Settings


def _read(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window; transformers gives a Mistral one unless the key is null."""
    if settings.source.get("sliding_window", 0) is None:
        return {}
    window = settings.integer("sliding_window", default=4096)
    found = window_fields(settings, values["num_layer"], window)
    if found.get("sliding_layers") is not None:
        settings.note(
            "only some layers have a sliding window; a Mistral has one in all "
            "layers in transformers"
        )
    return found


MISTRAL_HUGGINGFACE = DenseDecoder(
    model_type="mistral",
    model="MistralForCausalLM",
    title="Mistral",
    read=_read,
    written=lambda config: {"sliding_window": config.sliding_window},
    bos=1,
    eos=2,
    warns_of_fp16=False,  # served in fp16 everywhere
).mapping()
