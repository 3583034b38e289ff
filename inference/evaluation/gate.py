"""Apply bounds to metrics: absolute limits, and limits relative to a stored baseline.

Exit codes: 0 every bound holds, 3 a bound is breached, 5 no bound is breached but the samples do
not show that all hold; any other means that the evaluation itself failed.
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
        bound: the limit in words, such as `min 0.13`, or the sentence.
        status: held, breached, or insufficient if the samples show neither.
        tier: critical, or advisory, which does not affect the exit status.
        limit: the number of an absolute bound.
        baseline: the baseline's value for a relative bound.
        drop, low, high: how much worse than the baseline the paired samples are, and the limits of
            that, each at the bound's confidence; for a perplexity, of its logarithm.
        p_value: probability of such a drop if the bound held; Holm's if there are several bounds.
        samples: number of compared pairs.
        needed: number of samples that would decide; None if no number would, or if it is decided.
        unseen: if insufficient, the largest share of samples that could be worse without one of
            them being in the comparison.
        smallest: the smallest drop that 80 % of runs would detect, on the scale of `drop`.
        note: limitations of the verdict.
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
        """The drop with its limits, or the value, and what more samples could show."""
        parts = [self._drop_text if self.drop is not None else f"{self.value:.6g}"]
        if self.status == INSUFFICIENT and self.needed is None:
            parts.append("no number of samples would decide, allow more")
        elif self.status == INSUFFICIENT:
            parts.append(f"{self.needed:,} samples would decide")
        if self.unseen is not None:
            parts.append(f"up to {100 * self.unseen:.2g} % of all samples could be hurt unseen")
        if self.smallest is not None:
            parts.append(f"80 % of runs catch {amount_text(self.smallest, self.unit)}")
        return "; ".join(filter(None, (*parts, self.note)))

    def __str__(self) -> str:
        verb = {HELD: "holds", BREACHED: "breaches"}.get(self.status, "is insufficient for")
        tier = " (advisory)" * (self.tier == ADVISORY)
        text = f"{self.metric} = {self.value:.6g} {verb} {self.bound}{tier}"
        if self.drop is not None:
            return f"{text}: {self.text}"
        return "; ".join(filter(None, (text, self.note)))

    @property
    def _drop_text(self) -> str:
        amounts = (self.drop, self.low, self.high)
        drop, low, high = (amount_text(amount or 0.0, self.unit) for amount in amounts)
        limits = {HELD: f"at most {high}", BREACHED: f"at least {low}"}
        word = "drop" if self.higher_is_better else "rise"
        within = limits.get(self.status, f"between {low} and {high}")
        return f"{word} {drop}, {within}, over {self.samples:,} samples"


def amount_text(drop: float, unit: str) -> str:
    """Format a drop: in points for a fraction, in percent for a perplexity."""
    if unit == "fraction":
        return f"{100 * drop:.3g} points"
    return f"{100 * growth(drop):.3g} %" if unit == "perplexity" else f"{drop:.4g}"


@dataclass(frozen=True)
class GateResult:
    """The result of a gate: one verdict for each bound."""

    verdicts: tuple[Verdict, ...] = ()

    def of(self, status: str) -> tuple[Verdict, ...]:
        """Return the verdicts that have a status."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == status)

    @property
    def deciding(self) -> tuple[Verdict, ...]:
        """The critical verdicts that fail the gate: breaches, or else insufficient ones."""
        critical = GateResult(tuple(each for each in self.verdicts if each.tier == CRITICAL))
        return critical.of(BREACHED) or critical.of(INSUFFICIENT)

    @property
    def passed(self) -> bool:
        """Return whether every critical bound holds; true without any."""
        return not self.deciding

    @property
    def exit_code(self) -> int:
        """The exit code of a command with this gate."""
        if self.passed:
            return EXIT_PASS
        return EXIT_GATE_BREACHED if self.deciding[0].status == BREACHED else EXIT_INSUFFICIENT


@dataclass(frozen=True)
class Measured:
    """A metric of this run, and the data to which its bounds apply.

    Attributes:
        baseline: the baseline's metric; required by a relative bound (`Baseline.problems`).
        pairs: the samples of both; required by a sentence about a drop or rise.
        load_effect: how far the server's load may move the metric, in either direction.
        tier: critical or advisory.
    """

    metric: Metric
    baseline: Metric | None = None
    pairs: Pairs | None = None
    load_effect: float = 0.0
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
    """Apply bounds to the metrics of a run.

    Raises:
        ValueError: a bound names a metric that was not measured.
    """
    return apply_gates([measured], bounds)[0]


