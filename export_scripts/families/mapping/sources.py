"""Operations that make an FT tensor from the tensors that a source stores.

An operation rearranges views and avoids arithmetic: the result is a list of parts along one axis,
which the conversion copies directly into the files. The same code runs on `ShapeTensor`, which has
a shape but no values, so that every shape is checked before a byte is read. Only methods of tensors
are used; nothing here imports numpy.

Each rearrangement has an inverse, `views`: the source's tensors as views of the FT tensor.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from export_scripts.families.mapping.tensors import ShapeTensor, Tensor, float32, joined
from export_scripts.numeric.dtypes import Shape

# (key[, axis, unit]) -> pieces, one per training rank; with an axis, maybe more, cut on it in
# multiples of `unit` so that less memory is needed to gather them.
Get = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Parts:
    """A tensor in FT layout, as consecutive parts along one axis.

    The shape may be finer than FT's (such as heads and size per head for their product), if it is
    the same in C order.
    """

    axis: int
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""
        shape = list(self.tensors[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.tensors)
        return tuple(shape)


@dataclass(frozen=True)
class View:
    """A source's tensor as a rearrangement of an FT tensor; `rearranged` applies it."""

    sizes: Shape  # axes of the FT tensor, split where the rearrangement needs it
    order: Shape  # the axes of `sizes` in the source's order; some may be omitted
    shape: Shape  # the source's shape: the same values in C order
    index: int = 0  # index on the omitted axes
    zero_rows: int = 0  # rows in the source before the first row of FT's
    place: int = 0  # position among the views that make up the rows of a source's tensor


Keys = tuple[str, ...]  # names of tensors, or of settings, in a source
Views = Sequence[tuple[str, View]]
# (key, axis on which training ranks cut it; None: replicated) of every tensor read.
Reads = tuple[tuple[str, int | None], ...]


def same(shape: Shape) -> View:
    """Return the view of a tensor that the source stores in the same order."""
    return View(shape, tuple(range(len(shape))), shape)


class TensorSource:
    """The source of an FT tensor."""

    @property
    def reads(self) -> Reads:
        """(key, axis on which training ranks cut it; None: replicated) of every tensor read."""
        return ()

    def build(self, get: Get, config: Any) -> Parts:
        """Return the tensor; `get` returns the pieces of a key."""
        raise NotImplementedError

    def views(self, shape: Shape, config: Any) -> Views:  # noqa: ARG002
        """Return (key, view of the FT tensor); empty if the FT tensor does not hold the values."""
        return []


Sources = dict[str, TensorSource]  # name of a tensor in the layout -> source


def join(pieces: Sequence[Tensor], axis: int | None) -> Tensor:
    """Return a tensor from a key's pieces (the first if they are replicas)."""
    return pieces[0] if axis is None or len(pieces) == 1 else joined(pieces, axis)


def _without_replicas(pieces: Sequence[Tensor], cut: int | None) -> Sequence[Tensor]:
    return pieces[:1] if cut is None else pieces


@dataclass(frozen=True)
class Copy(TensorSource):
    """A tensor as stored; `cut` is the axis on which training ranks cut it."""

    key: str
    cut: int | None = None
    skip: int = field(default=0, kw_only=True)  # zero rows in the source before FT's first row
    blocks: int = field(default=1, kw_only=True)  # blocks of columns, an axis of their own in FT

    @property
    def reads(self) -> Reads:
        """The key."""
        return ((self.key, self.cut),)

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return the pieces, without rows that FT does not have."""
        pieces = _without_replicas(get(self.key, self.cut), self.cut)
        if self.skip:
            pieces = [piece[self.skip :] for piece in pieces]
        if self.blocks > 1:
            pieces = [piece.reshape(*piece.shape[:-1], self.blocks, -1) for piece in pieces]
        return Parts(self.cut or 0, tuple(pieces))

    def views(self, shape: Shape, config: Any) -> Views:  # noqa: ARG002
        """Return the tensor as stored."""
        stored = (*shape[:-2], math.prod(shape[-2:])) if self.blocks > 1 else shape
        stored = (stored[0] + self.skip, *stored[1:]) if self.skip else stored
        view = View(shape, tuple(range(len(shape))), stored, zero_rows=self.skip)
        return [(self.key, view)]


@dataclass(frozen=True)
class Flat(Copy):
    """A vector that the source stores with a further first axis, or as a number without axes."""

    outer: Shape | None = field(default=None, kw_only=True)  # the first axis; None: a number

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return the vector."""
        return Parts(0, (get(self.key)[0].reshape(-1),))

    def views(self, shape: Shape, config: Any) -> Views:  # noqa: ARG002
        """Return the vector as stored."""
        stored = () if self.outer is None else (*self.outer, *shape)
        return [(self.key, View(shape, (0,), stored))]


