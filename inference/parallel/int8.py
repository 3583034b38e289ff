"""8-bit weights: quantisation, and a product that widens them again."""

# Shapes: N rows (tokens), I inputs, O outputs, G groups of inputs

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference.parallel.epilogue import Epilogue

# Inputs that products read at once; FP8 weights with grouped scales need groups of a multiple.
FP8_GROUP = 128


class ScaledWeight(NamedTuple):
    """An FP8 weight as stored in a checkpoint."""

    values: Tensor  # (I, O) E4M3
    scale: Tensor  # (G, O) fp32
    group: int  # inputs per scale
    dtype: torch.dtype  # type of products

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device


Weight = Tensor | ScaledWeight


def combine(weights: Sequence[Weight], arrange: Callable[[list[Tensor]], Tensor]) -> Weight:
    """Combine weights with the same inputs into one weight (I, O).

    Args:
        weights: Either all tensors or all `ScaledWeight`.
        arrange: Joins tensors along their outputs.
    """
    plain = [each for each in weights if isinstance(each, Tensor)]
    if plain:
        return arrange(plain)
    scaled = [each for each in weights if isinstance(each, ScaledWeight)]
    values = arrange([each.values.view(torch.uint8) for each in scaled])
    scale = arrange([each.scale for each in scaled])
    values = values.view(scaled[0].values.dtype)
    return scaled[0]._replace(values=values, scale=scale)


def quantise(weight: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantise a weight (I, O): return (O, I) in 8 bits, and the scale of each output (O,) fp32.

    For int8 as in FasterTransformer's weight-only quantisation: scale = max|w| / 128 of each
    output, values rounded and clamped to [-128, 127]. For FP8, each output's largest magnitude
    becomes the largest number of the type.
    """
    columns = weight.t().float()  # (O, I)
    is_int8 = dtype == torch.int8
    scale = columns.abs().amax(dim=1) / (128 if is_int8 else torch.finfo(dtype).max)
    columns = columns / torch.where(scale > 0, scale, 1).unsqueeze(1)
    if is_int8:
        columns = columns.round_().clamp_(-128, 127)
    return columns.to(dtype).contiguous(), scale


class Int8Gemm:
    """A product with 8-bit weights and a scale per output; activations are not quantised."""

    def __init__(self, weight: Tensor, epilogue: Epilogue) -> None:
        """Quantise `weight` (I, O); only the 8-bit copy is kept."""
        self.weight, self.scale = quantise(weight)
        self.epilogue = epilogue

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return activation(x W + bias) + residual in the type of x."""
        y = torch.mm(x, self.weight.t().to(x.dtype)).mul_(self.scale.to(x.dtype))
        bias = self.epilogue.bias
        return self.epilogue.finish(y if bias is None else y.add_(bias), residual)
