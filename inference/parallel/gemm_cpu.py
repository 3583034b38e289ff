"""Products on CPU: oneDNN's for fp32, bf16 and 8-bit weights, FBGEMM's for weights of fp16.

What decoding costs is reading the weights. Measured on two cores (AMD Zen 4, 37 GB/s of memory)
with GPT-2's matrices, as weights of fp32 read per second at one row and at eight: plain products
18 and 7 GB/s, oneDNN's blocked form 36 and 24, bf16 50 and 42, fp16 70 and 37, 8 bits 75 and 52.
"""

# Shapes: N rows (tokens), I inputs, O outputs

from __future__ import annotations

import ctypes
import sys

import torch

from inference.parallel.epilogue import GemmActivation, finish
from inference.parallel.int8 import quantise

# The row count the blocked form is chosen for; it serves one row and prompts as well.
_ROWS_HINT = 8
# oneDNN's kernels take several rows at once and have slower ones for fewer: one row alone takes 1.2
# to 1.7 times as long as four.
_LEAST_ROWS = 4

# oneDNN's post-operations as torch names them: (attribute, algorithm).
_POST_OPS: dict[GemmActivation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu_erf": ("gelu", "none"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether `OneDnnGemm` multiplies this type fast here."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_fp16_weights() -> bool:
    """Return whether `HalfGemm` works here."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_int8() -> bool:
    """Return whether `OneDnnInt8Gemm` works here; older processors' sums of pairs saturate."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    return vnni is not None and has_onednn(torch.float32) and bool(vnni())


class OneDnnGemm:
    """A product in fp32 or bf16 with the weight in oneDNN's blocked form."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GemmActivation | None
    ) -> None:
        """Copy `weight` (I, O) into the blocked form."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.t(), _ROWS_HINT)
        _use_huge_pages(self.weight)
        self.bias = bias
        self.attribute, self.algorithm = _POST_OPS[activation]
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(x W + bias) + residual."""
        rows = len(x)
        if rows < _LEAST_ROWS:
            x = _repeated(x)
            residual = None if residual is None else _repeated(residual)
        y: torch.Tensor
        if residual is None:
            y = self._unary(x, self.weight, self.bias, self.attribute, [], self.algorithm)
        else:
            assert self.attribute == "none", "a residual is added to a plain product"
            y = self._binary(x, residual, self.weight, self.bias, "add")
        return y[:rows] if rows < _LEAST_ROWS else y


def _repeated(x: torch.Tensor) -> torch.Tensor:
    """Return x with its rows repeated up to the least number at least."""
    rows = len(x)
    return x.expand(_LEAST_ROWS, -1) if rows == 1 else x.repeat(-(-_LEAST_ROWS // rows), 1)


class HalfGemm:
    """A product of fp32 rows with weights of fp16, widened as they are read: half the bytes."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GemmActivation | None
    ) -> None:
        """Copy `weight` (I, O) fp16 into FBGEMM's form."""
        columns = weight.t().float().contiguous()
        bias = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(columns, bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default
        self.activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(x W + bias) + residual in fp32."""
        y: torch.Tensor = self._product(x.contiguous(), self._packed)
        return finish(y, activation=self.activation, residual=residual)


class OneDnnInt8Gemm:
    """A product with weights of 8 bits and a scale per output.

    Processors multiply 8 bits by 8 bits. Each row is therefore written as whole numbers of 16 bits
    times a factor of its own, and these as two digits of 8 bits, which are multiplied as two rows
    and put together again: the activations lose no more than in bf16, and no row sees another.
    """

    # A row's numbers q lie in [-32639, 32639]; q = 256 * (high - 128) + (low - 128).
    _MOST = 127 * 257
    _ZERO = 128 * 257
    # Added to q, this leaves q + _ZERO in the two low octets of the sum's fp32: it is so large that
    # whole numbers follow each other there.
    _SHIFT = float(2**23 + _ZERO)

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GemmActivation | None
    ) -> None:
        """Quantise `weight` (I, O); only the 8-bit copy is kept."""
        columns, self._scale = quantise(weight)
        self._weight = torch.ops.onednn.qlinear_prepack(columns, None)
        _use_huge_pages(self._weight)
        self._zero_points = torch.zeros(len(columns), dtype=torch.int32)
        self._least = torch.full((), torch.finfo(torch.float32).tiny)
        self._shift = torch.full((), self._SHIFT)
        self._product = torch.ops.onednn.qlinear_pointwise.default
        self._bias = torch.zeros(()) if bias is None else bias.float()
        self._activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(x W + bias) + residual in the type of x."""
        rows = len(x)
        # Few operations: at one row each costs as much as a tenth of the product.
        wide = x.float()
        unit = torch.add(self._least, wide.abs().amax(1, keepdim=True), alpha=1 / self._MOST)
        octets = torch.addcdiv(self._shift, wide, unit).view(torch.uint8).view(rows, -1, 4)
        # Low digits, high digits, and of a single row the others too: four rows are the fastest.
        digits = octets if rows == 1 else octets[..., :2]
        y = self._multiply(digits.permute(2, 0, 1).flatten(0, 1))
        y = torch.add(y[:rows], y[rows : 2 * rows], alpha=256)
        y = torch.addcmul(self._bias, y, unit).to(x.dtype)
        return finish(y, activation=self._activation, residual=residual)

    def _multiply(self, digits: torch.Tensor) -> torch.Tensor:
        """Return (digits - 128) W in fp32."""
        y: torch.Tensor = self._product(
            *(digits, 1.0, 128),
            *(self._weight, self._scale, self._zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return y


# Failing costs nothing: older kernels collapse nothing, and small weights have no whole huge page.
_LIBC = ctypes.CDLL(None)
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE = 2 << 20


def _use_huge_pages(packed: torch.Tensor) -> None:
    """Ask the kernel for huge pages under a weight, where it can: products are 5 to 10% faster."""
    if sys.platform != "linux":
        return
    start: int = torch.ops.mkldnn.data_ptr(packed)
    stop = start + torch.ops.mkldnn._nbytes(packed)
    start = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    size = (stop - start) // _HUGE_PAGE * _HUGE_PAGE
    if size > 0:
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
