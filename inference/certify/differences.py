"""Differences of a stored tensor from its expected values, and the errors that a type explains.

Shapes: flat values in C order; a row is a slice along the first axis. R rows, W columns, G groups
of columns that share a scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from export_scripts.numeric.arrays import Array, to_float32

_RANGES_SHOWN = 4
# Bounds of the integers of a grid, which are the nearest ones unless a calibration moved them.
_HALF_STEP = 0.52  # quotients close to a half may be rounded either way
_BF16 = 2.0**-8  # largest rounding error of bf16; values, scales and quotients may have it
_MAX_CUT = 0.02  # share of a group's squares beyond the ends of its grid, as AWQ chooses them
# Calibration (GPTQ, AutoRound) moves values of every group, and its errors do not depend on the
# values: their correlation is noise, and their mean is small. The errors of a wrong scale are
# proportional to the values; those of zero points off by one have a mean of 3 standard deviations.
_MOST_GROUPS = 0.5
_DEVIATIONS, _MAX_BIAS = 6.0, 0.75  # of a group, in standard deviations
_MAX_FACTOR = 0.02  # of all values
_MAX_STEPS = 4.0


@dataclass(frozen=True)
class Rounding:
    """The largest error that a stored type explains: the sum of three bounds.

    Attributes:
        method: name of the quantisation or merge for messages; empty for plain values.
        relative: share of the value.
        least: absolute bound.
        of_largest: share of the largest value of its block.
        state: state of a tensor with such errors.
    """

    method: str = ""
    relative: float = 0.0
    least: float = 0.0
    of_largest: float = 0.0
    state: str = "dequantised"

    def explains(self, source: Array, error: Array) -> Array:
        """Return which flat values are within the bound of the source's, as booleans."""
        size = np.where(np.isfinite(source), np.abs(source), 0)
        bound = size * self.relative + self.least + size.max(initial=0) * self.of_largest
        near: Array = error <= bound
        return near


@dataclass
class Differences:
    """Differences of the values compared so far.

    `rows` and `columns` (first, last) are those of the `bad` values, which the rounding does not
    explain; `count` values have other bytes, and the largest difference is `error`.
    """

    shape: tuple[int, ...]
    rounding: Rounding | None
    count: int = 0
    bad: int = 0
    error: float = 0.0
    rows: set[int] = field(default_factory=set)
    columns: tuple[int, int] = (1 << 62, 0)

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return max(1, math.prod(self.shape[1:]))

    def blocks(self, expected: Iterator[Array]) -> Iterator[Array]:
        """Yield the expected values in blocks of a size that `add` takes."""
        return expected

    def add(self, wide: Array, expected: Array, found: Array, at: int) -> None:
        """Count the differences of a block at flat index `at`; `wide` is `expected` unrounded."""
        wrong = raw_bits(expected) != raw_bits(found)
        if wide is expected and not wrong.any():
            return
        with np.errstate(all="ignore"):
            source, value = to_float32(wide), to_float32(found)
            error = np.abs(value - source)
            error[np.isnan(source) & np.isnan(value) | (source == value)] = 0
            error[np.isnan(error)] = np.inf
            # Zeros may have another sign, and NaN other bits.
            bad = wrong & (error > 0) & self._unexplained(source, value, error, at)
            bad |= np.isinf(error)
        self.error = max(self.error, float(error.max(initial=0)))
        self.count += int(wrong.sum())
        if bad.any():
            self._mark(*np.divmod(np.flatnonzero(bad) + at, self.width))

    def _unexplained(self, source: Array, _value: Array, error: Array, _at: int) -> Array:
        if self.rounding is None:
            return np.ones(len(source), bool)
        return ~self.rounding.explains(source, error)

    def _mark(self, rows: Array, columns: Array) -> None:
        """Record the places of bad values."""
        self.bad += len(rows)
        self.rows.update(np.unique(rows).tolist())  # a block has millions of values, few rows
        low, high = self.columns
        self.columns = (min(low, int(columns.min())), max(high, int(columns.max())))

    def state(self) -> tuple[str, str]:
        """Return the state of the tensor and its reason, or an empty one."""
        method = self.rounding.method if self.rounding else ""
        if self.bad:
            return "changed", f"more than the rounding of {method} explains" if method else ""
        if not self.count:
            return ("rounded" if self.error else "equal"), ""
        if self.rounding is None or not method:
            return "one step", ""
        return self.rounding.state, f"within the rounding of {method}"

    def places(self, tokens: int | None) -> Iterator[str]:
        """Yield where the tensor differs, and by how much.

        Rows from index `tokens` on are padding; None if there is none.
        """
        if self.rows:
            starts = sorted(row for row in self.rows if row - 1 not in self.rows)
            ends = sorted(row for row in self.rows if row + 1 not in self.rows)
            ranges = [f"{low}-{high}" for low, high in zip(starts, ends, strict=True)]
            more = len(ranges) - _RANGES_SHOWN
            where = f"rows {', '.join(ranges[:_RANGES_SHOWN])}"
            where += f" and {more} more ranges" if more > 0 else ""
            where += ", columns {}-{}".format(*self.columns) if len(self.shape) > 1 else ""
            if tokens is not None and starts[0] >= tokens:
                where += f", all of them padding after the tokenizer's {tokens} tokens"
            yield f"{where} of {list(self.shape)}"
        if self.error:
            count = f"{self.bad or self.count:,} of {math.prod(self.shape):,}"
            yield f"{count} values differ, by up to {self.error:.3g}"


