"""Dequantisation: the fp32 values of matrices from stored integers and scales.

Shapes: matrices are (out, in); the inputs are in G groups, each with a scale. Names and shapes are
checked by `checkpoints.quantized`, without numpy.
"""

import ml_dtypes
import numpy as np

from export_scripts.numeric.arrays import Array, to_float32

# Magnitudes of E2M1 by its three lower bits; the fourth bit is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)
# The column of each 4-bit integer in a word: AutoAWQ, awq/modules/linear/gemm.py.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def with_scales(
    stored: Array,
    scale: Array,
    grid: tuple[int, int],
    block: tuple[int, int],
    zero: Array | None = None,
    bits: int = 0,
) -> Array:
    """Return scale x (values - zero); each entry of the grid applies to a block of rows x columns.

    With `bits`, words (out, in / n) hold n signed integers each, shifted so that they begin at 0,
    and words (out / n, groups) the zero points.
    """
    if bits:
        stored = _unpacked(stored, bits).reshape(len(stored), -1) - (1 << bits - 1)
    if bits and zero is not None:
        zero = _unpacked(zero.T, bits).reshape(grid[1], -1).T[: grid[0]] - (1 << bits - 1)
    values = wide(stored)
    rows, columns = block
    width = values.shape[1]
    scale = to_float32(scale).reshape(grid)
    zero = None if zero is None else wide(zero).reshape(grid)
    for number, row in enumerate(scale):
        part = values[number * rows : (number + 1) * rows]
        if zero is not None:
            part -= np.repeat(zero[number], columns)[:width]
        part *= np.repeat(row, columns)[:width]
    return values


def scales_of_rows(scale: Array, grid: tuple[int, int], height: int, rows: int) -> Array:
    """Return the fp32 scales of rows, (rows, groups), from those of blocks of `height` rows."""
    return np.repeat(to_float32(scale).reshape(grid), height, axis=0)[:rows]


def awq(words: Array, zeros: Array, scales: Array) -> Array:
    """Return AWQ's values from words (in, out / 8), zero points (G, out / 8), scales (G, out)."""
    values, zeros = _in_awq_order(words), _in_awq_order(zeros)
    group = len(values) // len(zeros)
    values -= np.repeat(zeros, group, axis=0)
    scale = np.ascontiguousarray(scales.T)
    return with_scales(values.T, scale, (values.shape[1], len(zeros)), (1, group))


def gptq(
    words: Array, zeros: Array, scales: Array, group: Array | None, *, bits: int, zero_offset: int
) -> Array:
    """Return the values of GPTQ's words.

    Args:
        words: The integers in words (in / n, out).
        zeros: The zero points minus `zero_offset`, in words (G, out / n).
        scales: (G, out).
        group: The group of each input; None for inputs in order.
        bits: Bits of an integer.
        zero_offset: 1 or 0.

    Raises:
        ValueError: An input is in a group that does not exist.
    """
    groups, out = scales.shape
    values = _unpacked(words, bits).transpose(0, 2, 1).reshape(-1, out)  # from (in / n, out, n)
    zeros = (_unpacked(zeros, bits).reshape(groups, out) + zero_offset) & ((1 << bits) - 1)
    scales = to_float32(scales)
    if group is None:
        group = np.arange(len(values)) // (len(values) // groups)
    elif group.min() < 0 or group.max() >= groups:
        raise ValueError(
            f"g_idx names groups from {group.min()} to {group.max()}; the scales have {groups}"
        )
    return np.ascontiguousarray(((values - zeros[group]) * scales[group]).T)


def mxfp4(blocks: Array, scales: Array) -> Array:
    """Return the values (1, in, out) of blocks (out, in / 32, 16), with two E2M1 values in a byte.

    The lower half of a byte comes first. Scales (out, in / 32) are exponents plus 127; 255 is NaN.
    """
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    power = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int32) - 127))
    values = np.take(_E2M1, halves) * power[..., None].astype(np.float32)
    return values.reshape(len(values), -1).T[None]


def wide(values: Array) -> Array:
    """Return integers, or the bytes of FP8 E4M3, as fp32."""
    is_fp8 = values.dtype == np.uint8
    return (values.view(ml_dtypes.float8_e4m3fn) if is_fp8 else values).astype(np.float32)


def _unpacked(words: Array, bits: int) -> Array:
    """Return the integers in 32-bit words on a new last axis, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found = words.view(np.uint32)[..., None] >> shifts & ((1 << bits) - 1)
    return found.astype(np.int16)


def _in_awq_order(words: Array) -> Array:
    return _unpacked(words, 4)[..., np.argsort(_AWQ_ORDER)].reshape(len(words), -1)
