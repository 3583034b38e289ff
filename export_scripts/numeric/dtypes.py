"""Types of numbers by name: bytes of a value, torch's name and numpy's.

Only `torch_dtype` imports torch, when it is called.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]  # a size, or an index, on each axis of a tensor

# Every type that a source may store, little-endian. numpy has no type for bf16 (the upper half of
# an fp32) and fp8: they are represented by their bytes.
SOURCE_TYPES = {
    "fp64": (8, "float64", "<f8"),
    "fp32": (4, "float32", "<f4"),
    "fp16": (2, "float16", "<f2"),
    "bf16": (2, "bfloat16", "V2"),
    "fp8": (1, "float8_e4m3fn", "u1"),
    "int64": (8, "int64", "<i8"),
    "int32": (4, "int32", "<i4"),
    "int16": (2, "int16", "<i2"),
    "int8": (1, "int8", "i1"),
    "uint8": (1, "uint8", "u1"),
    "bool": (1, "bool", "?"),
    "complex64": (8, "complex64", "<c8"),
    "complex128": (16, "complex128", "<c16"),
}
WEIGHT_DATA_TYPES = ("fp32", "fp16", "bf16")

# The largest finite value of each floating type.
LARGEST_FINITE = {
    "fp32": 3.4028234663852886e38,
    "fp16": 65504.0,
    "bf16": 3.3895313892515355e38,
}


def strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def item_size(name: str) -> int:
    """Return the size in bytes of a value of a type.

    Raises:
        ValueError: The type is unknown.
    """
    if name not in SOURCE_TYPES:
        raise ValueError(f"unknown data type {name!r}; known: {', '.join(SOURCE_TYPES)}")
    return SOURCE_TYPES[name][0]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for a name in SOURCE_TYPES."""
    import torch

    dtype = getattr(torch, SOURCE_TYPES[name][1])
    assert isinstance(dtype, torch.dtype)
    return dtype
