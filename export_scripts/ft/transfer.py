"""Copy strided, cast, cut tensors into contiguous file contents, a bounded piece at a time.

Shapes: P rows of the file chunk, R the product of its other axes.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from export_scripts.families.shapes import ShapeTensor
from export_scripts.families.sources import Parts
from export_scripts.ft.disk import BLOCK_BYTES
from export_scripts.ft.dtypes import item_size, torch_dtype

# A chunk of a file: large enough that system calls do not count, small enough for several workers.
CHUNK_BYTES = 8 << 20

# A transposed tile (fits the second-level cache, both ways).
_TILE_COLUMNS = 1024
_TILE_ROWS = 512
# Below this the plain strided copy is as fast.
_SMALL = 4096

# Views of the same width: signed for the largest value, unsigned for the most negative one.
_INTEGERS = {
    "fp32": (np.int32, np.uint32, 0x7F800000),
    "fp16": (np.int16, np.uint16, 0x7C00),
    "bf16": (np.int16, np.uint16, 0x7F80),
}


@dataclass
class ValueRange:
    """Smallest and largest value of what was written; `finite` is False after inf or NaN."""

    smallest: float = math.inf
    largest: float = -math.inf
    finite: bool = True

    @property
    def largest_magnitude(self) -> float:
        """Largest absolute value."""
        return max(abs(self.smallest), abs(self.largest))

    def include(self, other: ValueRange) -> None:
        """Widen to another range."""
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self.finite = self.finite and other.finite


@dataclass
class Workspace:
    """One worker's buffers, allocated once."""

    chunk: npt.NDArray[np.uint8] = field(default_factory=lambda: _aligned(CHUNK_BYTES))
    tiles: torch.Tensor = field(
        default_factory=lambda: torch.empty(2, _TILE_COLUMNS * _TILE_ROWS * 4, dtype=torch.uint8)
    )

    def tile(self, number: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return scratch `number` as a (rows, columns) matrix."""
        count = rows * columns * dtype.itemsize
        return self.tiles[number, :count].view(dtype).view(rows, columns)


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins at a page, as direct writes want it."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


def _rows_per_chunk(row_bytes: int, chunk_bytes: int) -> int:
    """Return how many rows to write at once: whole blocks where that many fit."""
    rows = max(1, chunk_bytes // max(row_bytes, 1))
    whole = BLOCK_BYTES // math.gcd(row_bytes, BLOCK_BYTES)
    return rows // whole * whole or rows


_workspaces = threading.local()


def workspace() -> Workspace:
    """Return the calling thread's buffers."""
    found = getattr(_workspaces, "own", None)
    if found is None:
        found = _workspaces.own = Workspace()
    assert isinstance(found, Workspace)
    return found


def file_chunks(
    parts: Parts, shape: tuple[int, ...], split_axis: int, tp_rank: int, data_type: str
) -> Iterator[tuple[memoryview, ValueRange]]:
    """Yield the contents of one rank's file, with the range of each chunk's values.

    A chunk is valid until the next one is asked for.

    Args:
        parts: The whole tensor.
        shape: The rank's shape in the parts' axes.
        split_axis: Axis shared among ranks, -1 for none.
        tp_rank: The rank.
        data_type: Type on disk.
    """
    space = workspace()
    dtype = torch_dtype(data_type)
    row = math.prod(shape[1:]) * item_size(data_type)
    if row > len(space.chunk):
        space.chunk = _aligned(row)
    step = _rows_per_chunk(row, len(space.chunk))
    start = tp_rank * shape[split_axis] if split_axis >= 0 else 0
    for first in range(0, shape[0], step):
        rows = min(step, shape[0] - first)
        raw = space.chunk[: rows * row]
        out = torch.from_numpy(raw).view(dtype).view(rows, *shape[1:])
        window = [(0, size) for size in shape]
        window[0] = (first, first + rows)
        if split_axis >= 0:
            low, high = window[split_axis]
            window[split_axis] = (low + start, high + start)
        _gather(out, parts, window, space)
        yield raw.data, value_range(raw, data_type)


def _gather(
    out: torch.Tensor, parts: Parts, window: list[tuple[int, int]], space: Workspace
) -> None:
    """Fill `out` with the window (low, high per axis) of the whole tensor."""
    offset = 0
    low, high = window[parts.axis]
    for part in parts.tensors:
        size = part.shape[parts.axis]
        begin, end = max(low, offset), min(high, offset + size)
        if begin < end:
            target = out.narrow(parts.axis, begin - low, end - begin)
            if isinstance(part, ShapeTensor):
                target.fill_(part.fill)
            else:
                source = part
                for axis, (first, last) in enumerate(window):
                    if axis == parts.axis:
                        first, last = begin - offset, end - offset
                    source = source.narrow(axis, first, last - first)
                _copy(target, source, space)
        offset += size


def _copy(target: torch.Tensor, source: torch.Tensor, space: Workspace) -> None:
    if (
        source.ndim < 2
        or source.numel() < _SMALL
        or source.stride(0) != 1
        or source.stride(-1) == 1
    ):
        target.copy_(source)
    else:
        _transpose(target, source.movedim(0, -1), space)


def _transpose(target: torch.Tensor, rows: torch.Tensor, space: Workspace) -> None:
    """Copy `rows` (R..., P), contiguous along P, into `target` (P, R...).

    Tiles pass through scratch memory: a cast row copy, then torch's blocked transposition, which
    needs both sides contiguous.
    """
    inner = math.prod(rows.shape[1:-1])
    group = max(1, _TILE_COLUMNS // inner)
    if rows.ndim > 2 and inner > _TILE_COLUMNS:
        for i in range(rows.shape[0]):
            _transpose(target[:, i], rows[i], space)
        return
    for first in range(0, rows.shape[0], group):
        block = rows[first : first + group]  # (r, ..., P)
        for start in range(0, rows.shape[-1], _TILE_ROWS):
            piece = block[..., start : start + _TILE_ROWS]
            place = target[start : start + _TILE_ROWS, first : first + group]
            width, height = piece.shape[-1], piece.numel() // piece.shape[-1]
            straight = space.tile(0, height, width, target.dtype)
            straight.view(piece.shape).copy_(piece)
            if place.is_contiguous():
                place.view(width, height).copy_(straight.t())
                continue
            turned = space.tile(1, width, height, target.dtype)
            turned.copy_(straight.t())
            place.copy_(turned.view(place.shape))


def value_range(raw: npt.NDArray[np.uint8], data_type: str) -> ValueRange:
    """Return the range of a chunk of values, by comparing their bit patterns as integers.

    Non-negative floats are ordered like signed integers; negative ones, read as unsigned, are
    ordered by magnitude and lie above all others. Integer maxima run at memory speed.
    """
    if data_type not in _INTEGERS:
        values = raw.view(np.int8)
        return ValueRange(float(values.min()), float(values.max()))
    signed, unsigned, infinity = _INTEGERS[data_type]
    sign = 1 << (np.dtype(unsigned).itemsize * 8 - 1)
    top, bottom = int(raw.view(signed).max()), int(raw.view(unsigned).max())
    # All negative: the largest is the one of least magnitude. All positive: the smallest likewise.
    largest = top if top >= 0 else int(raw.view(unsigned).min())
    smallest = bottom if bottom >= sign else int(raw.view(signed).min())
    finite = (largest & (sign - 1)) < infinity and (smallest & (sign - 1)) < infinity
    return ValueRange(_float(smallest, data_type), _float(largest, data_type), finite)


def _float(bits: int, data_type: str) -> float:
    if data_type == "bf16":
        return float(np.uint32(bits << 16).view(np.float32))
    if data_type == "fp16":
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits).view(np.float32))
