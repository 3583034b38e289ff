"""Architectures as records of plain choices; each family derives one from its config.ini.

They hold everything that the forward pass needs, so that the model's modules do not depend on the
family.
"""

from dataclasses import dataclass, field
from typing import Literal

from foundations.files.json_content import Table

Norm = Literal["layernorm", "rmsnorm"]
# gelu is the tanh approximation unless exact_gelu is set, as in FasterTransformer. relu2 is squared
# ReLU; xielu has parameters in each layer, and no gate.
Activation = Literal["gelu", "relu", "relu2", "silu", "xielu"]

_KINDS: tuple[Activation, ...] = ("gelu", "relu", "relu2", "silu")
_ACTIVATIONS: dict[str, tuple[Activation, bool]] = {
    **{kind: (kind, False) for kind in _KINDS},
    **{f"gated-{kind}": (kind, True) for kind in _KINDS},
    "geglu": ("gelu", True),
    "reglu": ("relu", True),
    "siglu": ("silu", True),
    "xielu": ("xielu", False),
}


def activation_choice(spelling: str) -> tuple[Activation, bool]:
    """Return (activation, gated) for a spelling that FT's loader accepts in config.ini.

    Raises:
        ValueError: The loader would abort on this spelling.
    """
    try:
        return _ACTIVATIONS[spelling.lower()]
    except KeyError:
        raise ValueError(
            f"activation {spelling!r} is unknown to the loader; known: {', '.join(_ACTIVATIONS)}"
        ) from None


# Kind of rotary scaling -> required parameters, by Hugging Face's names.
ROTARY_SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding of a decoder: `dims` dimensions of each head are rotated.

    `kind` is one of ROTARY_SCALINGS, `scaling` its parameters; longrope's include its
    attention_factor, and kinds with an original length include that. With llama_4_scaling_beta,
    queries grow with the number of original lengths before their position; dynamic with alpha
    changes the base once, for all lengths.
    """

    dims: int
    base: float = 10000.0
    kind: str | None = None  # None: plain rotary
    scaling: Table = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """Sizes and choices of all models."""

    head_num: int
    size_per_head: int
    hidden: int
    inter_size: int
    num_layer: int
    layernorm_eps: float = 1e-6
    exact_gelu: bool = False  # gelu by erf, not tanh


@dataclass(frozen=True, kw_only=True)
class DecoderArchitecture(_Layers):
    """A decoder-only model."""

    kv_head_num: int
    vocab_size: int
    position: Literal["learned", "alibi", "rotary_interleaved", "rotary_half", "none"]
    max_pos_seq_len: int | None = None  # size of the table of positions; None: no table
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None  # for layers with a sliding window; None: `rotary`
    rotary_layers: tuple[bool, ...] | None = None  # whether each layer rotates; None: all do
    norm: Norm = "layernorm"
    norm_one_plus: bool = False  # the stored scale is the distance from 1
    has_input_norms: bool = True  # attention and MLP read normalised input
    has_output_norms: bool = False  # their outputs are normalised before the residual adds them
    # Norm of queries and keys before rotary: over each head with scales of one head ("head") or of
    # all ("heads"), or over "all" heads together (RMSNorm only).
    query_key_norm: Literal["head", "heads", "all"] | None = None
    query_key_norm_rotated: bool = False  # that norm comes after rotary
    norm_before: bool = True  # False: normalise after the residual (post_layernorm)
    residual_from_norm: bool = False  # the residual adds the normalised input, not the input
    # parallel: x + attention(norm1(x)) + mlp(norm2(x)); parallel_shared: one norm for both.
    residual: Literal["sequential", "parallel", "parallel_shared"] = "sequential"
    activation: Activation = "gelu"
    gated: bool = False  # act(x W1) * (x W3) before W2
    has_pre_decoder_layernorm: bool = False
    has_post_decoder_layernorm: bool = True
    # attention.{query,key,value} instead of attention.query_key_value
    separate_qkv: bool = False
    fused_bias_sum: bool = False  # mlp.attention.bias.sum replaces both output biases
    untied_head: bool = False
    head_bias: bool = False
    adapter_inter_size: int = 0  # 0: no adapters after attention and MLP
    sliding_window: int | None = None  # positions that a query attends to, its own included
    sliding_layers: tuple[bool, ...] | None = None  # whether each layer has the window; None: all
    attention_scale: float | None = None  # factor of q.k; None: 1 / sqrt(size_per_head)
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None  # the same for logits, after their scale
    logit_scale: float = 1.0
    embedding_scale: float = 1.0  # factor of token embeddings
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderArchitecture(_Layers):
    """A T5-like model; encoder and decoder differ only in depth."""

    decoder_num_layer: int  # 0: only an encoder; `num_layer` is the encoder's
    vocab_size: int
    position: Literal["relative", "absolute"]
    num_buckets_or_max_pos_seq_len: int
    max_distance: int = 128
    norm: Norm = "rmsnorm"
    bias: bool = False
    scale_attention: bool = False  # q.k / sqrt(size_per_head)
    scale_logits: bool = False  # logits / sqrt(hidden)
    activation: Activation = "relu"
    gated: bool = False
    untied_head: bool = True
    adapter_inter_size: int = 0
    ia3_num_tasks: int = 0

    @property
    def max_pos_seq_len(self) -> int | None:
        """The number of rows of the table of positions; None without a table."""
        return self.num_buckets_or_max_pos_seq_len if self.position == "absolute" else None


@dataclass(frozen=True, kw_only=True)
class EncoderArchitecture(_Layers):
    """A BERT-like stack of post-layernorm encoder layers (no embeddings, no heads)."""

    activation: Activation = "gelu"
    q_scaling: float = 1.0


Architecture = DecoderArchitecture | EncoderDecoderArchitecture | EncoderArchitecture
