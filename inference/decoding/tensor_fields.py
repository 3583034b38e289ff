"""Reading the per-row tensors of a request; every problem is noted, none is raised."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Range = tuple[float, float]  # the least and the largest value
ANY = -math.inf, math.inf


@dataclass
class TensorFields:
    """Tensors of one request of `batch` rows; a bad tensor reads as its default."""

    tensors: Mapping[str, Array]
    batch: int
    problems: list[str] = field(default_factory=list)

    def numbers(
        self, name: str, *, default: float, per_row: bool = False, within: Range = ANY
    ) -> list[Any]:
        """Return one number per row, of the type of `default`: integers, or finite fp32 values.

        `per_row` forbids a single value for all rows.
        """
        kinds, expected = "iu", "an integer type"
        if isinstance(default, float):
            kinds, expected = "fiu", "a floating-point type"
        values = self._values(name, kinds, expected, per_row, within)
        return values or [default] * self.batch

    def flags(self, name: str) -> list[bool]:
        """Return one boolean per row, False where the tensor is absent."""
        return self._values(name, "b", "BOOL") or [False] * self.batch

    def check_names(self, required: Sequence[str], optional: Collection[str]) -> None:
        """Note required inputs that are missing, and inputs that the model does not know."""
        missing = [name for name in required if name not in self.tensors]
        self.problems += [f"{name}: required input is missing" for name in missing]
        known = {*required, *optional}
        for name in sorted(set(self.tensors) - known):
            self.problems.append(f"{name}: unknown input; this model takes {sorted(known)}")

    def lengths(self, name: str, *, width: int, may_be_empty: bool = False) -> list[int]:
        """Return the true tokens of each row of a tensor of `width` columns; bad ones are clipped.

        `may_be_empty` allows rows without tokens where there are no columns.
        """
        least = 0 if may_be_empty and width == 0 else 1
        lengths = self.numbers(name, default=0, within=(least, width))
        return [min(max(length, 0), width) for length in lengths]

    def ia3_tasks(self, count: int) -> list[int | None]:
        """Return the IA3 task of each row, of `count` that are loaded; None where not asked for."""
        name = "ia3_tasks"
        if name in self.tensors and count:
            return [*self.numbers(name, default=0, within=(0, count - 1))]
        if name in self.tensors:
            self.problems.append(f"{name}: this model has no IA3 adapters; omit the tensor")
        return [None] * self.batch

    def _values(
        self, name: str, kinds: str, expected: str, per_row: bool = False, within: Range = ANY
    ) -> list[Any] | None:
        value = self.tensors.get(name)
        if value is None:
            return None
        if value.dtype.kind not in kinds:
            self.problems.append(f"{name}: expected {expected}, got {value.dtype}")
            return None
        # A single row may also come as a bare scalar.
        sizes = (self.batch,) if per_row else (self.batch, 1)
        if value.shape[1:] not in ((), (1,)) or value.size not in sizes:
            shapes = f"[{self.batch},1]" if per_row else f"[{self.batch},1] or [1]"
            self.problems.append(f"{name}: expected shape {shapes}, got {list(value.shape)}")
            return None
        if value.dtype.kind == "f":
            value = value.astype(np.float32)
        values: list[Any] = value.reshape(-1).tolist()
        if kinds == "fiu":
            values = [float(np.float32(v)) for v in values]
        low, high = within
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
        for b, each in enumerate(values):
            if not (low <= each <= high and math.isfinite(each)):
                shown = f"{each:g}" if isinstance(each, float) else each
                expected = wanted if math.isfinite(each) else "finite"
                self.problems.append(f"{name}[{b}]={shown} must be {expected}")
        return values * self.batch if len(values) != self.batch else values
