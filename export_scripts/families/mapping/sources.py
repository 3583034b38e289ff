"""Operations that make one FT tensor of the tensors a source stores.

An operation rearranges views and avoids arithmetic: the result is a list of parts
along one axis, which the conversion copies straight into the files. The same code runs on
`ShapeTensor`, which has a shape and no values, so that every shape is checked before a byte is
read. Tensors are handled through their methods only; nothing here imports numpy.

Each rearrangement is followed by its inverse, `views`: the source's tensors as views of the FT one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from export_scripts.families.mapping.tensors import ShapeTensor, Tensor, float32, joined


class Get(Protocol):
    """A function that returns the pieces of a key, one per training rank."""

    def __call__(self, key: str, cut: int | None = None, unit: int = 1) -> Sequence[Tensor]:
        """Return the pieces.

        Args:
            key: Source key.
            cut: Axis on which they may be cut once more, where that saves gathering them.
            unit: Number of entries of that axis that belong together.
        """


@dataclass(frozen=True)
class Parts:
    """A tensor in FT layout, as consecutive parts along one axis.

    The shape may be finer than the FT shape (heads and size per head apart, where FT has their
    product), as long as it is the same in C order.
    """

    axis: int
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        shape = list(self.tensors[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.tensors)
        return tuple(shape)


@dataclass(frozen=True)
class View:
    """A tensor of a source as a rearrangement of an FT tensor; see `families.mapping.views`.

    Attributes:
        sizes: Axes of the FT tensor, split where the rearrangement needs it.
        order: The axes of `sizes` in the order of the source; an axis may be left out.
        shape: Sizes in the source: the same values in C order.
        index: Entry taken of the axis left out.
        zero_rows: Rows in the source before those that FT has.
        place: Position among the views whose rows follow each other in one tensor of the source.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    index: int = 0
    zero_rows: int = 0
    place: int = 0


Views = Sequence[tuple[str, View]]


def same(shape: Sequence[int], *, stored: Sequence[int] | None = None) -> View:
    """Return the view of a tensor that the source stores in the same order."""
    return View(tuple(shape), tuple(range(len(shape))), tuple(stored or shape))


def turned(shape: Sequence[int]) -> View:
    """Return the view of a transposed matrix, or of a vector as it is."""
    order = tuple(reversed(range(len(shape))))
    return View(tuple(shape), order, tuple(shape[axis] for axis in order))


class TensorSource(Protocol):
    """The source of an FT tensor."""

    def views(self, shape: tuple[int, ...], config: Any) -> Views:
        """Return the keys read as views of the FT tensor; empty if it does not hold them.

        Args:
            shape: Sizes of the FT tensor.
            config: The config of one rank.
        """

    @property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """Keys read, each with the axis on which training ranks cut it (None: replicated)."""

    def build(self, get: Get, config: Any) -> Parts:
        """Return the tensor; `get` gives the pieces of a key, one per training rank."""


def join(pieces: Sequence[Tensor], axis: int | None) -> Tensor:
    """Return one tensor from a key's pieces (the first when they are copies)."""
    return pieces[0] if axis is None or len(pieces) == 1 else joined(pieces, axis)


def _taken(pieces: Sequence[Tensor], cut: int | None) -> Sequence[Tensor]:
    return pieces[:1] if cut is None else pieces


class _OneKey:
    """A source that reads one key."""

    key: str
    cut: int | None

    @property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """The one key."""
        return ((self.key, self.cut),)

    def views(self, shape: tuple[int, ...], config: Any) -> Views:  # noqa: ARG002
        """Return the tensor as it is."""
        return [(self.key, same(shape))]


class _Derived:
    """A source whose values do not give back what they were made of."""

    def views(self, shape: tuple[int, ...], config: Any) -> Views:  # noqa: ARG002
        """Return nothing."""
        return []


