"""One matrix product of one rank, its weight kept in the form its device multiplies fastest.

On CPU oneDNN's blocked form is used: measured on two cores with GPT-2's matrices it reads weights
at 24 GB/s for 1 to 8 rows, where a plain product reaches 19 GB/s for one row and 8 GB/s for eight.
"""

# Shapes: N rows (tokens), I inputs, O outputs

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch.nn import functional

from export_scripts.families.architecture import Activation

GemmActivation = Literal["gelu_tanh", "gelu_erf", "relu", "silu"]


def gemm_activation(activation: Activation, *, exact_gelu: bool = False) -> GemmActivation:
    """Return the form of an architecture's activation that a product can apply."""
    if activation == "gelu":
        return "gelu_erf" if exact_gelu else "gelu_tanh"
    return activation


class Gemm(Protocol):
    """y = activation(x W + bias) + residual."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return (N, O) for x (N, I)."""
        ...


def _activate(x: torch.Tensor, activation: GemmActivation) -> torch.Tensor:
    if activation == "relu":
        return functional.relu(x)
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def make_gemm(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: GemmActivation | None = None,
    int8: bool = False,
) -> Gemm:
    """Return the product with `weight` (I, O), in the weight's type and on its device.

    The weight may be memory-mapped or a transposed view; the result keeps no reference to it
    where the device has a better form. With `int8` it is quantised, one scale per output.
    """
    if int8:
        return Int8Gemm(weight, bias, activation)
    if weight.device.type == "cpu" and _has_onednn(weight.dtype) and weight.numel():
        return _OneDnnGemm(weight, bias, activation)
    return _PlainGemm(weight, bias, activation)


def _has_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


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
        if self.activation is not None:
            y = _activate(y, self.activation)
        return y if residual is None else y.add_(residual)


# oneDNN's post-operations as torch names them: (attribute, algorithm).
_POST_OPS: dict[GemmActivation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu_erf": ("gelu", "none"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}
# The row count the blocked form is chosen for; 8 is as good for 1 and for prompts.
_ROWS_HINT = 8


class _OneDnnGemm:
    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GemmActivation | None
    ) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.t(), _ROWS_HINT)
        self.bias = bias
        self.attribute, self.algorithm = _POST_OPS[activation]
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor
        if residual is None:
            y = self._unary(x, self.weight, self.bias, self.attribute, [], self.algorithm)
            return y
        assert self.attribute == "none", "a residual is added to a plain product"
        y = self._binary(x, residual, self.weight, self.bias, "add")
        return y


# (x (M, I), weight (O, I) int8, scale (O,)) -> (M, O), for few rows.
_Int8Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# torch's 8-bit product on CPU: fast for so few rows, and it reads past rows of other lengths.
_CPU_INT8_ROWS = 16
_CPU_INT8_STRIDE = 16


def _cpu_int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # It is fast for bf16 only.
    narrow = x.to(torch.bfloat16).contiguous()
    return torch._weight_int8pack_mm(narrow, weight, scale.to(torch.bfloat16)).to(x.dtype)


def _int8_product(weight: torch.Tensor) -> tuple[_Int8Product | None, int]:
    """Return a product that reads a weight (I, O) as 8 bits, and the most rows it is used for."""
    if weight.device.type == "cpu":
        fits = weight.shape[0] % _CPU_INT8_STRIDE == 0
        return _cpu_int8_product if fits else None, _CPU_INT8_ROWS
    try:
        from inference.parallel.int8_cuda import MOST_ROWS, int8_product
    except ImportError:  # torch without Triton
        return None, 0
    return int8_product if weight.dtype.itemsize == 2 else None, MOST_ROWS


class Int8Gemm:
    """A product with weights of 8 bits and a scale per output; activations are not quantised.

    Formula: FasterTransformer, weight-only quantisation: scale = max|w| / 128 of each output
    column, values rounded and kept within [-128, 127].
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: GemmActivation | None = None,
    ) -> None:
        """Quantise `weight` (I, O); only the 8-bit copy is kept."""
        columns = weight.t().float()  # (O, I)
        self.scale = columns.abs().amax(dim=1) / 128
        divisor = torch.where(self.scale > 0, self.scale, 1).unsqueeze(1)
        rounded = (columns / divisor).round_().clamp_(-128, 127)
        self.weight = rounded.to(torch.int8).contiguous()  # (O, I)
        self.bias = bias
        self.activation = activation
        # For more rows the weights are widened first.
        self._product, self._most_rows = _int8_product(weight)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(x W + bias) + residual in the type of x."""
        if self._product is not None and len(x) <= self._most_rows:
            y = self._product(x.contiguous(), self.weight, self.scale)
        else:
            y = torch.mm(x, self.weight.t().to(x.dtype)).mul_(self.scale.to(x.dtype))
        if self.bias is not None:
            y = y.add_(self.bias)
        if self.activation is not None:
            y = _activate(y, self.activation)
        return y if residual is None else y.add_(residual)
