"""Hugging Face Qwen2, with biases of queries, keys and values, and Qwen3, which normalises them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    ATTENTION_BIAS_KEYS,
    DenseDecoder,
    llama_keys,
    window_fields,
    written_windows,
)
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.mapping.settings import Settings


def _read(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window, of the layers from max_window_layers on if use_sliding_window is set."""
    count, source = values["num_layer"], settings.source
    in_use = source.get("use_sliding_window") and source.get("sliding_window", 0) is not None
    window = settings.integer("sliding_window", default=4096) if in_use else None
    full = settings.integer("max_window_layers", default=28, least=0)
    return window_fields(settings, count, window, [number >= full for number in range(count)])


def _written(config: DenseConfig) -> dict[str, Any]:
    return {"use_sliding_window": config.sliding_window is not None, **written_windows(config)}


QWEN2_HUGGINGFACE = DenseDecoder(
    model_type="qwen2",
    model="Qwen2ForCausalLM",
    title="Qwen2, Qwen2.5",
    fixed={"has_qkv_bias": True},
    read=_read,
    written=_written,
).mapping()

QWEN3_HUGGINGFACE = DenseDecoder(
    model_type="qwen3",
    model="Qwen3ForCausalLM",
    title="Qwen3",
    keys=llama_keys(*ATTENTION_BIAS_KEYS),
    fixed={"query_key_norm": "head"},
    read=_read,
    written=_written,
    head_dim=128,
).mapping()