@dataclass(frozen=True)
class Copy(_OneKey):
    """A tensor as stored; `cut` is the axis on which training ranks cut it."""

    key: str
    cut: int | None = None

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return the pieces as they are."""
        return Parts(self.cut or 0, tuple(_taken(get(self.key, self.cut), self.cut)))


@dataclass(frozen=True)
class Transpose(_OneKey):
    """A transposed nn.Linear weight, (out, in) -> (in, out); `cut` is the axis in the source."""

    key: str
    cut: int | None = None

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return the pieces transposed."""
        pieces = _taken(get(self.key, self.cut), self.cut)
        axis = 0 if self.cut is None else 1 - self.cut
        return Parts(axis, tuple(piece.T for piece in pieces))

    def views(self, shape: tuple[int, ...], config: Any) -> Views:  # noqa: ARG002
        """Return the transposed tensor."""
        return [(self.key, turned(shape))]


@dataclass(frozen=True)
class Mapped(_OneKey):
    """`function(tensor, config)` of a tensor that is not cut.

    Args:
        key: Source key.
        function: Gives the tensor in FT layout.
        view: The inverse of `function`, from the FT shape.
    """

    key: str
    function: Callable[[Tensor, Any], Tensor]
    view: Callable[[tuple[int, ...]], View]
    cut: None = None

    def views(self, shape: tuple[int, ...], config: Any) -> Views:  # noqa: ARG002
        """Return the tensor before `function`."""
        return [(self.key, self.view(shape))]

    def build(self, get: Get, config: Any) -> Parts:
        """Return the mapped tensor."""
        return Parts(0, (self.function(get(self.key)[0], config),))


