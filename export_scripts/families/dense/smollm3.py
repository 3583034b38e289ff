"""Hugging Face SmolLM3: a Llama some of whose layers do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    BIAS_KEYS,
    DenseDecoder,
    llama_keys,
    stated_window,
    window_fields,
    written_windows,
)
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.mapping.settings import Settings


def _read(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers that rotate, of which a window is in none."""
    count, source = values["num_layer"], settings.source
    every = settings.integer("no_rope_layer_interval", default=4)
    rotates = source.get("no_rope_layers") or [(n + 1) % every != 0 for n in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count:
        settings.note(
            f"no_rope_layers = {rotates!r}: expected an entry for each of the {count} layers"
        )
        return {}
    layers = tuple(number for number in range(count) if rotates[number])
    window = stated_window(settings, in_use=source.get("use_sliding_window"))
    return {
        **window_fields(settings, count, window, [not each for each in rotates[:count]]),
        "rotary_layers": None if len(layers) == count else layers,
    }


def _written(config: DenseConfig) -> dict[str, Any]:
    count = config.num_layer
    rotates = range(count) if config.rotary_layers is None else config.rotary_layers
    return {
        "use_sliding_window": config.sliding_window is not None,
        "no_rope_layers": [int(number in rotates) for number in range(count)],
        # The library's own may lie beyond the vocabulary, as may the end of a small model.
        "pad_token_id": min(config.end_id, config.vocab_size - 1),
        **written_windows(config),
    }


SMOLLM3_HUGGINGFACE = DenseDecoder(
    model_type="smollm3",
    model="SmolLM3ForCausalLM",
    title="SmolLM3",
    keys=llama_keys(*BIAS_KEYS),
    read=_read,
    written=_written,
    is_tied=True,
    bos=128000,
    eos=128001,
    rotary_base=2e6,
).mapping()
