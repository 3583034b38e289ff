"""The product of one row on a GPU with all that follows it in one kernel, in Triton's language.

Decoding one sequence reads every weight once per token. cuBLAS reads them about as fast (2.6 to
4.2 TB/s on an H200, GPT-J-6B's matrices; this kernel 3.2 to 4.1), but bias, activation, residual
and its own second kernel for divided sums are launches more. Import this only where CUDA is: Triton
comes with torch's CUDA builds.
"""

# Shapes: N rows, I inputs, O outputs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from inference.parallel.epilogue import GemmActivation, finish

# The best or near it of twelve tiles for each of GPT-J's matrices: 3.2 to 4.1 TB/s.
_OUTPUTS, _INPUTS = 4, 1024
_ACTIVATIONS: dict[GemmActivation | None, int] = {
    None: 0,
    "gelu_tanh": 1,
    "gelu_erf": 2,
    "relu": 3,
    "silu": 4,
}


@triton.jit  # type: ignore[untyped-decorator]
def _one_row(  # type: ignore[no-untyped-def]
    x_at,
    weight_at,
    bias_at,
    residual_at,
    y_at,
    outputs,
    inputs,
    OUTPUTS: tl.constexpr,  # noqa: N803 - constants of the kernel
    INPUTS: tl.constexpr,  # noqa: N803
    ACTIVATION: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_RESIDUAL: tl.constexpr,  # noqa: N803
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < outputs
    row_at = weight_at + output[:, None].to(tl.int64) * inputs
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(0, inputs, INPUTS):
        place = first + tl.arange(0, INPUTS)
        there = inside[:, None] & (place[None, :] < inputs)
        # Each weight is read once; what is kept in the cache are the inputs.
        weight = tl.load(
            row_at + place[None, :], mask=there, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_at + place, mask=place < inputs, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias_at + output, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)  # sqrt(2 / pi)
        y = y * tl.sigmoid(2 * inner)  # (1 + tanh(inner)) / 2
    if ACTIVATION == 2:
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == 3:
        y = tl.maximum(y, 0.0)
    if ACTIVATION == 4:
        y = y * tl.sigmoid(y)
    if HAS_RESIDUAL:
        y += tl.load(residual_at + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at + output, y.to(y_at.dtype.element_ty), mask=inside)


class CudaGemm:
    """A product in 16 bits: one row by the kernel above, more by cuBLAS."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GemmActivation | None
    ) -> None:
        """Keep `weight` (I, O) with its inputs side by side, which cuBLAS reads as fast."""
        self.weight = weight.t().contiguous()  # (O, I)
        self.bias = bias
        self.activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(x W + bias) + residual."""
        if len(x) == 1:
            return self._one_row(x.contiguous(), residual)
        y = functional.linear(x, self.weight, self.bias)
        return finish(y, activation=self.activation, residual=residual)

    def _one_row(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        outputs, inputs = self.weight.shape
        y = x.new_empty(1, outputs)
        grid: Any = (triton.cdiv(outputs, _OUTPUTS),)
        _one_row[grid](
            *(x, self.weight, x if self.bias is None else self.bias),
            *(x if residual is None else residual, y, outputs, inputs),
            OUTPUTS=_OUTPUTS,
            INPUTS=_INPUTS,
            ACTIVATION=_ACTIVATIONS[self.activation],
            HAS_BIAS=self.bias is not None,
            HAS_RESIDUAL=residual is not None,
        )
        return y
