"""Decoders in the style of Llama, Mistral and Qwen2, in a layout of our own.

RMSNorm, gated MLP, grouped-query attention, rotary positions. The layout follows the GPT one where
it can; docs/llama_layout.md describes it. NVIDIA's FasterTransformer has no Llama.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import (
    DecoderArchitecture,
    Rotary,
    activation_choice,
)
from export_scripts.families.layout.decoder import DecoderConfig
from export_scripts.families.layout.spec import ModelFamily, WeightSpec
from export_scripts.families.mapping.rotary import RotarySettings, rotary_fraction
from export_scripts.families.mapping.sources import Copy, Get, Parts, TensorSource

LAYER = "model.layers.{layer}."

# Activation of a gated MLP -> activation_type.
GATED = {"silu": "gated-silu", "gelu": "geglu", "relu": "reglu"}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """config.ini [llama]; no loader but ours reads it."""

    SECTION: ClassVar[str] = "llama"

    kv_head_num: int  # of the model; see stored_kv_head_num
    hidden_size: int
    max_pos_seq_len: int
    layernorm_eps: float
    activation_type: str = "gated-silu"
    exact_gelu: bool = False  # geglu's gelu is by erf, not tanh
    tie_word_embeddings: bool = False
    has_qkv_bias: bool = False
    has_attention_dense_bias: bool = False
    has_mlp_bias: bool = False
    sliding_window: int | None = None  # number of positions attended to, the current one included
    rotary_embedding: int  # dimensions of each head that are rotated
    rotary_base: float = 10000.0
    rotary_scaling_type: str | None = None  # linear, dynamic, llama3 or yarn
    rotary_factor: float | None = None
    rotary_original_max_position_embeddings: int | None = None
    rotary_low_freq_factor: float | None = None
    rotary_high_freq_factor: float | None = None
    rotary_beta_fast: float | None = None
    rotary_beta_slow: float | None = None
    rotary_attention_factor: float | None = None
    rotary_truncate: bool | None = None

    def __post_init__(self) -> None:
        """Refuse an odd number of rotated dimensions.

        Raises:
            ValueError: They cannot be rotated two at a time.
        """
        if self.rotary_embedding % 2:
            raise ValueError(
                f"rotary_embedding = {self.rotary_embedding} of the head size {self.size_per_head} "
                "cannot be represented: dimensions are rotated two at a time"
            )

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.hidden_size

    @property
    def untied_head(self) -> bool:
        """True if the folder holds its own LM head."""
        return not self.tie_word_embeddings

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.head_num * self.size_per_head

    @property
    def stored_kv_head_num(self) -> int:
        """Key and value heads in the folder.

        More ranks than heads get one head each: each head is stored tensor_para_size / kv_head_num
        times in a row.
        """
        tp_size = self.tensor_para_size
        if tp_size > self.kv_head_num and tp_size % self.kv_head_num == 0:
            return tp_size
        return self.kv_head_num

    @property
    def kv_width(self) -> int:
        """Width of the stored key (or value) heads together."""
        return self.stored_kv_head_num * self.size_per_head


def llama_architecture(config: LlamaConfig) -> DecoderArchitecture:
    """Return the decoder a Llama config describes.

    Raises:
        ValueError: activation_type is unknown or has no gate.
    """
    activation, gated = activation_choice(config.activation_type)
    if not gated:
        raise ValueError(f"activation_type = {config.activation_type}: expected a gated one")
    return config.decoder(
        kv_head_num=config.stored_kv_head_num,
        position="rotary_half",
        max_pos_seq_len=config.max_pos_seq_len,
        rotary=Rotary(
            dims=config.rotary_embedding, base=config.rotary_base, scaling=_scaling(config)
        ),
        norm="rmsnorm",
        norm_eps=config.layernorm_eps,
        activation=activation,
        exact_gelu=config.exact_gelu,
        gated=True,
        separate_qkv=True,
        untied_head=config.untied_head,
        sliding_window=config.sliding_window,
    )


_SCALING_FIELDS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
)


def _scaling(config: LlamaConfig) -> tuple[tuple[str, str], ...]:
    if config.rotary_scaling_type is None:
        return ()
    values = {name: getattr(config, f"rotary_{name}") for name in _SCALING_FIELDS}
    known = ((name, str(value)) for name, value in values.items() if value is not None)
    return (("type", config.rotary_scaling_type), *known)


def rotary_fields(rotary: RotarySettings, size_per_head: int) -> dict[str, Any]:
    """Return the rotary keys of config.ini."""
    scaled = {} if rotary.kind == "default" else {"rotary_scaling_type": rotary.kind}
    return {
        "rotary_embedding": int(size_per_head * rotary.fraction),
        "rotary_base": rotary.base,
        **scaled,
        **{f"rotary_{name}": value for name, value in rotary.scaling.items()},
    }


def written_rotary(config: LlamaConfig) -> dict[str, Any]:
    """Return the rotary settings of config.json of which `rotary_fields` makes the config's."""
    scaling = {
        name: value
        for name in _SCALING_FIELDS
        if (value := getattr(config, f"rotary_{name}")) is not None
    }
    kind = config.rotary_scaling_type
    fraction = rotary_fraction(config.rotary_embedding, config.size_per_head)
    return {
        "rope_theta": config.rotary_base,
        **({} if fraction == 1 else {"partial_rotary_factor": fraction}),
        "rope_scaling": None if kind is None else {"rope_type": kind, **scaling},
    }


