"""Traits of a NeMo T5, from its configuration, and the limits of FT's T5.

Key names: NeMo 1.x, examples/nlp/language_modeling/conf/megatron_t5_config.yaml and
megatron_model_base_config.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from export_scripts.families.mapping.megatron_traits import (
    nemo_fuses_activation,
    nemo_gelu_is_exact,
    refuse_mistyped,
)
from export_scripts.families.t5.config import FT_MAX_DISTANCE, FT_NORM_EPS

# NeMo's activations -> the loader's spelling. The fast- variants fuse both halves of a gate into
# one matrix, under the names of the plain one.
_ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "geglu": "geglu",
    "reglu": "reglu",
    "swiglu": "gated-silu",
}
_NORMS = ("layernorm", "layernorm1p", "low_precision_layernorm", "rmsnorm")
_POSITIONS = {"learned_absolute": "absolute", "relative": "relative"}

# Sizes that FT's T5 stores once for both stacks.
_COMMON_SIZES = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")
_COMMON_CHOICES = (
    "activation", "bias", "normalization", "position_embedding_type", "transformer_block_type",
    "normalize_attention_scores", "layernorm_epsilon", "megatron_legacy",
    "relative_attention_num_buckets", "relative_attention_max_distance",
    "max_position_embeddings", "bias_activation_fusion", "bias_gelu_fusion", "openai_gelu",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Side:
    """One stack's configuration: the flat keys, overridden by the stack's own section."""

    name: str
    source: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; null counts as absent."""
        value = self.source.get(key)
        return default if value is None else value

    def size(self, key: str) -> int | None:
        """Return a size, or None if it is not a positive integer."""
        value = self.get(key)
        return value if isinstance(value, int) and value > 0 else None

    @property
    def head_size(self) -> int | None:
        """Width of one head."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if self.get("kv_channels") is not None or hidden is None or heads is None:
            return self.size("kv_channels")
        return hidden // heads


@dataclass(frozen=True, kw_only=True)
class NemoT5:
    """Traits of a NeMo T5, common to both stacks."""

    encoder: Side
    decoder: Side
    pp_size: int
    split_rank: int

    @property
    def activation(self) -> str:
        """The source's word."""
        return str(self.encoder.get("activation", "gelu")).lower()

    @property
    def feed_forward_proj(self) -> str:
        """The loader's word."""
        return _ACTIVATIONS[self.activation]

    @property
    def exact_gelu(self) -> bool:
        """True if gelu is by erf; every archive of NeMo states whether its activation is fused."""
        config = self.encoder.source
        return nemo_gelu_is_exact(config) and not nemo_fuses_activation(config)

    @property
    def normalization(self) -> str:
        """The source's norm; layernorm by default."""
        return str(self.encoder.get("normalization", "layernorm")).lower()

    @property
    def bias(self) -> bool:
        """True if the linears have biases."""
        return bool(self.encoder.get("bias", True))

    @property
    def with_bias(self) -> bool:
        """The value of t5_with_bias: biases, LayerNorm and scaled attention, or none of them."""
        return self.normalization != "rmsnorm"

    @property
    def position(self) -> str:
        """FT's name, or the source's if FT has none."""
        word = str(self.encoder.get("position_embedding_type", "learned_absolute"))
        return _POSITIONS.get(word, word)

    @property
    def positions(self) -> int | None:
        """Rows of the table of positions or of the relative bias."""
        if self.position == "relative":
            return int(self.encoder.get("relative_attention_num_buckets", 32))
        return self.encoder.size("max_position_embeddings")

    @property
    def norm_eps(self) -> float:
        """Epsilon of the norms; FT's by default."""
        return float(self.encoder.get("layernorm_epsilon", FT_NORM_EPS))

    @property
    def max_distance(self) -> int:
        """Distance from which all relative positions share the last bucket."""
        return int(self.encoder.get("relative_attention_max_distance", FT_MAX_DISTANCE))

    @property
    def legacy(self) -> bool:
        """True if fused projections are ordered parts first, then heads."""
        return bool(self.encoder.get("megatron_legacy", False))

    @property
    def scores_normalised(self) -> bool:
        """True if the source divides attention scores by sqrt(size per head)."""
        return bool(self.encoder.get("normalize_attention_scores", True))

    def query_factor(self, size_per_head: int) -> float:
        """Return the factor of queries that corrects FT's scaling by t5_with_bias alone."""
        if self.scores_normalised == self.with_bias:
            return 1.0
        root = math.sqrt(size_per_head)
        return 1 / root if self.scores_normalised else root


