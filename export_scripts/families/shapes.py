"""A tensor that has a shape and no values: for checking what operations make of a source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class ShapeTensor:
    """A tensor without values: the methods the operations use, for checking shapes.

    Where values are wanted, one stands for `fill` everywhere.
    """

    def __init__(self, shape: Sequence[int], *, fill: float = 0.0) -> None:
        self.shape = tuple(shape)
        self.fill = fill

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    def size(self, axis: int | None = None) -> Any:
        """Return the shape, or one size."""
        return self.shape if axis is None else self.shape[axis]

    def reshape(self, *sizes: Any) -> ShapeTensor:
        """Return the tensor in another shape.

        Raises:
            ValueError: The sizes do not hold as many values.
        """
        shape = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        if -1 in shape:
            rest = math.prod(size for size in shape if size != -1)
            shape[shape.index(-1)] = self.numel() // rest if rest else 0
        if math.prod(shape) != self.numel():
            raise ValueError(f"{list(self.shape)} cannot be viewed as {shape}")
        return ShapeTensor(shape)

    view = reshape

    def permute(self, *axes: Any) -> ShapeTensor:
        """Return the axes in another order."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"{list(self.shape)} cannot be permuted by {list(order)}")
        return ShapeTensor([self.shape[axis] for axis in order])

    def transpose(self, first: int, second: int) -> ShapeTensor:
        """Return two axes exchanged."""
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self.permute(*order)

    def t(self) -> ShapeTensor:
        """Return a matrix transposed.

        Raises:
            ValueError: It is not a matrix.
        """
        if self.ndim != 2:
            raise ValueError(f"{list(self.shape)} is not a matrix")
        return ShapeTensor(self.shape[::-1])

    def unsqueeze(self, axis: int) -> ShapeTensor:
        """Return the tensor with a new axis of one."""
        at = axis % (self.ndim + 1)
        return ShapeTensor((*self.shape[:at], 1, *self.shape[at:]))

    def expand(self, *sizes: Any) -> ShapeTensor:
        """Return the tensor repeated to a shape."""
        return ShapeTensor(sizes[0] if not isinstance(sizes[0], int) else sizes)

    def __getitem__(self, index: Any) -> ShapeTensor:
        items = index if isinstance(index, tuple) else (index,)
        shape: list[int] = []
        for axis, item in enumerate(items):
            if isinstance(item, slice):
                shape.append(len(range(*item.indices(self.shape[axis]))))
            elif not -self.shape[axis] <= item < self.shape[axis]:
                raise ValueError(f"axis {axis} of {list(self.shape)} has no index {item}")
        return ShapeTensor((*shape, *self.shape[len(items) :]))

    def same(self, *_: Any, **__: Any) -> ShapeTensor:
        """Return a tensor of the same shape."""
        return ShapeTensor(self.shape)

    float = half = bfloat16 = to = contiguous = clone = round = clamp = abs = same

    def _combine(self, other: Any) -> ShapeTensor:
        if not isinstance(other, ShapeTensor):
            return ShapeTensor(self.shape)
        longer, shorter = sorted((self.shape, other.shape), key=len, reverse=True)
        padded = (1,) * (len(longer) - len(shorter)) + tuple(shorter)
        if any(a != b and 1 not in (a, b) for a, b in zip(longer, padded, strict=True)):
            raise ValueError(f"{list(self.shape)} and {list(other.shape)} do not fit")
        return ShapeTensor([max(a, b) for a, b in zip(longer, padded, strict=True)])

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _combine

    def __matmul__(self, other: ShapeTensor) -> ShapeTensor:
        if self.shape[-1] != other.shape[0]:
            raise ValueError(f"{list(self.shape)} @ {list(other.shape)} do not fit")
        return ShapeTensor((*self.shape[:-1], *other.shape[1:]))
