"""The Llama layout from megatron-core checkpoints with rotary positions and RMSNorm.

NeMo and Megatron-LM save the same tensors and differ in their configuration only.
"""

# Shapes: k key/value heads of one training rank, g queries per key, d size per head, f MLP width,
# h hidden

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.gpt.core import (
    CORE_HEAD,
    CORE_WTE,
    core_is_tied,
    core_norm_keys,
    core_traits,
    is_core,
)
from export_scripts.families.gpt.megatron import assumed_tokens_warning, start_and_end
from export_scripts.families.llama.layout import (
    GATED,
    LAYER,
    LLAMA,
    LlamaConfig,
    in_first,
    repeated_heads,
    rotary_fields,
)
from export_scripts.families.mapping.megatron_traits import MegatronTraits, foreign_settings
from export_scripts.families.mapping.nemo2_traits import unknown_model
from export_scripts.families.mapping.rotary import RotarySettings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
    Copy,
    Half,
    Mapped,
    TensorSource,
    Transpose,
)

CORE_LAYER = "model.decoder.layers.{layer}."
_QKV = CORE_LAYER + "self_attention.linear_qkv."
_FC1 = CORE_LAYER + "mlp.linear_fc1."

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


def _is_core_llama(facts: Facts) -> bool:
    if not is_core(facts):
        return False
    traits = core_traits(facts)
    return traits.position == "rope" and traits.normalization.startswith("rmsnorm")


def core_reasons(facts: Facts, *, is_mixture: bool = False) -> list[str]:
    """Return every reason the layout, or that of its mixtures, cannot hold a model."""
    traits = core_traits(facts)
    source = traits.source
    sizes = (traits.head_num, traits.hidden, traits.inter_size, traits.num_layer)
    checks = (
        (
            None in sizes,
            "num_attention_heads, hidden_size, ffn_hidden_size or num_layers is missing",
        ),
        (traits.max_positions is None, "max_position_embeddings is missing"),
        (not traits.gated, f"activation = {traits.activation}: expected a gated one"),
        (traits.activation not in GATED, f"activation = {traits.activation} is unknown"),
        (
            traits.qk_norm and not is_mixture,
            "qk_layernorm = true: normalised queries and keys are not supported",
        ),
        (
            is_mixture and traits.position != "rope",
            f"position_embedding_type = {traits.position}: mixtures are written with rope alone",
        ),
        (
            is_mixture and not traits.normalization.startswith("rmsnorm"),
            f"normalization = {traits.normalization}: mixtures are written with RMSNorm alone",
        ),
        (traits.virtual_pp > 1, "an interleaved pipeline schedule's layer order is unknown"),
        (traits.block_type != "pre_ln", f"transformer_block_type = {traits.block_type}"),
        (not traits.normalized_scores, "normalize_attention_scores = false"),
        (bool(source.get("rotary_interleaved")), "rotary_interleaved = true"),
    )
    return [reason for applies, reason in checks if applies] + (
        foreign_settings(traits) + unknown_model(facts)
    )


def config_from_core(facts: Facts) -> LlamaConfig:
    """Return the config of a megatron-core checkpoint with rotary positions and RMSNorm.

    Raises:
        ValueError: The special tokens are not known.
    """
    traits = core_traits(facts)
    head_num, size_per_head = _known(traits.head_num), _known(traits.size_per_head)
    start_id, end_id = start_and_end(facts)
    return LlamaConfig(
        model_name="llama",
        head_num=head_num,
        kv_head_num=traits.query_groups or head_num,
        size_per_head=size_per_head,
        hidden_size=_known(traits.hidden),
        inter_size=_known(traits.inter_size),
        num_layer=_known(traits.num_layer),
        vocab_size=facts.rows(CORE_WTE),
        max_pos_seq_len=_known(traits.max_positions),
        start_id=start_id,
        end_id=end_id,
        layernorm_eps=traits.norm_eps,
        activation_type=GATED[traits.activation],
        exact_gelu=traits.exact_gelu,
        tie_word_embeddings=core_is_tied(facts),
        has_qkv_bias=facts.has(_QKV.format(layer=0) + "bias"),
        has_attention_dense_bias=facts.has(
            "model.decoder.layers.0.self_attention.linear_proj.bias"
        ),
        has_mlp_bias=facts.has(_FC1.format(layer=0) + "bias"),
        sliding_window=_core_window(traits),
        **rotary_fields(_core_rotary(traits), size_per_head),
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
    )


def _known(size: int | None) -> int:
    assert size, "a size the mapping's reasons do not ask for"
    return size


def _core_window(traits: MegatronTraits) -> int | None:
    """Return Transformer Engine's window, which counts the positions before the current one."""
    window = traits.source.get("window_size")
    return int(window[0]) + 1 if window and int(window[0]) >= 0 else None


def _core_rotary(traits: MegatronTraits) -> RotarySettings:
    base, fraction = traits.rotary_base, traits.rotary_fraction
    source = traits.source
    if source.get("scale_positional_embedding") or source.get("use_rope_scaling"):
        scaling = {
            name: type(usual)(next((source[key] for key in keys if source.get(key)), usual))
            for name, keys, usual in _LLAMA31
        }
        return RotarySettings("llama3", base, fraction, scaling)
    if traits.rotary_interpolation not in (None, 1):
        return RotarySettings("linear", base, fraction, {"factor": traits.rotary_interpolation})
    return RotarySettings("default", base, fraction)


