"""Weights as numpy arrays: their types, and conversions that round as torch does.

numpy has no bfloat16. Its arrays have the void type `BF16`: they can be sliced, transposed and
joined, and arithmetic on them fails and does not give wrong values. ml_dtypes converts them.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from export_scripts.numeric.dtypes import SOURCE_TYPES, Shape

Array = npt.NDArray[Any]

BF16 = np.dtype("V2")

DTYPES = {name: np.dtype(code) for name, (_, _, code) in SOURCE_TYPES.items()}
_FP32, _FP16 = DTYPES["fp32"], DTYPES["fp16"]

# Intermediate results of a block of this size fit the second-level cache.
_BLOCK_VALUES = 1 << 16
_WORTH_A_TABLE = 1 << 12


def store(target: Array, values: Array) -> None:
    """Copy values into an array of the same shape and any type, rounding to nearest, ties to even.

    fp64 is rounded to fp32 first, as torch does. Values out of range become infinite.
    """
    if target.dtype == values.dtype:
        np.copyto(bits(target), bits(values))
        return
    if not values.ndim:
        target, values = target[None], values[None]
    with np.errstate(over="ignore", invalid="ignore"):
        for block in _blocks(values.shape):
            _store_block(target[block], values[block])


def bits(array: Array) -> Array:
    """Return bf16 as integers, which numpy copies faster; other arrays unchanged."""
    return array.view(np.uint16) if array.dtype == BF16 else array


def _blocks(shape: Shape) -> Iterator[tuple[Any, ...]]:
    """Yield indices that cut a shape along its first axes into blocks of bounded size."""
    inner = math.prod(shape[1:])
    if inner > _BLOCK_VALUES:
        for first in range(shape[0]):
            yield from ((first, *rest) for rest in _blocks(shape[1:]))
        return
    step = max(1, _BLOCK_VALUES // max(1, inner))
    for first in range(0, shape[0], step):
        yield (slice(first, first + step),)


def _numbers(array: Array) -> Array:
    """Return bf16 as numbers."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == BF16 else array


def _store_block(target: Array, values: Array) -> None:
    if values.dtype == _FP16 and values.size >= _WORTH_A_TABLE:
        table = _table(target.dtype)
        np.copyto(bits(target), np.take(table, values.view(np.uint16), mode="clip"))
    else:
        exact = _numbers(values) if values.dtype == BF16 else to_float32(values)
        np.copyto(_numbers(target), exact, casting="unsafe")


@functools.cache
def _table(wanted: np.dtype[Any]) -> Array:
    """Return all 65536 values of fp16 in another type: a lookup is faster than a conversion."""
    table = np.empty(1 << 16, wanted)
    every = np.arange(1 << 16, dtype=np.uint16).view(_FP16)
    np.copyto(_numbers(table), every, casting="unsafe")
    return bits(table)


def to_float32(values: Array) -> Array:
    """Return values as fp32: exact for fp16 and bf16, rounded for fp64."""
    if values.dtype == _FP32:
        return values
    with np.errstate(over="ignore"):
        return _numbers(values).astype(_FP32)


def round_to(values: Array, data_type: str) -> Array:
    """Return values as fp32, rounded to the precision of a type of DTYPES."""
    narrow = np.empty(values.shape, DTYPES[data_type])
    store(narrow, values)
    return to_float32(narrow)
