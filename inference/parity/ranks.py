"""All ranks of a folder as threads of this process, and what each of them notes.

Layers of the runtime are wrapped, so that the output of each part is noted. A part adds the
residual itself when it serves; here it is called without one, which is added once it is noted.
"""

# Shapes: N tokens, W width of a part

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from inference.model.layers import Sublayer
from inference.parallel.epilogue import finish
from inference.parallel.linear import AllReduce
from inference.parity.activations import Activations, Place
from inference.ranks.processes import threads_per_rank

# How the ranks' tensors of one place make one: all the same, terms of a sum, or some columns each.
Merge = Literal["same", "sum", "columns"]


class Notes:
    """The activations of one rank by place; later tokens of a place follow the earlier ones."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[Place, list[torch.Tensor]] = {}
        self.merges: dict[Place, Merge] = {}

    def add(self, place: Place, x: torch.Tensor, merge: Merge = "same") -> None:
        """Keep a copy of x (N, W)."""
        self.tensors.setdefault(place, []).append(x.to(torch.float32, copy=True))
        self.merges[place] = merge


def on_ranks(tp_size: int, work: Callable[[Notes, AllReduce | None], None]) -> Activations:
    """Return what the ranks noted, merged.

    `work` runs one rank: it is given where to note, and the all-reduce if there are others.
    """
    sums = _ThreadSum(tp_size)

    def run(rank: int) -> Notes:
        torch.set_num_threads(threads_per_rank(tp_size))
        notes = Notes(rank)
        try:
            with torch.inference_mode():
                work(notes, sums.for_rank(rank) if tp_size > 1 else None)
        except BaseException:
            sums.abort()
            raise
        return notes

    with ThreadPoolExecutor(tp_size, "rank") as pool:
        tasks = [pool.submit(run, rank) for rank in range(tp_size)]
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        # Ranks that only waited for a failed one add nothing.
        causes = (e for e in errors if not isinstance(e, threading.BrokenBarrierError))
        raise next(causes, errors[0])
    return _merged([task.result() for task in tasks])


def _merged(ranks: Sequence[Notes]) -> Activations:
    merged = {}
    for place, merge in ranks[0].merges.items():
        parts = [torch.cat(notes.tensors[place]) for notes in ranks]
        if merge == "columns":
            merged[place] = torch.cat(parts, dim=1)
        else:
            merged[place] = torch.stack(parts).sum(0) if merge == "sum" else parts[0]
    return merged


class _ThreadSum:
    """Sums a tensor over the threads that are ranks, on each of them in the order of ranks."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size)

    def for_rank(self, rank: int) -> AllReduce:
        """Return the all-reduce of one rank."""

        def reduce(
            x: torch.Tensor,
            *,
            bias: torch.Tensor | None = None,
            residual: torch.Tensor | None = None,
        ) -> torch.Tensor:
            self._parts[rank] = x
            self._barrier.wait()
            total = torch.stack([part for part in self._parts if part is not None]).sum(0)
            self._barrier.wait()  # all read this part before the next one is offered
            return finish(total, bias=bias, residual=residual)

        return reduce

    def abort(self) -> None:
        """End the waits of the other ranks."""
        self._barrier.abort()


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
