"""Matrix products of a rank, with weights in the form that the device multiplies fastest."""

# Shapes: N rows (tokens), I inputs, O outputs

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inference.parallel import gemm_cpu
from inference.parallel.epilogue import (
    PLAIN_GEMM,
    Epilogue,
    GemmActivation,
    GemmOptions,
    activate,
)
from inference.parallel.int8 import Int8Gemm, Weight, combine
from inference.parallel.native_cpu import NativeGemm, has_native

# A linear without residual, from (N, I) to (N, O).
Product = Callable[[Tensor], Tensor]
# activation(x W + bias) + residual, (N, O), for x (N, I) and residual (N, O) or None.
Gemm = Callable[..., Tensor]


def make_gemm(
    weight: Weight,
    bias: Tensor | None = None,
    *,
    activation: GemmActivation | None = None,
    rounds: bool = False,
    options: GemmOptions = PLAIN_GEMM,
) -> Gemm:
    """Return the product with `weight` (I, O), on its device.

    The weight may be memory-mapped or a transposed view, or on a GPU in FP8; the product keeps no
    reference to it if the device has a faster form. Rows and results have the weight's type, but
    fp32 on a CPU for fp16 weights. With `rounds`, only another product reads the results, see
    `Epilogue`.
    """
    return _build(weight, Epilogue(bias, activation, rounds=rounds), options)


def make_gated_gemm(
    weights: tuple[Weight, Weight],
    biases: tuple[Tensor | None, Tensor | None],
    *,
    activation: GemmActivation,
    rounds: bool = False,
    options: GemmOptions = PLAIN_GEMM,
) -> Product:
    """Return the product activation(x W + b) * (x V + c) for `weights` W, V (I, O) each.

    A GPU in 16 bits computes both as one product with alternating outputs, the CPU library as one
    with concatenated outputs. `rounds` as for `make_gemm`.
    """
    gate, linear = weights
    on_gpu = gate.device.type != "cpu" and gate.dtype.itemsize == 2
    if not on_gpu and not _is_native(gate, options):
        up = make_gemm(gate, biases[0], activation=activation, options=options)
        other = make_gemm(linear, biases[1], options=options)
        return lambda x: up(x).mul_(other(x))
    axis = 2 if on_gpu else 1
    present, bias = next((b for b in biases if b is not None), None), None
    if present is not None:
        filled = [torch.zeros_like(present) if b is None else b for b in biases]
        bias = torch.stack([b.flatten() for b in filled], dim=axis - 1).flatten()
    weight = combine(weights, lambda each: torch.stack(each, dim=axis).flatten(1))
    if on_gpu:
        return _build(weight, Epilogue(bias, activation, gated=True, rounds=rounds), options)
    both = _build(weight, Epilogue(bias), options)

    def product(x: Tensor) -> Tensor:
        first, second = both(x).chunk(2, dim=1)
        return activate(first, activation).mul_(second)

    return product


def _is_native(weight: Weight, options: GemmOptions) -> bool:
    dtype = torch.int8 if options.int8 else weight.dtype
    return weight.device.type == "cpu" and has_native(dtype, len(weight))


def _build(weight: Weight, epilogue: Epilogue, options: GemmOptions) -> Gemm:
    is_cpu = weight.device.type == "cpu"
    if not is_cpu and weight.dtype.itemsize == 2:
        from inference.parallel.gemm_cuda import CudaGemm

        return CudaGemm(weight, epilogue, options)
    assert isinstance(weight, Tensor), "a CPU multiplies no FP8"
    assert not options.fp8, "FP8 needs a GPU and 16 bits"
    assert not options.batch_invariant, "batch invariance needs a GPU and 16 bits"
    kind: Callable[[Tensor, Epilogue], Gemm] = _PlainGemm
    if _is_native(weight, options):
        kind = partial(NativeGemm, int8=options.int8)
    elif options.int8:
        is_fast = is_cpu and gemm_cpu.has_fbgemm_int8()
        kind = gemm_cpu.FbgemmInt8Gemm if is_fast else Int8Gemm
    elif is_cpu and weight.dtype == torch.float16:
        kind = gemm_cpu.HalfGemm
    elif is_cpu and gemm_cpu.has_onednn(weight.dtype):
        kind = gemm_cpu.OneDnnGemm
    return kind(weight, epilogue)


@dataclass(frozen=True)
class _PlainGemm:
    weight: Tensor  # (I, O)
    epilogue: Epilogue

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        bias = self.epilogue.bias
        y = torch.mm(x, self.weight) if bias is None else torch.addmm(bias, x, self.weight)
        return self.epilogue.finish(y, residual)
