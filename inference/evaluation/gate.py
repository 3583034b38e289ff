"""Bounds on metrics: what a release must reach, absolutely or against a stored baseline.

Exit codes: 0 every bound holds, 3 a bound is breached, 5 none is, but the samples cannot show that
all hold; anything else means that the evaluation itself could not be done.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from inference.evaluation.bounds import CHANGE, PairedBound, sentences_of
from inference.evaluation.options import Bound, Bounds
from inference.evaluation.paired_tests import (
    Pairs,
    check_drop,
    holm,
    smallest_drop,
    unseen_share,
)
from inference.evaluation.statistics import growth
from inference.evaluation.task import Metric

EXIT_PASS = 0
EXIT_GATE_BREACHED = 3
EXIT_NOT_EVALUATED = 4
EXIT_INSUFFICIENT = 5
HELD, BREACHED, INSUFFICIENT = "held", "breached", "insufficient"
CRITICAL, ADVISORY = "critical", "advisory"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one bound.

    Attributes:
        bound: in words, such as `min 0.13`, or its sentence.
        status: held, breached, or insufficient: the samples show neither.
        tier: an advisory bound does not decide the exit status.
        limit: the number of an absolute bound.
        baseline: the baseline's value for a relative bound.
        drop, low, high: how much worse than the baseline the paired samples are, and its limits,
            each at the bound's confidence; of a perplexity, of its logarithm.
        p_value: chance of a drop like this if the bound held; of several bounds, Holm's.
        samples: pairs that were compared.
        needed: samples that would decide, where they are insufficient; None where none would.
        unseen: where they are insufficient, the share of samples that could be hurt without one of
            them being among those compared.
        smallest: the smallest drop that 80 % of runs would catch, as `drop` is given.
        note: what the bound cannot show.
    """

    metric: str
    value: float
    bound: str
    status: str
    tier: str = CRITICAL
    unit: str = "fraction"
    higher_is_better: bool = True
    limit: float | None = None
    baseline: float | None = None
    drop: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    samples: int | None = None
    needed: int | None = None
    unseen: float | None = None
    smallest: float | None = None
    note: str = ""

    @property
    def text(self) -> str:
        """The drop with its limits, or the value, and what follows from it."""
        parts = [self._drop_text if self.drop is not None else f"{self.value:.6g}"]
        if self.status == INSUFFICIENT and self.needed is None:
            parts.append("no number of samples would decide, allow more")
        elif self.status == INSUFFICIENT:
            parts.append(f"{self.needed:,} samples would decide")
        if self.unseen is not None:
            parts.append(f"up to {100 * self.unseen:.2g} % of all samples could be hurt unseen")
        if self.smallest is not None:
            parts.append(f"80 % of runs catch {amount_text(self.smallest, self.unit)}")
        return "; ".join(part for part in (*parts, self.note) if part)

    def __str__(self) -> str:
        verb = {HELD: "holds", BREACHED: "breaches"}.get(self.status, "is insufficient for")
        tier = " (advisory)" * (self.tier == ADVISORY)
        text = f"{self.metric} = {self.value:.6g} {verb} {self.bound}{tier}"
        if self.drop is not None:
            return f"{text}: {self.text}"
        return "; ".join(part for part in (text, self.note) if part)

    @property
    def _drop_text(self) -> str:
        found = (self.drop, self.low, self.high)
        drop, low, high = (amount_text(each or 0.0, self.unit) for each in found)
        limits = {HELD: f"at most {high}", BREACHED: f"at least {low}"}
        word = "drop" if self.higher_is_better else "rise"
        within = limits.get(self.status, f"between {low} and {high}")
        return f"{word} {drop}, {within}, over {self.samples:,} samples"


def amount_text(drop: float, unit: str) -> str:
    """Return a drop as people read it: points of a fraction, percent of a perplexity."""
    if unit == "fraction":
        return f"{100 * drop:.3g} points"
    return f"{100 * growth(drop):.3g} %" if unit == "perplexity" else f"{drop:.4g}"


@dataclass(frozen=True)
class GateResult:
    """The gate's result: one verdict a bound."""

    verdicts: tuple[Verdict, ...] = ()

    def of(self, status: str) -> tuple[Verdict, ...]:
        """Return the verdicts of one status."""
        return tuple(each for each in self.verdicts if each.status == status)

    @property
    def deciding(self) -> tuple[Verdict, ...]:
        """The critical verdicts for which it does not pass: breaches, or else insufficient ones."""
        critical = GateResult(tuple(each for each in self.verdicts if each.tier == CRITICAL))
        return critical.of(BREACHED) or critical.of(INSUFFICIENT)

    @property
    def passed(self) -> bool:
        """Return whether every critical bound holds (also when there are none)."""
        return not self.deciding

    @property
    def exit_code(self) -> int:
        """The exit code of a command that trusts this gate."""
        if self.passed:
            return EXIT_PASS
        return EXIT_GATE_BREACHED if self.deciding[0].status == BREACHED else EXIT_INSUFFICIENT


@dataclass(frozen=True)
class Measured:
    """A metric of this run, and what it is judged by.

    Attributes:
        baseline, pairs: the baseline's, and the samples of both; they are there where a bound asks
            for them (Baseline.problems and check).
        moved: how far it depends on the server's load, which may count for or against it.
        tier: whether its bounds decide.
    """

    metric: Metric
    baseline: Metric | None = None
    pairs: Pairs | None = None
    moved: float = 0.0
    tier: str = CRITICAL

    def verdict(self, bound: str, status: str, **others: Any) -> Verdict:
        """Return the outcome of a bound."""
        return Verdict(
            self.metric.name,
            self.metric.value,
            bound,
            status,
            tier=self.tier,
            unit=self.metric.unit,
            higher_is_better=self.metric.higher_is_better,
            **others,
        )


