"""Mixtures whose experts and router rows are permuted alike, which leaves the function the same."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from export_scripts.checkpoints.base import ComputedPiece, FileMaps, Piece, StoredTensor
from export_scripts.conversion.tensor_plan import TensorPlan
from export_scripts.families.mapping.source_mapping import ENTRY
from export_scripts.numeric.arrays import Array
from inference.certify.pair import Pair, keys_read

_ROUTER = ".mlp.router.weight"


@dataclass(frozen=True)
class _Rows(Piece):
    """A tensor stacked from the entries of its first axis, in any order."""

    dtype: str
    shape: tuple[int, ...]
    rows: tuple[Piece, ...]

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of its entries."""
        return tuple(stored for row in self.rows for stored in row.stored)

    def load(self, maps: FileMaps) -> Array:
        """Return the entries, stacked in memory."""
        return np.stack([row.load(maps) for row in self.rows])

    def select(self, index: int) -> Piece:
        """Return one entry."""
        return self.rows[index]


@dataclass(frozen=True)
class ExpertLayer:
    """The router and the experts of one layer of a source."""

    pair: Pair
    items: tuple[TensorPlan, ...]

    @property
    def keys(self) -> set[str | None]:
        """The names under which the source stores them."""
        return {*map(self.pair.facts.resolve, keys_read(self.items))}

    @property
    def router(self) -> str | None:
        """The name of the router's matrix (experts, hidden)."""
        items = (item for item in self.items if item.tensor.name.endswith(_ROUTER))
        return next(map(self.pair.facts.resolve, keys_read(items)), None)

    def reordered(self, order: Sequence[int]) -> Pair | None:
        """Return the pair with the source's experts and their router rows in another order.

        None if it moves experts between groups, which changes what the router selects.
        """
        size = len(order) // getattr(self.pair.config, "group_num", 1)
        groups = (order[first : first + size] for first in range(0, len(order), size))
        if any(len({number // size for number in group}) > 1 for group in groups):
            return None
        facts = self.pair.facts
        tensors = dict(facts.reader.tensors)
        for item in self.items:
            expert = item.index.get("expert")
            for template, _ in item.source.reads:
                key = template.format(**item.index)
                name = facts.resolve(key) or key
                if expert is None:
                    tensors[name] = tuple(_permuted(piece, order) for piece in facts.pieces(name))
                elif ENTRY in key:
                    rows = tuple(facts.pieces(f"{name}{ENTRY}{number}")[0] for number in order)
                    tensors[name] = (_Rows(rows[0].dtype, (len(rows), *rows[0].shape), rows),)
                else:
                    other = template.format(**{**item.index, "expert": order[int(expert)]})
                    tensors[name] = tuple(facts.pieces(other))
        reader = dataclasses.replace(facts.reader, tensors=tensors)
        return dataclasses.replace(self.pair, facts=dataclasses.replace(facts, reader=reader))


def _permuted(piece: Piece, order: Sequence[int]) -> Piece:
    """Return a router's tensor with its axis of experts in another order."""
    axis = piece.shape.index(len(order))
    return ComputedPiece(
        piece.dtype, piece.shape, piece.stored, lambda maps: piece.load(maps).take(order, axis)
    )


def expert_layers(pair: Pair) -> Iterator[ExpertLayer]:
    """Yield the layers of a source that have experts."""
    layers: dict[object, list[TensorPlan]] = {}
    for item in () if pair.plan is None else pair.plan.tensors:
        if "expert" in item.index or ".mlp.router." in item.tensor.name:
            layers.setdefault(item.index["layer"], []).append(item)
    for items in layers.values():
        yield ExpertLayer(pair, tuple(items))


def order_of_rows(source: Array, folder: Array) -> list[int] | None:
    """Return the source's row index for each row of the folder; None if it is not a permutation."""
    places = {row.tobytes(): number for number, row in enumerate(source)}
    order = [places.get(row.tobytes(), -1) for row in folder]
    return order if sorted(order) == [*range(len(source))] else None
