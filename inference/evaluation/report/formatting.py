"""Numbers and durations as people read them, the same in every page of a report."""

from inference.evaluation.record import Comparison, Report, RequestStatistics
from inference.evaluation.task import Tally


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


def references(report: Report) -> dict[str, str]:
    """Return how each metric that has a reference compares with it, by the metric's name."""
    units = {metric.name: metric.unit for metric in report.metrics}
    return {
        each.metric: reference_text(each, units[each.metric])
        for task in report.tasks
        for each in task.comparisons.values()
    }


def reference_text(comparison: Comparison, unit: str) -> str:
    """Return how a metric compares with its reference, in one line."""
    if comparison.agreeing is not None and not comparison.disagreeing:
        return f"equals the reference on all {comparison.agreeing:,} samples"
    words = f"reference {value_text(comparison.reference, unit)}"
    if comparison.agreeing is None and comparison.largest_difference is not None:
        return f"{words}, samples within {number_text(comparison.largest_difference)}"
    words += f" ({difference_text(comparison.difference, unit)})"
    if comparison.disagreeing:
        total = comparison.disagreeing + (comparison.agreeing or 0)
        words += f", {comparison.disagreeing:,} of {total:,} samples differ"
    return words


def time_text(requests: RequestStatistics) -> str:
    """Return how long requests took, and how fast tokens came."""
    count = requests.count or requests.stop + requests.length  # of those that a task words itself
    text = f"{count:,} request{'s' * (count != 1)} in {seconds_text(requests.seconds)}"
    if requests.latency.count:
        text += f", p50 {milliseconds_text(requests.latency.p50_ms)}"
    if requests.generated:
        text += f", {number_text(requests.tokens_per_s)} generated tokens/s"
    return text


def ends_text(requests: RequestStatistics) -> str:
    """Return how the requests of a task ended; empty where that is not known."""
    counts = {name: getattr(requests, name) for name in Tally.NAMES}
    if not any(counts.values()):
        return ""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


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
