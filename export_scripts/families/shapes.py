"""A tensor that has a shape and no values: for checking what operations make of a source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class ShapeTensor:
    """A tensor without values: the methods of numpy's arrays that operations use, for shapes.

    Where values are wanted, one stands for `fill` everywhere.
    """

    def __init__(self, shape: Sequence[int], *, fill: float = 0.0) -> None:
        self.shape = tuple(shape)
        self.fill = fill

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def T(self) -> ShapeTensor:  # noqa: N802 - numpy's name
        """A matrix transposed.

        Raises:
            ValueError: It is not a matrix.
        """
        if self.ndim != 2:
            raise ValueError(f"{list(self.shape)} is not a matrix")
        return ShapeTensor(self.shape[::-1])

    def reshape(self, *sizes: int) -> ShapeTensor:
        """Return the tensor in another shape.

        Raises:
            ValueError: The sizes do not hold as many values.
        """
        shape = list(sizes)
        if -1 in shape:
            rest = math.prod(size for size in shape if size != -1)
            shape[shape.index(-1)] = self.size // rest if rest else 0
        if math.prod(shape) != self.size:
            raise ValueError(f"{list(self.shape)} cannot be viewed as {shape}")
        return ShapeTensor(shape)

    def transpose(self, *axes: int) -> ShapeTensor:
        """Return the axes in another order.

        Raises:
            ValueError: The order does not name every axis once.
        """
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"{list(self.shape)} cannot be permuted by {list(axes)}")
        return ShapeTensor([self.shape[axis] for axis in axes])

    def repeat(self, times: int, axis: int) -> ShapeTensor:
        """Return every entry along an axis repeated."""
        shape = list(self.shape)
        shape[axis] *= times
        return ShapeTensor(shape)

    def __getitem__(self, index: Any) -> ShapeTensor:
        items = index if isinstance(index, tuple) else (index,)
        shape: list[int] = []
        axis = 0
        for item in items:
            if item is None:
                shape.append(1)
                continue
            if isinstance(item, slice):
                shape.append(len(range(*item.indices(self.shape[axis]))))
            elif not -self.shape[axis] <= item < self.shape[axis]:
                raise ValueError(f"axis {axis} of {list(self.shape)} has no index {item}")
            axis += 1
        return ShapeTensor((*shape, *self.shape[axis:]))

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