def apply_gate(measured: Iterable[Measured], bounds: Bounds) -> GateResult:
    """Compare metrics with their bounds.

    Raises:
        ValueError: a bound names a metric that was not measured.
    """
    return apply_gates([measured], bounds)[0]


def apply_gates(runs: Sequence[Iterable[Measured]], bounds: Bounds) -> list[GateResult]:
    """Compare the metrics of several runs with the same bounds, all of which are tested together.

    Raises:
        ValueError: a bound names a metric that a run did not measure.
    """
    sentences = [each for bound in bounds.values() for each in sentences_of(bound)]
    tested = len(runs) * sum(each.word != CHANGE for each in sentences)
    found: list[list[Verdict]] = []
    for measured in runs:
        by_name = {each.metric.name: each for each in measured}
        if missing := [name for name in bounds if name not in by_name]:
            known = ", ".join(by_name) or "none"
            raise ValueError(
                f"evaluate.gate.{missing[0]}: this metric was not measured; measured: {known}."
            )
        found.append([])
        for name, bound in bounds.items():
            found[-1] += _absolute(by_name[name], bound)
            found[-1] += (_sentence(by_name[name], each, tested) for each in sentences_of(bound))
    p_values = [each.p_value for own in found for each in own if each.p_value is not None]
    adjusted = iter(holm(p_values))
    return [GateResult(tuple(_decided(each, adjusted) for each in own)) for own in found]


def _absolute(own: Measured, bound: Bound) -> Iterator[Verdict]:
    """Yield the verdicts of the absolute bounds; NaN breaches each."""
    for word, limit, sign in (("min", bound.min, 1), ("max", bound.max, -1)):
        if limit is not None:
            status = HELD if sign * (own.metric.value - limit) >= 0 else BREACHED
            yield own.verdict(f"{word} {limit:g}", status, limit=limit)


def _sentence(own: Measured, bound: PairedBound, tested: int) -> Verdict:
    """Return the verdict of one sentence, of which `tested` are tested together."""
    assert own.baseline is not None, "checked by Baseline.problems"
    margin, before = bound.margin(own.baseline), own.baseline.value
    if bound.is_advisory:
        own = replace(own, tier=ADVISORY)
    if bound.word == CHANGE:
        return _unchanged(own, bound, margin, before)
    return _paired(own, bound, margin, tested, before)


def _unchanged(own: Measured, bound: PairedBound, margin: float, before: float) -> Verdict:
    """Return whether the samples changed by no more than `margin` on average, in any direction.

    Nothing is inferred: that is the most by which the metric itself can have moved.
    """
    metric, pairs = own.metric, own.pairs
    if pairs is None:
        change = abs(metric.value - before)
        note = f"changed by {change:.4g} from {before:.6g}, {margin:.4g} is allowed"
    else:
        sizes = abs(pairs.losses())
        change = float(sizes.mean())
        found, allowed = (amount_text(each, metric.unit) for each in (change, margin))
        note = (
            f"{sum(pairs.changed):,} of {len(sizes):,} samples changed, on average by {found} in "
            f"either direction; {allowed} is allowed"
        )
    status = HELD if change <= margin else BREACHED
    if status == BREACHED and change <= margin + own.moved:
        status = INSUFFICIENT
        note += "; the load alone moves it as far"
    return own.verdict(bound.text, status, baseline=before, note=note)


def _paired(
    own: Measured, bound: PairedBound, margin: float, tested: int, before: float
) -> Verdict:
    """Return what the samples show about a sentence, one of those `tested` together.

    Whether it is breached is left to Holm.
    """
    metric, pairs, moved, alpha = own.metric, own.pairs, own.moved, 1 - bound.confidence
    if pairs is None:
        raise ValueError(f"{metric.name}: the samples of both runs are not there to be compared.")
    check = partial(check_drop, pairs, confidence=1 - alpha, bounded=metric.unit == "fraction")
    test = check(margin)
    p_breached, is_held = test.p_breached, test.p_held <= alpha
    if moved:
        p_breached = check(margin + moved).p_breached
        is_held = moved < margin and check(margin - moved).p_held <= alpha
    notes = [f"the load moves it by {amount_text(moved, metric.unit)}"] if moved else []
    better = check_drop(pairs.reversed, 0.0, confidence=1 - alpha)
    if better.low > margin + moved:
        notes.append("better than the bound would let it be worse: check model, data and prompts")
    deviation = test.deviation
    if pairs.is_binary:  # what changed to the worse and to the better alike
        deviation = math.sqrt(2 * min(pairs.changed) / test.count)
    return own.verdict(
        bound.text,
        HELD if is_held else INSUFFICIENT,
        baseline=before,
        drop=test.drop,
        low=test.low,
        high=test.high,
        p_value=p_breached,
        samples=test.count,
        needed=test.needed,
        unseen=unseen_share(test.count, alpha=alpha) if test.drop < margin else None,
        smallest=smallest_drop(
            test.count, deviation, margin + moved, alpha=alpha / tested, binary=pairs.is_binary
        ),
        note="; ".join(notes),
    )


def _decided(verdict: Verdict, adjusted: Iterator[float]) -> Verdict:
    """Return a verdict by its p-value, if it has one, which is the next of those adjusted."""
    if verdict.p_value is not None:
        p_value, level = next(adjusted), 1 - PairedBound.parse(verdict.bound).confidence
        status = BREACHED if p_value <= level else verdict.status
        verdict = replace(verdict, p_value=p_value, status=status)
    if verdict.status != INSUFFICIENT:
        verdict = replace(verdict, needed=None, unseen=None)
    return verdict
