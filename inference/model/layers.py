"""The parts of a transformer layer, written as for a single device."""

# Shapes: N tokens of a step, E hidden, H local query heads, K local key/value heads, D head size

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from export_scripts.families.layout.architecture import Norm
from inference.model.ragged import EncoderStep
from inference.model.rotary import RotaryTable
from inference.model.step import Step, Tokens
from inference.parallel.gemm import Gemm, Product
from inference.parallel.linear import AllReduce
from inference.parallel.native_cpu import has_library, rms_norm

# A LayerNorm or RMSNorm: of x, or of x + residual, the norm of each row (N, E); with the keywords
# `onto` (N, E) and `factor` the former plus the factor times the norm. One whose readers are
# products gives many rows as `RoundedRows` where these are in FP8.
Normalise = Callable[..., Any]


def make_norm(
    kind: Norm,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rounds: bool = False,
) -> Normalise:
    """Return a LayerNorm or RMSNorm over the last axis; with `rounds` only FP8 products read it."""
    assert bias is None or kind == "layernorm"
    if weight.is_cuda:
        from inference.model.gpu.norm import norm

        centred = kind == "layernorm"
        return partial(norm, weight=weight, bias=bias, eps=eps, centred=centred, rounds=rounds)
    shape = list(weight.shape)
    by_library = kind == "rmsnorm" and has_library()

    def normalise(
        x: Tensor,
        residual: Tensor | None = None,
        *,
        onto: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        x = x if residual is None else x + residual
        if by_library:
            y = rms_norm(x, weight, eps)
            return y if onto is None else torch.add(onto, y, alpha=factor)
        wide = x.to(weight.dtype)  # a scale is kept in fp32 where its rounding would matter
        if kind == "layernorm":
            y = functional.layer_norm(wide, shape, weight, bias, eps).to(x.dtype)
        else:
            y = functional.rms_norm(wide, shape, weight, eps).to(x.dtype)
        return y if onto is None else torch.add(onto, y, alpha=factor)

    return normalise


@dataclass(frozen=True)
class QueryKeyNorm:
    """RMSNorm or, `centred`, LayerNorm of queries and keys, in place.

    It comes before their rotation or, if `rotated`, after it.

    `counts` are this rank's query and key heads, `weight` (H + K, D) fp32 their scales, `bias` what
    is added to them, if anything. If `whole`, the mean is that of all heads together: `reduce` sums
    over the `tp_size` ranks that share them.
    """

    weight: Tensor
    counts: tuple[int, int]
    eps: float
    whole: bool
    reduce: AllReduce | None
    tp_size: int
    centred: bool = False
    bias: Tensor | None = None
    rotated: bool = False

    def __call__(self, heads: Tensor) -> None:
        """Normalise heads (N, H+K, D)."""
        if heads.is_cuda and not self.whole and not self.centred:
            from inference.model.gpu.norm import norm_heads

            norm_heads(heads, weight=self.weight, eps=self.eps)
            return
        wide = heads.float()
        if self.centred:
            wide = wide - wide.mean(2, keepdim=True)
        mean = wide.square().mean(2)  # (N, H+K)
        if self.whole:
            queries, keys = torch.split(mean, list(self.counts), dim=1)
            both = self._summed(torch.stack((queries.mean(1), keys.mean(1)), dim=1))
            mean = torch.cat((both[:, :1].expand_as(queries), both[:, 1:].expand_as(keys)), dim=1)
        wide = wide * (mean + self.eps).rsqrt().unsqueeze(2) * self.weight
        heads.copy_(wide if self.bias is None else wide + self.bias)

    def _summed(self, mean: Tensor) -> Tensor:
        """Return the mean squares of all ranks' queries and keys (N, 2) for those of this one."""
        return mean if self.reduce is None else self.reduce(mean) / self.tp_size


def alibi_slopes(head_num: int) -> Tensor:
    """Return the slope of each head (head_num,), fp32 (Press et al., Train Short, Test Long).

    If the count is not a power of two, the further heads take every other slope of the next power.
    """
    power = 2 ** math.floor(math.log2(head_num))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(head_num - power)]
    return torch.tensor(slopes)


