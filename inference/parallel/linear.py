"""Linears split among tensor-parallel ranks; weights keep FT's (in, out) layout.

A linear whose outputs are divided is a plain product: each rank computes its own columns.
"""

# Shapes: N rows (tokens), H hidden, V vocabulary, T tensor-parallel size

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from inference.parallel.epilogue import PLAIN_GEMM, GemmOptions
from inference.parallel.gemm import make_gemm


class AllReduce(Protocol):
    """The sum over the ranks of a stage, and what follows it."""

    def __call__(
        self,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of the ranks' `x` (N, E) + bias + residual; `x` may be overwritten."""
        ...


class RowParallelLinear:
    """A linear whose inputs are divided: the ranks' products are summed by one all-reduce.

    `bias` is whole and added once, after the sum. With `reduce` None and more than one rank the
    caller sums, for several linears that share one all-reduce.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        reduce: AllReduce | None = None,
        options: GemmOptions = PLAIN_GEMM,
    ) -> None:
        """Take this rank's `weight` (in/T, out)."""
        self._reduce = reduce
        self._bias = bias if reduce is not None else None
        self._gemm = make_gemm(weight, bias if reduce is None else None, options=options)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W + bias + residual, (N, out), for x (N, in/T).

        `residual` may be overwritten.
        """
        if self._reduce is None:
            return self._gemm(x, residual)
        return self._reduce(self._gemm(x), bias=self._bias, residual=residual)


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
