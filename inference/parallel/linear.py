"""Linears split among tensor-parallel ranks; weights keep FT's (in, out) layout.

A linear whose outputs are divided is a plain product: each rank computes its own columns.
"""

# Shapes: N rows (tokens), H hidden, V vocabulary, T tensor-parallel size

from collections.abc import Callable

import torch
from torch.nn import functional

from inference.parallel.epilogue import PLAIN_GEMM, GemmOptions
from inference.parallel.gemm import Gemm, make_gemm

# The sum over the ranks of a stage of x (N, E), which may be overwritten, + bias + residual: these
# two are keywords.
AllReduce = Callable[..., torch.Tensor]


def make_row_gemm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
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

    def summed(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return reduce(gemm(x), bias=bias, residual=residual)

    return summed


class VocabParallelHead:
    """Hidden states to this rank's slice of the logits, in fp32, after the final `norm` if any."""

    def __init__(
        self,
        table: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        rows: int,
        width: int,
        norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
        input_scale: float = 1.0,
        scale: float = 1.0,
        softcap: float | None = None,
        options: GemmOptions = PLAIN_GEMM,
    ) -> None:
        """Take this rank's part.

        Args:
            table: (rows or more, H); those beyond `rows` have no token.
            bias: (rows,).
            rows: Tokens of this rank.
            width: Of every rank's slice, at least `rows`.
            norm: Of the hidden states.
            input_scale: On what the norm gives.
            scale: On the logits.
            softcap: A scaled logit becomes cap * tanh(logit / cap).
            options: Of the product.
        """
        if bias is not None:
            bias = functional.pad(bias, (0, len(table) - rows))
        self._gemm = make_gemm(table.t(), bias, options=options) if rows else None
        self._rows = rows
        self.width = width
        self.norm, self._input_scale = norm, input_scale
        self._scale, self._softcap = scale, softcap

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return (N, width) fp32, in `out` if given; columns beyond the rows are the lowest."""
        x = x if self.norm is None else self.norm(x)
        x = x if self._input_scale == 1 else x * self._input_scale
        if out is None:
            out = x.new_empty(len(x), self.width, dtype=torch.float32)
        out[:, self._rows :] = torch.finfo(torch.float32).min
        if self._gemm is not None:
            y = out[:, : self._rows].copy_(self._gemm(x)[:, : self._rows])
            if self._softcap is not None:
                y.mul_(self._scale / self._softcap).tanh_().mul_(self._softcap)
            elif self._scale != 1:
                y.mul_(self._scale)
        return out
