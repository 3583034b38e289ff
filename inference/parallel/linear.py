"""Linears split among tensor-parallel ranks; weights keep FT's (in, out) layout.

A column-parallel linear is a plain product, as each rank computes its own outputs.
"""

# Shapes: N rows (tokens), H hidden, V vocabulary, T tensor-parallel size

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.parallel.epilogue import PLAIN_GEMM, GemmOptions
from inference.parallel.gemm import Gemm, make_gemm
from inference.parallel.int8 import Weight

# Returns the sum of x (N, E) over the ranks of a stage, + the keywords `bias` and `residual`; x may
# be overwritten.
AllReduce = Callable[..., Tensor]


def make_row_gemm(
    weight: Weight,
    bias: Tensor | None,
    *,
    reduce: AllReduce | None = None,
    options: GemmOptions = PLAIN_GEMM,
) -> Gemm:
    """Return a row-parallel linear, given this rank's part of the weight (in/T, out).

    It computes x W + bias + residual (N, out) for x (N, in/T); the residual may be overwritten. One
    all-reduce sums the ranks' products; the undivided `bias` is added once, afterwards. If `reduce`
    is None on several ranks, the caller sums, so that several linears can share an all-reduce.
    """
    if reduce is None:
        return make_gemm(weight, bias, options=options)
    gemm = make_gemm(weight, options=options)

    def summed(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return reduce(gemm(x), bias=bias, residual=residual)

    return summed


@dataclass
class VocabParallelHead:
    """The head: from hidden states, by the final norm if any, to this rank's logits in fp32."""

    gemm: Gemm | None  # outputs beyond `rows` are padding; None if this rank has no rows
    rows: int  # vocabulary ids of this rank
    width: int  # of every rank's slice, at least `rows`
    norm: Callable[[Tensor], Tensor] | None = None  # of the hidden states
    input_scale: float = 1.0  # on the normalised hidden states
    scale: float = 1.0  # on the logits
    softcap: float | None = None  # a scaled logit becomes cap * tanh(logit / cap)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return (N, width) fp32, in `out` if set; padding columns hold the lowest number."""
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
