"""Tests of a drop between two runs over the same samples, and their power.

A positive drop is worse. Two hypotheses are tested against a margin: that the drop is at most the
margin (rejected: breached), and that it is at least the margin (rejected: held).

Scores of 0 and 1 are tested by McNemar's exact test at the margin 0, and at other margins by the
score test of T. Tango (Statistics in Medicine 17, 1998) with a continuity correction, bounded by
the binomial tails of lost samples alone. For other scores, a breach is tested by Student's t on
each sample's influence on the metric. This test cannot show "held": samples that get much worse but
are rare may be missing from the data, and without a limit on the loss of one sample no test of a
mean keeps its level (R. R. Bahadur, L. J. Savage, Annals of Mathematical Statistics 27, 1956).
Losses are therefore limited, and "held" is tested by betting (I. Waudby-Smith, A. Ramdas, Journal
of the Royal Statistical Society B 86, 2024, section 4): if the drop is the margin or more, a player
who bets on smaller losses does not gain on average, whatever the distribution; multiplying the
stake by 20 shows at 95 % that the drop is smaller.
"""

# Shapes: N samples, B bets

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Counts = int | npt.NDArray[np.int64]

POWER = 0.8  # share of runs that detect the smallest detectable drop
# The largest loss of one sample: of a score between 0 and 1; and of log probabilities, in nats for
# each token of an average sample. Guessing a token among 22,000 costs 10 nats.
MAX_LOSS, MAX_LOSS_NATS = 1.0, 10.0
# Bets as shares of the largest bet, which only a maximal loss can ruin, and the stake on each. The
# first bet is best if no score changes, the others if scores move in both directions.
_BETS = tuple(0.5**power for power in range(8))
_STAKES = (0.75, *(0.25 / 7,) * 7)
_NORMAL = NormalDist()
_TIE = 1e-9
_STEPS = 24  # of a bisection
_RUNS = 4000  # simulated to find the power of a test
# Continuity corrections of the score test, in samples. Smaller ones, summed over all tables, give
# false verdicts too often.
_BREACH_CORRECTION, _HOLD_CORRECTION = 0.8, 1.0


@dataclass(frozen=True)
class Pairs:
    """The scores of the same samples in two runs.

    Attributes:
        new, old: the score of each sample, higher is better.
        new_weights, old_weights: its weight in the metric, such as a text's number of tokens; empty
            for equal weights.
    """

    new: tuple[float, ...]
    old: tuple[float, ...]
    new_weights: tuple[float, ...] = ()
    old_weights: tuple[float, ...] = ()

    @property
    def is_binary(self) -> bool:
        """Return whether every score is 0 or 1, and all samples have the same weight."""
        return not self.new_weights and {*self.new, *self.old} <= {0.0, 1.0}

    @property
    def changed(self) -> tuple[int, int]:
        """Return the number of samples that became worse, and of those that became better."""
        both = list(zip(self.new, self.old, strict=True))
        return sum(new < old for new, old in both), sum(new > old for new, old in both)

    @property
    def reversed(self) -> Pairs:
        """The same pairs with the two runs exchanged."""
        return Pairs(self.old, self.new, self.old_weights, self.new_weights)

    def losses(self, margin: float = 0.0) -> Floats:
        """Return each sample's loss (N,) on the scale of the metric, less its share of the margin.

        The mean of the losses is the amount by which the drop exceeds the margin.
        """
        import numpy as np

        new, old = (np.asarray(scores, np.float64) for scores in (self.new, self.old))
        ones = np.ones(len(new))
        after = np.asarray(self.new_weights or ones, np.float64)
        before = np.asarray(self.old_weights or ones, np.float64)
        ratio = old.sum() / before.sum()
        expected = (old - ratio * before) / before.mean()
        found: Floats = expected - (new - (ratio - margin) * after) / after.mean()
        return found


