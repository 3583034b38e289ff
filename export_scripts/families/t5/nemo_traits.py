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
    INTERLEAVED,
    in_use,
    megatron_settings,
    nemo_fuses_activation,
    nemo_gelu_is_exact,
)
from export_scripts.families.mapping.settings import Settings
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
_FOREIGN = {
    "transformer_block_type": "norms stand elsewhere",
    "relative_position_bias_self_attention_only": "cross attention has a position bias",
    "headscale": "heads are scaled",
    "num_moe_experts": "the model is a mixture of experts",
    "virtual_pipeline_model_parallel_size": INTERLEAVED,
}

_SIZES = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_layers")
# What FT's T5 stores once for both stacks.
_COMMON = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "activation", "bias",
    "normalization", "position_embedding_type", "transformer_block_type",
    "normalize_attention_scores", "layernorm_epsilon", "megatron_legacy",
    "relative_attention_num_buckets", "relative_attention_max_distance", "max_position_embeddings",
    "bias_activation_fusion", "bias_gelu_fusion", "openai_gelu",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NemoT5:
    """Traits of a NeMo T5, common to both stacks."""

    encoder: Settings
    decoder: Settings
    sizes: Mapping[str, int]  # of the encoder, by the source's keys; 0 if absent
    decoder_layers: int
    size_per_head: int
    pp_size: int
    split_rank: int
    activation: str  # the source's word
    exact_gelu: bool  # gelu by erf; every archive of NeMo states whether its activation is fused
    normalization: str
    bias: bool  # of the linears
    position: str  # the source's word
    positions: int  # rows of the table of positions or of the relative bias
    max_distance: int  # from which all relative positions share the last bucket
    norm_eps: float
    legacy: bool  # fused projections are ordered parts first, then heads
    scores_normalised: bool  # attention scores are divided by sqrt(size per head)

    @property
    def feed_forward_proj(self) -> str:
        """The loader's word."""
        return _ACTIVATIONS[self.activation]

    @property
    def position_embedding_type(self) -> str:
        """The loader's word."""
        return _POSITIONS[self.position]

    @property
    def with_bias(self) -> bool:
        """The value of t5_with_bias: biases, LayerNorm and scaled attention, or none of them."""
        return self.normalization != "rmsnorm"

    def query_factor(self) -> float:
        """Return the factor of queries that corrects FT's scaling by t5_with_bias alone."""
        if self.scores_normalised == self.with_bias:
            return 1.0
        root = math.sqrt(self.size_per_head)
        return 1 / root if self.scores_normalised else root


def nemo_t5(config: Mapping[str, Any]) -> NemoT5:
    """Return the facts of a NeMo model_config, flat or with a section per stack.

    Raises:
        CheckpointMismatchError: Sizes or numbers are malformed; all are listed.
    """
    flat = {k: v for k, v in config.items() if k not in ("encoder", "decoder")}
    sides = {}
    for name in ("encoder", "decoder"):
        own = config.get(name)
        own = own if isinstance(own, Mapping) else {}
        sides[name] = megatron_settings({**flat, **own}, f"model_config.yaml, {name}")
    encoder, decoder = sides["encoder"], sides["decoder"]
    sizes = {name: [each.integer(name, default=0, least=0) for each in sides.values()]
             for name in _SIZES}  # fmt: skip
    heads, hidden = sizes["num_attention_heads"][0], sizes["hidden_size"][0]
    word = str(encoder.value("position_embedding_type", default="learned_absolute"))
    is_relative = word == "relative"
    bucket_num = encoder.integer("relative_attention_num_buckets", default=32)
    traits = NemoT5(
        **sides,
        sizes={name: counts[0] for name, counts in sizes.items()},
        decoder_layers=sizes["num_layers"][1],
        size_per_head=encoder.integer("kv_channels", default=hidden // heads if heads else 1),
        pp_size=encoder.integer("pipeline_model_parallel_size", default=1),
        split_rank=encoder.integer("pipeline_model_parallel_split_rank", default=0, least=0),
        activation=str(encoder.value("activation", default="gelu")).lower(),
        exact_gelu=nemo_gelu_is_exact(encoder.source) and not nemo_fuses_activation(encoder.source),
        normalization=str(encoder.value("normalization", default="layernorm")).lower(),
        bias=bool(encoder.value("bias", default=True)),
        position=word,
        positions=bucket_num
        if is_relative
        else encoder.integer("max_position_embeddings", default=0, least=0),
        max_distance=encoder.integer("relative_attention_max_distance", default=FT_MAX_DISTANCE),
        norm_eps=encoder.number("layernorm_epsilon", default=FT_NORM_EPS),
        legacy=bool(encoder.source.get("megatron_legacy")),
        scores_normalised=bool(encoder.value("normalize_attention_scores", default=True)),
    )
    encoder.problems += decoder.problems
    encoder.finish()
    return traits


def not_t5(traits: NemoT5) -> list[str]:
    """Return every reason the FT T5 layout cannot hold a model."""
    encoder, decoder = traits.encoder, traits.decoder
    reasons = [
        f"{side.label} has no {key}: a T5 folder needs it"
        for side in (encoder, decoder)
        for key in _SIZES
        if not side.source.get(key)
    ]
    reasons += [
        f"{key} = {encoder.source.get(key)!r} in the encoder and {decoder.source.get(key)!r} in "
        "the decoder: FT's T5 has one value for both"
        for key in _COMMON
        if encoder.source.get(key) != decoder.source.get(key)
    ]
    known = {
        "activation": (traits.activation, _ACTIVATIONS),
        "position_embedding_type": (traits.position, _POSITIONS),
        "normalization": (traits.normalization, _NORMS),
    }
    reasons += [
        f"{key} = {value}: FT's T5 has {', '.join(values)}"
        for key, (value, values) in known.items()
        if value not in values
    ]
    reasons += dict.fromkeys(
        reason for side in (encoder, decoder) for reason in in_use(side.source, _FOREIGN)
    )
    is_gelu = traits.activation in ("gelu", "geglu")
    is_cut = traits.pp_size > 1
    checks = {
        f"openai_gelu = true overrides activation = {traits.activation}": (
            bool(encoder.source.get("openai_gelu")) and not is_gelu
        ),
        "max_position_embeddings is missing: the table of positions needs its size": (
            not traits.positions
        ),
        "bias = true with normalization = rmsnorm: FT's T5 with biases has layernorm": (
            traits.normalization == "rmsnorm" and traits.bias
        ),
        f"pipeline_model_parallel_split_rank = {traits.split_rank} with "
        f"pipeline_model_parallel_size = {traits.pp_size}: expected a stage between, where the "
        "decoder begins": is_cut and not 0 < traits.split_rank < traits.pp_size,
    }
    return reasons + [text for text, applies in checks.items() if applies]
