"""Paired comparison of the metrics of two runs, sample by sample."""

import math
from collections.abc import Iterable

from inference.evaluation.paired_tests import Pairs, check_drop
from inference.evaluation.record import Comparison
from inference.evaluation.statistics import growth
from inference.evaluation.task import Metric, Prediction, Values

_ONE_SIDED = 0.975  # of each limit of a 95% interval


def pairs_of(metric: Metric, found: Iterable[tuple[Prediction, Values]]) -> Pairs | None:
    """Pair a metric's scores in this run with those in another one.

    `found` are predictions with the other run's values. None unless all have the mean's quantities.
    """
    names = [name for name in (metric.sample_value, metric.weight) if name]
    rows = [(new.values, old) for new, old in found if metric.group in ("", new.group)]
    if (
        not metric.scale
        or not rows
        or any(not set(names) <= each.keys() for row in rows for each in row)
    ):
        return None
    columns = [
        tuple(each[name] for each in run) for name in names for run in zip(*rows, strict=True)
    ]
    if metric.higher_is_better or metric.scale == "exp":
        return Pairs(*columns)
    return Pairs(*(tuple(-each for each in scores) for scores in columns[:2]), *columns[2:])


def compare_metric(metric: Metric, reference: Metric, pairs: Pairs | None) -> Comparison:
    """Compare a metric with another run's; `pairs` are the samples of both, None if unknown."""
    if pairs is None:
        return Comparison(reference.value, metric.value - reference.value)
    worse, better = (
        check_drop(sides, 0.0, confidence=_ONE_SIDED) for sides in (pairs, pairs.reversed)
    )
    difference, *limits = (
        _in_unit(metric, pairs, drop) for drop in (worse.drop, worse.low, -better.low)
    )
    changes = [abs(new - old) for new, old in zip(pairs.new, pairs.old, strict=True)]
    return Comparison(
        reference.value,
        difference,
        min(limits),
        max(limits),
        p_value=min(1.0, 2 * min(worse.p_breached, better.p_breached)),
        same=changes.count(0.0),
        count=len(changes),
        largest_change=max(changes),
    )


def _in_unit(metric: Metric, pairs: Pairs, drop: float) -> float:
    """Convert a drop to the difference between two runs, in the metric's unit."""
    if metric.scale == "exp":
        tokens = math.fsum(pairs.old_weights) or len(pairs.old)
        return (growth(-math.fsum(pairs.old) / tokens) + 1) * growth(drop) if drop else 0.0
    return -drop if metric.higher_is_better else drop
