"""Numbers and durations as people read them, the same in every page of a report."""

from __future__ import annotations

from inference.evaluation.record import LatencyPoint
from inference.evaluation.task import Metric


def value_text(value: float, unit: str) -> str:
    """Return a metric's value: fractions as percent, everything else with four digits."""
    if unit == "fraction":
        return f"{100 * value:.2f}%"
    return number_text(value)


def number_text(value: float) -> str:
    """Return a number with four significant digits and thousands separated."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e9 or magnitude < 1e-3:
        return f"{value:.3g}"
    if magnitude >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def difference_text(value: float, unit: str) -> str:
    """Return a difference with its sign; of fractions in percentage points."""
    if value == 0:
        return "0"
    if unit == "fraction":
        return f"{100 * value:+.2f} pt"
    return f"{value:+.4g}"


def interval_text(metric: Metric) -> str:
    """Return the 95% interval of a metric."""
    low, high = value_text(metric.low, metric.unit), value_text(metric.high, metric.unit)
    return f"{low} to {high}"


def seconds_text(seconds: float) -> str:
    """Return a duration."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def milliseconds_text(value: float) -> str:
    """Return a latency."""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def metric_title(name: str) -> str:
    """Return a metric's name for a heading: `lambada_last_word` becomes "Last word"."""
    words = name.split("_")[1:] or name.split("_")
    return " ".join(words).capitalize()


def shape_text(point: LatencyPoint) -> str:
    """Return the tokens in and out of a point."""
    return f"{point.input_len} + {point.output_len}"


def load_text(point: LatencyPoint) -> str:
    """Return the load of a point: the batch where it is more than one row, and the requests."""
    batch = f"batch {point.batch_size}, " if point.batch_size > 1 else ""
    return f"{batch}{point.concurrency} in flight"
