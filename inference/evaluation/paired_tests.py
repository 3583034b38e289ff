"""Tests of a drop between two runs over the same samples, and their power.

A drop is oriented so that positive is worse. Two hypotheses are tested against a margin: that the
drop is at most the margin (rejected: breached), and that it is at least that (rejected: held).

Scores of 0 and 1 are tested exactly (exact_tests.py). Other scores are tested by Student's t on
each sample's influence on the metric and by a bootstrap; the weaker of both counts.
"""

# Shapes: N samples, R resamples

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

POWER = 0.8  # share of runs in which the smallest detectable drop is caught
# What is assumed of two healthy runs before the second was made: this share of answers differs, and
# other scores correlate with 1 minus half of it.
ASSUMED_CHANGE = 0.02
_NORMAL = NormalDist()
_RESAMPLES = 5000
_CHUNK_VALUES = 1 << 22  # drawn at a time
_TIE = 1e-9
_STEPS = 20  # of a bisection


@dataclass(frozen=True)
class Pairs:
    """The scores of the same samples in two runs.

    Attributes:
        new, old: the score of each sample, higher is better.
        new_weights, old_weights: its weight in the metric, such as the tokens of a text.
    """

    new: tuple[float, ...]
    old: tuple[float, ...]
    new_weights: tuple[float, ...] = ()
    old_weights: tuple[float, ...] = ()

    @property
    def is_binary(self) -> bool:
        """Return whether every score is 0 or 1, and each sample counts the same."""
        return not self.new_weights and {*self.new, *self.old} <= {0.0, 1.0}

    @property
    def changed(self) -> tuple[int, int]:
        """Return how many samples became worse, and how many became better."""
        both = list(zip(self.new, self.old, strict=True))
        return sum(new < old for new, old in both), sum(new > old for new, old in both)


@dataclass(frozen=True)
class DropTest:
    """The drop between two runs, and what the samples show of it.

    Attributes:
        p_breached: chance of as large a drop if the true one were the margin.
        p_held: chance of as small a drop if the true one were the margin.
        low, high: the drop's limits, each with the confidence that was asked for.
        deviation: of one sample's drop.
    """

    drop: float
    p_breached: float
    p_held: float
    low: float
    high: float
    count: int
    deviation: float


def check_drop(pairs: Pairs, margin: float, *, confidence: float, bounded: bool = True) -> DropTest:
    """Test a drop against a margin, 0 or more; `bounded` scores lie between 0 and 1."""
    if pairs.is_binary:
        return _check_binary(pairs, margin, 1 - confidence)
    return _check_mean(pairs, margin, 1 - confidence, bounded=bounded)


def samples_needed(test: DropTest, margin: float, *, alpha: float, bounded: bool) -> int | None:
    """Return how many samples would decide with the power `POWER`, at the drop that was seen.

    None where no number would: the drop equals the margin.
    """
    distance = abs(margin - test.drop)
    if distance < _TIE:
        return None
    both = _NORMAL.inv_cdf(1 - alpha) + _NORMAL.inv_cdf(POWER)
    found = (both * test.deviation / distance) ** 2
    if bounded and max(0.0, test.drop) < margin < 1:  # what did not change so far may, rarely
        found = max(found, math.log(alpha) / math.log1p(-margin))
    return max(test.count + 1, math.ceil(found)) if found < 1e9 else None


