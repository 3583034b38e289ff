"""Numbers, durations and rows of tables as people read them, the same in every page of a report."""

from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_INSUFFICIENT, HELD
from inference.evaluation.record import (
    Comparison,
    LatencyPoint,
    Report,
    RequestStatistics,
    TaskReport,
)
from inference.evaluation.task import Metric, Tally

METRIC_HEAD = (
    "metric", "value", "95% interval", "n", "against", "difference", "95% of difference",
    "chance", "samples agree",
)  # fmt: skip
LATENCY_HEAD = (
    "tokens in + out", "load", "requests", "mean", "p50", "p95", "p99", "first token",
    "each further", "tokens/s",
)  # fmt: skip


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


def spread_text(comparison: Comparison, unit: str) -> str:
    """Return the 95% interval of a difference; empty without paired samples."""
    if comparison.low is None or comparison.high is None:
        return ""
    return f"{difference_text(comparison.low, unit)} to {difference_text(comparison.high, unit)}"


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


def references(report: Report) -> dict[str, str]:
    """Return how each metric that has a reference compares with it, by the metric's name."""
    units = {metric.name: metric.unit for metric in report.metrics}
    return {
        name: reference_text(each, units[name])
        for task in report.tasks
        for name, each in compared(task).items()
    }


def compared(task: TaskReport) -> dict[str, Comparison]:
    """Return the comparison with the reference of each metric that has one."""
    return {} if task.reference is None else {each.metric: each for each in task.reference.metrics}


def metric_row(metric: Metric, other: Comparison | None = None) -> tuple[str, ...]:
    """Return a metric, and its comparison with another run's, under METRIC_HEAD."""
    value = value_text(metric.value, metric.unit)
    own = (metric.name, value, interval_text(metric), f"{metric.count:,}")
    if other is None:
        return (*own, *[""] * (len(METRIC_HEAD) - len(own)))
    agreement = ""
    if other.agreeing is not None:
        agreement = f"{other.agreeing:,} of {other.agreeing + (other.disagreeing or 0):,}"
    elif other.largest_difference is not None:
        agreement = f"to {number_text(other.largest_difference)}"
    return (
        *own,
        value_text(other.reference, metric.unit),
        difference_text(other.difference, metric.unit),
        spread_text(other, metric.unit),
        "" if other.p_value is None else f"p = {other.p_value:.2g}",
        agreement,
    )


def times(report: Report) -> dict[str, str]:
    """Return how long the requests of each task took, and those of its reference, in one line."""
    found = {}
    for task in report.tasks:
        found[task.name] = time_text(task.requests)
        if task.reference is not None and task.reference.requests is not None:
            found[f"{task.name} by the reference"] = time_text(task.reference.requests)
    return found


def time_text(requests: RequestStatistics) -> str:
    """Return how long requests took, and how fast tokens came."""
    text = (
        f"{requests.count:,} request{'s' * (requests.count != 1)} in "
        f"{seconds_text(requests.seconds)}, p50 {milliseconds_text(requests.latency.p50_ms)}"
    )
    if requests.generated:
        text += f", {number_text(requests.tokens_per_s)} generated tokens/s"
    return text


def ends_text(requests: RequestStatistics) -> str:
    """Return how the requests of a task ended; empty where that is not known."""
    counts = [(getattr(requests, name), name) for name in Tally.NAMES]
    return ", ".join(f"{count:,} {name}" for count, name in counts) * any(
        each for each, _ in counts
    )


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
    """Return the tokens in and out of a point; of an encoder, which generates none, those in."""
    return f"{point.input_len} + {point.output_len}" if point.output_len else str(point.input_len)


def load_text(point: LatencyPoint) -> str:
    """Return the load of a point: the batch where it is more than one row, and the requests."""
    batch = f"batch {point.batch_size}, " if point.batch_size > 1 else ""
    return f"{batch}{point.concurrency} in flight"


def latency_row(point: LatencyPoint) -> tuple[str, ...]:
    """Return a point of the latency sweep under LATENCY_HEAD."""
    latency = point.latency
    all_ms = (latency.mean_ms, latency.p50_ms, latency.p95_ms, latency.p99_ms)
    return (
        shape_text(point),
        load_text(point),
        str(point.requests),
        *(
            "" if value is None else milliseconds_text(value)
            for value in (*all_ms, point.first_token_ms, point.per_token_ms)
        ),
        number_text(point.tokens_per_s),
    )


def latency_note(report: Report) -> str:
    """Return how the sweep was measured."""
    if not any(point.output_len for point in report.latency):
        tokens = "The model is an encoder: tokens per second are those of the requests."
    elif all(point.streamed for point in report.latency):
        tokens = "The model streams: each token was timed on arrival."
    else:
        tokens = (
            "The model returns whole answers: the time to the first token is that of a request for "
            "one token, and the time of each further token is the rest of the median latency, "
            "divided evenly."
        )
    return f"Each request was sent when the one before it was answered. {tokens}"


def verdict(report: Report) -> str:
    """Return the outcome of the gate in a few words."""
    if not report.bounds:
        return "no gate set"
    gate, held, checked = report.gate, len(report.gate.of(HELD)), len(report.gate.verdicts)
    if gate.exit_code == EXIT_GATE_BREACHED:
        return f"gate breached ({len(gate.deciding)} of {checked} bounds)"
    if gate.exit_code == EXIT_INSUFFICIENT:
        return f"gate undecided ({len(gate.deciding)} of {checked} bounds need more samples)"
    others = ", the others are advisory" * (held < checked)
    return f"gate passed ({held} of {checked} bounds hold{others})"