def _group_rows(config: LlamaConfig) -> int:
    """Return the rows of one group: its queries, its key and its value."""
    return (config.head_num // config.kv_head_num + 2) * config.size_per_head


def _groups(rows: Any, config: LlamaConfig) -> Any:
    """Return one rank's rows as (k, g + 2, d[, h]): per group its queries, its key, its value."""
    d = config.size_per_head
    per_group = _group_rows(config)
    return rows.reshape(rows.shape[0] // per_group, per_group // d, d, *rows.shape[1:])


def _core_query(rows: Any, config: LlamaConfig) -> Any:
    groups = _groups(rows, config)
    queries = groups[:, : config.head_num // config.kv_head_num]  # (k, g, d[, h])
    k, g, *rest = queries.shape
    return in_first(queries.reshape(k * g, *rest))


def _core_key(rows: Any, config: LlamaConfig) -> Any:
    return in_first(repeated_heads(_groups(rows, config)[:, -2], config))


def _core_value(rows: Any, config: LlamaConfig) -> Any:
    return in_first(repeated_heads(_groups(rows, config)[:, -1], config))


def _half(rows: Any, which: int) -> Any:
    """Return a half of one rank's gated projection (2 * f[, h]) as ([h,] f)."""
    half = rows.reshape(2, rows.shape[0] // 2, *rows.shape[1:])[which]
    return half.T if half.ndim == 2 else half


def _activated(rows: Any, config: LlamaConfig) -> Any:  # noqa: ARG001
    return _half(rows, 0)


def _linear_half(rows: Any, config: LlamaConfig) -> Any:  # noqa: ARG001
    return _half(rows, 1)


def _cut(ours: str, theirs: str, function: Any, unit: Any = None) -> dict[str, TensorSource]:
    """Return the sources of a weight and a bias whose rows training ranks share."""
    return {
        f"{LAYER}{ours}.weight": Mapped(f"{theirs}weight", function, cut=0, axis=1, unit=unit),
        f"{LAYER}{ours}.bias": Mapped(f"{theirs}bias", function, cut=0, axis=0, unit=unit),
    }


def gated_sources(facts: Facts, mlp: str, projection: str) -> dict[str, TensorSource]:
    """Return the activated and the linear half of a gated projection, per rank or whole.

    Args:
        facts: The source.
        mlp: Name of the MLP in a layer.
        projection: Key of the projection, without `weight` or `bias`.
    """
    if not facts.reader.is_distributed:
        return {
            **_cut(f"{mlp}dense_h_to_4h", projection, _activated),
            **_cut(f"{mlp}dense_h_to_4h_2", projection, _linear_half),
        }
    return {
        f"{LAYER}{mlp}{ours}.{part}": Half(f"{projection}{part}", which)
        for which, ours in enumerate(("dense_h_to_4h", "dense_h_to_4h_2"))
        for part in ("weight", "bias")
    }


def weights_from_core(facts: Facts, config: LlamaConfig) -> Mapping[str, TensorSource]:  # noqa: ARG001
    """Return each tensor's source; norms may be fused into the linear that follows."""
    norms = {LAYER + ours: theirs for ours, theirs in core_norm_keys(facts).items()}
    norms["model.final_layernorm"] = "model.decoder.final_layernorm."
    return {
        "model.wte": Copy(CORE_WTE, cut=0),
        **{f"{ours}.weight": core_norm(facts, f"{key}weight") for ours, key in norms.items()},
        **_cut("attention.query", _QKV, _core_query, _group_rows),
        **_cut("attention.key", _QKV, _core_key, _group_rows),
        **_cut("attention.value", _QKV, _core_value, _group_rows),
        LAYER + "attention.dense.weight": Transpose(
            CORE_LAYER + "self_attention.linear_proj.weight", cut=1
        ),
        LAYER + "attention.dense.bias": Copy(CORE_LAYER + "self_attention.linear_proj.bias"),
        **gated_sources(facts, "mlp.", _FC1),
        LAYER + "mlp.dense_4h_to_h.weight": Transpose(CORE_LAYER + "mlp.linear_fc2.weight", cut=1),
        LAYER + "mlp.dense_4h_to_h.bias": Copy(CORE_LAYER + "mlp.linear_fc2.bias"),
        "model.lm_head.weight": Copy(CORE_HEAD, cut=0),
    }


def core_norm(facts: Facts, key: str) -> TensorSource:
    """Return a norm's scale; some models store its distance from 1."""
    traits = core_traits(facts)
    if traits.normalization.endswith("1p"):
        return Adjusted(Copy(key), lambda part, _: part + 1)
    return Copy(key)


def _core_mapping(source_format: str, title: str) -> SourceMapping:
    return SourceMapping(
        name=f"{source_format}-core-llama",
        title=title,
        family=LLAMA,
        format=source_format,
        matches=_is_core_llama,
        config=config_from_core,
        weights=weights_from_core,
        unsupported=core_reasons,
        ignored=("*._extra_state", "*rotary_pos_emb.inv_freq"),
        copies=lambda _, config: (CORE_HEAD,) if config.tie_word_embeddings else (),
        prefix="model.",
        warnings=assumed_tokens_warning,
    )


LLAMA_CORE_MAPPINGS: tuple[SourceMapping, ...] = (
    _core_mapping("nemo", "NeMo Llama-style decoder in megatron-core layout"),
    _core_mapping("megatron", "Megatron-LM Llama-style decoder in megatron-core layout"),
    _core_mapping("nemo2", "NeMo 2 Llama-style decoder"),
    _core_mapping("bridge", "Megatron Bridge Llama-style decoder"),
)
