"""Hugging Face Phi-3 and Phi-4: fused queries, keys and values, and fused halves of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    DenseDecoder,
    llama_keys,
    llama_names,
    stated_window,
    window_fields,
)
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.mapping.names import QUERY_KEY_VALUE
from export_scripts.families.mapping.settings import Settings


def _read(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("rotary_scaling_type") not in (None, "longrope"):
        settings.note(
            f"rotary scaling {values['rotary_scaling_type']!r} cannot be "
            "represented: transformers takes a Phi-3's for longrope"
        )
    return window_fields(settings, values["num_layer"], stated_window(settings))


def _written(config: DenseConfig) -> dict[str, Any]:
    original = config.rotary_original_max_position_embeddings
    return {
        "original_max_position_embeddings": original or config.max_pos_seq_len,
        "sliding_window": config.sliding_window,
        # The library's own may lie beyond the vocabulary, as may the end of a small model.
        "pad_token_id": min(config.end_id, config.vocab_size - 1),
    }


PHI3_HUGGINGFACE = DenseDecoder(
    model_type="phi3",
    model="Phi3ForCausalLM",
    title="Phi-3, Phi-4",
    keys=llama_keys(eps=("rms_norm_eps", 1e-5)),
    names=llama_names(
        {
            **dict.fromkeys(QUERY_KEY_VALUE, "self_attn.qkv_proj"),
            **dict.fromkeys(("mlp.dense_h_to_4h", "mlp.dense_h_to_4h_2"), "mlp.gate_up_proj"),
        }
    ),
    rows="blocks",
    read=_read,
    written=_written,
    bos=1,
    eos=32000,
    rotary_fraction=1.0,
).mapping()
