"""Metrics over all samples from the quantities of each."""

from __future__ import annotations

from collections.abc import Sequence

from inference.evaluation.statistics import (
    Z_95,
    mean_and_stderr,
    wilson_interval,
)
from inference.evaluation.task import Metric, Score


def mean_metric(
    name: str,
    scores: Sequence[Score],
    *,
    key: str,
    method: str,
    value: str = "",
    group: str = "",
    is_share: bool = True,
) -> Metric:
    """Return the mean of the quantity `value` (`name` unless given), which lies between 0 and 1.

    The interval is Wilson's of a share, whose samples score 0 or 1, and otherwise the normal one.
    """
    values = [score.values[value or name] for score in scores]
    mean, stderr = mean_and_stderr(values)
    low, high = max(0.0, mean - Z_95 * stderr), min(1.0, mean + Z_95 * stderr)
    if is_share:
        low, high = wilson_interval(int(sum(values)), len(values))
    return Metric(
        name=name,
        key=key,
        value=mean,
        stderr=stderr,
        low=low,
        high=high,
        count=len(scores),
        method=method,
        sample_value=value or name,
        scale="mean",
        group=group,
    )
