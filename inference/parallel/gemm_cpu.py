"""Matrix products on CPU: oneDNN for fp32 and bf16, FBGEMM for fp16 and 8-bit weights.

Decoding is bound by reading the weights. Speeds with GPT-2's, on two cores, for one row and for
eight: an AMD Zen 4 (37 GB/s of memory) reads fp32 weights at 18 and 7 GB/s with plain products, at
36 and 24 in oneDNN's blocked form; bf16 at 50 and 42, fp16 at 70 and 37, counted in fp32 bytes. An
Intel Sapphire Rapids (19 GB/s) takes 9 and 12 ms for 8-bit weights with FBGEMM, 15 and 18 ms with
oneDNN and AMX, which is as fast from 16 rows on.
"""

# Shapes: N rows (tokens), I inputs, O outputs

import ctypes
import sys
import warnings
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from inference.parallel.epilogue import Epilogue, GemmActivation
from inference.parallel.int8 import quantise

# The number of rows for which the blocked form is chosen; it suits one row and prompts as well.
_ROWS_HINT = 8
# With fewer rows oneDNN uses slower kernels: a single row takes 1.2 to 1.7 times as long as four.
_MIN_ROWS = 4

# In models of 7B parameters and more, whose layers are this wide, a few activations are a hundred
# times larger than the others (LLM.int8(), arXiv 2208.07339), which a single 8-bit digit would
# round away. Reading their weights takes so long that a second digit costs little.
TWO_DIGITS_INPUTS = 4096

# oneDNN's post-operations by torch's names: (attribute, algorithm).
_POST_OPS: dict[GemmActivation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu_erf": ("gelu", "none"),
    "relu": ("relu", ""),
    "relu2": ("relu", ""),  # squared afterwards
    "silu": ("swish", ""),
}


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether `OneDnnGemm` is fast for this type on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_fp16_weights() -> bool:
    """Return whether `HalfGemm` is available."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_vnni() -> bool:
    """Return whether the processor sums 8-bit products in 32 bits, so that they cannot saturate."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    return vnni is not None and bool(vnni())


def has_fbgemm_int8() -> bool:
    """Return whether `FbgemmInt8Gemm` is available."""
    product = "linear_with_input_q_dq_qweight_dq_output_fp32"
    return has_fp16_weights() and hasattr(torch.ops.quantized, product)


class OneDnnGemm:
    """A product in fp32 or bf16 with the weight in oneDNN's blocked form."""

    def __init__(self, weight: Tensor, epilogue: Epilogue) -> None:
        """Copy `weight` (I, O) into the blocked form."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.t(), _ROWS_HINT)
        ops = torch.ops.mkldnn
        use_huge_pages(ops.data_ptr(self.weight), ops._nbytes(self.weight))
        self.bias = epilogue.bias
        self.attribute, self.algorithm = _POST_OPS[epilogue.activation]
        self._squared = epilogue.activation == "relu2"
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return activation(x W + bias) + residual."""
        rows = len(x)
        if rows < _MIN_ROWS:
            x = _repeated(x)
            residual = None if residual is None else _repeated(residual)
        y: Tensor
        if residual is None:
            y = self._unary(x, self.weight, self.bias, self.attribute, [], self.algorithm)
            y = y.square_() if self._squared else y
        else:
            assert self.attribute == "none", "a residual is added to a plain product"
            y = self._binary(x, residual, self.weight, self.bias, "add")
        return y[:rows] if rows < _MIN_ROWS else y