def repeated_heads(heads: Any, config: LlamaConfig) -> Any:
    """Return key or value heads (k, d[, h]), each as often as the folder stores it."""
    times = config.stored_kv_head_num // config.kv_head_num
    return heads if times == 1 else heads.repeat(times, 0)


def in_first(heads: Any) -> Any:
    """Return ([h,] heads, d) of (heads, d[, h])."""
    return heads.transpose(2, 0, 1) if heads.ndim == 3 else heads


LAYOUT: tuple[WeightSpec, ...] = (
    WeightSpec("model.wte", ("vocab_size", "hidden")),
    WeightSpec(LAYER + "input_layernorm.weight", ("hidden",)),
    WeightSpec(LAYER + "attention.query.weight", ("hidden", "attention_width"), split=1),
    WeightSpec(
        LAYER + "attention.query.bias", ("attention_width",), split=0, when=("has_qkv_bias",)
    ),
    WeightSpec(LAYER + "attention.key.weight", ("hidden", "kv_width"), split=1),
    WeightSpec(LAYER + "attention.key.bias", ("kv_width",), split=0, when=("has_qkv_bias",)),
    WeightSpec(LAYER + "attention.value.weight", ("hidden", "kv_width"), split=1),
    WeightSpec(LAYER + "attention.value.bias", ("kv_width",), split=0, when=("has_qkv_bias",)),
    WeightSpec(LAYER + "attention.dense.weight", ("attention_width", "hidden"), split=0),
    WeightSpec(LAYER + "attention.dense.bias", ("hidden",), when=("has_attention_dense_bias",)),
    WeightSpec(LAYER + "post_attention_layernorm.weight", ("hidden",)),
    # The activated half of the gated MLP, then the linear one.
    WeightSpec(LAYER + "mlp.dense_h_to_4h.weight", ("hidden", "inter_size"), split=1),
    WeightSpec(LAYER + "mlp.dense_h_to_4h.bias", ("inter_size",), split=0, when=("has_mlp_bias",)),
    WeightSpec(LAYER + "mlp.dense_h_to_4h_2.weight", ("hidden", "inter_size"), split=1),
    WeightSpec(
        LAYER + "mlp.dense_h_to_4h_2.bias", ("inter_size",), split=0, when=("has_mlp_bias",)
    ),
    WeightSpec(LAYER + "mlp.dense_4h_to_h.weight", ("inter_size", "hidden"), split=0),
    WeightSpec(LAYER + "mlp.dense_4h_to_h.bias", ("hidden",), when=("has_mlp_bias",)),
    WeightSpec("model.final_layernorm.weight", ("hidden",)),
    WeightSpec("model.lm_head.weight", ("vocab_size", "hidden"), when=("untied_head",)),
)


@dataclass(frozen=True)
class _FirstCopies(Copy):
    """Key or value heads of a folder of more ranks than heads: the first rank of each head."""

    copies: int = 1

    def build(self, get: Get, config: Any) -> Parts:
        """Return one piece of each head."""
        parts = super().build(get, config)
        return Parts(parts.axis, parts.tensors[:: self.copies])


def _whole_heads(stored: LlamaConfig, names: Collection[str]) -> dict[str, TensorSource]:
    """Return the sources of keys and values where several ranks have the same head."""
    copies = stored.stored_kv_head_num // stored.kv_head_num
    heads = (name for name in (f"{LAYER}attention.{part}." for part in ("key", "value")))
    return {
        name + kind: _FirstCopies(name + kind, cut=axis, copies=copies)
        for name in heads
        for kind, axis in (("weight", 1), ("bias", 0))
        if copies > 1 and (name + kind).format(layer=0) in names
    }


LLAMA = ModelFamily(
    name="llama",
    model_type="Llama",
    config=LlamaConfig,
    architecture=llama_architecture,
    layout=LAYOUT,
    divisible=("head_num", "stored_kv_head_num", "inter_size"),
    whole=_whole_heads,
    ft_backend=False,
)
