"""One matrix product of one rank, its weight kept in the form its device multiplies fastest."""

# Shapes: N rows (tokens), I inputs, O outputs

from __future__ import annotations

from typing import Protocol

import torch

from inference.parallel import gemm_cpu
from inference.parallel.epilogue import GemmActivation, finish, gemm_activation
from inference.parallel.int8 import Int8Gemm

__all__ = ["Gemm", "GemmActivation", "gemm_activation", "make_gemm"]


class Gemm(Protocol):
    """y = activation(x W + bias) + residual."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GemmActivation | None
    ) -> None:
        """Take `weight` (I, O)."""
        ...

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return (N, O) for x (N, I)."""
        ...


def make_gemm(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: GemmActivation | None = None,
    int8: bool = False,
) -> Gemm:
    """Return the product with `weight` (I, O), on its device.

    The weight may be memory-mapped or a transposed view; the result keeps no reference to it
    where the device has a better form. On CPU a weight of fp16 takes fp32 rows and gives such;
    else rows have the weight's type. With `int8` it is quantised, one scale per output.
    """
    if not weight.numel():
        return _PlainGemm(weight, bias, activation)
    on_cpu = weight.device.type == "cpu"
    if int8:
        if on_cpu and gemm_cpu.has_int8():
            return gemm_cpu.OneDnnInt8Gemm(weight, bias, activation)
        return Int8Gemm(weight, bias, activation)
    if on_cpu and weight.dtype == torch.float16:
        return gemm_cpu.HalfGemm(weight, bias, activation)
    if on_cpu and gemm_cpu.has_onednn(weight.dtype):
        return gemm_cpu.OneDnnGemm(weight, bias, activation)
    cuda_gemm = _cuda_gemm() if weight.is_cuda and weight.dtype.itemsize == 2 else None
    return (cuda_gemm or _PlainGemm)(weight, bias, activation)


def _cuda_gemm() -> type[Gemm] | None:
    try:
        from inference.parallel.gemm_cuda import CudaGemm
    except ImportError:  # torch without Triton
        return None
    return CudaGemm


class _PlainGemm:
    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GemmActivation | None
    ) -> None:
        self.weight = weight  # (I, O)
        self.bias = bias
        self.activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self.bias is None:
            y = torch.mm(x, self.weight)
        else:
            y = torch.addmm(self.bias, x, self.weight)
        return finish(y, activation=self.activation, residual=residual)
