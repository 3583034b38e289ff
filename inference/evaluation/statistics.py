"""Intervals and standard errors, computed with the standard library only."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from inference.evaluation.task import Metric, Prediction

Z_95 = 1.959963984540054  # two-sided 95% of the normal distribution
LEAST_LOG_PROB = -200.0  # lower limit of a mean, so that perplexity and interval fit a double
_LARGEST_LOG = 700.0  # exp of more overflows a double
_SAME = 1e-9  # tolerance for a recomputed value


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that fits a double; a bool is not one."""
    is_numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_numeric and abs(value) <= sys.float_info.max


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    Unlike the normal interval it stays within 0..1 and is not empty at 0 or `count` successes.
    """
    rate, z = successes / count, Z_95
    scale = 1 + z * z / count
    centre = (rate + z * z / (2 * count)) / scale
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / scale
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == count else min(1.0, centre + half)
    return low, high


def mean_and_stderr(
    values: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return the sum of values over the sum of weights, and its standard error to first order.

    Without weights this is the mean, whose variance has n - 1 degrees of freedom, as in evaluation
    harnesses. The error of a single value is 0.

    Raises:
        ValueError: there are no values, or no weights above 0.
    """
    weights = [1.0] * len(values) if weights is None else weights
    total, count = math.fsum(weights), len(values)
    if not values or total <= 0:
        raise ValueError("no values to average")
    mean = math.fsum(values) / total
    if count == 1:
        return mean, 0.0
    squares = math.fsum((v - mean * w) ** 2 for v, w in zip(values, weights, strict=True))
    return mean, math.sqrt(count * squares / (count - 1)) / total


def is_mean_of(metric: Metric, found: Sequence[Prediction]) -> bool:
    """Return whether a metric has the value that these samples give."""
    samples = [each.values for each in found if metric.group in ("", each.group)]
    try:
        values = [sample[metric.sample_value] for sample in samples]
        weights = [sample[metric.weight] for sample in samples] if metric.weight else None
        mean, _ = mean_and_stderr(values, weights)
    except (KeyError, ValueError):
        return False
    if metric.scale == "exp":
        mean = math.exp(-max(mean, LEAST_LOG_PROB))
    return len(samples) == metric.count and math.isclose(
        mean, metric.value, rel_tol=_SAME, abs_tol=_SAME
    )


def growth(log_ratio: float) -> float:
    """Return exp(x) - 1; infinity if it overflows a double."""
    return math.expm1(log_ratio) if log_ratio < _LARGEST_LOG else math.inf


def mean_metric(
    name: str,
    found: Sequence[Prediction],
    *,
    key: str,
    method: str,
    value: str = "",
    group: str = "",
    is_share: bool = True,
) -> Metric:
    """Return the mean of the quantity `value` (default: `name`), which lies between 0 and 1.

    The interval is Wilson's for a share, whose samples score 0 or 1, and else the normal one.
    """
    values = [each.values[value or name] for each in found]
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
        count=len(found),
        method=method,
        sample_value=value or name,
        scale="mean",
        group=group,
    )
