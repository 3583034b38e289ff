"""Paired comparison: one metric of two runs, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from inference.evaluation.paired_tests import mcnemar
from inference.evaluation.record import Comparison, Prediction
from inference.evaluation.statistics import Z_95, mean_and_stderr
from inference.evaluation.task import Metric

_MAX_SHOWN = 50


def values_by_sample(predictions: Iterable[Prediction]) -> dict[str, dict[int, float]]:
    """Return each per-sample quantity as values by sample index."""
    columns: dict[str, dict[int, float]] = {}
    for prediction in predictions:
        for name, value in prediction.values.items():
            columns.setdefault(name, {})[prediction.index] = value
    return columns


def compare_metric(
    metric: Metric,
    reference_value: float,
    predictions: Sequence[Prediction],
    column: Mapping[int, float],
) -> Comparison:
    """Compare one metric with a value, and its samples with a column of values by sample index."""
    difference = metric.value - reference_value
    pairs = [
        (each.index, each.values[metric.sample_value], float(column[each.index]))
        for each in predictions
        if each.index in column
    ]
    if not pairs:
        return Comparison(metric.name, metric.value, reference_value, difference)
    differences = [ours - theirs for _, ours, theirs in pairs]
    largest = max(abs(each) for each in differences)
    if metric.unit != "fraction":
        return Comparison(
            metric.name, metric.value, reference_value, difference, largest_difference=largest
        )
    disagreeing = [index for index, ours, theirs in pairs if ours != theirs]
    mean, stderr = mean_and_stderr(differences)
    gains = sum(math.isclose(each, 1.0) for each in differences)
    losses = sum(math.isclose(each, -1.0) for each in differences)
    return Comparison(
        metric=metric.name,
        value=metric.value,
        reference=reference_value,
        difference=difference,
        low=mean - Z_95 * stderr,
        high=mean + Z_95 * stderr,
        agreeing=len(pairs) - len(disagreeing),
        disagreeing=len(disagreeing),
        p_value=min(1.0, 2 * min(mcnemar(losses, gains))),
        first_disagreements=tuple(disagreeing[:_MAX_SHOWN]),
        largest_difference=largest,
    )
