"""Views of FT tensors as a source stores them: parts with their axes split and permuted.

`sources` describes each view; here it is taken of parts, whatever ranks they were stored by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from export_scripts.families.mapping.sources import Parts, View
from export_scripts.families.mapping.tensors import ShapeTensor, Tensor, joined


def taken(parts: Parts, view: View) -> Parts:
    """Return the source's tensor, of parts of the FT one; its C order is the source's."""
    parts, groups = _split(parts, view.sizes)
    left_out = [axis for axis in range(len(view.sizes)) if axis not in view.order]
    if left_out:
        (axis,) = groups[left_out[0]]
        parts, groups = _entry(parts, axis, view.index), _without(groups, axis)
    order = [axis for name in view.order for axis in groups[name]]
    tensors = tuple(part.transpose(*order) for part in parts.tensors)
    axis = order.index(parts.axis) if len(tensors) > 1 else 0
    if not view.zero_rows:
        return Parts(axis, tensors)
    assert axis == 0, "rows are added before the first"
    return Parts(0, (ShapeTensor((view.zero_rows, *tensors[0].shape[1:])), *tensors))


def _split(parts: Parts, sizes: Sequence[int]) -> tuple[Parts, list[list[int]]]:
    """Return parts with finer axes, and the axes that make up each entry of `sizes`."""
    fine = parts.shape
    factors = _factors(fine, sizes)
    if factors is None or not _divides(parts, factors[parts.axis]):
        # Cut elsewhere than between the entries: gathered first.
        whole = parts.tensors[0]
        if len(parts.tensors) > 1:
            whole = joined(parts.tensors, parts.axis)
        return Parts(0, (whole.reshape(*sizes),)), [[axis] for axis in range(len(sizes))]
    joint = parts.axis if len(parts.tensors) > 1 else None
    flat: list[int] = []
    place, inner = 0, 1
    for number, each in enumerate(factors):
        if number == joint:
            place, inner = len(flat), math.prod(each[1:])
        flat += each if number == joint or each != [1] else []
    if joint is None:
        return Parts(0, (parts.tensors[0].reshape(*flat),)), _grouped(flat, sizes)
    tensors = []
    for part in parts.tensors:
        flat[place] = part.shape[joint] // inner
        tensors.append(part.reshape(*flat))
    flat[place] = parts.shape[joint] // inner
    return Parts(place, tuple(tensors)), _grouped(flat, sizes)


def _factors(fine: Sequence[int], sizes: Sequence[int]) -> list[list[int]] | None:
    """Return each axis of `fine` as factors, so that those of `sizes` begin between factors.

    None if some axis of either begins within a factor of the other.
    """
    ends = {math.prod(sizes[:count]) for count in range(1, len(sizes) + 1)}
    out: list[list[int]] = []
    begin = 1
    for size in fine:
        inside = sorted(end for end in ends if begin < end < begin * size)
        steps = [begin, *inside, begin * size]
        if any(after % before for before, after in itertools.pairwise(steps)):
            return None
        out.append([after // before for before, after in itertools.pairwise(steps)])
        begin *= size
    return out


def _divides(parts: Parts, factors: Sequence[int]) -> bool:
    inner = math.prod(factors[1:])
    return all(part.shape[parts.axis] % inner == 0 for part in parts.tensors)


def _grouped(flat: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    axis = 0
    for size in sizes:
        group: list[int] = []
        while axis < len(flat) and math.prod(flat[i] for i in group) < size:
            group.append(axis)
            axis += 1
        groups.append(group)
    return groups


def _entry(parts: Parts, axis: int, index: int) -> Parts:
    """Return one entry of an axis, which is then gone."""

    def at(part: Tensor, place: int) -> Tensor:
        return part[(slice(None),) * axis + (place,)]

    if axis != parts.axis:
        after = parts.axis - (axis < parts.axis)
        return Parts(after, tuple(at(part, index) for part in parts.tensors))
    for part in parts.tensors:
        if index < part.shape[axis]:
            return Parts(0, (at(part, index),))
        index -= part.shape[axis]
    raise AssertionError("no such entry")


def _without(groups: Sequence[Sequence[int]], axis: int) -> list[list[int]]:
    return [[each - (each > axis) for each in group if each != axis] for group in groups]
