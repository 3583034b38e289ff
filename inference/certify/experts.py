"""Mixtures whose experts and router rows are permuted alike, which leaves the function the same."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from export_scripts.numeric.arrays import Array
from inference.certify.pair import Pair, keys_read
from inference.certify.units import Unit

_ROUTER = ".mlp.router."
# Layer -> key of a unit -> the experts that it holds; None for the router, which has all.
_Layers = Mapping[Any, Mapping[str, set[Any]]]


def reordered_experts(
    pair: Pair, units: Mapping[str, Unit], changed: Collection[str]
) -> Iterator[tuple[str, list[Unit]]]:
    """Yield each changed router whose rows are permuted, and its layer's units in that order.

    An order that moves experts between groups changes what the router selects.
    """
    for layer in _layers(pair, units).values():
        for router, experts in layer.items():
            if experts != {None} or router not in changed or len(units[router].shape) < 2:
                continue
            order = _order_of_rows(*units[router].matrices())
            if order is not None and _keeps_groups(order, getattr(pair.config, "group_num", 1)):
                yield router, [_reordered(units, key, layer[key], order) for key in layer]


def _keeps_groups(order: Sequence[int], count: int) -> bool:
    """Return whether the experts of each group of neighbours were a group before."""
    size = len(order) // count
    moves = {(place // size, number // size) for place, number in enumerate(order)}
    return len(moves) == count


def _reordered(
    units: Mapping[str, Unit], key: str, experts: set[Any], order: Sequence[int]
) -> Unit:
    """Return a unit with the source's values of the experts that the folder has in its places."""
    unit, (expert, *others) = units[key], experts
    if expert is None or others:
        return unit.taken([order.index(number) for number in range(len(order))])
    head, _, tail = key.rpartition(f".{expert}.")
    other = units.get(f"{head}.{order[int(expert)]}.{tail}", unit)
    return replace(unit, written=other.written)


def _layers(pair: Pair, units: Mapping[str, Unit]) -> _Layers:
    places: dict[Any, set[tuple[Any, Any]]] = defaultdict(set)
    for item in () if pair.plan is None else pair.plan.tensors:
        if "expert" in item.index or _ROUTER in item.tensor.name:
            place = item.index["layer"], item.index.get("expert")
            for source in (item, *map(pair.facts.resolve, keys_read([item]))):
                places[source].add(place)
    layers: dict[Any, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for unit in units.values():
        for item in unit.written.items:
            names = [item] if item in places else map(pair.facts.resolve, keys_read([item]))
            for layer, expert in {place for name in names for place in places.get(name, ())}:
                layers[layer][unit.key].add(expert)
    return layers


def _order_of_rows(source: Array, folder: Array) -> list[int] | None:
    """Return the source's row index for each row of the folder; None if it is not a permutation."""
    places = {row.tobytes(): number for number, row in enumerate(source)}
    order = [places.get(row.tobytes(), -1) for row in folder]
    return order if sorted(order) == [*range(len(source))] else None
