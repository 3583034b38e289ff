"""The tensors of a folder, each with the values that its source implies.

Shapes: flat values in C order; a row is a slice along the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from export_scripts.checkpoints.base import FLOATING_TYPES, ComputedPiece, FileMaps, Piece
from export_scripts.checkpoints.huggingface import TIED_TABLES
from export_scripts.checkpoints.quantized import WidePiece
from export_scripts.conversion.lora import Sum
from export_scripts.conversion.sharding import file_chunks
from export_scripts.conversion.tensor_plan import WrittenTensor, rank_window, whole_window
from export_scripts.families.mapping.sources import Adjusted, Compute, Parts, rearranged
from export_scripts.numeric.arrays import DTYPES, Array
from export_scripts.numeric.dtypes import item_size
from inference.certify.differences import Differences, GridDifferences, Rounding
from inference.certify.pair import Pair, keys_read, stored_type

# One unit in the last place of each type. fp64 is compared as fp32; fp16's smallest step is 2^-24.
_STEPS = {
    "fp64": Rounding(relative=2.0**-23),
    "fp32": Rounding(relative=2.0**-23),
    "fp16": Rounding(relative=2.0**-10, least=2.0**-24),
    "bf16": Rounding(relative=2.0**-7),
}
_SUMS = 1e-6  # sums of products may round differently on another machine
# e4m3 keeps 3 bits: half a step of a value, plus 8 % for rounded operands. Subnormal numbers: half
# a step of 2^-9, of 1/448 of the largest value.
# E2M1 keeps one bit; its subnormal numbers have steps of 1/12 of the largest.
_QUANTISED = {
    "fp8": Rounding("fp8", relative=2.0**-4 * 1.08, of_largest=2.0**-18),
    "int4": Rounding("mxfp4", relative=2.0**-2 * 1.08, of_largest=1 / 24),
}


def source_pieces(pair: Pair, written: WrittenTensor) -> list[Piece]:
    """Return the pieces of the source from which a tensor is made."""
    return [piece for key in keys_read(written.items) for piece in pair.facts.pieces(key)]


@dataclass(frozen=True)
class Unit:
    """One stored tensor of a pair's folder, or one rank's file of it, and its expected value."""

    pair: Pair
    key: str
    written: WrittenTensor  # its sources
    stored: Piece
    shape: tuple[int, ...]  # expected
    rank: int = 0  # in a folder of shards

    @property
    def sources(self) -> list[Piece]:
        """The pieces of the source from which it is made."""
        return source_pieces(self.pair, self.written)

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return max(1, math.prod(self.stored.shape[1:]))

    @property
    def is_table(self) -> bool:
        """Whether it has a row for each token, so that a side may have padding rows."""
        return self.written.key.endswith(TIED_TABLES)

    @property
    def common_rows(self) -> int | None:
        """The number of rows that both sides have; None if the shapes are incompatible."""
        found, wanted = self.stored.shape, self.shape
        if found == wanted:
            return found[0] if found else 1
        if found[1:] == wanted[1:] and found and self.is_table:
            return min(found[0], wanted[0])
        return None

    def values(self) -> Array:
        """Return the stored values, flat: a view of the mapped file, unless they are computed."""
        return self.stored.load(self.pair.folder.facts.maps).reshape(-1)

    def expected(self, kind: str, count: int) -> Iterator[Array]:
        """Yield the first `count` expected values, flat; a block is valid until the next one."""
        facts, tp_size = self.pair.facts, self.pair.folder.facts.tp_size

        def pieces() -> Iterator[tuple[Parts, Any, str]]:
            last = None
            for item, view in self.written.pieces:
                if item is not last:
                    last, built = item, item.build(facts, self.pair.config)
                if view is None:
                    window = rank_window(built, item.tensor, tp_size, self.rank)
                    yield built, window, kind
                else:
                    parts = rearranged(built, view)
                    yield parts, whole_window(parts.shape), kind

        for chunk in file_chunks(pieces(), math.prod(self.shape) * item_size(kind)):
            values = np.frombuffer(chunk, DTYPES[kind])[:count]
            count -= len(values)
            yield values

    def matrices(self) -> tuple[Array, Array]:
        """Return the expected and the stored values as matrices of rows."""
        values, kind = self.values(), self.stored.dtype
        expected = np.concatenate([block.copy() for block in self.expected(kind, len(values))])
        return expected.reshape(-1, self.width), values.reshape(-1, self.width)

    def differences(self, types: set[str]) -> Differences:
        """Return an empty record of differences; `types` are the source's."""
        is_quantised = self.pair.folder.quantised is not None and len(self.stored.stored) > 1
        kind = stored_type(self.stored) if is_quantised else self.stored.dtype
        if isinstance(self.stored, WidePiece) and kind != "fp8":
            # The folder does not say whether a calibration chose its integers.
            (scale,) = (each for each in self.stored.stored if each.dtype in FLOATING_TYPES)
            groups = max(1, math.prod(scale.shape) // self.stored.shape[0])
            limits = self.stored.limits(self.pair.folder.facts.maps)
            return GridDifferences(int(kind.removeprefix("int")), groups, limits)
        return Differences(self.stored.shape, self._rounding(kind, types))

    def _rounding(self, kind: str, types: set[str]) -> Rounding | None:
        if kind in _QUANTISED:
            return _QUANTISED[kind]
        step = _STEPS.get(kind)
        if step is None:  # integers, such as a buffer of positions
            return None
        if any(isinstance(getattr(piece, "compute", None), Sum) for piece in self.sources):
            # Some programs round the update before they add it, and then the sum.
            size = max(_SUMS, step.relative / 2)
            return replace(step, method="a merged adapter", of_largest=size, state="merged")
        if any(isinstance(item.source, (Adjusted, Compute)) for item in self.written.items):
            return replace(step, of_largest=_SUMS)
        return None if types == {kind} else step

    def taken(self, order: Sequence[int]) -> Unit:
        """Return the unit with its stored values in another order on the axis of that size."""
        stored, axis = self.stored, self.stored.shape.index(len(order))

        def load(maps: FileMaps) -> Array:
            return stored.load(maps).take(order, axis)

        moved = ComputedPiece(stored.dtype, stored.shape, stored.stored, load)
        return replace(self, stored=moved)
