"""Exact tests of answers that are right or wrong in two runs, by tables of losses and gains.

With the margin 0 that is McNemar's test. With another it is the unconditional test ordered by the
score statistic (T. Tango, Statistics in Medicine 17, 1998): the largest tail over the unknown rate
of changed answers, enumerated.
"""

import math
from bisect import bisect_left
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, xlogy
from scipy.stats import binom, norm

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_TIE = 1e-9
_WINDOW = 6.0  # standard deviations of a count that are enumerated; beyond lie 2e-9
_MOST_GAINS = 100.0  # expected gains up to which tails are enumerated; beyond, they are normal


def signed_score(losses: int, gains: int, count: int, margin: float) -> float:
    """Return the score of one table at any margin."""
    if margin < 0:
        return -signed_score(gains, losses, count, -margin)
    return float(_score(np.array([losses]), np.array([gains]), count, margin)[0])


def exact_p_values(losses: int, gains: int, count: int, margin: float) -> tuple[float, float]:
    """Return the exact chances of at least, and of at most, such a drop if it were the margin.

    Where it is 0, a changed answer is a loss half of the time (Q. McNemar, Psychometrika 12, 1947).
    """
    if margin == 0:
        changed = losses + gains
        return float(binom.sf(losses - 1, changed, 0.5)), float(binom.cdf(losses, changed, 0.5))
    if margin >= 1:
        return 1.0, 0.0
    seen = signed_score(losses, gains, count, margin)
    return _tails(seen, count, margin, are_many=gains > _MOST_GAINS)


def _tails(seen: float, count: int, margin: float, *, are_many: bool) -> tuple[float, float]:
    """Return the largest chances of at least, and of at most, a score at a drop of `margin`."""
    above, below = (norm.sf(seen), norm.cdf(seen)) if are_many else (0.0, 0.0)
    for scores, cumulative in _null(count, margin):
        above = max(above, 1 - cumulative[np.searchsorted(scores, seen - _TIE, side="left")])
        below = max(below, cumulative[np.searchsorted(scores, seen + _TIE, side="right")])
    return min(1.0, float(above)), min(1.0, float(below))


def _score(losses: Counts, gains: Counts, count: int, margin: float) -> Floats:
    """Return Tango's statistic of tables: how far the drop is above the margin, in its errors."""
    changed = losses + gains
    linear = changed + margin * (losses - gains) - 2 * count * margin
    root = np.sqrt(linear**2 + 8 * count * gains * margin * (1 - margin))
    rate = (linear + root) / (4 * count)  # of gains, the likeliest at a drop of `margin`
    variance = count * (2 * rate + margin - margin**2)
    found: Floats = (losses - gains - count * margin) / np.sqrt(np.maximum(variance, 1e-300))
    return found


@lru_cache(maxsize=64)
def _null(count: int, margin: float) -> list[tuple[Floats, Floats]]:
    """Return the score's distribution at a drop of `margin`, for each of a range of rates of gains.

    Each is the sorted scores of all tables, and the chance of less than each, then 1.
    """
    most = min((1 - margin) / 2, _MOST_GAINS / count)
    rates = [*np.geomspace(min(0.02 / count, most), most, 25), *np.linspace(0, most, 40)]
    found = []
    for rate in rates:
        losses, gains, chances = _tables(count, rate + margin, rate)
        scores = _score(losses, gains, count, margin)
        order = np.argsort(scores)
        found.append((scores[order], np.concatenate([[0.0], np.cumsum(chances[order])])))
    return found


def _tables(count: int, lost: float, gained: float) -> tuple[Counts, Counts, Floats]:
    """Return the tables of losses and gains that are not too rare, and their chances."""

    def window(rate: float) -> Counts:
        width = _WINDOW * math.sqrt(count * rate * (1 - rate)) + _WINDOW * (rate > 0)
        middle = count * rate
        return np.arange(
            max(0, math.floor(middle - width)), min(count, math.ceil(middle + width)) + 1
        )

    losses, gains = (each.ravel() for each in np.meshgrid(window(lost), window(gained)))
    same = count - losses - gains
    losses, gains, same = losses[same >= 0], gains[same >= 0], same[same >= 0]
    logs = gammaln(count + 1) + sum(
        xlogy(number, max(0.0, rate)) - gammaln(number + 1)
        for number, rate in ((losses, lost), (gains, gained), (same, 1 - lost - gained))
    )
    return losses, gains, np.exp(logs)


@lru_cache(maxsize=64)
def _critical_score(count: int, margin: float, alpha: float) -> float:
    """Return the score from which on a drop is found to exceed the margin."""
    scores = np.unique(np.concatenate([each for each, _ in _null(count, margin)]))
    are_many = _MOST_GAINS / count < (1 - margin) / 2
    tails = partial(_tails, count=count, margin=margin, are_many=are_many)
    first = bisect_left(scores, True, key=lambda seen: tails(seen)[0] <= alpha)
    return float(scores[first]) if first < len(scores) else math.inf


def power(count: int, margin: float, alpha: float, changed: float, drop: float) -> float:
    """Return the share of runs in which a true drop is found to exceed the margin.

    `changed` is the share of answers that change without any drop, as many to the better.
    """
    gained = max(0.0, min(changed / 2, (1 - drop) / 2))
    losses, gains, chances = _tables(count, min(1.0, gained + drop), gained)
    if margin:
        least = _critical_score(count, margin, alpha) - _TIE
        caught = _score(losses, gains, count, margin) >= least
    else:
        # McNemar's test rejects from one more on than what binom.isf gives.
        caught = losses > binom.isf(alpha, losses + gains, 0.5)
    return float(chances[caught].sum())
