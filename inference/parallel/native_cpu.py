"""The project's CPU library: products in int8 and bf16, attention of single tokens, RMSNorms.

It reads memory as fast as the processor can (`native/rows.c`), and is compiled when the project is
installed or its wheel is built. Without it torch computes (`gemm_cpu.py`).
"""

# Shapes: N rows (tokens), I inputs, O outputs, B sequences, H query heads, K key/value heads, S
#         cached tokens, D head size

import ctypes
import logging
import os
import platform
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inference.parallel.epilogue import Epilogue
from inference.parallel.gemm_cpu import TWO_DIGITS_INPUTS, use_huge_pages
from inference.parallel.int8 import quantise

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).with_name("native")
LIBRARY = _FOLDER / "rows.so"
# Selects an instruction set, or "none" for torch's products.
VARIABLE = "SLIPWAY_CPU_KERNEL"
_CHOICES = {"x86_64": ("avx2", "avx512", "amx"), "aarch64": ("dotprod",)}

_WIDTH = 32  # outputs of a block
_GROUP = {torch.int8: 4, torch.bfloat16: 2}  # inputs that are stored together
_GROUPS = 16  # a multiple of which a weight has, the last ones zeros
_MAX_INPUTS = 1 << 16  # so that a sum of 8-bit products fits into 32 bits


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "scale", "sums", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "kind")),
    )


@cache
def _library() -> tuple[Any, int]:
    """Return the library, None to compute by torch, and the level of instructions to use.

    Raises:
        ValueError: The variable selects an unknown or unavailable instruction set.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    choices = ("auto", "none", *_CHOICES.get(platform.machine(), ()))
    if wanted not in choices:
        raise ValueError(f"{VARIABLE}={wanted}: expected one of {', '.join(choices)}")
    if wanted == "none":
        return None, -1
    reason: object = f"this processor has none of {', '.join(choices[2:])}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        source = b"".join((_FOLDER / name).read_bytes() for name in ("rows.c", "kernel.h"))
        if library.slipway_source() & 0xFFFFFFFF != zlib.crc32(source):
            raise OSError("it was built from another version; install this one again")
        level = library.slipway_level(wanted.encode())
        if level >= 0:
            pointer: Any = ctypes.c_void_p
            number: Any = ctypes.c_int64
            small: Any = ctypes.c_int
            library.slipway_multiply.argtypes = [*[pointer] * 4, number, *[small] * 3]
            attended = [*[pointer] * 5, *[number] * 8, ctypes.c_float, *[small] * 3]
            library.slipway_attend.argtypes = attended
            normed = [*[pointer] * 3, *[number] * 2, ctypes.c_float, *[small] * 3]
            library.slipway_rms_norm.argtypes = normed
            library.slipway_rms_norm.restype = None
            return library, level
    except OSError as error:
        reason = error
    if wanted != "auto":
        raise ValueError(f"{VARIABLE}={wanted}: {reason}; unset it to use what is available")
    logger.warning("8-bit and bf16 weights are multiplied by torch, not by %s: %s", LIBRARY, reason)
    return None, -1


def has_library() -> bool:
    """Return whether the library is available, for `attend` and `rms_norm`."""
    return _library()[0] is not None


def has_native(weight: torch.dtype, inputs: int) -> bool:
    """Return whether `NativeGemm` supports a type of weights and is the fastest product for it."""
    library, level = _library()
    if weight not in _GROUP or library is None:
        return False
    if weight == torch.int8:
        return inputs <= _MAX_INPUTS
    return _CHOICES[platform.machine()][level] == "amx" or not multiplies_bf16()


def multiplies_bf16() -> bool:
    """Return whether the processor has bf16 products; oneDNN is then faster for prompts."""
    if platform.machine() == "aarch64":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


class NativeGemm:
    """A product with a weight in bf16, or in int8 with a scale per output.

    With bf16 weights, products are in fp32; with int8 weights, rows are rounded to integers, see
    `FbgemmInt8Gemm`. A row's result does not depend on the others or on their number.
    """

    def __init__(self, weight: Tensor, epilogue: Epilogue, *, int8: bool) -> None:
        """Copy `weight` (I, O) into blocks of outputs."""
        library, self._level = _library()
        self._multiply = library.slipway_multiply
        inputs, self._outputs = weight.shape
        tensors, kind = {}, 0
        if int8:
            columns, scale = quantise(weight)
            tensors = {"scale": scale, "sums": columns.sum(1, dtype=torch.int32)}
            kind = 2 if inputs >= TWO_DIGITS_INPUTS else 1
        else:
            columns = weight.t()
        if epilogue.bias is not None:
            tensors["bias"] = epilogue.bias.float()
        more = -self._outputs % _WIDTH
        self._tensors = {name: functional.pad(each, (0, more)) for name, each in tensors.items()}
        self._tensors["values"] = values = _blocks(columns)
        use_huge_pages(values.data_ptr(), values.nbytes)
        pointers = {name: each.data_ptr() for name, each in self._tensors.items()}
        self._weight = _Weight(**pointers, inputs=inputs, outputs=self._outputs, kind=kind)
        self._address = ctypes.addressof(self._weight)
        self._epilogue = epilogue

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return activation(x W + bias) + residual in the type of x."""
        x = x.contiguous()
        rows = x.shape[0]  # faster than len(x)
        y = x.new_empty(rows, self._outputs)
        late = self._epilogue.activation is not None  # adds the residual after the activation
        added = None if residual is None or late else residual.contiguous()
        failed = self._multiply(
            self._address,
            x.data_ptr(),
            y.data_ptr(),
            None if added is None else added.data_ptr(),
            rows,
            x.dtype == torch.bfloat16,
            self._level,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a product of {rows} rows")
        return self._epilogue.finish(y, residual if late else None)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Return the attention (B, H*D) of one token of each sequence, for query (B, H, D).

    Keys and values (B, K, S, D) are views of the cache with equal strides; all three are fp32 or
    bf16. `spans` (2, B) int64 are the first token that each sequence sees and the end of its
    tokens. Sums are in fp32.
    """
    library, level = _library()
    sequences, heads, size = query.shape
    if query.stride()[1:] != (size, 1):
        query = query.contiguous()
    slot, head, token, _ = keys.stride()
    assert token == size
    assert values.stride() == keys.stride()
    out = query.new_empty(sequences, heads * size)
    _, key_heads, longest, _ = keys.shape
    failed = library.slipway_attend(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        spans.data_ptr(),
        *(sequences, heads, key_heads, size),
        *(query.stride(0), slot, head, longest),
        scale,
        query.dtype == torch.bfloat16,
        level,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the attention over {longest} tokens")
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight of each row, in the type of x, fp32 or bf16."""
    library, _ = _library()
    x = x.contiguous()
    y = torch.empty_like(x)
    size = weight.shape[0]
    library.slipway_rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        *(x.numel() // size, size),
        eps,
        x.dtype == torch.bfloat16,
        weight.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def _blocks(columns: Tensor) -> Tensor:
    """Return (O, I) in the library's layout: (blocks, groups, 32 outputs, inputs of a group)."""
    outputs, inputs = columns.shape
    group = _GROUP[columns.dtype]
    more = (0, -inputs % (_GROUPS * group), 0, -outputs % _WIDTH)
    columns = functional.pad(columns, more) if any(more) else columns
    blocks = columns.reshape(len(columns) // _WIDTH, _WIDTH, -1, group)
    return blocks.transpose(1, 2).contiguous()
