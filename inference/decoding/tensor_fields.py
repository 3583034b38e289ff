"""Reading the per-row tensors of a request; every problem is noted, none is raised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class TensorFields:
    """Tensors of one request of `batch` rows; a bad tensor reads as its default."""

    tensors: Mapping[str, Array]
    batch: int
    problems: list[str] = field(default_factory=list)

    def integers(self, name: str, *, default: int, per_row: bool = False) -> list[int]:
        """Return one integer per row; `per_row` forbids a single value for all rows."""
        return self._values(name, "iu", "an integer type", per_row) or ([default] * self.batch)

    def floats(self, name: str, *, default: float, per_row: bool = False) -> list[float]:
        """Return one finite FP32 value per row as a Python float."""
        values = self._values(name, "fiu", "a floating-point type", per_row)
        if values is None:
            return [default] * self.batch
        for b, value in enumerate(values):
            if not np.isfinite(value):
                self.problems.append(f"{name}[{b}]={value} must be finite")
                values[b] = default
        return values

    def flags(self, name: str) -> list[bool]:
        """Return one boolean per row, False where the tensor is absent."""
        values = self._values(name, "b", "BOOL", False)
        return values or [False] * self.batch

    def check_names(self, known: Collection[str]) -> None:
        """Note inputs that the model does not know."""
        for name in sorted(set(self.tensors) - set(known)):
            self.problems.append(f"{name}: unknown input; this model takes {sorted(known)}")

    def lengths(self, name: str, *, width: int, may_be_empty: bool = False) -> list[int]:
        """Return the true tokens of each row of a tensor of `width` columns; bad ones are clipped.

        `may_be_empty` allows rows without tokens where there are no columns.
        """
        least = 0 if may_be_empty and width == 0 else 1
        lengths = self.required_integers(name)
        if lengths is None:
            return [0] * self.batch
        self.problems += [
            f"{name}[{b}]={length} must be in [{least}, {width}]"
            for b, length in enumerate(lengths)
            if not least <= length <= width
        ]
        return [min(max(length, 0), width) for length in lengths]

    def ia3_tasks(self, count: int) -> list[int | None]:
        """Return the IA3 task of each row, of `count` that are loaded; None where not asked for."""
        name = "ia3_tasks"
        if name not in self.tensors:
            return [None] * self.batch
        if count == 0:
            self.problems.append(f"{name}: this model has no IA3 adapters; omit the tensor")
            return [None] * self.batch
        tasks = self.integers(name, default=0)
        for b, task in enumerate(tasks):
            if not 0 <= task < count:
                self.problems.append(f"{name}[{b}]={task} must be in [0, {count})")
        return [*tasks]

    def required_integers(self, name: str) -> list[int] | None:
        """Return one integer per row, or None (and a problem) where the tensor is missing."""
        if name not in self.tensors:
            self.problems.append(f"{name}: required input is missing")
            return None
        return self._values(name, "iu", "an integer type", False)

    def _values(self, name: str, kinds: str, expected: str, per_row: bool) -> list[Any] | None:
        value = self.tensors.get(name)
        if value is None:
            return None
        if value.dtype.kind not in kinds:
            self.problems.append(f"{name}: expected {expected}, got {value.dtype}")
            return None
        if not self._is_per_row(value, allow_one=not per_row):
            sizes = f"[{self.batch},1]" if per_row else f"[{self.batch},1] or [1]"
            self.problems.append(f"{name}: expected shape {sizes}, got {list(value.shape)}")
            return None
        if value.dtype.kind == "f":
            value = value.astype(np.float32)
        values: list[Any] = value.reshape(-1).tolist()
        if kinds == "fiu":
            values = [float(np.float32(v)) for v in values]
        return values * self.batch if len(values) != self.batch else values

    def _is_per_row(self, value: Array, *, allow_one: bool) -> bool:
        if value.ndim not in (1, 2) or (value.ndim == 2 and value.shape[1] != 1):
            # A single row may also come as a bare scalar.
            return value.ndim == 0 and (allow_one or self.batch == 1)
        return value.shape[0] == self.batch or (allow_one and value.shape[0] == 1)
