"""Reading of the per-row tensors of a request; problems are collected, not raised."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Range = tuple[float, float]  # minimum and maximum
ANY = -math.inf, math.inf
# Names for messages, by numpy's type kinds.
_CONTENTS = {"iu": "integers", "f": "floating-point values", "fiu": "numbers", "OS": "BYTES"}
# Type of a default -> the type kinds that are accepted; flags are boolean.
_KINDS = {int: "iu", float: "fiu"}


@dataclass
class TensorFields:
    """The tensors of one request of `batch` rows; an invalid tensor reads as its default."""

    tensors: Mapping[str, Array]
    batch: int
    problems: list[str] = field(default_factory=list)

    def array(self, name: str, kinds: str, *shapes: tuple[int, ...]) -> Array | None:
        """Return a tensor of one of the shapes, floating-point values as fp32.

        -1 in a shape stands for any size; messages name the first shape. None if the tensor is
        absent or refused.
        """
        value = self.tensors.get(name)
        if value is None:
            return None
        sizes = value.shape
        fits = any(
            len(shape) == len(sizes)
            and all(want in (size, -1) for want, size in zip(shape, sizes, strict=True))
            for shape in shapes
        )
        if value.dtype.kind not in kinds or not fits:
            content, shape = _CONTENTS.get(kinds, "BOOL"), ",".join(map(str, shapes[0]))
            got = f"{value.dtype} {list(sizes)}"
            self.problems.append(f"{name}: expected {content} of shape [{shape}], got {got}")
            return None
        if value.dtype.kind != "f":
            return value
        with np.errstate(over="ignore"):  # values beyond fp32 become infinite
            return value.astype(np.float32, copy=False)

    def finite(self, name: str, *shape: int) -> Array | None:
        """Return a tensor of finite fp32 values, or None if it is absent or refused."""
        value = self.array(name, "f", shape)
        if value is None or np.isfinite(value).all():
            return value
        self.problems.append(f"{name}: holds values that are not finite")
        return None

    def numbers(
        self, name: str, *, default: float | None, per_row: bool = False, within: Range = ANY
    ) -> list[Any]:
        """Return a value for each row, of the type of `default`: int, bool, or float in fp32.

        `per_row` forbids a single value for all rows.
        """
        shapes: list[tuple[int, ...]] = [(self.batch, 1), (self.batch,)]
        if not per_row or self.batch == 1:
            shapes += [(1, 1), (1,), ()]
        kinds = _KINDS.get(type(default), "b")
        value = self.array(name, kinds, *shapes)
        if value is None:
            return [default] * self.batch
        if isinstance(default, float):
            value = value.astype(np.float32)
        values: list[Any] = value.reshape(-1).tolist()
        low, high = within
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
        for b, each in enumerate(values):
            if not (low <= each <= high and math.isfinite(each)):
                shown = f"{each:g}" if isinstance(each, float) else each
                expected = wanted if math.isfinite(each) else "finite"
                self.problems.append(f"{name}[{b}]={shown} must be {expected}")
        return values * (self.batch // len(values))

    def common(self, name: str) -> int | None:
        """Return the integer that all rows share, None if the tensor is absent."""
        values = self.numbers(name, default=0)
        if len(set(values)) > 1:
            self.problems.append(f"{name} must be identical for all rows of a request")
        return values[0] if name in self.tensors else None

    def check_names(self, required: Sequence[str], optional: Collection[str]) -> None:
        """Report required inputs that are missing, and inputs that the model does not take."""
        missing = [name for name in required if name not in self.tensors]
        self.problems += [f"{name}: required input is missing" for name in missing]
        known = {*required, *optional}
        for name in sorted(set(self.tensors) - known):
            self.problems.append(f"{name}: unknown input; this model takes {sorted(known)}")

    def lengths(self, name: str, *, width: int, may_be_empty: bool = False) -> list[int]:
        """Return each row's number of tokens, clipped to `width`; invalid ones are reported.

        `may_be_empty` allows rows without tokens if `width` is 0.
        """
        least = 0 if may_be_empty and width == 0 else 1
        lengths = self.numbers(name, default=0, within=(least, width))
        return [min(max(length, 0), width) for length in lengths]

    def ia3_tasks(self, count: int) -> list[int | None]:
        """Return the IA3 task of each row out of `count` loaded ones, None for rows without."""
        if "ia3_tasks" not in self.tensors:
            return [None] * self.batch
        if not count:
            self.problems.append("ia3_tasks: this model has no IA3 adapters; omit the tensor")
        return [*self.numbers("ia3_tasks", default=0, within=(0, max(count - 1, 0)))]
