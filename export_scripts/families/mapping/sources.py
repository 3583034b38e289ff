"""Operations that make one FT tensor of the tensors a source stores.

An operation rearranges views and avoids arithmetic: the result is a list of parts
along one axis, which the conversion copies straight into the files. The same code runs on
`ShapeTensor`, which has a shape and no values, so that every shape is checked before a byte is
read. Tensors are handled through their methods only; nothing here imports numpy.

Each rearrangement has its inverse, `views`: the source's tensors as views of the FT one.
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

# From a key, and perhaps an axis and a number of its entries that belong together: the pieces, one
# for each training rank, or more, cut on the axis where that saves gathering them.
Get = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Parts:
    """A tensor in FT layout, as consecutive parts along one axis.

    The shape may be finer than the FT shape (heads and size per head apart, where FT has their
    product), as long as it is the same in C order.
    """

    axis: int
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the whole."""
        shape = list(self.tensors[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.tensors)
        return tuple(shape)


@dataclass(frozen=True)
class View:
    """A tensor of a source as a rearrangement of an FT tensor, which `taken` makes."""

    sizes: Shape  # axes of the FT tensor, split where the rearrangement needs it
    order: Shape  # of `sizes` in the source; an axis may be left out
    shape: Shape  # in the source: the same values in C order
    index: int = 0  # entry taken of the axis left out
    zero_rows: int = 0  # rows in the source before those that FT has
    place: int = 0  # among the views whose rows follow each other in one tensor of the source


Views = Sequence[tuple[str, View]]
# Keys read, each with the axis on which training ranks cut it (None: replicated).
Reads = tuple[tuple[str, int | None], ...]


def same(shape: Shape) -> View:
    """Return the view of a tensor that the source stores in the same order."""
    return View(shape, tuple(range(len(shape))), shape)


class TensorSource:
    """The source of an FT tensor."""

    @property
    def reads(self) -> Reads:
        """Keys read, each with the axis on which training ranks cut it (None: replicated)."""
        return ()

    def build(self, get: Get, config: Any) -> Parts:
        """Return the tensor; `get` gives the pieces of a key, one per training rank."""
        raise NotImplementedError

    def views(self, shape: Shape, config: Any) -> Views:  # noqa: ARG002
        """Return the keys read as views of the FT tensor; empty if it does not hold them."""
        return []


Sources = dict[str, TensorSource]  # by the names of tensors of a layout


def join(pieces: Sequence[Tensor], axis: int | None) -> Tensor:
    """Return one tensor from a key's pieces (the first when they are copies)."""
    return pieces[0] if axis is None or len(pieces) == 1 else joined(pieces, axis)


def _taken(pieces: Sequence[Tensor], cut: int | None) -> Sequence[Tensor]:
    return pieces[:1] if cut is None else pieces


@dataclass(frozen=True)
class Copy(TensorSource):
    """A tensor as stored; `cut` is the axis on which training ranks cut it."""

    key: str
    cut: int | None = None
    skip: int = field(default=0, kw_only=True)  # rows before those that FT has, which are zeros
    blocks: int = field(default=1, kw_only=True)  # of columns, which FT has apart

    @property
    def reads(self) -> Reads:
        """The one key."""
        return ((self.key, self.cut),)

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return the pieces, without the rows that FT has not."""
        pieces: Sequence[Tensor] = _taken(get(self.key, self.cut), self.cut)
        if self.skip:
            pieces = [piece[self.skip :] for piece in pieces]
        if self.blocks > 1:
            pieces = [piece.reshape(*piece.shape[:-1], self.blocks, -1) for piece in pieces]
        return Parts(self.cut or 0, tuple(pieces))

    def views(self, shape: Shape, config: Any) -> Views:  # noqa: ARG002
        """Return the tensor as it is stored."""
        stored = (*shape[:-2], math.prod(shape[-2:])) if self.blocks > 1 else shape
        stored = (stored[0] + self.skip, *stored[1:]) if self.skip else stored
        view = View(shape, tuple(range(len(shape))), stored, zero_rows=self.skip)
        return [(self.key, view)]


@dataclass(frozen=True)
class Flat(Copy):
    """A vector that the source stores with one more axis before, or a number without any."""

    outer: Shape | None = field(default=None, kw_only=True)  # that axis; None: a number

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return it as a vector."""
        return Parts(0, (get(self.key)[0].reshape(-1),))

    def views(self, shape: Shape, config: Any) -> Views:  # noqa: ARG002
        """Return it as it is stored."""
        stored = () if self.outer is None else (*self.outer, *shape)
        return [(self.key, View(shape, (0,), stored))]


class Nesting(NamedTuple):
    """The nested axes of the rows of a tensor, in a source and in the layout.

    Their letters: k parts, n heads, g groups of m heads, d size of a head, h halves, f and r rows.
    """

    stored: str  # axes as stored, the outermost first, one letter each
    order: tuple[str, ...]  # of the result; the letters of a word become one axis
    sizes: Mapping[str, int]  # by letter; one may be left out, which is what remains
    taken: tuple[str, int, int] | None = None  # an axis, and the first and end of what is taken
    times: int = 1  # how often the layout has each entry of the last axis but one


@dataclass(frozen=True)
class Rows(Copy):
    """Rows of a weight (rows, in) or a bias (rows,) in another order: ([in,] rows)."""

    nesting: Callable[[Any], Nesting] = lambda _: Nesting("r", ("r",), {})  # of a config
    # Each training rank's piece is nested so; else only the whole tensor is, and what is taken of
    # it lies together.
    of_each: bool = True
    place: int = 0  # which of the tensors that are taken of one key this is

    def build(self, get: Get, config: Any) -> Parts:
        """Return the rows of each piece."""
        nesting = self.nesting(config)
        if not self.of_each:
            parts = _between(get(self.key, 0), nesting)
            return Parts(parts[0].ndim - 1, tuple(map(_columns, parts)))
        free = "".join(set(nesting.stored) - set(nesting.sizes))
        if self.cut == 1 or nesting.stored[0] == free:
            pieces = get(self.key, self.cut, math.prod(nesting.sizes.values()))
        else:  # Pieces can be cut once more only between the outermost entries.
            pieces = get(self.key)
        out = tuple(_moved(piece, nesting) for piece in _taken(pieces, self.cut))
        axis = out[0].ndim - len(nesting.order)
        axis += next((n for n, word in enumerate(nesting.order) if free and free in word), 0)
        return Parts(0 if self.cut == 1 else axis, out)

    def views(self, shape: Shape, config: Any) -> Views:
        """Return the rows as stored: all, or for each entry of the outermost axis those taken."""
        nesting = self.nesting(config)
        tail = shape[: len(shape) - (2 if nesting.order[0] == "k" else 1)]
        rows, sizes = math.prod(shape[len(tail) :]), dict(nesting.sizes)
        outer = ""
        if nesting.taken is not None:
            letter, first, end = nesting.taken
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
    if nesting.taken is not None:
        letter, first, end = nesting.taken
        index = (*(slice(None),) * letters.index(letter), slice(first, end))
        split = split[index]
    order = [letters.index(each) for word in nesting.order for each in word]
    moved = split.transpose(*range(len(letters), len(letters) + len(tail)), *order)
    if len(order) > len(nesting.order):
        sizes = iter(moved.shape[len(tail) :])
        merged = [math.prod(next(sizes) for _ in word) for word in nesting.order]
        moved = moved.reshape(*moved.shape[: len(tail)], *merged)
    return moved if nesting.times == 1 else moved.repeat(nesting.times, moved.ndim - 2)


def _between(pieces: Sequence[Tensor], nesting: Nesting) -> list[Tensor]:
    """Return the rows that are taken of pieces which follow each other."""
    assert nesting.taken is not None
    letter, *ends = nesting.taken
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
    """Return a transposed nn.Linear weight, (out, in) -> (in, out); `cut` is of the source."""
    return Rows(key, cut)


def half(key: str, which: int, *, of_each: bool = False) -> Rows:
    """Return the first (0) or second (1) half of the rows of a tensor, as `Rows` turns them.

    With `of_each` each training rank's piece holds a part of both halves.
    """
    nesting = Nesting("hf", ("hf",), {"h": 2}, ("h", which, which + 1))
    return Rows(key, 0, lambda _: nesting, of_each, which)


def attention_heads(key: str, part: int, rows: str, cut: int | None) -> Rows:
    """Return queries (`part` 0), keys (1) or values (2), (rows[, in]) -> ([in,] heads, size).

    The rows are "own", of this part alone; "blocks", all queries, all keys, all values; or
    "groups", for each key/value head its queries, its key and its value. Key and value heads are
    repeated for a folder of more ranks than it has of them.
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
    """Return scales of the keys' norm: those of all heads are repeated like the heads."""

    def nesting(config: Any) -> Nesting:
        is_one = config.query_key_norm == "head"
        times = 1 if is_one else config.stored_kv_head_num // config.kv_head_num
        return Nesting("nd", ("n", "d"), {"d": config.size_per_head}, times=times)

    return Rows(key, cut, nesting)


@dataclass(frozen=True)
class HeadScales(TensorSource):
    """Scales of norms of each head's own, a key for each (size,), or one for all (heads, size)."""

    keys: tuple[str, ...]
    part: int  # queries (0) or keys (1), which are repeated like their heads
    is_joint: bool = False

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

    It becomes ([in,] parts, heads, size), or (in, heads, size) where one part is selected. The rows
    of a training rank are nested by `order`: n heads, k parts, d per head, whose config field is
    `head_size`.
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
        """Return each of the three."""
        order = (2, 0) if len(shape) == 3 else (1,)
        stored = tuple(shape[axis] for axis in order)
        return [(key, View(shape, order, stored, index)) for index, key in enumerate(self.keys)]


@dataclass(frozen=True)
class Compute(TensorSource):
    """`function(config, *wholes)` of gathered tensors, where values are computed.

    Arithmetic is the function's, in `float32`.
    """

    function: Callable[..., Tensor]
    keys: tuple[str, ...]
    cut: int = 0  # axis on which training ranks cut each

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

    The others are whole tensors, which training ranks cut on axis 0; with any the part is whole.
    """

    source: TensorSource
    function: Callable[..., Tensor]
    others: tuple[str, ...] = ()

    @property
    def reads(self) -> Reads:
        """The other source's keys, and those of the others."""
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
    """A tensor the loader requires and the architecture lacks; `shape` as in the layout."""

    shape: tuple[str | int, ...]
    value: float = 0.0

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return a part without values; the conversion writes `value` everywhere."""
        shape = [config.dim(size, {}) for size in self.shape]
        return Parts(0, (ShapeTensor(shape, fill=self.value),))


def taken(parts: Parts, view: View) -> Parts:
    """Return the source's tensor, of parts of the FT one; its C order is the source's."""
    if math.prod(view.shape) == 1:
        return parts
    parts, groups = _split(parts, view.sizes)
    order = [axis for name in view.order for axis in groups[name]]
    left_out = [axis for name, group in enumerate(groups) for axis in group if axis not in order]
    index = view.index
    for gone in reversed(left_out):
        index, entry = divmod(index, parts.shape[gone])
        parts, order = _entry(parts, gone, entry), [axis - (axis > gone) for axis in order]
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