@dataclass(frozen=True)
class Embedding:
    """The input side: tokens, virtual tokens and positions, then a norm in some models.

    A rank may hold only some rows of the vocabulary; the others then contribute by `reduce`.
    """

    table: Tensor  # (rows, E), which may be memory-mapped; row 0 is token `first_row`
    vocab_size: int
    dtype: torch.dtype
    first_row: int = 0
    reduce: AllReduce | None = None
    scale: float = 1.0  # on the rows of the vocabulary, rounded to `dtype`
    prompts: Tensor | None = None  # all loaded prompt tables, one after the other
    positions: Tensor | None = None  # (max_pos_seq_len, E)
    norm: Normalise | None = None

    def __call__(self, tokens: Tokens) -> Tensor:
        """Return the first layer's input (N, E)."""
        x = self._with_virtual(tokens) if tokens.has_virtual else self._real(tokens.ids)
        if self.positions is not None:
            x = x + functional.embedding(tokens.positions, self.positions).to(self.dtype)
        return normalised(x, self.norm)

    def _with_virtual(self, tokens: Tokens) -> Tensor:
        ids, given = tokens.ids, (self.prompts, tokens.embeddings)
        tables = [table.to(self.dtype) for table in given if table is not None]
        rows = (ids - self.vocab_size).clamp_min(0)
        virtual = functional.embedding(rows, torch.cat(tables))  # (N, E)
        real = self._real(ids.clamp_max(self.vocab_size - 1))
        return torch.where((ids >= self.vocab_size).unsqueeze(1), virtual, real)

    def _real(self, ids: Tensor) -> Tensor:
        if self.reduce is None:
            x = functional.embedding(ids, self.table).to(self.dtype)
        elif not len(self.table):
            sizes = len(ids), self.table.shape[1]
            x = self.reduce(torch.zeros(sizes, dtype=self.dtype, device=ids.device))
        else:
            local = ids - self.first_row
            absent = (local < 0) | (local >= len(self.table))
            x = functional.embedding(local.masked_fill(absent, 0), self.table).to(self.dtype)
            x = self.reduce(x.masked_fill_(absent.unsqueeze(1), 0))
        return x if self.scale == 1 else x.mul_(self.scale)


@dataclass(frozen=True)
class Attention:
    """Self-attention over the cache, or within the rows of an encoder."""

    qkv: Product
    out: Gemm
    heads: tuple[int, int, int]  # this rank's query heads, its key/value heads, and their size
    layer: int  # of this stage
    rotary: RotaryTable | None = None
    norm: QueryKeyNorm | None = None
    scalers: Tensor | None = None  # of IA3, (tasks + 1, H+2K, D)

    def __call__(
        self, x: Tensor, step: Step | EncoderStep, residual: Tensor | None = None
    ) -> Tensor:
        """Return (N, E) for normalised x (N, E), plus `residual`, which may be overwritten."""
        H, K, D = self.heads  # noqa: N806 - the shape legend
        qkv = scaled(self.qkv(x).view(-1, H + 2 * K, D), self.scalers, step.tasks)  # (N, H+2K, D)
        heads, angles, growth, rotates = qkv[:, : H + K], None, None, False
        if self.rotary is not None:
            assert isinstance(step, Step)
            angles, rotates = step.angles[self.rotary], step.attention.rotates
            growth = angles.growth
        if self.norm is not None:
            if angles is not None and self.norm.rotated:
                # Kernels that rotate cannot normalise after it.
                heads.copy_(angles.rotate(heads))
                angles = None
            self.norm(heads)
        query, new = qkv[:, :H], qkv[:, H:]
        if angles is not None and not rotates:
            rotated, angles = angles.rotate(heads), None
            query, new = rotated[:, :H], torch.cat((rotated[:, H:], qkv[:, H + K :]), dim=1)
        if growth is not None:
            query.mul_(growth)
        mixed = step.attention(query, layer=self.layer, new=new, angles=angles)
        return self.out(kept(mixed, step), None if residual is None else kept(residual, step))