def _repeated(x: Tensor) -> Tensor:
    """Return x with its rows repeated, so that there are at least `_MIN_ROWS`."""
    rows = len(x)
    return x.expand(_MIN_ROWS, -1) if rows == 1 else x.repeat(-(-_MIN_ROWS // rows), 1)


# Number of rows that FBGEMM divides into tiles at a time.
_TILED_ROWS = 120


@cache
def _padding_rows() -> list[int]:
    """Return, for 1 to 120 rows, how many padding rows make FBGEMM sum all rows in the same order.

    Without AVX-512 its tiles of one and two rows use another order: a row's result would depend on
    the number of rows.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, _TILED_ROWS, 64, generator=generator)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    product = torch.ops.quantized.linear_dynamic_fp16
    whole = product(x, packed)
    counts = range(1, _TILED_ROWS + 1)
    good = [rows for rows in counts if product(x[:rows], packed).equal(whole[:rows])]
    return [next(each for each in good if each >= rows) - rows for rows in counts]


class HalfGemm:
    """A product of fp32 rows with fp16 weights, which are widened as they are read."""

    def __init__(self, weight: Tensor, epilogue: Epilogue) -> None:
        """Copy `weight` (I, O) fp16 into FBGEMM's layout."""
        columns = weight.t().float().contiguous()
        bias = None if epilogue.bias is None else epilogue.bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(columns, bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default
        self._epilogue = epilogue

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return activation(x W + bias) + residual in fp32."""
        rows = len(x)
        more = _padding_rows()[(rows - 1) % _TILED_ROWS]
        x = functional.pad(x, (0, 0, 0, more)) if more else x.contiguous()
        y = self._product(x, self._packed)
        return self._epilogue.finish(y[:rows], residual)


class FbgemmInt8Gemm:
    """A product of rows rounded to 8 bits with 8-bit weights and a scale per output.

    Each row is divided by its largest magnitude and rounded to integers, whose products have exact
    sums: a row's result does not depend on the others or on their number. For rows with many
    inputs, the remainders are rounded and multiplied, too.
    """

    def __init__(self, weight: Tensor, epilogue: Epilogue) -> None:
        """Quantise `weight` (I, O); only the 8-bit copy is kept."""
        columns, scale = quantise(weight)
        zeros = torch.zeros(len(columns), dtype=torch.int64)
        with warnings.catch_warnings():
            # torch warns that quantised tensors will be removed; `has_fbgemm_int8` checks for them.
            warnings.simplefilter("ignore")
            quantised = torch._make_per_channel_quantized_tensor(columns, scale.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        # Without VNNI, sums of two products are 16 bits wide, which suffices for 7 bits by 8.
        largest = 127 if has_vnni() else 63
        self._step, self._zero_point = 1 / largest, largest + 1
        self._two_digits = len(weight) >= TWO_DIGITS_INPUTS
        self._product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        self._bias = None if epilogue.bias is None else epilogue.bias.float()
        self._epilogue = epilogue

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return activation(x W + bias) + residual in the type of x."""
        # Few operations, since for one row each costs a tenth of the product.
        wide = x if x.dtype == torch.float32 else x.float()
        unit = wide.abs().amax(1, keepdim=True)
        # The division makes a row of zeros NaN, which the product rounds to an arbitrary integer;
        # multiplied by the unit, which is zero, the result is zero again.
        y = self._multiply(wide / unit)
        y = y.mul_(unit) if self._bias is None else torch.addcmul(self._bias, y, unit, out=y)
        return self._epilogue.finish(y.to(x.dtype), residual)

    def _multiply(self, x: Tensor) -> Tensor:
        """Return x W for rows within [-1, 1], rounded to one or two digits of 8 bits."""
        y: Tensor
        if not self._two_digits:
            y = self._product(x, self._step, self._zero_point, self._packed)
            return y
        first = (x / self._step).round() * self._step
        second = (x - first) * (2 / self._step)  # at most 1
        digits = torch.cat((first, second))
        y = self._product(digits, self._step, self._zero_point, self._packed)
        return torch.add(y[: len(x)], y[len(x) :], alpha=self._step / 2)


# Errors are ignored: older kernels lack MADV_COLLAPSE, and small weights fill no huge page.
_LIBC = ctypes.CDLL(None)
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE = 2 << 20


def use_huge_pages(start: int, size: int) -> None:
    """Ask the kernel to back a weight by huge pages, which makes products 5 to 10% faster.

    Args:
        start: Address of the weight.
        size: Its size in bytes.
    """
    if sys.platform != "linux":
        return
    first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    size = (start + size - first) // _HUGE_PAGE * _HUGE_PAGE
    if size > 0:
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)