def smallest_drop(
    count: int, deviation: float, margin: float, *, alpha: float, binary: bool
) -> float | None:
    """Return the smallest drop that is found to exceed `margin` in `POWER` of all runs.

    `deviation` is that of one sample's drop where nothing is wrong. None where even the loss of
    every answer would be missed.
    """
    if not binary:
        if count < 2:
            return None
        both = _t_quantile(1 - alpha, count - 1) + _NORMAL.inv_cdf(POWER)
        return margin + both * deviation / math.sqrt(count)
    from inference.evaluation.exact_tests import power

    caught = partial(power, count, margin, alpha, deviation**2)
    if margin >= 1 or caught(1.0) < POWER:
        return None
    return _root(lambda drop: caught(drop) - POWER, margin, 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (S. Holm, Scand. J. of Statistics 6, 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _check_binary(pairs: Pairs, margin: float, alpha: float) -> DropTest:
    from inference.evaluation.exact_tests import exact_p_values, signed_score

    (losses, gains), count = pairs.changed, len(pairs.new)
    drop = (losses - gains) / count
    breached, held = exact_p_values(losses, gains, count, margin)
    far = _NORMAL.inv_cdf(1 - alpha)
    # Tango's limits, on the side of the margin on which the exact test is.
    low = _root(lambda tried: far - signed_score(losses, gains, count, tried), -1.0, drop)
    high = _root(lambda tried: -far - signed_score(losses, gains, count, tried), drop, 1.0)
    return DropTest(
        drop=drop,
        p_breached=breached,
        p_held=held,
        low=max(low, margin) if breached <= alpha else min(low, margin),
        high=min(high, margin) if held <= alpha else max(high, margin),
        count=count,
        deviation=math.sqrt(max(0.0, (losses + gains) / count - drop * drop)),
    )


def _check_mean(pairs: Pairs, margin: float, alpha: float, *, bounded: bool) -> DropTest:
    import numpy as np

    new, old = (np.asarray(each, np.float64) for each in (pairs.new, pairs.old))
    ones = np.ones(len(new))
    heavy = np.asarray(pairs.new_weights or ones, np.float64)
    before = np.asarray(pairs.old_weights or ones, np.float64)
    ratio_new, ratio_old = new.sum() / heavy.sum(), old.sum() / before.sum()
    drop = float(ratio_old - ratio_new)
    # Each sample's influence on the drop; of plain means, its own difference less the drop.
    influence = (old - ratio_old * before) / before.mean() - (
        new - ratio_new * heavy
    ) / heavy.mean()
    count = len(influence)
    deviation = float(influence.std(ddof=1)) if count > 1 else math.inf
    error = deviation / math.sqrt(count)
    resampled = _bootstrap(new, heavy, old, before)

    t = (drop - margin) / error if error else math.copysign(math.inf, drop - margin)
    t = 0.0 if drop == margin else t
    draws = len(resampled) + 1
    breached = max(_t_tail(t, count - 1), (1 + int((resampled <= margin).sum())) / draws)
    held = max(_t_tail(-t, count - 1), (1 + int((resampled >= margin).sum())) / draws)
    if bounded and 0 < margin < 1:  # the loss of rare samples may not have been drawn
        held = max(held, (1 - margin) ** count)
    spread = _t_quantile(1 - alpha, count - 1) * error if count > 1 else math.inf
    low, high = np.quantile(resampled, [alpha, 1 - alpha])
    return DropTest(
        drop=drop,
        p_breached=min(1.0, breached),
        p_held=min(1.0, held),
        low=min(float(low), drop - spread),
        high=max(float(high), drop + spread),
        count=count,
        deviation=deviation,
    )


def _bootstrap(new: Floats, new_weights: Floats, old: Floats, old_weights: Floats) -> Floats:
    """Return the drop (R,) of samples drawn anew, always the same ones."""
    import numpy as np

    random = np.random.default_rng(0)
    count = len(new)
    columns = np.stack([new, new_weights, old, old_weights])  # (4, N)
    found: list[Any] = []
    rows = max(1, _CHUNK_VALUES // count)
    for start in range(0, _RESAMPLES, rows):
        drawn = random.integers(0, count, (min(rows, _RESAMPLES - start), count))
        sums = [column[drawn].sum(axis=1) for column in columns]
        found.append(sums[2] / sums[3] - sums[0] / sums[1])
    return np.concatenate(found)


def _t_tail(t: float, freedom: int) -> float:
    """Return the chance of more than `t` in Student's distribution.

    By its normal equivalent (D. L. Wallace, Annals of Mathematical Statistics 30, 1959), within
    0.001 from three degrees of freedom on.
    """
    if freedom < 1 or t == 0:
        return 0.5
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    ratio = (8 * freedom + 1) / (8 * freedom + 3)
    normal = ratio * math.sqrt(freedom * math.log1p(t * t / freedom))
    return 1 - _NORMAL.cdf(math.copysign(normal, t))


def _t_quantile(share: float, freedom: int) -> float:
    """Return the value that `share` (above one half) of Student's distribution stays below."""
    normal = _NORMAL.inv_cdf(share) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(normal * normal / freedom))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function that grows crosses zero."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return high