@dataclass(frozen=True)
class DropTest:
    """The drop between two runs, and the tests of it.

    Attributes:
        p_breached: probability of so large a drop if the true drop were the margin.
        p_held: probability of so small a drop if the true drop were the margin.
        low, high: the limits of the drop, each at the requested confidence.
        count: number of samples.
        deviation: standard deviation of one sample's drop.
        needed: number of samples that would decide with power `POWER` if the true drop were this
            one; None if no number would, because the drop equals the margin.
    """

    drop: float
    p_breached: float
    p_held: float
    low: float
    high: float
    count: int
    deviation: float
    needed: int | None = None


def check_drop(pairs: Pairs, margin: float, *, confidence: float, bounded: bool = True) -> DropTest:
    """Test a drop against a margin of at least 0; `bounded` scores lie between 0 and 1."""
    alpha = 1 - confidence
    if pairs.is_binary:
        test, needed = _check_binary(pairs, margin, alpha)
    else:
        test, needed = _check_mean(pairs, margin, alpha, MAX_LOSS if bounded else MAX_LOSS_NATS)
    if abs(margin - test.drop) < _TIE:
        return test
    if margin < test.drop:
        needed = _samples_by_error(test, margin, alpha)
    return replace(test, needed=max(test.count + 1, math.ceil(needed)) if needed < 1e9 else None)


def unseen_share(count: int, *, alpha: float) -> float:
    """Return the largest share of a population of which `count` samples may show no member.

    This is the exact upper limit of a share with no observation (C. J. Clopper, E. S. Pearson,
    Biometrika 26, 1934).
    """
    return 1 - float(alpha ** (1 / count))


def _samples_by_error(test: DropTest, margin: float, alpha: float) -> float:
    """Return the number of samples that decide, from the standard error of the drop alone."""
    quantiles = _NORMAL.inv_cdf(1 - alpha) + _NORMAL.inv_cdf(POWER)
    return float((quantiles * test.deviation / (margin - test.drop)) ** 2)


