"""Traits of a Megatron-style decoder, from a NeMo configuration or Megatron-LM arguments.

Key names: NeMo 1.x, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml; Megatron-LM,
megatron/training/arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
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
    "squared-relu": "relu2",
    "squared_relu": "relu2",
}


@dataclass(frozen=True, kw_only=True)
class MegatronTraits:
    """Traits of a Megatron-style decoder; sizes are None if the source does not state them."""

    head_num: int | None
    hidden: int | None
    inter_size: int | None
    num_layer: int | None
    max_positions: int | None
    norm_eps: float
    position: str  # learned_absolute, rope, alibi, ...
    normalization: str  # layernorm, layernorm1p, rmsnorm, ...
    activation: str  # gelu, relu, silu, or the source's own word
    gated: bool
    fused_gelu: bool  # one kernel adds the bias and computes gelu, in its tanh form
    exact_gelu: bool  # gelu by erf
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


def refuse_mistyped(config: Mapping[str, Any], label: str) -> None:
    """Refuse a configuration with malformed sizes; null counts as absent.

    Args:
        config: Keys of NeMo or Megatron-LM.
        label: Its name in messages.

    Raises:
        CheckpointMismatchError: Every such key with its value.
    """
    problems = [
        f"{label}: {key} = {config[key]!r} is not a positive whole number"
        for key in _COUNTS
        if config.get(key) is not None and not _is_count(config[key])
    ]
    width = config.get("project_size") or 1
    if not _is_count(width):
        problems.append(f"{label}: project_size = {width!r} is not a positive whole number")
    problems += [
        f"{label}: {key} = {config[key]!r} is not a number"
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
        CheckpointMismatchError: A size is malformed.
    """
    refuse_mistyped(config, "model_config.yaml")
    word = str(config.get("activation") or "gelu")
    activation, gated = _activation(word, openai_gelu=bool(config.get("openai_gelu")))
    bias = bool(_first(config, "bias", default=True))
    # Without a gate the fused kernel needs a bias to add.
    fused = nemo_fuses_activation(config) and (bias or gated) and activation == "gelu"
    return MegatronTraits(
        head_num=config.get("num_attention_heads"),
        hidden=config.get("hidden_size"),
        inter_size=_first(config, "ffn_hidden_size", default=_four_times(config)),
        num_layer=config.get("num_layers"),
        max_positions=_first(config, "max_position_embeddings", "encoder_seq_length"),
        norm_eps=float(_first(config, "layernorm_epsilon", default=1e-5)),
        position=str(config.get("position_embedding_type") or "learned_absolute"),
        normalization=_normalization(config, "layernorm_zero_centered_gamma"),
        activation=activation,
        gated=gated,
        fused_gelu=fused,
        exact_gelu=not fused and nemo_gelu_is_exact(config),
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
        CheckpointMismatchError: A size is malformed.
    """
    refuse_mistyped(args, "the checkpoint's args")
    activation = _megatron_activation(args)
    bias = bool(_first(args, "add_bias_linear", default=True))
    fused = activation == "gelu" and bias and bool(_first(args, "bias_gelu_fusion", default=True))
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    return MegatronTraits(
        head_num=args.get("num_attention_heads"),
        hidden=args.get("hidden_size"),
        inter_size=_first(args, "ffn_hidden_size", default=_four_times(args)),
        num_layer=args.get("num_layers"),
        max_positions=args.get("max_position_embeddings"),
        norm_eps=float(_first(args, "layernorm_epsilon", "norm_epsilon", default=1e-5)),
        position=_megatron_position(args),
        normalization=_normalization(args, "apply_layernorm_1p"),
        activation=activation,
        gated=bool(args.get("swiglu") or args.get("quick_geglu")),
        fused_gelu=fused,
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


def _normalization(config: Mapping[str, Any], zero_centred: str) -> str:
    """Return the norm's name, ending in 1p if scales are stored as their distance from 1."""
    word = str(config.get("normalization") or "layernorm").lower()
    return word if word.endswith("1p") or not config.get(zero_centred) else f"{word}1p"


def _activation(word: str, *, openai_gelu: bool) -> tuple[str, bool]:
    """Return (kind, gated); NeMo's openai_gelu overrides `activation`."""
    bare = _bare(word)
    if bare in _GATED:
        return "gelu" if openai_gelu else _GATED[bare], True
    kind = _PLAIN.get(bare, word)
    return "gelu" if openai_gelu and bare in _PLAIN else kind, False


def _bare(word: str) -> str:
    return word.lower().removeprefix("fast-").removeprefix("fast_")


def _megatron_activation(args: Mapping[str, Any]) -> str:
    for flag, word in (("squared_relu", "relu2"), ("quick_geglu", "quick_gelu")):
        if args.get(flag):
            return word
    return "silu" if args.get("swiglu") else "gelu"


def nemo_fuses_activation(config: Mapping[str, Any]) -> bool:
    """Return whether a NeMo configuration asks for the kernel that fuses bias and activation."""
    return bool(_first(config, "bias_activation_fusion", "bias_gelu_fusion", default=True))


def nemo_gelu_is_exact(config: Mapping[str, Any]) -> bool:
    """Return whether a NeMo model computes gelu by erf where no kernel fuses it with its bias.

    NeMo 1.x, nlp/modules/common/megatron/mlp.py. The fused kernels, there and in megatron-core
    (megatron/core/fusions), compute the tanh form, with a gate and without.
    """
    word = _bare(str(config.get("activation") or "gelu"))
    return word in ("gelu", "geglu") and not config.get("openai_gelu")


# Settings that change what a model computes and leave no trace in its tensors.
# NeMo 1.x, megatron_gpt_model.py; megatron/core/transformer/transformer_config.py.
_FOREIGN = {
    "apply_embedding_scaling": "the embedding is multiplied by sqrt(hidden_size)",
    "mcore_customization_config": "megatron-core's layers are changed",
    "drop_layers": "layers are left out",
    "no_rope_freq": "only some layers have rotary positions",
    "window_attn_skip_freq": "only some layers attend in a window",
    "qk_l2_norm": "queries and keys are normalised",
    "softmax_scale": "scores are divided by another number than sqrt(size_per_head)",
    "glu_linear_offset": "the linear half of the gate has an offset",
    "activation_func_clamp_value": "activations are clamped",
    "attention_output_gate": "attention's output passes a gate",
    "experimental_attention_variant": "attention is of another kind",
    "linear_attention_freq": "only some layers have softmax attention",
    "heterogeneous_block_specs": "layers differ from each other",
    "multi_latent_attention": "keys and values are compressed",
}


def foreign_settings(traits: MegatronTraits, *, held: Collection[str] = ()) -> list[str]:
    """Return every reason a layout cannot hold a model that its tensors do not show.

    Args:
        traits: The model's.
        held: Settings of these that the layout holds.
    """
    reasons = [
        f"{key} = {traits.source[key]!r}: {what}, which the layout does not hold"
        for key, what in _FOREIGN.items()
        if key not in held and traits.source.get(key)
    ]
    softmax = traits.source.get("softmax_type") or "vanilla"
    if softmax != "vanilla":
        reasons.append(f"softmax_type = {softmax}: attention has only the plain softmax")
    return reasons