def nemo_t5(config: Mapping[str, Any]) -> NemoT5:
    """Return the facts of a NeMo model_config, flat or with a section per stack.

    Raises:
        CheckpointMismatchError: A size is malformed.
    """

    def side(name: str) -> Side:
        own = config.get(name)
        flat = {k: v for k, v in config.items() if k not in ("encoder", "decoder")}
        return Side(name=name, source={**flat, **own} if isinstance(own, Mapping) else flat)

    sides = {name: side(name) for name in ("encoder", "decoder")}
    for name, each in sides.items():
        refuse_mistyped(each.source, f"model_config.yaml, {name}")
    return NemoT5(
        **sides,
        pp_size=config.get("pipeline_model_parallel_size") or 1,
        split_rank=config.get("pipeline_model_parallel_split_rank") or 0,
    )


def not_t5(traits: NemoT5) -> list[str]:
    """Return every reason the FT T5 layout cannot hold a model."""
    encoder, decoder = traits.encoder, traits.decoder
    reasons = [
        f"{side.name}: {key} = {side.get(key)!r}: a T5 folder needs {key}"
        for side in (encoder, decoder)
        for key in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_layers")
        if side.size(key) is None
    ]
    reasons += [
        f"{key} = {encoder.get(key)!r} in the encoder and {decoder.get(key)!r} in the decoder: "
        "FT's T5 has one value for both"
        for key in (*_COMMON_SIZES, *_COMMON_CHOICES)
        if encoder.get(key) != decoder.get(key)
    ]
    norm = traits.normalization
    checks = (
        (
            traits.activation not in _ACTIVATIONS,
            f"activation = {traits.activation}: FT's T5 has {', '.join(_ACTIVATIONS)}",
        ),
        (
            bool(encoder.get("openai_gelu")) and traits.activation not in ("gelu", "geglu"),
            f"openai_gelu = true overrides activation = {traits.activation}",
        ),
        (
            traits.position not in _POSITIONS.values(),
            f"position_embedding_type = {traits.position}: FT's T5 has learned_absolute and "
            "relative",
        ),
        (
            traits.positions is None,
            "max_position_embeddings is missing: the table of positions needs its size",
        ),
        (norm not in _NORMS, f"normalization = {norm}: FT's T5 has {', '.join(_NORMS)}"),
        (
            norm == "rmsnorm" and traits.bias,
            "bias = true with normalization = rmsnorm: FT's T5 with biases has layernorm",
        ),
        (
            encoder.get("transformer_block_type", "pre_ln") != "pre_ln",
            f"transformer_block_type = {encoder.get('transformer_block_type')}: only pre_ln",
        ),
        (
            not encoder.get("relative_position_bias_self_attention_only", True),
            "relative_position_bias_self_attention_only = false: FT's T5 has no position bias in "
            "cross attention",
        ),
        (
            any(bool(side.get("headscale", False)) for side in (encoder, decoder)),
            "headscale = true: FT's T5 does not scale heads",
        ),
        (
            any((side.get("num_moe_experts") or 1) > 1 for side in (encoder, decoder)),
            "num_moe_experts: a mixture of experts is not converted",
        ),
        (
            (encoder.get("virtual_pipeline_model_parallel_size") or 1) > 1,
            "virtual_pipeline_model_parallel_size > 1: an interleaved schedule's layer order "
            "is unknown",
        ),
    )
    reasons += [text for applies, text in checks if applies]
    return reasons + _stage_reasons(traits)


def _stage_reasons(traits: NemoT5) -> list[str]:
    if traits.pp_size == 1:
        return []
    if not 0 < traits.split_rank < traits.pp_size:
        return [
            f"pipeline_model_parallel_split_rank = {traits.split_rank} with "
            f"pipeline_model_parallel_size = {traits.pp_size}: expected a stage between, where the "
            "decoder begins"
        ]
    return []
