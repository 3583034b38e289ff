"""Tensors in several chunks, as distributed checkpoints store them.

A chunk is a box of the whole tensor. The layout over training ranks no longer matters.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from export_scripts.checkpoints.base import FileMaps, Piece, StoredTensor
from export_scripts.numeric.dtypes import SOURCE_TYPES

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

# Every pair of chunks is compared, which a damaged index could make endless.
_MOST_CHUNKS = 4096


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor."""

    begin: tuple[int, ...]  # index of its first value on each axis of the whole
    values: StoredTensor  # its stored values

    @property
    def end(self) -> tuple[int, ...]:
        """Index behind its last value on each axis."""
        return tuple(b + n for b, n in zip(self.begin, self.values.shape, strict=True))

    def overlaps(self, other: Chunk) -> bool:
        """Return whether two chunks overlap."""
        ranges = zip(self.begin, self.end, other.begin, other.end, strict=True)
        return all(max(a, c) < min(b, d) for a, b, c, d in ranges)


@dataclass(frozen=True)
class ChunkedTensor(Piece):
    """One whole tensor in chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The stored tensors it consists of."""
        return tuple(chunk.values for chunk in self.chunks)

    def load(self, maps: FileMaps) -> Array:
        """Return the tensor gathered in memory."""
        import numpy as np

        from export_scripts.numeric.arrays import DTYPES, bits

        whole = np.empty(self.shape, DTYPES[self.dtype])
        for chunk in self.chunks:
            box = tuple(itertools.starmap(slice, zip(chunk.begin, chunk.end, strict=True)))
            np.copyto(bits(whole[box]), bits(chunk.values.load(maps)))
        return whole

    def slabs(self, axis: int | None, unit: int = 1) -> tuple[Piece, ...]:
        """Return the chunks in order if they follow each other along `axis`, else the whole."""
        if axis is None:
            return (self,)
        before, after = self.shape[:axis], self.shape[axis + 1 :]
        for values in self.stored:
            size = values.shape[axis]
            if values.shape != (*before, size, *after) or size % unit:
                return (self,)
        return tuple(chunk.values for chunk in sorted(self.chunks, key=lambda each: each.begin))

    def same_bytes(self, other: Piece, maps: FileMaps) -> bool:
        """Return whether both have the same chunks and the same values, byte by byte."""
        if not isinstance(other, ChunkedTensor) or self.shape != other.shape:
            return False
        mine, theirs = ({chunk.begin: chunk for chunk in each.chunks} for each in (self, other))
        return mine.keys() == theirs.keys() and all(
            chunk.values.same_bytes(theirs[begin].values, maps) for begin, chunk in mine.items()
        )

    def problems(self) -> list[str]:
        """Return the reason the chunks do not make the whole: overlap, excess or holes."""
        if len(self.chunks) > _MOST_CHUNKS:
            return [f"it has {len(self.chunks)} chunks; expected at most {_MOST_CHUNKS}"]
        outside = [
            f"a chunk of {list(chunk.values.shape)} at {list(chunk.begin)} reaches beyond "
            f"{list(self.shape)}"
            for chunk in self.chunks
            if any(end > size for end, size in zip(chunk.end, self.shape, strict=True))
        ]
        overlapping = [
            f"chunks of {list(a.values.shape)} at {list(a.begin)} and of {list(b.values.shape)} at "
            f"{list(b.begin)} overlap"
            for a, b in itertools.combinations(self.chunks, 2)
            if a.overlaps(b)
        ]
        if outside or overlapping:
            return (outside + overlapping)[:1]
        held, whole = (sum(math.prod(t.shape) for t in self.stored), math.prod(self.shape))
        if held < whole:
            return [f"its chunks hold {held} of its {whole} values: some are missing"]
        return []

    def select(self, index: int) -> ChunkedTensor:
        """Return the values at `index` of the first axis."""
        chunks = tuple(
            Chunk(chunk.begin[1:], _row(chunk.values, index - chunk.begin[0]))
            for chunk in self.chunks
            if chunk.begin[0] <= index < chunk.end[0]
        )
        return ChunkedTensor(self.dtype, self.shape[1:], chunks)


def concatenated(first: ChunkedTensor, second: ChunkedTensor) -> ChunkedTensor:
    """Return two tensors of one type one after the other along their first axis."""
    rows = first.shape[0]
    moved = tuple(
        Chunk((chunk.begin[0] + rows, *chunk.begin[1:]), chunk.values) for chunk in second.chunks
    )
    shape = (rows + second.shape[0], *first.shape[1:])
    return ChunkedTensor(first.dtype, shape, first.chunks + moved)


def _row(values: StoredTensor, index: int) -> StoredTensor:
    """Return the values at `index` of the first axis; nothing is read."""
    step = values.stride[0] if values.stride else math.prod(values.shape[1:])
    return dataclasses.replace(
        values,
        offset=values.offset + index * step * SOURCE_TYPES[values.dtype][0],
        shape=values.shape[1:],
        stride=values.stride[1:] if values.stride else None,
    )
