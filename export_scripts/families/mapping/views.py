"""Views of FT tensors as a source stores them: parts with their axes split and permuted.

`sources` describes each view; here it is taken of parts, whatever ranks they were stored by.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from export_scripts.families.mapping.sources import Parts, View
from export_scripts.families.mapping.tensors import ShapeTensor, joined


def taken(parts: Parts, view: View) -> Parts:
    """Return the source's tensor, of parts of the FT one; its C order is the source's."""
    parts, groups = _split(parts, view.sizes)
    order = [axis for name in view.order for axis in groups[name]]
    left_out = [axis for name, group in enumerate(groups) for axis in group if axis not in order]
    if left_out:
        (gone,) = left_out
        parts, order = _entry(parts, gone, view.index), [axis - (axis > gone) for axis in order]
    tensors = tuple(part.transpose(*order) for part in parts.tensors)
    axis = order.index(parts.axis) if len(tensors) > 1 else 0
    if not view.zero_rows:
        return Parts(axis, tensors)
    assert axis == 0, "rows are added before the first"
    return Parts(0, (ShapeTensor((view.zero_rows, *tensors[0].shape[1:])), *tensors))


def _split(parts: Parts, sizes: Sequence[int]) -> tuple[Parts, list[range]]:
    """Return parts with finer axes, and the axes that make up each entry of `sizes`."""
    own, wanted = _steps(parts.shape), _steps(sizes)
    steps = sorted({*own, *wanted}, reverse=True)
    fine = [outer // inner for outer, inner in itertools.pairwise(steps)]
    # Parts of an axis are cut on the outermost of those that make it up.
    cut = steps.index(own[parts.axis]) if len(parts.tensors) > 1 else 0
    rest = math.prod(fine) // fine[cut]
    if any(outer % inner for outer, inner in itertools.pairwise(steps)) or any(
        part.size % rest for part in parts.tensors
    ):
        # Cut elsewhere than between the entries: gathered first.
        return _split(Parts(0, (joined(parts.tensors, parts.axis).reshape(*sizes),)), sizes)
    fine[cut] = -1
    groups = [range(*map(steps.index, ends)) for ends in itertools.pairwise(wanted)]
    return Parts(cut, tuple(part.reshape(*fine) for part in parts.tensors)), groups


def _steps(sizes: Sequence[int]) -> list[int]:
    """Return how many values an entry of each axis holds in C order, the whole's before them."""
    return [math.prod(sizes[axis:]) for axis in range(len(sizes) + 1)]


def _entry(parts: Parts, axis: int, index: int) -> Parts:
    """Return one entry of an axis, which is then gone."""
    tensors, cut = parts.tensors, parts.axis - (axis < parts.axis)
    if axis == parts.axis:
        ends = list(itertools.accumulate(part.shape[axis] for part in tensors))
        number = bisect.bisect_right(ends, index)
        index -= ends[number] - tensors[number].shape[axis]
        tensors, cut = (tensors[number],), 0
    return Parts(cut, tuple(part[(slice(None),) * axis + (index,)] for part in tensors))