class GridDifferences(Differences):
    """Differences of integers with scales, judged by the groups of values that share a scale.

    Without calibration, each value is the nearest of its grid, whose ends may cut off some. If
    values of most groups are not, a calibration has moved them, and only those groups are wrong
    whose errors depend on the values.
    """

    def __init__(self, count: int, groups: int, limits: tuple[Array, Array]) -> None:
        """Take the bits of an integer, the groups of a row, and the ends (R, W) of the grids."""
        super().__init__(limits[0].shape, Rounding(f"{count} bits"))
        self._low, self._high = np.minimum(*limits), np.maximum(*limits)
        self._steps = (1 << count) - 1
        # GPTQ may reorder inputs: the columns of a group need not be neighbours.
        order = np.argsort(self._high[0] - self._low[0], kind="stable")
        self._columns = order.reshape(groups if self.width % groups == 0 else 1, -1)
        self._moved = np.zeros((self.shape[0], len(self._columns)), bool)
        self._wrong = self._moved.copy()
        self._squares = self._products = self._unseen = 0.0

    def blocks(self, expected: Iterator[Array]) -> Iterator[Array]:
        """Yield the expected values in blocks of whole rows."""
        rest = np.empty(0, np.float32)
        for block in expected:
            rest = np.concatenate([rest, block])
            count = len(rest) // self.width * self.width
            yield rest[:count]
            rest = rest[count:]

    def _unexplained(self, source: Array, value: Array, error: Array, at: int) -> Array:
        """Judge the groups of some rows; `state` decides whether a calibration moved values."""
        rows = slice(at // self.width, (at + len(error)) // self.width)
        source, value, low, high = (
            each.reshape(-1, self.width)[:, self._columns]  # (R, G, columns of a group)
            for each in (source, value, self._low[rows], self._high[rows])
        )
        inside, step = np.clip(source, low, high), (high - low) / self._steps
        off = value - inside
        size = np.abs(off) / step
        is_cut = ~(_power(source - inside) <= _MAX_CUT * _power(source))
        is_near = (off == 0) | (size <= _HALF_STEP + np.abs(inside) / step * 3 * _BF16)
        squares, products = _power(inside), (inside * off).sum(-1)
        noise = inside * (off - inside * (products / squares)[..., None])
        bound = _DEVIATIONS * _power(noise) ** 0.5 + _BF16 * squares
        is_scaled = ~(np.abs(products) <= bound)
        bias = max(_MAX_BIAS, _DEVIATIONS / off.shape[-1] ** 0.5)
        is_shifted = ~(np.abs(off.mean(-1)) <= bias * off.std(-1))
        usual = np.maximum(_MAX_STEPS, _DEVIATIONS * np.mean(size * size, axis=0) ** 0.5)
        is_far = ~(size <= usual).all(-1)
        self._moved[rows] = ~is_near.all(-1) | is_cut
        self._wrong[rows] = is_cut | is_scaled | is_shifted | is_far
        self._unseen = max(self._unseen, float((bound / squares).max()))
        self._squares += float(squares.sum())
        self._products += float(products.sum())
        return np.zeros(len(error), bool)

    def state(self) -> tuple[str, str]:
        """Return the state of the tensor and its reason, after marking the wrong groups."""
        moved, is_calibrated = self._moved, self._moved.mean() >= _MOST_GROUPS
        if is_calibrated and abs(self._products) <= _MAX_FACTOR * self._squares:
            moved &= self._wrong
        rows, groups = np.nonzero(moved)
        if len(rows):
            columns = self._columns[groups]
            self._mark(np.repeat(rows, columns.shape[1]), columns.ravel())
        state, reason = super().state()
        if state != "dequantised" or not is_calibrated:
            return state, reason
        seen = f"a wrong scale of any group would be seen if it were off by {self._unseen:.0%}"
        return "calibrated", f"{reason} and calibration; {seen}"


def _power(values: Array) -> Array:
    """Return the sum of the squares of each group."""
    found: Array = np.sum(values * values, axis=-1)
    return found


def raw_bits(values: Array) -> Array:
    """Return values as unsigned integers with the same bits."""
    return values.view(f"u{values.dtype.itemsize}")
