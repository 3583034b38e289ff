"""Tensors in chunks, as distributed checkpoints store them.

A chunk is a box of the whole tensor, whatever the layout of the training ranks was.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from export_scripts.checkpoints.base import FileMaps, Piece, Pieces, StoredParts
from export_scripts.numeric.dtypes import Shape
from foundations.errors import refuse

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

# Every pair of chunks is compared, which a damaged index could make endless.
_MAX_CHUNKS = 4096


ChunkOffset = Shape  # index of a chunk's first value on each axis of the whole tensor


@dataclass(frozen=True)
class ChunkedTensor(Piece):
    """A whole tensor in chunks."""

    dtype: str
    shape: Shape
    chunks: Mapping[ChunkOffset, Piece]

    @property
    def ordered(self) -> Pieces:
        """The chunks in order of their offsets.

        In this order, two lists of chunks that fill the same shape and have the same sizes also
        have the same offsets.
        """
        return tuple(self.chunks[begin] for begin in sorted(self.chunks))

    @property
    def stored(self) -> StoredParts:
        """The stored tensors that it consists of."""
        return tuple(stored for chunk in self.ordered for stored in chunk.stored)

    @property
    def pieces(self) -> Pieces:
        """The tensor as one piece: itself, or its only chunk."""
        return self.ordered if len(self.chunks) == 1 else (self,)

    def load(self, maps: FileMaps) -> Array:
        """Return the tensor gathered in memory."""
        import numpy as np

        from export_scripts.numeric.arrays import DTYPES, bits

        whole = np.empty(self.shape, DTYPES[self.dtype])
        for begin, values in self.chunks.items():
            box = tuple(map(slice, begin, _end(begin, values)))
            np.copyto(bits(whole[box]), bits(values.load(maps)))
        return whole

    def slabs(self, axis: int | None, unit: int = 1) -> Pieces:
        """Return the chunks in order if they follow each other along `axis`, else the whole."""
        if axis is None:
            return (self,)
        before, after = self.shape[:axis], self.shape[axis + 1 :]
        for values in self.ordered:
            size = values.shape[axis]
            if values.shape != (*before, size, *after) or size % unit:
                return (self,)
        return self.ordered

    def problems(self) -> list[str]:
        """Return why the chunks do not make up the whole: overlap, excess or holes."""
        if len(self.chunks) > _MAX_CHUNKS:
            return [f"it has {len(self.chunks)} chunks; expected at most {_MAX_CHUNKS}"]
        boxes = [
            (begin, _end(begin, values), list(values.shape))
            for begin, values in self.chunks.items()
        ]
        outside = [
            f"a chunk of {sizes} at {list(begin)} reaches beyond {list(self.shape)}"
            for begin, end, sizes in boxes
            if any(map(operator.gt, end, self.shape))
        ]
        cut = {
            axis
            for begin, end, _ in boxes
            for axis, bounds in enumerate(zip(begin, end, strict=True))
            if bounds != (0, self.shape[axis])
        }
        # If a tensor is cut along one axis, as by FSDP, only neighbours can overlap.
        pairs = (
            itertools.pairwise(sorted(boxes))
            if len(cut) < 2
            else (itertools.combinations(boxes, 2))
        )
        overlapping = [
            f"chunks of {a[2]} at {list(a[0])} and of {b[2]} at {list(b[0])} overlap"
            for a, b in pairs
            if all(map(operator.lt, map(max, a[0], b[0]), map(min, a[1], b[1])))
        ]
        if outside or overlapping:
            return (outside + overlapping)[:1]
        held, whole = (sum(math.prod(t.shape) for t in self.ordered), math.prod(self.shape))
        if held < whole:
            return [f"its chunks hold {held} of its {whole} values: some are missing"]
        return []

    def select(self, index: int) -> ChunkedTensor:
        """Return the values at `index` of the first axis."""
        chunks = {
            begin[1:]: values.select(index - begin[0])
            for begin, values in self.chunks.items()
            if 0 <= index - begin[0] < values.shape[0]
        }
        return ChunkedTensor(self.dtype, self.shape[1:], chunks)


ChunkedTensors = dict[str, ChunkedTensor]


def chunked(piece: Piece) -> ChunkedTensor:
    """Return a piece as a chunked tensor; it may be the only chunk."""
    if isinstance(piece, ChunkedTensor):
        return piece
    return ChunkedTensor(piece.dtype, piece.shape, {(0,) * len(piece.shape): piece})


def refuse_holes(tensors: Mapping[str, ChunkedTensor], where: object) -> None:
    """Check that the chunks of each tensor make up the whole.

    Raises:
        CheckpointMismatchError: Chunks overlap, reach beyond their tensor, or leave holes.
    """
    problems = [
        f"{name}: {problem}" for name, tensor in tensors.items() for problem in tensor.problems()
    ]
    refuse(problems, where)


def concatenated(first: ChunkedTensor, second: ChunkedTensor) -> ChunkedTensor:
    """Return two tensors of one type concatenated along their first axis."""
    rows = first.shape[0]
    moved = {(begin[0] + rows, *begin[1:]): values for begin, values in second.chunks.items()}
    shape = (rows + second.shape[0], *first.shape[1:])
    return ChunkedTensor(first.dtype, shape, {**first.chunks, **moved})


def _end(begin: ChunkOffset, values: Piece) -> ChunkOffset:
    """Return the index after a chunk's last value on each axis."""
    return tuple(map(operator.add, begin, values.shape))
