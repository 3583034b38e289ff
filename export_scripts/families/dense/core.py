"""Dense decoders from megatron-core checkpoints with rotary positions.

NeMo and Megatron-LM save the same tensors and differ in their configuration only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from export_scripts.families.dense.huggingface import GATED
from export_scripts.families.dense.layout import DENSE, DenseConfig
from export_scripts.families.gpt.core import (
    CORE_LAYER,
    CORE_WTE,
    GPT_CORE_MAPPINGS,
    core_is_tied,
    core_names,
    core_traits,
    is_core,
)
from export_scripts.families.gpt.megatron import common_fields
from export_scripts.families.layout.spec import WeightSpec
from export_scripts.families.mapping.megatron_traits import MegatronTraits, foreign_settings
from export_scripts.families.mapping.names import completed, named_sources
from export_scripts.families.mapping.nemo2_traits import unknown_model
from export_scripts.families.mapping.rotary import scaling_fields
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import TensorSource

# Traits that the tensors of the first layer show.
_FIRST_LAYER = CORE_LAYER.format(layer=0)
_PRESENT = {
    "has_qkv_bias": "self_attention.linear_qkv.bias",
    "has_attention_dense_bias": "self_attention.linear_proj.bias",
    "has_mlp_bias": "mlp.linear_fc1.bias",
    "has_output_norms": "mlp.linear_fc2.post_layernorm.weight",
}

# Settings that leave no trace in the tensors, and that the layout holds.
_HELD = (
    "apply_embedding_scaling",
    "no_rope_freq",
    "qk_layernorm",
    "softmax_scale",
    "window_attn_skip_freq",
    "window_size",
)

# NeMo's scale_positional_embedding and Megatron-LM's use_rope_scaling are Llama 3.1's scaling: its
# parameters, their names in either library, and their defaults.
# NeMo 1.x, megatron_gpt_model.py, mcore_model_customize;
# megatron/core/models/common/embeddings/rotary_pos_embedding.py, _apply_scaling
_LLAMA31: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("factor", ("scale_factor", "rope_scaling_factor"), 8.0),
    ("low_freq_factor", ("low_freq_factor",), 1.0),
    ("high_freq_factor", ("high_freq_factor",), 4.0),
    ("original_max_position_embeddings", ("old_context_len",), 8192),
)


def core_reasons(facts: Facts, *, is_mixture: bool = False) -> list[str]:
    """Return every reason the layout, or that of its mixtures, cannot hold a model."""
    traits = core_traits(facts)
    is_rms = traits.normalization.startswith("rmsnorm")
    known: dict[str, tuple[str, Collection[str]]] = {
        "activation": (traits.activation, GATED),
        "normalization": (traits.normalization.removesuffix("1p"), ("rmsnorm", "layernorm")),
    }
    if is_mixture:
        known["position_embedding_type"] = (traits.position, ("rope",))
        known["normalization"] = (traits.normalization.removesuffix("1p"), ("rmsnorm",))
    reasons = [
        f"{key} = {value} cannot be represented; known: {', '.join(values)}"
        for key, (value, values) in known.items()
        if value not in values
    ]
    if is_mixture and not traits.gated:
        reasons.append(f"activation = {traits.activation}: mixtures are written with a gate alone")
    if traits.qk_norm and not is_rms:
        reasons.append(
            f"qk_layernorm = true with normalization = {traits.normalization}: queries and keys "
            "are normalised with RMSNorm alone"
        )
    return reasons + foreign_settings(traits, held=_HELD) + unknown_model(facts)


def core_config(facts: Facts) -> DenseConfig:
    """Return the config of a megatron-core checkpoint with rotary positions.

    Raises:
        ValueError: The special tokens are not known.
    """
    traits = core_traits(facts)
    present: dict[str, Any] = {
        field: facts.has(_FIRST_LAYER + name) for field, name in _PRESENT.items()
    }
    is_scaled = _is_gemma(traits) or traits.source.get("apply_embedding_scaling")
    common = common_fields(facts, traits, vocab_size=facts.rows(CORE_WTE), tied=core_is_tied(facts))
    return DenseConfig(
        **common,
        model_name="llama",
        kv_head_num=traits.query_groups,
        hidden_size=traits.hidden,
        norm_type=traits.normalization.removesuffix("1p"),
        norm_one_plus=_keeps_one_plus(traits),
        query_key_norm="head" if traits.qk_norm else None,
        activation_type=GATED[traits.activation] if traits.gated else traits.activation,
        **present,
        attention_scale=_attention_scale(traits),
        attention_softcap=traits.source.get("attn_logit_softcapping") or None,
        logit_softcap=traits.source.get("final_logit_softcapping") or None,
        embedding_scale=math.sqrt(traits.hidden) if is_scaled else 1.0,
        **_core_windows(traits),
        rotary_layers=_layers(traits, "no_rope_freq"),
        **_core_rotary(traits),
    )


def _is_gemma(traits: MegatronTraits) -> bool:
    """Return whether a model is one of Megatron Bridge's Gemmas, which add to their settings.

    NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/gemma
    """
    return str(traits.source.get("model_class")).startswith("Gemma")


def _keeps_one_plus(traits: MegatronTraits) -> bool:
    """Return whether a folder keeps the distance of scales from 1, as the models do elsewhere.

    Of those in transformers, Gemmas do, and others with layernorms, but not with RMSNorm.
    """
    return traits.normalization == "layernorm1p" or (
        _is_gemma(traits) and traits.normalization == "rmsnorm1p"
    )


def _attention_scale(traits: MegatronTraits) -> float | None:
    """Return the stated scale of scores, or that of a stated width of heads."""
    width, scale = (traits.source.get(key) for key in ("query_pre_attn_scalar", "softmax_scale"))
    if width is None and _is_gemma(traits) and scale:
        width = round(scale**-2)  # of which the scale was computed
    return scale if width is None else width**-0.5


def _layers(traits: MegatronTraits, key: str, *, skipped: bool = True) -> tuple[int, ...] | None:
    """Return the layers that a pattern does not skip; None: all.

    A number skips every so many-th. A list says of each layer whether it is `skipped`.
    megatron/core/transformer/transformer_config.py; transformer/utils.py
    """
    pattern, count = traits.source.get(key), traits.num_layer
    if not pattern:
        return None
    if isinstance(pattern, list):
        layers = tuple(n for n in range(count) if bool(pattern[n]) is not skipped)
    else:
        layers = tuple(n for n in range(count) if (n + 1) % int(pattern))
    return None if len(layers) == count else layers


def _core_windows(traits: MegatronTraits) -> dict[str, Any]:
    """Return the window and the layers that have it.

    Transformer Engine counts the positions before the current one; Gemma 3 states one number.
    """
    window, count = traits.source.get("window_size"), traits.num_layer
    pattern = traits.source.get("interleaved_attn_pattern")
    layers: tuple[int, ...] | None
    if pattern and isinstance(pattern[0], str):
        layers = tuple(n for n, kind in enumerate(pattern) if kind == "sliding_attention")
    elif pattern:
        local, others = pattern
        layers = tuple(n for n in range(count) if n % (local + others) < local)
    elif _is_gemma(traits):
        layers = tuple(range(0, count, 2))
    else:
        layers = _layers(traits, "window_attn_skip_freq", skipped=False)
    size = window if isinstance(window, int) else int(window[0]) + 1 if window else 0
    if size < 1 or layers == ():
        return {}
    return {"sliding_window": size, "sliding_layers": layers}


def _core_rotary(traits: MegatronTraits) -> dict[str, Any]:
    source = traits.source
    fields = {
        "rotary_embedding": int(traits.size_per_head * traits.rotary_fraction),
        "rotary_base": traits.rotary_base,
    }
    if traits.rotary_local_base is not None:
        fields["rotary_local_base"] = traits.rotary_local_base
        if (factor := source.get("rope_scaling_factor") or 1) != 1:
            return {**fields, **scaling_fields("linear", {"factor": float(factor)})}
        return fields
    if source.get("scale_positional_embedding") or source.get("use_rope_scaling"):
        scaling = {
            name: type(usual)(next((source[key] for key in keys if source.get(key)), usual))
            for name, keys, usual in _LLAMA31
        }
        return {**fields, **scaling_fields("llama3", scaling)}
    if traits.rotary_interpolation not in (None, 1):
        return {**fields, **scaling_fields("linear", {"factor": traits.rotary_interpolation})}
    return fields


def core_sources(
    facts: Facts, names: Mapping[str, str], layout: Sequence[WeightSpec] = DENSE.layout
) -> dict[str, TensorSource]:
    """Return the source of each tensor of a layout."""
    # A distributed checkpoint keeps whole tensors.
    of_each = not facts.reader.is_distributed
    table = named_sources(names, layout, rows="groups", halves_of_each=of_each)
    traits = core_traits(facts)
    one_plus = traits.normalization.endswith("1p") and not _keeps_one_plus(traits)
    return completed(table, layout, facts, lacks=lambda _: False, is_one_plus=one_plus)


DENSE_CORE_MAPPINGS: tuple[SourceMapping, ...] = tuple(
    dataclasses.replace(
        gpt,
        name=f"{gpt.format}-core-dense",
        title=gpt.title.replace("GPT", "Llama-style decoder"),
        family=DENSE,
        matches=lambda facts: is_core(facts) and core_traits(facts).position == "rope",
        config=core_config,
        weights=lambda facts, _: core_sources(facts, core_names(facts)),
        unsupported=core_reasons,
        accepts=(),
    )
    for gpt in GPT_CORE_MAPPINGS
)