@dataclass(frozen=True)
class Half(_OneKey):
    """A half of the rows of a tensor (2 * f[, in]), transposed if it is a weight.

    Args:
        key: Source key.
        which: 0 for the first half, 1 for the second.
        of_each: Whether each training rank's piece holds a part of both halves; if not, only the
            whole tensor does.
    """

    key: str
    which: int
    of_each: bool = False
    cut: int | None = 0

    def views(self, shape: tuple[int, ...], config: Any) -> Views:  # noqa: ARG002
        """Return the half's rows."""
        return [(self.key, dataclasses.replace(turned(shape), place=self.which))]

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return the rows of the half, in as many parts as they are stored."""
        if self.of_each:
            halves = [piece.reshape(2, -1, *piece.shape[1:])[self.which] for piece in get(self.key)]
            return Parts(halves[0].ndim - 1, tuple(map(_columns, halves)))
        pieces = get(self.key, 0)
        rows = sum(piece.shape[0] for piece in pieces)
        low, high = (rows * i // 2 for i in (self.which, self.which + 1))
        parts = []
        begin = 0
        for piece in pieces:
            end = begin + piece.shape[0]
            part = piece[max(low - begin, 0) : max(min(high, end) - begin, 0)]
            if part.shape[0]:
                parts.append(_columns(part))
            begin = end
        return Parts(parts[0].ndim - 1, tuple(parts))


def _columns(rows: Tensor) -> Tensor:
    return rows.T if rows.ndim == 2 else rows


@dataclass(frozen=True)
class AttentionHeads(_OneKey):
    """Query, key or value heads, (rows[, in]) -> ([in,] heads, size per head).

    Key and value heads are repeated for a folder of more ranks than it has of them.

    Args:
        key: Weight or bias.
        part: 0 for the queries, 1 for the keys, 2 for the values.
        rows: What the rows are: "own", of this part alone; "blocks", all queries, all keys, all
            values; "groups", for each key/value head its queries, its key and its value.
        cut: 0 when training ranks each hold some heads.
    """

    key: str
    part: int
    rows: str = "own"
    cut: int | None = None

    def build(self, get: Get, config: Any) -> Parts:
        """Return each rank's heads."""
        d = config.size_per_head
        found = get(self.key, self.cut, sum(_group(config)) * d) if self.cut == 0 else get(self.key)
        out = tuple(self._heads(piece, config) for piece in _taken(found, self.cut))
        return Parts(out[0].ndim - 2, out)

    def views(self, shape: tuple[int, ...], config: Any) -> Views:
        """Return the heads as rows: of all groups together, or of one group after the other."""
        if self.rows != "groups" or config.kv_head_num == 1:
            return [(self.key, dataclasses.replace(turned(shape), place=self.part))]
        groups, each, d = config.kv_head_num, _group(config)[self.part], config.size_per_head
        sizes = (*shape[:-1], groups, each, d)  # ([in,] groups, heads of a group, d)
        order = (*range(len(sizes) - 2, len(sizes)), *range(len(shape) - 1))
        stored = (each * d, *shape[:-1])
        return [
            (self.key, View(sizes, order, stored, index=group, place=3 * group + self.part))
            for group in range(groups)
        ]

    def _heads(self, rows: Tensor, config: Any) -> Tensor:
        d, parts = config.size_per_head, _group(config)
        tail = rows.shape[1:]
        if self.rows == "own":
            heads = rows.reshape(rows.shape[0] // d, d, *tail)
        else:
            ends = [sum(parts[: number + 1]) for number in range(3)]
            if self.rows == "blocks":
                ends = [end * config.kv_head_num for end in ends]
            begin = ends[self.part - 1] if self.part else 0
            split = rows.reshape(rows.shape[0] // (ends[-1] * d), ends[-1], d, *tail)
            heads = split[:, begin : ends[self.part]]  # (groups, heads of a group, d[, in])
            heads = heads.reshape(heads.shape[0] * heads.shape[1], d, *tail)
        times = config.stored_kv_head_num // config.kv_head_num
        heads = heads if self.part == 0 or times == 1 else heads.repeat(times, 0)
        return heads.transpose(2, 0, 1) if heads.ndim == 3 else heads


def _group(config: Any) -> tuple[int, int, int]:
    """Return the queries, keys and values of one key/value head."""
    return config.head_num // config.kv_head_num, 1, 1


# Row order of a fused projection on one training rank: n heads, k parts (q, k, v), d per head.
ORDERS = ("nkd", "knd", "ndk")


@dataclass(frozen=True)
class SplitQKV(_OneKey):
    """A fused projection with rows (heads x parts x size per head) -> (in, parts, heads, size).

    Args:
        key: Weight (rows, in) or bias (rows,).
        order: Nesting of the rows on one training rank, one of ORDERS.
        cut: 0 when training ranks each hold some heads.
        parts: 3 for q, k, v; 2 for k, v.
        select: Take one part alone -> (in, heads, size).
        head_size: Config field with the size per head.
    """

    key: str
    order: str = "nkd"
    cut: int | None = 0
    parts: int = 3
    select: int | None = None
    head_size: str = "size_per_head"

    def build(self, get: Get, config: Any) -> Parts:
        """Return each rank's heads, parts first."""
        assert self.order in ORDERS, self.order
        d = getattr(config, self.head_size)
        # Heads can be separated only if they are the outermost.
        found = get(self.key, self.cut, self.parts * d) if self.order[0] == "n" else get(self.key)
        out = tuple(self._split(piece, d) for piece in _taken(found, self.cut))
        return Parts(out[0].ndim - 2, out)

    def views(self, shape: tuple[int, ...], config: Any) -> Views:
        """Return the fused rows, of all parts."""
        assert self.select is None, self.key
        d = getattr(config, self.head_size)
        heads = shape[-1] // d
        sizes = (*shape[:-1], heads, d)  # ([in], k, n, d)
        tail = len(shape) - 2
        order = (*(tail + "knd".index(axis) for axis in self.order), *range(tail))
        return [(self.key, View(sizes, order, (shape[-2] * shape[-1], *shape[:-2])))]

    def _split(self, rows: Tensor, d: int) -> Tensor:
        n = rows.shape[0] // (self.parts * d)
        sizes = {"n": n, "k": self.parts, "d": d}
        tail = tuple(rows.shape[1:])  # (in,) for a weight, () for a bias
        split = rows.reshape(*(sizes[axis] for axis in self.order), *tail)
        order = [self.order.index(axis) for axis in "knd"]
        split = split.transpose(*([3] if tail else []), *order)  # ([in], k, n, d)
        if self.select is None:
            return split
        return split[:, self.select] if tail else split[self.select]


@dataclass(frozen=True)
class StackQKV:
    """Three tensors stacked on a new axis before the last.

    Weights (out, in) become (in, 3, out), or stay (in, out) with `transposed=False`; biases
    (out,) become (3, out).
    """

    q: str
    k: str
    v: str
    transposed: bool = True
    cut: int | None = None

    @property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """The three keys."""
        return tuple((key, self.cut) for key in (self.q, self.k, self.v))

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return q, k and v as three parts."""
        wholes = [join(get(key), self.cut) for key, _ in self.reads]
        if wholes[0].ndim == 1:
            return Parts(0, tuple(whole[None] for whole in wholes))
        matrices = (whole.T if self.transposed else whole for whole in wholes)
        return Parts(1, tuple(matrix[:, None] for matrix in matrices))

    def views(self, shape: tuple[int, ...], config: Any) -> Views:  # noqa: ARG002
        """Return each of the three."""
        order = ((2, 0) if self.transposed else (0, 2)) if len(shape) == 3 else (1,)
        stored = tuple(shape[axis] for axis in order)
        return [
            (key, View(shape, order, stored, index)) for index, (key, _) in enumerate(self.reads)
        ]


@dataclass(frozen=True)
class Stack(_Derived):
    """Tensors stacked on a new first axis, one per task."""

    keys: tuple[str, ...]
    cut: int | None = None

    @property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """All keys."""
        return tuple((key, self.cut) for key in self.keys)

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return one part per key."""
        wholes = [join(get(key), self.cut) for key in self.keys]
        return Parts(0, tuple(whole[None] for whole in wholes))


@dataclass(frozen=True)
class Compute(_Derived):
    """`function(config, *wholes)` of gathered tensors, where values are computed.

    Arithmetic is the function's, in `float32`.
    """

    function: Callable[..., Tensor]
    keys: tuple[str, ...]
    cuts: tuple[int | None, ...] = ()

    @property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """All keys with their cuts (replicated where none is given)."""
        cuts = self.cuts or (None,) * len(self.keys)
        return tuple(zip(self.keys, cuts, strict=True))

    def build(self, get: Get, config: Any) -> Parts:
        """Return the function's result."""
        wholes = [join(get(key), cut) for key, cut in self.reads]
        return Parts(0, (self.function(config, *wholes),))


@dataclass(frozen=True)
class Adjusted(_Derived):
    """Another source with `function(part, config)` applied to each of its parts in fp32."""

    source: TensorSource
    function: Callable[[Tensor, Any], Tensor]

    @property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """The other source's keys."""
        return self.source.reads

    def build(self, get: Get, config: Any) -> Parts:
        """Return the adjusted parts."""
        parts = self.source.build(get, config)
        changed = tuple(self.function(float32(part), config) for part in parts.tensors)
        return Parts(parts.axis, changed)


@dataclass(frozen=True)
class PerIndex:
    """A source that differs from layer to layer: `choose(index)` gives the one of an index."""

    choose: Callable[[Mapping[str, int | str]], TensorSource]


@dataclass(frozen=True)
class Constant(_Derived):
    """A tensor the loader requires and the architecture lacks; `shape` as in the layout."""

    shape: tuple[str | int, ...]
    value: float = 0.0

    @property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """No keys."""
        return ()

    def build(self, get: Get, config: Any) -> Parts:  # noqa: ARG002
        """Return a part without values; the conversion writes `value` everywhere."""
        shape = [config.dim(size, {}) for size in self.shape]
        return Parts(0, (ShapeTensor(shape, fill=self.value),))
