"""What sources and origins compute with: the same on numpy arrays and on `ShapeTensor`.

numpy is imported when there are values, not to check shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export_scripts.families.shapes import ShapeTensor

# A numpy array when converting (see ft/arrays.py for bf16), a ShapeTensor when checking.
Tensor = Any


def float32(values: Tensor) -> Tensor:
    """Return values in fp32, in which all arithmetic is done."""
    if isinstance(values, ShapeTensor):
        return values
    from export_scripts.ft import arrays

    return arrays.float32(values)


def rounded(values: Tensor, data_type: str) -> Tensor:
    """Return values in fp32 with the precision of a type."""
    if isinstance(values, ShapeTensor):
        return values
    from export_scripts.ft import arrays

    return arrays.rounded(values, data_type)


def joined(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """Return tensors one after the other along an axis.

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
    """Return tensors of one shape side by side on a new axis (0 or 1)."""
    assert axis in (0, 1), axis
    return joined([part[:, None] if axis else part[None] for part in parts], axis)


def constant(numbers: Sequence[float], *, like: Tensor = None) -> Tensor:
    """Return numbers as an fp32 vector, or its shape where `like` is only a shape."""
    if isinstance(like, ShapeTensor):
        return ShapeTensor((len(numbers),))
    import numpy as np

    return np.array(numbers, np.float32)
