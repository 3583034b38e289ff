"""Metrics over all samples from the quantities of each."""

from __future__ import annotations

from collections.abc import Sequence

from inference.evaluation.statistics import (
    Z_95,
    mean_and_stderr,
    wilson_interval,
)
from inference.evaluation.task import Metric, Score


def accuracy_metric(
    name: str, scores: Sequence[Score], *, key: str, method: str, value: str = "", group: str = ""
) -> Metric:
    """Return the share of samples whose quantity `value` (`name` unless given) is 1."""
    right = [float(score.values[value or name] == 1.0) for score in scores]
    share, stderr = mean_and_stderr(right)
    low, high = wilson_interval(int(sum(right)), len(right))
    return Metric(
        name=name,
        key=key,
        value=share,
        stderr=stderr,
        low=low,
        high=high,
        count=len(scores),
        method=method,
        sample_value=value or name,
        scale="mean",
        group=group,
    )


def mean_metric(
    name: str, scores: Sequence[Score], *, key: str, method: str, value: str = "", group: str = ""
) -> Metric:
    """Return the mean of a quantity between 0 and 1, with the normal interval."""
    mean, stderr = mean_and_stderr([score.values[value or name] for score in scores])
    return Metric(
        name=name,
        key=key,
        value=mean,
        stderr=stderr,
        low=max(0.0, mean - Z_95 * stderr),
        high=min(1.0, mean + Z_95 * stderr),
        count=len(scores),
        method=method,
        sample_value=value or name,
        scale="mean",
        group=group,
    )