def smallest_drop(
    count: int, deviation: float, margin: float, *, alpha: float, binary: bool
) -> float | None:
    """Return the smallest drop that is found to exceed `margin` in a share `POWER` of all runs.

    `deviation` is the standard deviation of one sample's drop between equal models. None if even
    the loss of every answer would be missed.
    """
    if not binary:
        if count < 2:
            return None
        from scipy.special import stdtrit

        quantiles = float(stdtrit(count - 1, 1 - alpha)) + _NORMAL.inv_cdf(POWER)
        return margin + quantiles * deviation / math.sqrt(count)
    import numpy as np

    def excess_power(drop: float) -> float:
        """Return the power at a true drop, less the required one."""
        gained = min(deviation**2 / 2, (1 - drop) / 2)
        shares = (gained + drop, gained, max(0.0, 1 - 2 * gained - drop))
        losses, gains, _ = np.random.default_rng(0).multinomial(count, shares, _RUNS).T
        return float(np.mean(_tails(losses, gains, count, margin)[0] <= alpha)) - POWER

    return _root(excess_power, margin, 1.0) if margin < 1 and excess_power(1.0) >= 0 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (S. Holm, Scand. J. of Statistics 6, 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [*p_values], 0.0
    for rank, place in enumerate(order):
        largest = max(largest, p_values[place] * (len(order) - rank))
        adjusted[place] = min(1.0, largest)
    return adjusted


def _tails(losses: Counts, gains: Counts, count: int, margin: float) -> tuple[Any, Any]:
    """Return the probabilities of at least and of at most this drop if the true one is the margin.

    At the margin 0, a changed answer is a loss with probability 0.5 (Q. McNemar, Psychometrika 12,
    1947).
    """
    import numpy as np
    from scipy.special import bdtr, bdtrc, ndtr

    if margin < 0:
        return _tails(gains, losses, count, -margin)[::-1]
    if margin == 0:
        changed = losses + gains
        return bdtrc(losses - 1, changed, 0.5), bdtr(losses, changed, 0.5)
    if margin >= 1:
        return 1.0, 0.0
    linear = losses + gains + margin * (losses - gains) - 2 * count * margin
    root = np.sqrt(linear**2 + 8 * count * gains * margin * (1 - margin))
    rate = (linear + root) / (4 * count)  # maximum likelihood of gains at a drop of `margin`
    error = np.sqrt(count * (2 * rate + margin - margin**2))
    far = losses - gains - count * margin
    above = np.maximum(
        ndtr((_BREACH_CORRECTION - far) / error), bdtrc(losses - gains - 1, count, margin)
    )
    below = np.minimum(ndtr((far + _HOLD_CORRECTION) / error), bdtr(losses, count, margin))
    return above, below


def _check_binary(pairs: Pairs, margin: float, alpha: float) -> tuple[DropTest, float]:
    """Test scores of 0 and 1; also return the number of samples that would show "held"."""
    (losses, gains), count = pairs.changed, len(pairs.new)
    drop, tails = (losses - gains) / count, partial(_tails, losses, gains, count)
    breached, held = map(float, tails(margin))
    low = _root(lambda bound: tails(bound)[0] - alpha, -1.0, drop)
    high = _root(lambda bound: alpha - tails(bound)[1], drop, 1.0)
    test = DropTest(
        drop,
        breached,
        held,
        low=max(low, margin) if breached <= alpha else min(low, margin),
        high=min(high, margin) if held <= alpha else max(high, margin),
        count=count,
        deviation=math.sqrt(max(0.0, (losses + gains) / count - drop * drop)),
    )
    if not drop < margin < 1:
        return test, 0.0
    # Rare losses may not have been observed yet.
    rare = math.log(alpha) / math.log1p(-margin) if margin > 0 else 0.0
    return test, max(rare, _samples_by_error(test, margin, alpha))


def _check_mean(pairs: Pairs, margin: float, alpha: float, most: float) -> tuple[DropTest, float]:
    """Test a mean of samples that lose at most `most`; also return the samples that show "held"."""
    from scipy.special import stdtr, stdtrit  # importing scipy.stats takes a second

    count, drop = len(pairs.new), float(pairs.losses().mean())
    influence = pairs.losses(drop)  # of each sample on the drop; to first order for a ratio
    deviation = float(influence.std(ddof=1)) if count > 1 else math.inf
    error = deviation / math.sqrt(count)
    far = (drop - margin) / error if error else math.copysign(math.inf, drop - margin)
    is_unknown = count == 1 or drop == margin
    spread = float(stdtrit(count - 1, 1 - alpha)) * error if count > 1 else math.inf
    held, to_hold = _bet(pairs, margin, most, alpha)
    test = DropTest(
        drop,
        0.5 if is_unknown else float(stdtr(count - 1, -far)),
        held,
        low=drop - spread,
        high=_root(lambda bound: alpha - _bet(pairs, bound, most, alpha)[0], drop, max(most, drop)),
        count=count,
        deviation=deviation,
    )
    return test, to_hold


def _bet(pairs: Pairs, margin: float, most: float, alpha: float) -> tuple[float, float]:
    """Return the p-value of a drop of `margin` or more, and the number of samples that reject it.

    The p-value is 1 over the factor by which the bets have multiplied the stake (J. Ville, 1939).
    """
    import numpy as np

    if margin >= most:
        return 0.0, 0.0
    losses = pairs.losses(margin)
    # A larger loss than the limit refutes the limit: the bets become smaller in proportion.
    largest = max(most - margin, float(losses.max()))
    with np.errstate(divide="ignore", invalid="ignore"):  # a ruined bet
        gains = np.log1p(np.outer(_BETS, -losses / largest))  # (B, N)
        stakes = np.log(_STAKES)
        total = float(np.logaddexp.reduce(stakes + gains.sum(axis=1)))
        growth = gains.mean(axis=1)
        # The smallest n for which n growths, less their error at the required power, suffice.
        spread = _NORMAL.inv_cdf(POWER) * gains.std(axis=1)
        root = spread + np.sqrt(spread**2 - 4 * growth * (math.log(alpha) + stakes))
        needed = np.where(growth > 0, (root / (2 * growth)) ** 2, math.inf)
    return min(1.0, math.exp(-max(total, -700.0))), float(needed.min())


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of an increasing function."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return high
