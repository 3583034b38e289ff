"""The bytes of a shard: copied in chunks from strided tensors, cast, and split among ranks.

Shapes: P is the number of rows of a chunk, R the product of its other axes.
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
# Size of a huge page.
_HUGE_BYTES = 2 << 20

# Size of a tile that is transposed: it fits the second-level cache, a line of each row nearly fits
# the first-level cache.
_TILE_ROWS = 512
_TILE_COLUMNS = 512
# Keeps rows an odd number of cache lines apart; at a power of two they would share a few sets.
_TILE_GAP_BYTES = 64
# Below this number of values, the plain strided copy is as fast.
_SMALL = 4096

# (bytes of a value, bits of infinity); E4M3 has only NaN.
_INFINITIES = {
    "fp32": (4, 0x7F800000), "fp16": (2, 0x7C00), "bf16": (2, 0x7F80), "fp8": (1, 0x7F),
}  # fmt: skip


class Workspace(threading.local):
    """The buffers of a worker, allocated once.

    Chunks of large files alternate between two: one is written while the next is filled.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._chunks: list[Bytes] = []
        self._tile = np.empty(_TILE_ROWS * (_TILE_COLUMNS * 4 + _TILE_GAP_BYTES), np.uint8)

    def next_chunk(self, size_bytes: int) -> Bytes:
        """Return `size_bytes` of the buffer that was not used last."""
        chunk = self._chunks.pop(0) if len(self._chunks) == 2 else _aligned(self.chunk_bytes)
        if len(chunk) < size_bytes:
            chunk = _aligned(size_bytes)
        self._chunks.append(chunk)
        return chunk[:size_bytes]

    def enlarged(self, buffer: Bytes, filled: int, needed: int) -> Bytes:
        """Return the last buffer, replaced by a larger one if it lacks space for `needed` bytes."""
        if filled + needed <= len(buffer):
            return buffer
        larger = self._chunks[-1] = _aligned(filled + needed)
        larger[:filled] = buffer[:filled]
        return larger

    def tile(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Return scratch memory of a shape (..., columns)."""
        pitch = _TILE_COLUMNS * dtype.itemsize + _TILE_GAP_BYTES
        rows = self._tile[: math.prod(shape[:-1]) * pitch].view(dtype).reshape(*shape[:-1], -1)
        return rows[..., : shape[-1]]


def _aligned(size_bytes: int) -> Bytes:
    """Return page-aligned memory, in huge pages if the system has them.

    Direct writes need the alignment. With small pages, which are scattered, the disk accepts only
    a fraction of a chunk at once and runs at half its speed.
    """
    # Shared memory, mmap's default, has no huge pages.
    memory = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_BYTES
    return whole[start : start + size_bytes]


_WORKSPACE = Workspace()


def file_chunks(
    pieces: Iterable[bytes | tuple[Parts, Window, str]],
    size_bytes: int,
    inspect: Callable[[Bytes, str], None] = lambda *_: None,
) -> Iterator[memoryview]:
    """Yield the contents of a file in whole blocks, and the rest.

    A piece is (tensor, window of it, type), or bytes. `inspect` is called with (bytes, type) of
    tensors before they are yielded. In a file of LARGE_BYTES or more, a chunk stays valid until the
    next but one is requested.
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
                buffer = space.enlarged(buffer, filled, row)
            rows = min(end - first, (len(buffer) - filled) // row)
            raw = buffer[filled : filled + rows * row]
            if isinstance(parts, bytes):
                raw[:] = memoryview(parts)
            else:
                selected = [(first, first + rows), *others]
                gather(raw.view(dtype).reshape(rows, *shape), parts, selected, space)
                inspect(raw, data_type)
            first += rows
            filled += rows * row
        del parts
    if filled:
        yield buffer[:filled].data


def gather(out: Array, parts: Parts, window: Window, space: Workspace) -> None:
    """Fill `out` with a window of the tensor that parts make up."""
    offset = 0
    low, high = window[parts.axis]
    for part in parts.tensors:
        size = part.shape[parts.axis]
        begin, end = max(low, offset), min(high, offset + size)
        if begin < end:
            place = [slice(None)] * out.ndim
            place[parts.axis] = slice(begin - low, end - low)
            selected = [slice(first, last) for first, last in window]
            selected[parts.axis] = slice(begin - offset, end - offset)
            target = out[tuple(place)]
            if isinstance(part, ShapeTensor):
                store(target, np.broadcast_to(np.float32(part.fill), target.shape))
            else:
                _copy(target, part[tuple(selected)], space)
        offset += size


def _copy(target: Array, source: Array, space: Workspace) -> None:
    item = source.itemsize
    if source.ndim > 2 and item not in (source.strides[0], source.strides[-1]):
        # The contiguous axis is an inner one: it is first or last in slices along the others.
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

    Tiles pass through scratch memory: a row copy that casts, then a strided copy in the cache.
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
    """Return whether all values of a chunk are finite, by comparing their bits as integers.

    Without the sign, a finite value's bits are below infinity's. Integer maxima run at memory
    speed: the largest signed integer is a positive value, the largest unsigned a negative one.
    """
    if data_type not in _INFINITIES:
        return True
    width, infinity = _INFINITIES[data_type]
    positive, negative = int(raw.view(f"i{width}").max()), int(raw.view(f"u{width}").max())
    return positive < infinity and negative < infinity | 1 << 8 * width - 1
