"""Linears split among tensor-parallel ranks; weights keep FT's (in, out) layout.

A linear whose outputs are divided is a plain product: each rank computes its own columns.
"""

# Shapes: N rows (tokens), H hidden, V vocabulary, T tensor-parallel size

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.parallel.epilogue import PLAIN_GEMM, GemmOptions
from inference.parallel.gemm import Gemm, make_gemm
from inference.parallel.int8 import Weight

# The sum over the ranks of a stage of x (N, E), which may be overwritten, + bias + residual: these
# two are keywords.
AllReduce = Callable[..., Tensor]


def make_row_gemm(
    weight: Weight,
    bias: Tensor | None,
    *,
    reduce: AllReduce | None = None,
    options: GemmOptions = PLAIN_GEMM,
) -> Gemm:
    """Return the product of a linear whose inputs are divided, by this rank's part (in/T, out).

    It gives x W + bias + residual (N, out) for x (N, in/T) and a residual that may be overwritten.
    The ranks' products are summed by one all-reduce; `bias` is whole and added once, after the sum.
    With `reduce` None and more than one rank the caller sums, for several linears that share one
    all-reduce.
    """
    if reduce is None:
        return make_gemm(weight, bias, options=options)
    gemm = make_gemm(weight, options=options)

    def summed(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return reduce(gemm(x), bias=bias, residual=residual)

    return summed


@dataclass
class VocabParallelHead:
    """Hidden states to this rank's slice of the logits, in fp32, after the final norm if any."""

    gemm: Gemm | None  # whose outputs beyond `rows` have no token; None without rows
    rows: int  # tokens of this rank
    width: int  # of every rank's slice, at least `rows`
    norm: Callable[[Tensor], Tensor] | None = None  # of the hidden states
    input_scale: float = 1.0  # on what the norm gives
    scale: float = 1.0  # on the logits
    softcap: float | None = None  # a scaled logit becomes cap * tanh(logit / cap)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return (N, width) fp32, in `out` if given; columns beyond the rows are the lowest."""
        x = x if self.norm is None else self.norm(x)
        x = x if self.input_scale == 1 else x * self.input_scale
        if out is None:
            out = x.new_empty(len(x), self.width, dtype=torch.float32)
        out[:, self.rows :] = torch.finfo(torch.float32).min
        if self.gemm is not None:
            y = out[:, : self.rows].copy_(self.gemm(x)[:, : self.rows])
            if self.softcap is not None:
                y.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
            elif self.scale != 1:
                y.mul_(self.scale)
        return out
