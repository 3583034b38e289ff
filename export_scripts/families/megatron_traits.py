"""What a Megatron-style decoder is, read from a NeMo configuration or Megatron-LM arguments.

Key names: NeMo 1.x, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml; Megatron-LM,
megatron/training/arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from export_scripts.errors import CheckpointMismatchError

# NeMo spells the fused variants with a "fast-" prefix; they compute the same.
_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
_PLAIN = {
    "gelu": "gelu",
    "openai-gelu": "gelu",
    "openai_gelu": "gelu",
    "gelu_new": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, kw_only=True)
class MegatronTraits:
    """Facts of a Megatron-style decoder; sizes are None where the source does not tell."""

    head_num: int | None
    hidden: int | None
    inter_size: int | None
    num_layer: int | None
    max_positions: int | None
    pp_size: int
    norm_eps: float
    position: str  # learned_absolute, rope, alibi, ...
    normalization: str  # layernorm, layernorm1p, rmsnorm, ...
    activation: str  # gelu, relu, silu; the source's own word when it is none of them
    gated: bool
    exact_gelu: bool  # the fused kernel computes the tanh form, the plain one gelu by erf
    bias: bool
    tied: bool
    query_groups: int | None
    kv_channels: int | None
    block_type: str
    virtual_pp: int
    expert_num: int
    qk_norm: bool
    headscale: bool
    normalized_scores: bool
    rotary_base: float
    rotary_fraction: float
    rotary_interpolation: float | None
    project_size: int
    source: Mapping[str, Any]

    @property
    def size_per_head(self) -> int | None:
        """Width of one head, when heads and hidden size are known."""
        if self.kv_channels is not None:
            return self.kv_channels
        if self.head_num is None or self.hidden is None:
            return None
        return self.hidden // self.head_num


# Keys read here and by T5 that hold a size, and those that hold a number.
_COUNTS = (
    "num_attention_heads", "hidden_size", "ffn_hidden_size", "num_layers", "kv_channels",
    "max_position_embeddings", "encoder_seq_length", "num_query_groups", "num_moe_experts",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "relative_attention_num_buckets", "relative_attention_max_distance",
)  # fmt: skip
_NUMBERS = (
    "layernorm_epsilon", "norm_epsilon", "rotary_base", "rotary_percentage", "rotary_percent",
)  # fmt: skip


def refuse_mistyped(config: Mapping[str, Any], origin: str) -> None:
    """Refuse a configuration whose sizes are no sizes; null counts as absent.

    Args:
        config: Keys of NeMo or Megatron-LM.
        origin: What to call it in messages.

    Raises:
        CheckpointMismatchError: Every such key with its value.
    """
    problems = [
        f"{origin}: {key} = {config[key]!r} is not a positive whole number"
        for key in _COUNTS
        if config.get(key) is not None and not _is_count(config[key])
    ]
    width = config.get("project_size") or 1
    if not _is_count(width):
        problems.append(f"{origin}: project_size = {width!r} is not a positive whole number")
    problems += [
        f"{origin}: {key} = {config[key]!r} is not a number"
        for key in _NUMBERS
        if config.get(key) is not None and not _is_number(config[key])
    ]
    if problems:
        raise CheckpointMismatchError(problems)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    """Return whether a value reads as a number; YAML takes 1e-5, without a point, for text."""
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def nemo_traits(config: Mapping[str, Any]) -> MegatronTraits:
    """Return the traits of a NeMo model_config.

    Raises:
        CheckpointMismatchError: A size in it is none.
    """
    refuse_mistyped(config, "model_config.yaml")
    word = str(config.get("activation") or "gelu")
    activation, gated = _activation(word)
    bias = bool(_first(config, "bias", default=True))
    fused = bias and _first(config, "bias_activation_fusion", "bias_gelu_fusion", default=True)
    return MegatronTraits(
        head_num=config.get("num_attention_heads"),
        hidden=config.get("hidden_size"),
        inter_size=_first(config, "ffn_hidden_size", default=_four_times(config)),
        num_layer=config.get("num_layers"),
        max_positions=_first(config, "max_position_embeddings", "encoder_seq_length"),
        pp_size=config.get("pipeline_model_parallel_size") or 1,
        norm_eps=float(_first(config, "layernorm_epsilon", default=1e-5)),
        position=str(config.get("position_embedding_type") or "learned_absolute"),
        normalization=str(config.get("normalization") or "layernorm").lower(),
        activation=activation,
        gated=gated,
        exact_gelu=word == "gelu" and not fused and not config.get("openai_gelu"),
        bias=bias,
        tied=bool(_first(config, "share_embeddings_and_output_weights", default=True)),
        query_groups=config.get("num_query_groups"),
        kv_channels=config.get("kv_channels"),
        block_type=str(config.get("transformer_block_type") or "pre_ln"),
        virtual_pp=config.get("virtual_pipeline_model_parallel_size") or 1,
        expert_num=config.get("num_moe_experts") or 1,
        qk_norm=bool(config.get("qk_layernorm")),
        headscale=bool(config.get("headscale")),
        normalized_scores=bool(_first(config, "normalize_attention_scores", default=True)),
        rotary_base=float(_first(config, "rotary_base", default=10000)),
        rotary_fraction=float(_first(config, "rotary_percentage", default=1.0)),
        rotary_interpolation=config.get("seq_len_interpolation_factor"),
        project_size=0,
        source=config,
    )


def megatron_traits(args: Mapping[str, Any]) -> MegatronTraits:
    """Return the traits of Megatron-LM's saved arguments.

    Raises:
        CheckpointMismatchError: A size in them is none.
    """
    refuse_mistyped(args, "the checkpoint's args")
    squared = bool(args.get("squared_relu"))
    activation = "squared_relu" if squared else "silu" if args.get("swiglu") else "gelu"
    bias = bool(_first(args, "add_bias_linear", default=True))
    fused = bias and _first(args, "bias_gelu_fusion", default=True)
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    return MegatronTraits(
        head_num=args.get("num_attention_heads"),
        hidden=args.get("hidden_size"),
        inter_size=_first(args, "ffn_hidden_size", default=_four_times(args)),
        num_layer=args.get("num_layers"),
        max_positions=args.get("max_position_embeddings"),
        pp_size=args.get("pipeline_model_parallel_size") or 1,
        norm_eps=float(_first(args, "layernorm_epsilon", "norm_epsilon", default=1e-5)),
        position=_megatron_position(args),
        normalization=str(args.get("normalization") or "layernorm").lower()
        + ("1p" if args.get("apply_layernorm_1p") else ""),
        activation=activation,
        gated=bool(args.get("swiglu")),
        exact_gelu=activation == "gelu" and not fused and not args.get("openai_gelu"),
        bias=bias,
        tied=not args.get("untie_embeddings_and_output_weights"),
        query_groups=groups,
        kv_channels=args.get("kv_channels"),
        block_type="post_ln" if args.get("apply_residual_connection_post_layernorm") else "pre_ln",
        virtual_pp=args.get("virtual_pipeline_model_parallel_size") or 1,
        expert_num=_experts(args.get("num_experts")),
        qk_norm=bool(args.get("qk_layernorm")),
        headscale=False,
        normalized_scores=True,
        rotary_base=float(_first(args, "rotary_base", default=10000)),
        rotary_fraction=float(_first(args, "rotary_percent", default=1.0)),
        rotary_interpolation=args.get("rotary_seq_len_interpolation_factor"),
        project_size=int(args.get("project_size") or 0),
        source=args,
    )


def _first(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _four_times(config: Mapping[str, Any]) -> int | None:
    hidden = config.get("hidden_size")
    return 4 * hidden if isinstance(hidden, int) else None


def _experts(value: Any) -> int:
    if isinstance(value, list):
        return max((int(item) for item in value), default=1)
    return int(value) if value else 1


def _megatron_position(args: Mapping[str, Any]) -> str:
    if args.get("use_rotary_position_embeddings"):
        return "rope"
    return str(args.get("position_embedding_type") or "learned_absolute")


def _activation(word: str) -> tuple[str, bool]:
    bare = word.lower().removeprefix("fast-").removeprefix("fast_")
    if bare in _GATED:
        return _GATED[bare], True
    return _PLAIN.get(bare, word), False


def not_gpt(traits: MegatronTraits) -> list[str]:
    """Return every reason why the FT GPT layout cannot hold such a model."""
    reasons = [
        f"{key} = {traits.source.get(key)!r}: a GPT folder needs {key}"
        for key, value in (
            ("num_attention_heads", traits.head_num),
            ("hidden_size", traits.hidden),
            ("num_layers", traits.num_layer),
            ("ffn_hidden_size", traits.inter_size),
        )
        if not isinstance(value, int) or value < 1
    ]
    checks = (
        (
            traits.position != "learned_absolute",
            f"position_embedding_type = {traits.position}: FT's GPT has only learned_absolute",
        ),
        (
            traits.normalization not in ("layernorm", "layernorm1p"),
            f"normalization = {traits.normalization}: FT's GPT has only layernorm",
        ),
        (
            traits.gated,
            f"activation = {traits.source.get('activation', 'swiglu')}: FT's GPT has no gated "
            "activation",
        ),
        (
            not traits.gated and traits.activation not in ("gelu", "relu", "silu"),
            f"activation = {traits.activation}: FT's GPT has gelu, relu and silu",
        ),
        (
            traits.virtual_pp > 1,
            f"virtual_pipeline_model_parallel_size = {traits.virtual_pp}: an interleaved "
            "schedule's layer order cannot be told",
        ),
        (
            traits.query_groups not in (None, traits.head_num),
            f"num_query_groups = {traits.query_groups}: FT's GPT has one key/value head per head",
        ),
        (
            bool(traits.source.get("multi_query_attention")),
            "multi_query_attention = true: FT's GPT has one key/value head per head",
        ),
        (traits.qk_norm, "qk_layernorm = true: FT's GPT does not normalise queries and keys"),
        (
            traits.block_type != "pre_ln",
            f"transformer_block_type = {traits.block_type}: only pre_ln is converted",
        ),
        (traits.headscale, "headscale = true: FT's GPT does not scale heads"),
        (
            not traits.normalized_scores,
            "normalize_attention_scores = false: FT's GPT divides scores by sqrt(size_per_head)",
        ),
        (traits.expert_num > 1, f"{traits.expert_num} experts: FT's GPT has no mixture of experts"),
    )
    reasons += [text for applies, text in checks if applies]
    return reasons + _uneven_sizes(traits)


def _uneven_sizes(traits: MegatronTraits) -> list[str]:
    reasons = []
    heads, hidden, depth = traits.head_num, traits.hidden, traits.num_layer
    width = (traits.size_per_head or 0) * (heads or 0)
    if isinstance(heads, int) and isinstance(hidden, int) and width != hidden:
        reasons.append(
            f"{heads} heads of {traits.size_per_head} do not make hidden_size = {hidden}: FT's "
            "GPT needs kv_channels x num_attention_heads = hidden_size"
        )
    if isinstance(depth, int) and depth % traits.pp_size:
        reasons.append(
            f"num_layers = {depth} does not divide by the training pipeline size {traits.pp_size}: "
            "stages of unequal depth cannot be told apart"
        )
    return reasons
