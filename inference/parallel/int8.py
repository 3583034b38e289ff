"""Weights of 8 bits: how they are rounded, and the product that widens them again."""

# Shapes: N rows (tokens), M few rows, I inputs, O outputs

from __future__ import annotations

from collections.abc import Callable

import torch

from inference.parallel.epilogue import GemmActivation, finish

# (x (M, I), weight (O, I) int8, scale (O,)) -> (M, O), for few rows.
_FewRowsProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (O, I) int8 and the scale of each output (O,) fp32 for a weight (I, O).

    Formula: FasterTransformer, weight-only quantisation: scale = max|w| / 128 of each output
    column, values rounded and kept within [-128, 127].
    """
    columns = weight.t().float()  # (O, I)
    scale = columns.abs().amax(dim=1) / 128
    divisor = torch.where(scale > 0, scale, 1).unsqueeze(1)
    rounded = (columns / divisor).round_().clamp_(-128, 127)
    return rounded.to(torch.int8).contiguous(), scale


def _few_rows_product(weight: torch.Tensor) -> tuple[_FewRowsProduct | None, int]:
    """Return a product that reads a weight as 8 bits, and the most rows it is used for."""
    if weight.device.type == "cpu" or weight.dtype.itemsize != 2:
        return None, 0
    try:
        from inference.parallel.int8_cuda import MOST_ROWS, int8_product
    except ImportError:  # torch without Triton
        return None, 0
    return int8_product, MOST_ROWS


class Int8Gemm:
    """A product with weights of 8 bits and a scale per output; activations are not quantised."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: GemmActivation | None = None,
    ) -> None:
        """Quantise `weight` (I, O); only the 8-bit copy is kept."""
        self.weight, self.scale = quantise(weight)
        self.bias = bias
        self.activation = activation
        # For more rows the weights are widened first.
        self._product, self._most_rows = _few_rows_product(weight)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(x W + bias) + residual in the type of x."""
        if self._product is not None and len(x) <= self._most_rows:
            y = self._product(x.contiguous(), self.weight, self.scale)
        else:
            y = torch.mm(x, self.weight.t().to(x.dtype)).mul_(self.scale.to(x.dtype))
        return finish(y, bias=self.bias, activation=self.activation, residual=residual)
