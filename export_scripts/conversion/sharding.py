"""The bytes of one shard: cast, split among ranks and copied from strided tensors in chunks.

Shapes: P rows of the file chunk, R the product of its other axes.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from export_scripts.conversion.tensor_plan import Window
from export_scripts.families.mapping.sources import Parts
from export_scripts.families.mapping.tensors import ShapeTensor
from export_scripts.numeric.arrays import DTYPES, Array, bits, store
from export_scripts.numeric.dtypes import Shape
from foundations.files.disk import BLOCK_BYTES, LARGE_BYTES

Bytes = npt.NDArray[np.uint8]

# A chunk of a file: large enough to amortise system calls, small enough for several workers.
CHUNK_BYTES = 8 << 20
# A large page of memory.
_HUGE_BYTES = 2 << 20

# A transposed tile: it fits the second-level cache, the lines of its rows nearly the first.
_TILE_ROWS = 512
_TILE_COLUMNS = 512
# Rows are an odd number of cache lines apart; at a power of two they would share a few sets.
_TILE_GAP_BYTES = 64
# Below this the plain strided copy is as fast.
_SMALL = 4096

# The bytes of a value, and the bits of infinity; E4M3 has NaN alone.
_INFINITIES = {
    "fp32": (4, 0x7F800000), "fp16": (2, 0x7C00), "bf16": (2, 0x7F80), "fp8": (1, 0x7F),
}  # fmt: skip


class Workspace(threading.local):
    """Buffers of each worker, allocated once.

    Chunks of large files alternate between two: one is written while the next is filled.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._chunks: list[Bytes] = []
        self._tile = np.empty(_TILE_ROWS * (_TILE_COLUMNS * 4 + _TILE_GAP_BYTES), np.uint8)

    def next_chunk(self, size_bytes: int) -> Bytes:
        """Return `size_bytes` of the buffer that was not returned last."""
        chunk = self._chunks.pop(0) if len(self._chunks) == 2 else _aligned(self.chunk_bytes)
        if len(chunk) < size_bytes:
            chunk = _aligned(size_bytes)
        self._chunks.append(chunk)
        return chunk[:size_bytes]

    def with_room(self, buffer: Bytes, filled: int, wanted: int) -> Bytes:
        """Return the last buffer, or a larger one in its place with room for what is wanted."""
        if filled + wanted <= len(buffer):
            return buffer
        larger = self._chunks[-1] = _aligned(filled + wanted)
        larger[:filled] = buffer[:filled]
        return larger

    def tile(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Return scratch of a shape (..., columns)."""
        pitch = _TILE_COLUMNS * dtype.itemsize + _TILE_GAP_BYTES
        rows = self._tile[: math.prod(shape[:-1]) * pitch].view(dtype).reshape(*shape[:-1], -1)
        return rows[..., : shape[-1]]


def _aligned(size_bytes: int) -> Bytes:
    """Return page-aligned memory, in large pages if the system has them.

    Direct writes need the alignment. With small pages, which are scattered, the disk accepts only
    a fraction of a chunk at once and runs at half its speed.
    """
    # Shared memory, mmap's default, has no large pages.
    memory = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_BYTES
    return whole[start : start + size_bytes]


_WORKSPACE = Workspace()


def file_chunks(
    pieces: Iterable[bytes | tuple[Parts, Window, str]],
    size_bytes: int,
    look: Callable[[Bytes, str], None] = lambda *_: None,
) -> Iterator[memoryview]:
    """Yield the contents of a file in whole blocks, and the rest.

    A piece is a tensor, the window to take of it, and its type; or bytes as they are. `look` is
    called with the bytes and the type of each tensor's before they are yielded. A chunk of a file
    of LARGE_BYTES or more is valid until the next but one is requested.
    """
    space = _WORKSPACE
    is_large = size_bytes >= LARGE_BYTES
    buffer = space.next_chunk(space.chunk_bytes) if is_large else np.empty(size_bytes, np.uint8)
    filled = 0
    for piece in pieces:
        parts, window, data_type = (piece, [(0, 1)], "fp32") if isinstance(piece, bytes) else piece
        del piece
        dtype = DTYPES[data_type]
        (first, end), *others = window
        shape = [high - low for low, high in others]
        row = len(parts) if isinstance(parts, bytes) else math.prod(shape) * dtype.itemsize
        while first < end:
            if filled + row > len(buffer):
                whole = filled // BLOCK_BYTES * BLOCK_BYTES
                if whole:
                    yield buffer[:whole].data
                    rest = buffer[whole:filled]
                    buffer, filled = space.next_chunk(space.chunk_bytes), len(rest)
                    buffer[:filled] = rest
                buffer = space.with_room(buffer, filled, row)
            rows = min(end - first, (len(buffer) - filled) // row)
            raw = buffer[filled : filled + rows * row]
            if isinstance(parts, bytes):
                raw[:] = memoryview(parts)
            else:
                taken = [(first, first + rows), *others]
                gather(raw.view(dtype).reshape(rows, *shape), parts, taken, space)
                look(raw, data_type)
            first += rows
            filled += rows * row
        del parts
    if filled:
        yield buffer[:filled].data


def gather(out: Array, parts: Parts, window: Window, space: Workspace) -> None:
    """Fill `out` with the window (low, high per axis) of the whole tensor."""
    offset = 0
    low, high = window[parts.axis]
    for part in parts.tensors:
        size = part.shape[parts.axis]
        begin, end = max(low, offset), min(high, offset + size)
        if begin < end:
            place = [slice(None)] * out.ndim
            place[parts.axis] = slice(begin - low, end - low)
            taken = [slice(first, last) for first, last in window]
            taken[parts.axis] = slice(begin - offset, end - offset)
            target = out[tuple(place)]
            if isinstance(part, ShapeTensor):
                store(target, np.broadcast_to(np.float32(part.fill), target.shape))
            else:
                _copy(target, part[tuple(taken)], space)
        offset += size


def _copy(target: Array, source: Array, space: Workspace) -> None:
    item = source.itemsize
    if source.ndim > 2 and item not in (source.strides[0], source.strides[-1]):
        # The contiguous axis is an inner one, which is first or last in a part of the others.
        for number in range(len(source)):
            _copy(target[number], source[number], space)
        return
    if (
        source.ndim < 2
        or source.size < _SMALL
        or source.strides[0] != item
        or source.strides[-1] == item
    ):
        store(target, source)
    else:
        _transpose(target, np.moveaxis(source, 0, -1), space)


def _transpose(target: Array, rows: Array, space: Workspace) -> None:
    """Copy `rows` (R..., P), contiguous along P, into `target` (P, R...).

    Tiles pass through scratch memory: a cast row copy, then a strided one that stays in the cache.
    """
    inner = math.prod(rows.shape[1:-1])
    if rows.ndim > 2 and inner > _TILE_ROWS:
        for i in range(rows.shape[0]):
            _transpose(target[:, i], rows[i], space)
        return
    group = max(1, _TILE_ROWS // inner)
    for first in range(0, rows.shape[0], group):
        block = rows[first : first + group]  # (r, ..., P)
        for start in range(0, rows.shape[-1], _TILE_COLUMNS):
            piece = block[..., start : start + _TILE_COLUMNS]
            place = target[start : start + _TILE_COLUMNS, first : first + group]
            straight = space.tile(piece.shape, target.dtype)
            store(straight, piece)
            np.copyto(bits(place), bits(np.moveaxis(straight, -1, 0)))


def is_finite(raw: Bytes, data_type: str) -> bool:
    """Return whether no value of a chunk is infinite or NaN, by comparing bits as integers.

    Without its sign, the bits of a finite value are below infinity's. Integer maxima run at memory
    speed: positive values are the largest signed integers, negative ones the largest unsigned.
    """
    if data_type not in _INFINITIES:
        return True
    width, infinity = _INFINITIES[data_type]
    positive, negative = int(raw.view(f"i{width}").max()), int(raw.view(f"u{width}").max())
    return positive < infinity and negative < infinity | 1 << 8 * width - 1