def apply_gates(runs: Sequence[Iterable[Measured]], bounds: Bounds) -> list[GateResult]:
    """Apply bounds to the metrics of several runs, with one correction for all tests (Holm).

    Raises:
        ValueError: a bound names a metric that a run did not measure.
    """
    sentences = [sentence for bound in bounds.values() for sentence in sentences_of(bound)]
    tested = len(runs) * sum(sentence.word != CHANGE for sentence in sentences)
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
    p_values = [each.p_value for run in found for each in run if each.p_value is not None]
    adjusted = iter(holm(p_values))
    return [GateResult(tuple(_decided(each, adjusted) for each in run)) for run in found]


def _absolute(measured: Measured, bound: Bound) -> Iterator[Verdict]:
    """Yield the verdicts of the absolute limits; NaN breaches each."""
    for word, limit, sign in (("min", bound.min, 1), ("max", bound.max, -1)):
        if limit is not None:
            status = HELD if sign * (measured.metric.value - limit) >= 0 else BREACHED
            yield measured.verdict(f"{word} {limit:g}", status, limit=limit)


def _sentence(measured: Measured, bound: PairedBound, tested: int) -> Verdict:
    """Return the verdict of a sentence, one of `tested` that are tested together."""
    assert measured.baseline is not None, "checked by Baseline.problems"
    margin, before = bound.margin(measured.baseline), measured.baseline.value
    if bound.is_advisory:
        measured = replace(measured, tier=ADVISORY)
    if bound.word == CHANGE:
        return _unchanged(measured, bound, margin, before)
    return _paired(measured, bound, margin, tested, before)


def _unchanged(measured: Measured, bound: PairedBound, margin: float, before: float) -> Verdict:
    """Check that the samples changed by at most `margin` on average, in either direction.

    This is an observation, not an inference: the metric itself cannot have moved further.
    """
    metric, pairs = measured.metric, measured.pairs
    if pairs is None:
        change = abs(metric.value - before)
        note = f"changed by {change:.4g} from {before:.6g}, {margin:.4g} is allowed"
    else:
        sizes = abs(pairs.losses())
        change = float(sizes.mean())
        average, allowed = (amount_text(amount, metric.unit) for amount in (change, margin))
        note = (
            f"{sum(pairs.changed):,} of {len(sizes):,} samples changed, on average by {average} in "
            f"either direction; {allowed} is allowed"
        )
    status = HELD if change <= margin else BREACHED
    if status == BREACHED and change <= margin + measured.load_effect:
        status = INSUFFICIENT
        note += "; the load alone moves it as far"
    return measured.verdict(bound.text, status, baseline=before, note=note)


def _paired(
    measured: Measured, bound: PairedBound, margin: float, tested: int, before: float
) -> Verdict:
    """Test a sentence, one of `tested` together; `_decided` turns it into a breach, if it is one.

    Raises:
        ValueError: the samples of a run are missing.
    """
    metric, pairs, load_effect = measured.metric, measured.pairs, measured.load_effect
    alpha = 1 - bound.confidence
    if pairs is None:
        raise ValueError(f"{metric.name}: the samples of both runs are needed, and one has none.")
    check = partial(check_drop, pairs, confidence=1 - alpha, bounded=metric.unit == "fraction")
    test = check(margin)
    p_breached, is_held = test.p_breached, test.p_held <= alpha
    if load_effect:
        p_breached = check(margin + load_effect).p_breached
        is_held = load_effect < margin and check(margin - load_effect).p_held <= alpha
    notes = [f"the load moves it by {amount_text(load_effect, metric.unit)}"] if load_effect else []
    better = check_drop(pairs.reversed, 0.0, confidence=1 - alpha)
    if better.low > margin + load_effect:
        notes.append("better than the bound would let it be worse: check model, data and prompts")
    deviation = test.deviation
    if pairs.is_binary:  # the changes that cancel: as many for the worse as for the better
        deviation = math.sqrt(2 * min(pairs.changed) / test.count)
    return measured.verdict(
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
            test.count,
            deviation,
            margin + load_effect,
            alpha=alpha / tested,
            binary=pairs.is_binary,
        ),
        note="; ".join(notes),
    )


def _decided(verdict: Verdict, adjusted: Iterator[float]) -> Verdict:
    """Return a verdict with the next adjusted p-value, if it has one, and the status of that."""
    if verdict.p_value is not None:
        p_value, level = next(adjusted), 1 - PairedBound.parse(verdict.bound).confidence
        status = BREACHED if p_value <= level else verdict.status
        verdict = replace(verdict, p_value=p_value, status=status)
    if verdict.status != INSUFFICIENT:
        verdict = replace(verdict, needed=None, unseen=None)
    return verdict
