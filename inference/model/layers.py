"""The parts of a transformer layer, written as if for a single device."""

# Shapes: N tokens of a step, E hidden, H local query heads, K local key/value heads, D head size

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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

# A LayerNorm or RMSNorm of the rows of x, or of x + residual, (N, E). With the keywords `onto`
# (N, E) and `factor` the result is onto + factor * norm. If only FP8 products read the result, many
# rows are returned as `RoundedRows`.
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
        wide = x.to(weight.dtype)  # the scale is in fp32 where rounding it would matter
        if kind == "layernorm":
            y = functional.layer_norm(wide, shape, weight, bias, eps).to(x.dtype)
        else:
            y = functional.rms_norm(wide, shape, weight, eps).to(x.dtype)
        return y if onto is None else torch.add(onto, y, alpha=factor)

    return normalise


@dataclass(frozen=True)
class QueryKeyNorm:
    """RMSNorm or (`centred`) LayerNorm of queries and keys, in place.

    It is applied before their rotation, or after it if `rotated`. `counts` are this rank's numbers
    of query and key heads; `weight` (H + K, D) fp32 are their scales, `bias` their optional biases.
    If `whole`, the mean is over all heads together, summed by `reduce` over `tp_size` ranks.
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
        """Return the mean squares of queries and keys (N, 2) over all ranks."""
        return mean if self.reduce is None else self.reduce(mean) / self.tp_size


def alibi_slopes(head_num: int) -> Tensor:
    """Return the slope of each head (head_num,), fp32 (Press et al., Train Short, Test Long).

    If the count is not a power of two, further heads take every other slope of the next power.
    """
    power = 2 ** math.floor(math.log2(head_num))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(head_num - power)]
    return torch.tensor(slopes)


@dataclass(frozen=True)
class Embedding:
    """The embedding of tokens, virtual tokens and positions, with a norm in some models.

    If this rank holds only some rows of the vocabulary, `reduce` adds those of the other ranks.
    """

    table: Tensor  # (rows, E), may be memory-mapped; row 0 is token `first_row`
    vocab_size: int
    dtype: torch.dtype
    first_row: int = 0
    reduce: AllReduce | None = None
    scale: float = 1.0  # factor on vocabulary rows, rounded to `dtype`
    prompts: Tensor | None = None  # all loaded prompt tables, concatenated
    positions: Tensor | None = None  # (max_pos_seq_len, E)
    norm: Normalise | None = None

    def __call__(self, tokens: Tokens) -> Tensor:
        """Return the first layer's input (N, E)."""
        x = self._with_virtual(tokens) if tokens.has_virtual else self._real(tokens.ids)
        if self.positions is not None:
            x = x + functional.embedding(tokens.positions, self.positions).to(self.dtype)
        return normalised(x, self.norm)

    def _with_virtual(self, tokens: Tokens) -> Tensor:
        ids, tables = tokens.ids, (self.prompts, tokens.embeddings)
        present = [table.to(self.dtype) for table in tables if table is not None]
        rows = (ids - self.vocab_size).clamp_min(0)
        virtual = functional.embedding(rows, torch.cat(present))  # (N, E)
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
    heads: tuple[int, int, int]  # H and K of this rank, and D
    layer: int  # index in this stage
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
        rotated_first = self.norm is not None and self.norm.rotated
        if self.norm is not None and not rotated_first:
            self.norm(heads)
        # Kernels that rotate cannot normalise afterwards.
        if angles is not None and (rotated_first or not rotates):
            heads.copy_(angles.rotate(heads))
            angles = None
        if self.norm is not None and rotated_first:
            self.norm(heads)
        query, new = qkv[:, :H], qkv[:, H:]
        if growth is not None:
            query.mul_(growth)
        mixed = step.attention(query, layer=self.layer, new=new, angles=angles)
        rows = None if residual is None else selected(residual, step)
        return self.out(selected(mixed, step), rows)


@dataclass(frozen=True)
class XIELU:
    """An activation with fp32 parameters: a parabola above zero, an exponential below.

    Huang and Schlag, Deriving Activation Functions Using Integration, arXiv 2411.13010.
    """

    positive: Tensor  # (1,) like the others
    negative: Tensor
    beta: Tensor
    eps: Tensor  # upper limit of the exponent, just below zero

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of x."""
        wide = x.float()
        below = (torch.expm1(torch.minimum(wide, self.eps)) - wide) * self.negative
        curve = torch.where(wide > 0, self.positive * wide.square(), below)
        return (curve + self.beta * wide).to(x.dtype)


@dataclass(frozen=True)
class MLP:
    """Two linears with an activation, possibly gated, between them."""

    up: Product  # includes the activation unless that has parameters
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


# The residual stream of T5 in fp16 is known to exceed 65504, the largest fp16 number.
_FP16_LIMIT = 64504.0


@dataclass(frozen=True)
class Sublayer:
    """Attention or MLP with its norms, an adapter, and the residual."""

    part: Any
    norm: Normalise | None  # of the input; None: the part reads the residual directly
    output_norm: Normalise | None = None  # of the output, before the residual is added
    # A bottleneck after the part, before the residual is added. Order: FasterTransformer,
    # layers/adapter_layers/LinearAdapterLayer.cc (df4a753) and
    # models/multi_gpu_gpt/ParallelGptDecoder.cc (4c014fb).
    adapter: Sublayer | None = None
    scale: float = 1.0  # on the output
    bounded: bool = False  # whether results in fp16 are clamped
    sum_norm: Normalise | None = None  # of the sum with the residual
    residual_from_norm: bool = False  # whether the normalised input is the residual

    def __call__(self, x: Tensor, step: Step | EncoderStep) -> Tensor:
        """Return x plus the part's output for the normalised x, (N, E)."""
        h = normalised(x, self.norm)
        x = h if self.residual_from_norm else x
        norms = (self.output_norm, self.sum_norm)
        if norms == (None, None) and self.adapter is None and self.scale == 1:
            x = self.part(h, step, x)
        else:
            y = self.part(h, step)
            y = y if self.adapter is None else self.adapter(y, step)
            x = x if len(x) == len(y) else selected(x, step)
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
    """A layer of sublayers, each of which reads the output of the previous one."""

    parts: tuple[Sublayer, ...]

    def __call__(self, x: Tensor, step: Step | EncoderStep) -> Tensor:
        """Return (N, E) for x (N, E)."""
        for part in self.parts:
            x = part(x, step)
        return x


def selected(x: Tensor, step: Step | EncoderStep) -> Tensor:
    """Return the rows of x (N, E) whose outputs the layer computes."""
    return x if step.selected is None else x.index_select(0, step.selected)


def normalised(x: Tensor, norm: Normalise | None) -> Tensor:
    """Return the norm of x, or x without a norm."""
    y: Tensor = x if norm is None else norm(x)
    return y


def scaled(x: Tensor, scalers: Tensor | None, tasks: Tensor | None) -> Tensor:
    """Return x (N, ...) times each token's row of `scalers` (tasks + 1, ...), by `tasks` (N,).

    IA3 multiplies keys, values and MLP activations by a learned vector per task; tokens without a
    task use the last row, which is all ones (Liu et al., Few-Shot Parameter-Efficient Fine-Tuning,
    section 3.3).
    """
    return x if scalers is None or tasks is None else x * scalers[tasks]
