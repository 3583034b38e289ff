"""Values rounded to FP8 E4M3 with a scale per block; numpy has no such type, so bytes hold them."""

import ml_dtypes
import numpy as np

from export_scripts.numeric.arrays import Array

LARGEST = 448.0
_ROWS = 256  # number of rows that are rounded at once


def to_fp8(values: Array, block: tuple[int, int]) -> tuple[Array, Array]:
    """Return the E4M3 values (bytes) and the fp32 scales, one per block, of an fp32 matrix.

    Raises:
        ValueError: Values are infinite or not a number.
    """
    rows, columns = values.shape
    height, width = block
    places = [np.arange(0, size, step) for size, step in ((rows, height), (columns, width))]
    high, low = (
        each.reduceat(each.reduceat(values, places[1], axis=1), places[0], axis=0)
        for each in (np.maximum, np.minimum)
    )
    largest = np.maximum(high, -low)
    if not np.isfinite(largest).all():
        count = int((~np.isfinite(values)).sum())
        raise ValueError(
            f"holds {count} values that are infinite or not a number, which have no scale in FP8; "
            "training diverged or the file is damaged"
        )
    scales = np.maximum(largest / np.float32(LARGEST), np.finfo(np.float32).tiny)
    scales[largest == 0] = 1
    out = np.empty(values.shape, np.uint8)
    for first in range(0, rows, _ROWS):
        part = values[first : first + _ROWS]
        each = scales[np.arange(first, first + len(part)) // height]
        out[first : first + _ROWS] = fp8_bytes(part / np.repeat(each, width, 1)[:, :columns])
    return out, scales


def fp8_bytes(values: Array) -> Array:
    """Return fp32 values rounded to E4M3, ties to even, saturated at the largest; NaN is 0x7F."""
    codes = np.clip(values, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)
