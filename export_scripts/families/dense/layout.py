"""The layout of dense decoders that FasterTransformer lacks; docs/decoder_layout.md describes it.

NVIDIA's FasterTransformer has no decoder with RMSNorm, a gated MLP or grouped-query attention. The
layout follows GPT's where it can; keys of config.ini state the differences between models.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import (
    ROTARY_SCALINGS,
    DecoderArchitecture,
    Rotary,
    activation_choice,
)
from export_scripts.families.layout.config import Layers, ini_field
from export_scripts.families.layout.decoder import DecoderConfig
from export_scripts.families.layout.spec import ModelFamily, layout_table
from export_scripts.families.mapping.sources import Copy, Get, Parts, Sources
from foundations.files.json_content import Fields, without_nulls

_CHOICES = {
    "norm_type": ("rmsnorm", "layernorm"),
    "residual": ("sequential", "parallel", "parallel_shared"),
    "query_key_norm": (None, "head", "heads", "all"),
    "rotary_scaling_type": (None, *ROTARY_SCALINGS),
}
_POSITIVE = (
    "layernorm_eps", "attention_scale", "attention_softcap", "logit_softcap", "logit_scale",
    "embedding_scale", "residual_scale", "rotary_base", "rotary_local_base",
    "rotary_llama_4_scaling_beta", "rotary_alpha",
)  # fmt: skip
# Kind of scaling -> parameters that a folder must have in addition to ROTARY_SCALINGS'.
_LENGTH = ("original_max_position_embeddings",)
_COMPUTED = {"llama3": _LENGTH, "yarn": _LENGTH, "longrope": (*_LENGTH, "attention_factor")}
# Parameters of rotary scaling by Hugging Face's names; config.ini puts "rotary_" before them.
_SCALING = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "truncate", "short_factor", "long_factor",
    "llama_4_scaling_beta", "alpha",
)  # fmt: skip


def _trait(default: Any) -> Any:
    return ini_field(default, unless_default=True)


@dataclass(frozen=True, kw_only=True)
class DenseConfig(DecoderConfig):
    """config.ini [llama], named after the first of these models; only our loader reads it."""

    SECTION: ClassVar[str] = "llama"
    ARCHITECTURE: ClassVar[type[DecoderArchitecture]] = DecoderArchitecture

    kv_head_num: int  # the model's heads; the folder's are stored_kv_head_num
    hidden_size: int
    max_pos_seq_len: int
    layernorm_eps: float
    norm_type: str = _trait("rmsnorm")  # rmsnorm, layernorm
    norm_one_plus: bool = _trait(False)
    has_norm_bias: bool = _trait(True)  # whether layernorms have biases
    has_input_norms: bool = _trait(True)
    has_output_norms: bool = _trait(False)
    # Norm over each head with scales of one head ("head") or of all ("heads"), or over "all" heads.
    query_key_norm: str | None = None
    query_key_norm_rotated: bool = _trait(False)
    residual: str = _trait("sequential")  # sequential, parallel, parallel_shared
    activation_type: str = "gated-silu"
    exact_gelu: bool = False  # gelu by erf, not tanh
    tie_word_embeddings: bool = False
    has_qkv_bias: bool = False
    has_attention_dense_bias: bool = False
    has_mlp_bias: bool = False
    has_head_bias: bool = _trait(False)
    # Matrices of layers are in FP8; the number of inputs that share a scale of an output, 0: all.
    fp8_group_size: int | None = None
    attention_scale: float | None = None  # None: 1 / sqrt(size_per_head)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = _trait(1.0)
    embedding_scale: float = _trait(1.0)
    residual_scale: float = _trait(1.0)
    sliding_window: int | None = None  # number of positions attended to, the current one included
    sliding_layers: Layers = None  # layers with the window; None: all
    has_positional_encoding: bool = _trait(False)  # a table of learned positions
    use_attention_linear_bias: bool = _trait(False)
    rotary_embedding: int  # dimensions of each head that are rotated
    rotary_interleaved: bool = _trait(False)  # rotate neighbouring dimensions, not halves
    rotary_layers: Layers = None  # layers that rotate; None: all
    rotary_base: float = 10000.0
    rotary_local_base: float | None = None  # base of layers with the window, which are not scaled
    rotary_scaling_type: str | None = None  # linear, dynamic, llama3, yarn or longrope
    rotary_factor: float | None = None
    rotary_original_max_position_embeddings: int | None = None
    rotary_low_freq_factor: float | None = None
    rotary_high_freq_factor: float | None = None
    rotary_beta_fast: float | None = None
    rotary_beta_slow: float | None = None
    rotary_attention_factor: float | None = None
    rotary_truncate: bool | None = None
    rotary_short_factor: tuple[float, ...] | None = None
    rotary_long_factor: tuple[float, ...] | None = None
    rotary_llama_4_scaling_beta: float | None = None
    rotary_alpha: float | None = None

    def problems(self) -> list[str]:
        """Return a problem for each unknown choice, and for numbers that contradict each other."""
        problems = super().problems() + [
            f"{name} = {getattr(self, name)}; known: {', '.join(map(str, known))}"
            for name, known in _CHOICES.items()
            if getattr(self, name) not in known
        ]
        if self.kv_head_num < 1:
            problems.append(f"kv_head_num = {self.kv_head_num}: expected at least 1")
        problems += [
            f"{name} = {value}: expected a number greater than 0"
            for name in _POSITIVE
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        positions = ("has_positional_encoding", "use_attention_linear_bias", "rotary_embedding")
        if len(found := [name for name in positions if getattr(self, name)]) > 1:
            problems.append(f"{' and '.join(found)}: expected positions of one kind")
        if (self.query_key_norm, self.norm_type) == ("all", "layernorm"):
            problems.append("query_key_norm = all: only computed with norm_type = rmsnorm")
        kind = self.rotary_scaling_type or ""
        problems += [
            f"rotary_scaling_type = {kind} needs rotary_{name}"
            for name in (*ROTARY_SCALINGS.get(kind, ()), *_COMPUTED.get(kind, ()))
            if name not in self.rotary_scaling
        ]
        if group := self.fp8_group_size:
            shares = {"attention_width": self.attention_width, "inter_size": self.inter_size}
            problems += [
                f"fp8_group_size = {group}: {self.tensor_para_size} ranks share {name} = {width} "
                "within a group of one scale; use fewer ranks, or widen the weights"
                for name, width in shares.items()
                if self.tensor_para_size > 1 and width % (group * self.tensor_para_size)
            ]
        low, high = self.rotary_low_freq_factor, self.rotary_high_freq_factor
        if low is not None and high is not None and low >= high:
            problems.append(
                f"rotary_high_freq_factor = {high}: expected more than low_freq_factor = {low}"
            )
        dims = self.rotary_embedding
        return problems + [
            f"{name} has {len(factors)} factors for {dims} rotated dimensions: expected {dims // 2}"
            for name in ("rotary_short_factor", "rotary_long_factor")
            if (factors := getattr(self, name)) is not None and len(factors) != dims // 2
        ]

    @property
    def rotary_scaling(self) -> Fields:
        """Parameters of rotary scaling by Hugging Face's names."""
        return without_nulls({name: getattr(self, f"rotary_{name}") for name in _SCALING})

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.hidden_size

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a second matrix next to its first."""
        return activation_choice(self.activation_type)[1]

    @property
    def attention_width(self) -> int:
        """The total width of all query heads."""
        return self.head_num * self.size_per_head

    @property
    def stored_kv_head_num(self) -> int:
        """The number of key heads, and of value heads, in the folder.

        With more ranks than heads, each head is stored tensor_para_size / kv_head_num times in a
        row, so that every rank has one.
        """
        tp_size = self.tensor_para_size
        if tp_size > self.kv_head_num and tp_size % self.kv_head_num == 0:
            return tp_size
        return self.kv_head_num

    @property
    def kv_width(self) -> int:
        """The total width of the stored key (or value) heads."""
        return self.stored_kv_head_num * self.size_per_head

    def _per_layer(self, layers: Layers) -> tuple[bool, ...] | None:
        return None if layers is None else tuple(n in layers for n in range(self.num_layer))

    def architecture(self) -> DecoderArchitecture:
        """Return the decoder."""
        activation, gated = activation_choice(self.activation_type)
        rotary = local = None
        if dims := self.rotary_embedding:
            kind, scaling = self.rotary_scaling_type, self.rotary_scaling
            rotary = Rotary(dims=dims, base=self.rotary_base, kind=kind, scaling=scaling)
            if self.rotary_local_base is not None:
                local = Rotary(dims=dims, base=self.rotary_local_base)
        positions = {
            "rotary_interleaved": rotary and self.rotary_interleaved,
            "rotary_half": rotary,
            "learned": self.has_positional_encoding,
            "alibi": self.use_attention_linear_bias,
            "none": True,
        }
        return self.build_architecture(
            self.ARCHITECTURE,
            kv_head_num=self.stored_kv_head_num,
            position=next(kind for kind, is_it in positions.items() if is_it),
            rotary=rotary,
            local_rotary=local,
            rotary_layers=self._per_layer(self.rotary_layers),
            norm=self.norm_type,
            activation=activation,
            gated=gated,
            separate_qkv=True,
            head_bias=self.has_head_bias,
            sliding_layers=self._per_layer(self.sliding_layers),
        )


LAYOUT = layout_table("llama")


@dataclass(frozen=True)
class _DeduplicatedHeads(Copy):
    """Key or value heads of a folder that stores each `copies` times: the first of each."""

    copies: int = 1

    def build(self, get: Get, config: Any) -> Parts:
        parts = super().build(get, config)
        return Parts(parts.axis, parts.tensors[:: self.copies])


def _deduplicated_heads(stored: DenseConfig, _: Collection[str]) -> Sources:
    """Return the sources of keys and values if several ranks have the same head."""
    copies = stored.stored_kv_head_num // stored.kv_head_num
    return {
        spec.name: _DeduplicatedHeads(spec.name, cut=spec.split, copies=copies)
        for spec in LAYOUT
        if copies > 1 and "kv_width" in spec.shape and any(spec.expand(stored))
    }


DENSE = ModelFamily(
    name="llama",
    model_type="Llama",
    config=DenseConfig,
    layout=LAYOUT,
    divisible=("head_num", "stored_kv_head_num", "inter_size"),
    rank_dependent=_deduplicated_heads,
    ft_backend=False,
)
