"""Layers of the runtime with their parts wrapped, so that each part's output is noted.

A part adds the residual itself when it serves; here it is called without one, and the residual is
added once its output is noted.
"""

# Shapes: N tokens, E hidden

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from inference.model.layers import Sublayer
from inference.parity.activations import Place
from inference.parity.ranks import Notes

_Note = Callable[[torch.Tensor], None]
# Parts of a layer: name, field of the layer, and the linear in it whose output is the part's.
_PARTS = (
    ("attention", "attention", "out"),
    ("cross attention", "cross", "out"),
    ("mlp", "mlp", "down"),
)


def tapped(layer: Any, where: str, notes: Notes) -> Any:
    """Return a layer that notes its parts and its output; it has no type of the runtime's."""
    # Parallel halves share one sum over the ranks, after which their biases are added.
    is_shared = getattr(layer, "reduce", None) is not None

    def note(part: str, y: torch.Tensor) -> None:
        if is_shared and part == "mlp" and notes.rank == 0 and layer.bias is not None:
            y = y + layer.bias
        notes.add(Place(where, part), y, "sum" if is_shared else "same")

    parts = {}
    for name, field, end in _PARTS:
        if (part := getattr(layer, field, None)) is not None:
            inner = part.part if isinstance(part, Sublayer) else part
            linear = _TappedLinear(getattr(inner, end), partial(note, name))
            inner = replace(inner, **{end: linear})
            parts[field] = replace(part, part=inner) if isinstance(part, Sublayer) else inner
    return _TappedLayer(replace(layer, **parts), partial(notes.add, Place(where)))


@dataclass(frozen=True)
class _TappedLinear:
    inner: Callable[[torch.Tensor], torch.Tensor]
    note: _Note

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.inner(x)
        self.note(y)
        return y if residual is None else y + residual


@dataclass(frozen=True)
class _TappedLayer:
    inner: Any
    note: _Note

    def __call__(self, *inputs: Any, **more: Any) -> torch.Tensor:
        y: torch.Tensor = self.inner(*inputs, **more)
        self.note(y)
        return y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