@dataclass(frozen=True)
class XIELU:
    """An activation with parameters, fp32: a parabola above zero, an exponential below.

    Huang and Schlag, Deriving Activation Functions Using Integration, arXiv 2411.13010.
    """

    positive: Tensor  # (1,) like the others
    negative: Tensor
    beta: Tensor
    eps: Tensor  # most of what is exponentiated, just below zero

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of x, of its shape."""
        wide = x.float()
        below = (torch.expm1(torch.minimum(wide, self.eps)) - wide) * self.negative
        curve = torch.where(wide > 0, self.positive * wide.square(), below)
        return (curve + self.beta * wide).to(x.dtype)


@dataclass(frozen=True)
class MLP:
    """Two linears with an activation between, which may be gated."""

    up: Product  # with its activation, if that has no parameters
    down: Gemm
    scalers: Tensor | None = None  # of IA3, (tasks + 1, width)
    activation: XIELU | None = None

    def __call__(
        self, x: Tensor, step: Step | EncoderStep, residual: Tensor | None = None
    ) -> Tensor:
        """Return (N, E) for x (N, E)."""
        h = self.up(x)
        h = h if self.activation is None else self.activation(h)
        return self.down(scaled(h, self.scalers, step.tasks), residual)


# Half precision ends at 65504, which the residual stream of T5 in fp16 is known to exceed.
_FP16_LIMIT = 64504.0

PartT = TypeVar("PartT", bound=Callable[..., Tensor])


@dataclass(frozen=True)
class Sublayer(Generic[PartT]):
    """Attention or MLP with its norms, an adapter, and the residual."""

    part: PartT
    norm: Normalise | None  # None: the part reads the residual as it is
    output_norm: Normalise | None = None  # of the output, before it joins the residual
    # A bottleneck, added to the output before that joins the residual. Order: FasterTransformer,
    # layers/adapter_layers/LinearAdapterLayer.cc (df4a753) and
    # models/multi_gpu_gpt/ParallelGptDecoder.cc (4c014fb).
    adapter: Sublayer[MLP] | None = None
    scale: float = 1.0  # on what joins the residual
    bounded: bool = False  # in fp16
    sum_norm: Normalise | None = None  # of the sum with the residual
    residual_from_norm: bool = False

    def __call__(self, x: Tensor, step: Step | EncoderStep) -> Tensor:
        """Return x plus what the part makes of the normalised x, (N, E)."""
        h = normalised(x, self.norm)
        x = h if self.residual_from_norm else x
        norms = (self.output_norm, self.sum_norm)
        if norms == (None, None) and self.adapter is None and self.scale == 1:
            x = self.part(h, step, x)
        else:
            y = self.part(h, step)
            y = y if self.adapter is None else self.adapter(y, step)
            x = x if len(x) == len(y) else kept(x, step)
            if self.sum_norm is not None:
                x = self.sum_norm(y, x)
            elif self.output_norm is not None:
                x = self.output_norm(y, onto=x, factor=self.scale)
            else:
                x = torch.add(x, y, alpha=self.scale)
        is_bounded = self.bounded and x.dtype == torch.float16
        return x.clamp_(-_FP16_LIMIT, _FP16_LIMIT) if is_bounded else x


@dataclass(frozen=True)
class Sublayers:
    """A layer whose parts read each other's sums with the residual."""

    parts: tuple[Sublayer[Any], ...]

    def __call__(self, x: Tensor, step: Step | EncoderStep) -> Tensor:
        """Return (N, E) for x (N, E)."""
        for part in self.parts:
            x = part(x, step)
        return x


def kept(x: Tensor, step: Step | EncoderStep) -> Tensor:
    """Return the rows of x (N, E) that a layer's step keeps."""
    return x if step.kept is None else x.index_select(0, step.kept)


def normalised(x: Tensor, norm: Normalise | None) -> Tensor:
    """Return the norm of x, or x where there is none."""
    y: Tensor = x if norm is None else norm(x)
    return y


def scaled(x: Tensor, scalers: Tensor | None, tasks: Tensor | None) -> Tensor:
    """Return x (N, ...) scaled by the row of `scalers` (tasks + 1, ...) for each task (N,).

    IA3 multiplies keys, values and MLP activations by a learned vector per task; a token without a
    task takes the last row, which is all ones (Liu et al., Few-Shot Parameter-Efficient
    Fine-Tuning, section 3.3).
    """
    return x if scalers is None or tasks is None else x * scalers[tasks]