class Nesting(NamedTuple):
    """The nested axes of a tensor's rows, in the source and in the layout.

    Letters: k parts, n heads, g groups of m heads, d size of a head, h halves, f and r rows.
    """

    stored: str  # letters of the stored axes, outermost first
    order: tuple[str, ...]  # axes of the result; the letters of a word are merged into one axis
    sizes: Mapping[str, int]  # letter -> size; one may be missing, and is computed
    selected: tuple[str, int, int] | None = None  # (axis, first, end) of the selected entries
    times: int = 1  # how often the layout repeats each entry of the last axis but one


@dataclass(frozen=True)
class Rows(Copy):
    """Rows of a weight (rows, in) or a bias (rows,) in another order: ([in,] rows)."""

    nesting: Callable[[Any], Nesting] = lambda _: Nesting("r", ("r",), {})  # takes the config
    # Whether each training rank's piece has this nesting; else only the whole tensor has it, and
    # the selected rows are contiguous.
    per_rank: bool = True
    place: int = 0  # position among the tensors that are selected from one key

    def build(self, get: Get, config: Any) -> Parts:
        """Return the rows of each piece."""
        nesting = self.nesting(config)
        if not self.per_rank:
            parts = _selected_rows(get(self.key, 0), nesting)
            return Parts(parts[0].ndim - 1, tuple(map(_columns, parts)))
        free = "".join(set(nesting.stored) - set(nesting.sizes))
        if self.cut == 1 or nesting.stored[0] == free:
            pieces = get(self.key, self.cut, math.prod(nesting.sizes.values()))
        else:  # pieces can only be cut further between entries of the outermost axis
            pieces = get(self.key)
        out = tuple(_moved(piece, nesting) for piece in _without_replicas(pieces, self.cut))
        axis = out[0].ndim - len(nesting.order)
        axis += next((n for n, word in enumerate(nesting.order) if free and free in word), 0)
        return Parts(0 if self.cut == 1 else axis, out)

    def views(self, shape: Shape, config: Any) -> Views:
        """Return the rows as stored: all, or those selected for each entry of the outer axes."""
        nesting = self.nesting(config)
        tail = shape[: len(shape) - (2 if nesting.order[0] == "k" else 1)]
        rows, sizes = math.prod(shape[len(tail) :]), dict(nesting.sizes)
        outer = ""
        if nesting.selected is not None:
            letter, first, end = nesting.selected
            sizes[letter], outer = end - first, nesting.stored[: nesting.stored.index(letter)]
        for free in set(nesting.stored) - set(sizes):
            sizes[free] = rows // math.prod(sizes.values())
        letters = "".join(nesting.order)
        fine = (*tail, *(sizes[letter] for letter in letters))
        groups = math.prod(sizes[letter] for letter in outer)
        inner = nesting.stored if groups == 1 else nesting.stored.removeprefix(outer)
        order = (*(len(tail) + letters.index(each) for each in inner), *range(len(tail)))
        stored = (rows // groups, *tail)
        # The queries, keys and values of each group follow each other.
        return [
            (self.key, View(fine, order, stored, index=group, place=3 * group + self.place))
            for group in range(groups)
        ]


def _moved(rows: Tensor, nesting: Nesting) -> Tensor:
    letters, tail = nesting.stored, tuple(rows.shape[1:])
    split = rows.reshape(*(nesting.sizes.get(each, -1) for each in letters), *tail)
    if nesting.selected is not None:
        letter, first, end = nesting.selected
        index = (*(slice(None),) * letters.index(letter), slice(first, end))
        split = split[index]
    order = [letters.index(each) for word in nesting.order for each in word]
    moved = split.transpose(*range(len(letters), len(letters) + len(tail)), *order)
    if len(order) > len(nesting.order):
        sizes = iter(moved.shape[len(tail) :])
        merged = [math.prod(next(sizes) for _ in word) for word in nesting.order]
        moved = moved.reshape(*moved.shape[: len(tail)], *merged)
    return moved if nesting.times == 1 else moved.repeat(nesting.times, moved.ndim - 2)


def _selected_rows(pieces: Sequence[Tensor], nesting: Nesting) -> list[Tensor]:
    """Return the selected rows of consecutive pieces."""
    assert nesting.selected is not None
    letter, *ends = nesting.selected
    rows = sum(piece.shape[0] for piece in pieces)
    low, high = (rows * end // nesting.sizes[letter] for end in ends)
    parts, begin = [], 0
    for piece in pieces:
        part = piece[max(low - begin, 0) : max(high - begin, 0)]
        parts += [part] if part.shape[0] else []
        begin += piece.shape[0]
    return parts


def _columns(rows: Tensor) -> Tensor:
    return rows.T if rows.ndim == 2 else rows


def transposed(key: str, cut: int | None = None) -> Rows:
    """Return a transposed nn.Linear weight, (out, in) -> (in, out); `cut` is the source's axis."""
    return Rows(key, cut)


def half(key: str, which: int, *, per_rank: bool = False) -> Rows:
    """Return the first (0) or second (1) half of a tensor's rows, transposed.

    With `per_rank`, each training rank's piece holds a part of both halves.
    """
    nesting = Nesting("hf", ("hf",), {"h": 2}, ("h", which, which + 1))
    return Rows(key, 0, lambda _: nesting, per_rank, which)


def attention_heads(key: str, part: int, rows: str, cut: int | None) -> Rows:
    """Return queries (`part` 0), keys (1) or values (2), (rows[, in]) -> ([in,] heads, size).

    The stored rows are "own": only this part; "blocks": all queries, all keys, all values; or
    "groups": for each key/value head its queries, its key and its value. For more ranks than
    key/value heads, these are repeated.
    """

    def nesting(config: Any) -> Nesting:
        d, kv_heads = config.size_per_head, config.kv_head_num
        times = config.stored_kv_head_num // kv_heads if part else 1
        if rows == "own":
            return Nesting("nd", ("n", "d"), {"d": d}, times=times)
        counts = (config.head_num // kv_heads, 1, 1)
        first, end = sum(counts[:part]), sum(counts[: part + 1])
        if rows == "groups":
            sizes = {"m": sum(counts), "d": d}
            return Nesting("gmd", ("gm", "d"), sizes, ("m", first, end), times)
        sizes = {"m": sum(counts) * kv_heads, "d": d}
        return Nesting("md", ("m", "d"), sizes, ("m", first * kv_heads, end * kv_heads), times)

    return Rows(key, cut, nesting, place=part)


def key_scales(key: str, cut: int | None) -> Rows:
    """Return the scales of the keys' norm; scales of all heads are repeated like the heads."""

    def nesting(config: Any) -> Nesting:
        is_one = config.query_key_norm == "head"
        times = 1 if is_one else config.stored_kv_head_num // config.kv_head_num
        return Nesting("nd", ("n", "d"), {"d": config.size_per_head}, times=times)

    return Rows(key, cut, nesting)


@dataclass(frozen=True)
class HeadScales(TensorSource):
    """Scales of norms of each head: a key for each head (size,), or one for all (heads, size)."""

    keys: Keys
    part: int  # queries (0) or keys (1); the keys' are repeated like their heads
    is_joint: bool = False  # whether one key holds the scales of all heads

    @property
    def reads(self) -> Reads:
        """All keys."""
        return tuple((key, None) for key in self.keys)

    def build(self, get: Get, config: Any) -> Parts:
        """Return the scales of each key."""
        times = config.stored_kv_head_num // config.kv_head_num if self.part else 1
        found = (get(key)[0].reshape(-1, config.size_per_head) for key in self.keys)
        return Parts(0, tuple(scales.repeat(times, 0) for scales in found))

    def views(self, shape: Shape, config: Any) -> Views:
        """Return the scales of each key."""
        size = config.size_per_head
        whole = (math.prod(shape) // size, size)
        if self.is_joint:
            return [(self.keys[0], same(whole))]
        return [(key, View(whole, (1,), (size,), index)) for index, key in enumerate(self.keys)]


def split_qkv(
    key: str,
    order: str = "nkd",
    *,
    parts: int = 3,
    select: int | None = None,
    head_size: str = "size_per_head",
) -> Rows:
    """Return a fused projection with rows (heads x parts x size per head).

    It becomes ([in,] parts, heads, size), or (in, heads, size) if a part is selected. `order` is
    the nesting of a training rank's rows: n heads, k parts, d dimensions per head, whose config
    field is `head_size`.
    """

    def nesting(config: Any) -> Nesting:
        sizes = {"k": parts, "d": getattr(config, head_size)}
        if select is None:
            return Nesting(order, ("k", "n", "d"), sizes)
        return Nesting(order, ("kn", "d"), sizes, ("k", select, select + 1))

    return Rows(key, 0, nesting)


@dataclass(frozen=True)
class StackQKV(TensorSource):
    """Three weights (out, in) or biases (out,) as ([in,] 3, out)."""

    keys: tuple[str, str, str]

    @property
    def reads(self) -> Reads:
        """The three keys."""
        return tuple((key, None) for key in self.keys)

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return q, k and v as three parts."""
        wholes = [_columns(get(key)[0]) for key in self.keys]
        axis = wholes[0].ndim - 1
        return Parts(axis, tuple(whole[:, None] if axis else whole[None] for whole in wholes))

    def views(self, shape: Shape, config: Any) -> Views:  # noqa: ARG002
        """Return a view for each of the three."""
        order = (2, 0) if len(shape) == 3 else (1,)
        stored = tuple(shape[axis] for axis in order)
        return [(key, View(shape, order, stored, index)) for index, key in enumerate(self.keys)]


@dataclass(frozen=True)
class Compute(TensorSource):
    """`function(config, *wholes)` of gathered tensors, for values that must be computed.

    The function does its arithmetic in `float32`.
    """

    function: Callable[..., Tensor]
    keys: Keys
    cut: int = 0  # axis on which training ranks cut each tensor

    @property
    def reads(self) -> Reads:
        """All keys."""
        return tuple((key, self.cut) for key in self.keys)

    def build(self, get: Get, config: Any) -> Parts:
        """Return the function's result."""
        wholes = [join(get(key), self.cut) for key in self.keys]
        return Parts(0, (self.function(config, *wholes),))


@dataclass(frozen=True)
class Adjusted(TensorSource):
    """Another source with `function(part, config, *others)` applied to its parts in fp32.

    The others are whole tensors that training ranks cut on axis 0; if there are any, the part is
    whole, too.
    """

    source: TensorSource
    function: Callable[..., Tensor]
    others: Keys = ()

    @property
    def reads(self) -> Reads:
        """The source's keys, and those of the others."""
        return (*self.source.reads, *((key, 0) for key in self.others))

    def build(self, get: Get, config: Any) -> Parts:
        """Return the adjusted parts."""
        parts = self.source.build(get, config)
        tensors = (join(parts.tensors, parts.axis),) if self.others else parts.tensors
        others = [join(get(key), 0) for key in self.others]
        changed = tuple(self.function(float32(part), config, *others) for part in tensors)
        return Parts(parts.axis, changed)


@dataclass(frozen=True)
class Constant(TensorSource):
    """A tensor that the loader requires but the model lacks; `shape` is as in the layout."""

    shape: tuple[str | int, ...]
    value: float = 0.0

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return a part without values; the conversion fills it with `value`."""
        shape = [config.dim(size, {}) for size in self.shape]
        return Parts(0, (ShapeTensor(shape, fill=self.value),))


def rearranged(parts: Parts, view: View) -> Parts:
    """Return the source's tensor, in its C order, from parts of the FT tensor."""
    if math.prod(view.shape) == 1:
        return parts
    parts, groups = _split(parts, view.sizes)
    order = [axis for name in view.order for axis in groups[name]]
    omitted = [axis for name, group in enumerate(groups) for axis in group if axis not in order]
    index = view.index
    for dropped in reversed(omitted):
        index, entry = divmod(index, parts.shape[dropped])
        parts, order = _entry(parts, dropped, entry), [axis - (axis > dropped) for axis in order]
    tensors = tuple(part.transpose(*order) for part in parts.tensors)
    axis = order.index(parts.axis) if len(tensors) > 1 else 0
    if not view.zero_rows:
        return Parts(axis, tensors)
    assert axis == 0, "rows are added before the first"
    return Parts(0, (ShapeTensor((view.zero_rows, *tensors[0].shape[1:])), *tensors))


def _split(parts: Parts, sizes: Sequence[int]) -> tuple[Parts, list[range]]:
    """Return parts with finer axes, and the axes that make up each entry of `sizes`."""
    if math.prod(sizes) == 1:  # no axis is longer than another
        axes = [range(axis, axis + 1) for axis in range(len(sizes))]
        return Parts(0, (parts.tensors[0].reshape(*sizes),)), axes
    own, wanted = _steps(parts.shape), _steps(sizes)
    steps = sorted({*own, *wanted}, reverse=True)
    fine = [outer // inner for outer, inner in itertools.pairwise(steps)]
    # Parts are cut on the outermost of the finer axes that make up their axis.
    cut = steps.index(own[parts.axis]) if len(parts.tensors) > 1 else 0
    rest = math.prod(fine) // fine[cut]
    if any(outer % inner for outer, inner in itertools.pairwise(steps)) or any(
        part.size % rest for part in parts.tensors
    ):
        # The cuts are not between entries of that axis: gather first.
        return _split(Parts(0, (joined(parts.tensors, parts.axis).reshape(*sizes),)), sizes)
    fine[cut] = -1
    groups = [range(*map(steps.index, ends)) for ends in itertools.pairwise(wanted)]
    return Parts(cut, tuple(part.reshape(*fine) for part in parts.tensors)), groups


def _steps(sizes: Sequence[int]) -> list[int]:
    """Return the number of values of the whole, and of an entry of each axis, in C order."""
    return [math.prod(sizes[axis:]) for axis in range(len(sizes) + 1)]


def _entry(parts: Parts, axis: int, index: int) -> Parts:
    """Return an entry of an axis, without the axis."""
    tensors, cut = parts.tensors, parts.axis - (axis < parts.axis)
    if axis == parts.axis:
        ends = list(itertools.accumulate(part.shape[axis] for part in tensors))
        number = bisect.bisect_right(ends, index)
        index -= ends[number] - tensors[number].shape[axis]
        tensors, cut = (tensors[number],), 0
    return Parts(cut, tuple(part[(slice(None),) * axis + (index,)] for part in tensors))
