"""Tensors of source mappings: numpy arrays, or only their shapes.

The same code converts values and, with `ShapeTensor`, checks shapes before a byte is read. numpy is
only imported for values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# A numpy array (see numeric/arrays.py for bf16), or a ShapeTensor if only shapes are checked.
Tensor = Any


class ShapeTensor:
    """A tensor without values, with the numpy methods that operations use.

    Where values are needed, all are `fill`.
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
        """The transposed matrix."""
        return self.transpose(1, 0)

    def reshape(self, *sizes: int) -> ShapeTensor:
        """Return the tensor in another shape.

        Raises:
            ValueError: The sizes are for another number of values.
        """
        shape = list(sizes)
        if -1 in shape:
            rest = math.prod(size for size in shape if size != -1)
            shape[shape.index(-1)] = self.size // rest if rest else 0
        if math.prod(shape) != self.size:
            raise ValueError(f"{list(self.shape)} cannot be viewed as {shape}")
        return ShapeTensor(shape, fill=self.fill)

    def transpose(self, *axes: int) -> ShapeTensor:
        """Return the axes in another order.

        Raises:
            ValueError: The order does not name every axis once.
        """
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"{list(self.shape)} cannot be permuted by {list(axes)}")
        return ShapeTensor([self.shape[axis] for axis in axes], fill=self.fill)

    def repeat(self, times: int, axis: int) -> ShapeTensor:
        """Return every entry along an axis repeated."""
        shape = list(self.shape)
        shape[axis] *= times
        return ShapeTensor(shape)

    def __getitem__(self, index: Any) -> ShapeTensor:
        items = index if isinstance(index, tuple) else (index,)
        shape = []
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
        return ShapeTensor((*shape, *self.shape[axis:]), fill=self.fill)

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


def float32(values: Tensor) -> Tensor:
    """Return values in fp32, which all arithmetic uses."""
    if isinstance(values, ShapeTensor):
        return values
    from export_scripts.numeric import arrays

    return arrays.to_float32(values)


def rounded(values: Tensor, data_type: str) -> Tensor:
    """Return values in fp32, rounded to the precision of a type."""
    if isinstance(values, ShapeTensor):
        return values
    from export_scripts.numeric import arrays

    return arrays.round_to(values, data_type)


def joined(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """Return tensors concatenated along an axis.

    Raises:
        ValueError: Their other axes differ.
    """
    if isinstance(pieces[0], ShapeTensor):
        if len({(*p.shape[:axis], *p.shape[axis + 1 :]) for p in pieces}) > 1:
            raise ValueError(f"{[list(piece.shape) for piece in pieces]} do not fit together")
        shape = list(pieces[0].shape)
        shape[axis] = sum(piece.shape[axis] for piece in pieces)
        return ShapeTensor(shape)
    import numpy as np

    return np.concatenate(list(pieces), axis=axis)


def stacked(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Return tensors of one shape stacked on a new axis (0 or 1)."""
    assert axis in (0, 1), axis
    return joined([part[:, None] if axis else part[None] for part in parts], axis)


def constant(numbers: Sequence[float], *, like: Tensor = None) -> Tensor:
    """Return numbers as an fp32 vector, or only its shape if `like` is only a shape."""
    if isinstance(like, ShapeTensor):
        return ShapeTensor((len(numbers),))
    import numpy as np

    return np.array(numbers, np.float32)
