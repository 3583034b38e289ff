"""Charts of a report, each computed from its part of the record and drawn by templates/charts.html.

Places are in percent of the plotting area, so that a chart fills whatever width it is given;
names, legends and axes around it are laid out by the page.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from markupsafe import Markup

from inference.evaluation.record import (
    Distribution,
    HistoryPoint,
    LatencyPoint,
    Report,
    RequestStatistics,
    StageTiming,
    TaskReport,
)
from inference.evaluation.report.formatting import (
    compared,
    interval_hint,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    percent_axis,
    shape_text,
    value_text,
)
from inference.evaluation.report.page import draw
from inference.evaluation.task import Metric

_LOG_FROM = 15.0  # highest over lowest value, from which a linear axis hides the low ones


@dataclass(frozen=True)
class Axis:
    """The ticks of an axis, and the place of a value: percent from the left, or from the top.

    Attributes:
        text: of a tick.
        end: the value at which it ends, where ticks beyond are left out; null: the last tick.
        is_vertical: whether it grows upwards.
    """

    ticks: Sequence[float]
    text: Callable[[float], str] = number_text
    end: float | None = None
    is_vertical: bool = False
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of `value`."""
        low, high = self.ticks[0], self.ticks[-1] if self.end is None else self.end
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low)
        return round(100 * (1 - share if self.is_vertical else share), 2)

    @property
    def marks(self) -> list[tuple[float, str, str]]:
        """Place, text and kind of line of each tick."""
        shown = (each for each in self.ticks if self.end is None or each <= self.end)
        return [(self(each), self.text(each), "grid" if each else "base") for each in shown]


def nice_ticks(high: float, *, low: float = 0.0, count: int = 5) -> list[float]:
    """Return about `count` round values from `low` that reach at least to `high`."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low, low + 1.0]
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return values 1, 2 and 5 times powers of ten from below `low` to above `high`."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max(index for index, each in enumerate(steps) if each <= low * (1 + 1e-9))
    last = min(index for index, each in enumerate(steps) if each >= high * (1 - 1e-9))
    return steps[first : max(last, first + 1) + 1]


def history_chart(points: Sequence[HistoryPoint], name: str) -> Markup:
    """Draw one metric over the runs of the store, with its 95% interval; the last is this run."""
    runs = [(point, point.metrics[name]) for point in points if name in point.metrics]
    low, high = min(each.low for _, each in runs), max(each.high for _, each in runs)
    ticks = nice_ticks(high, low=max(0.0, low - (high - low) * 0.1), count=4)
    text = percent_axis(ticks) if runs[-1][1].unit == "fraction" else number_text
    x, y = Axis((-0.5, len(runs) - 0.5)), Axis(ticks, text, is_vertical=True)
    return draw("history", f"{metric_title(name)} over runs", x, y, runs)


def latency_histogram(latency: Distribution) -> Markup:
    """Draw the distribution of the requests' latency, with its median, 95th and 99th percentile."""
    edges = latency.edges_ms
    x = Axis(nice_ticks(max(edges[-1], latency.p99_ms)))
    y = Axis(nice_ticks(max(latency.counts), count=4), is_vertical=True)
    bars = list(zip(edges, edges[1:], latency.counts, strict=False))
    percentiles = (("p50", latency.p50_ms), ("p95", latency.p95_ms), ("p99", latency.p99_ms))
    return draw("histogram", x, y, bars, percentiles)


def throughput_chart(requests: RequestStatistics) -> Markup:
    """Draw the requests answered per second over the time of the run."""
    rates = [count / requests.interval_s for count in requests.completed]
    # The last interval is cut off by the end of the run.
    rest = requests.seconds - requests.interval_s * (len(rates) - 1)
    rates[-1] = requests.completed[-1] / max(rest, requests.interval_s / 4)
    end = max(requests.seconds, 1e-9)
    middles = [min((index + 0.5) * requests.interval_s, end) for index in range(len(rates))]
    x = Axis(nice_ticks(end), end=end)
    y = Axis(nice_ticks(max(*rates, requests.per_s), count=4), is_vertical=True)
    places = [*map(x, (0.0, *middles, end))], [*map(y, (rates[0], *rates, rates[-1]))]
    return draw("throughput", x, y, list(zip(*places, strict=True)), requests.per_s)


_Values = Callable[[LatencyPoint], tuple[float | None, float | None]]
# Title and axis of each chart of the latency sweep, and what it draws of a point: a value, and the
# higher one up to which a line is drawn, None where it has none.
_THROUGHPUT = "Throughput"
_SWEEP: tuple[tuple[str, str, _Values], ...] = (
    (
        "Latency of a request",
        "latency p50 (to p95), ms",
        lambda point: (point.latency.p50_ms, point.latency.p95_ms),
    ),
    (_THROUGHPUT, "tokens per second", lambda point: (point.tokens_per_s, None)),
    (
        "Time to the first token",
        "first token p50 (to p95), ms",
        lambda point: (point.first_token_ms, point.first_token_p95_ms),
    ),
    ("Each further token", "each further token, ms", lambda point: (point.per_token_ms, None)),
)


def sweep_charts(points: Sequence[LatencyPoint]) -> list[tuple[str, Markup]]:
    """Return the title and the drawing of each chart that has a point.

    A chart has a place per shape, and in it a column per load: a bar of throughput, a mark of a
    time.
    """
    charts = []
    for title, axis, values_of in _SWEEP:
        values = {point: values_of(point) for point in points}
        known = {p: (low, high or low) for p, (low, high) in values.items() if low is not None}
        if known:
            charts.append((title, _sweep_chart(title, axis, known)))
    return charts


def _sweep_chart(
    title: str, axis: str, points: Mapping[LatencyPoint, tuple[float, float]]
) -> Markup:
    shapes = list(dict.fromkeys(map(shape_text, points)))
    loads = list(dict.fromkeys(map(load_text, points)))
    column = min(0.7 / len(loads), 0.12 * len(shapes))  # of a shape's place
    lowest, highest = min(map(min, points.values())), max(map(max, points.values()))
    is_bar = title == _THROUGHPUT
    is_log = not is_bar and lowest > 0 and highest / lowest > _LOG_FROM
    ticks = log_ticks(lowest, highest) if is_log else nice_ticks(highest, count=4)
    marks = []
    for point, (value, high) in points.items():
        series = loads.index(load_text(point))
        middle = shapes.index(shape_text(point)) + (series - (len(loads) - 1) / 2) * column
        marks.append((point, series, value, high, middle))
    return draw(
        "sweep",
        f"{title} by shape and load",
        "tokens in + out" if any(point.output_len for point in points) else "tokens in",
        f"{axis}, log scale" if is_log else axis,
        Axis((-0.5, len(shapes) - 0.5)),
        Axis(ticks, is_vertical=True, is_log=is_log),
        loads,
        shapes,
        marks,
        column,
        is_bar,
    )


def accuracy_chart(report: Report, task: TaskReport) -> Markup:
    """Draw each fraction with its 95% interval, its reference, its baseline and its lower bound.

    Without a fraction the drawing is empty.
    """
    metrics = [metric for metric in task.metrics if metric.unit == "fraction"]
    if not metrics:
        return Markup()
    source = "" if task.reference is None else task.reference.source
    others = {
        "reference": {name: each.reference for name, each in compared(task).items()},
        "baseline": {name: metric.value for name, metric in report.baseline.items()},
        "bound": {name: each.min for name, each in report.bounds.items() if each.min is not None},
    }
    marks = [
        {kind: found[metric.name] for kind, found in others.items() if metric.name in found}
        for metric in metrics
    ]
    words = {
        "value": "measured, with 95% interval",
        "reference": f"reference: {source}",
        "baseline": f"baseline: {report.baseline_source}",
        "bound": "lower bound of the gate",
    }
    keys = [each for each in words.items() if each[0] in {"value", *chain(*marks)}]
    x = _percent([metric.high for metric in metrics] + [v for each in marks for v in each.values()])
    return draw("accuracies", x, metrics, marks, keys)


def _percent(values: Iterable[float]) -> Axis:
    """Return an axis of fractions that reaches a little beyond all values, but not beyond 1."""
    ticks = nice_ticks(min(1.0, max(values) * 1.05))
    return Axis(ticks, percent_axis(ticks))


def comparison_chart(pairs: Sequence[tuple[Metric, Metric]]) -> Markup:
    """Draw each fraction of two runs, one interval above the other."""
    rows = {
        metric_title(pair[0].name): [
            (
                each.value,
                each.low,
                each.high,
                value_text(each.value, each.unit),
                interval_hint(each),
            )
            for each in pair
        ]
        for pair in pairs
    }
    x = _percent(each.high for pair in pairs for each in pair)
    return draw("two_runs", "Accuracies of two runs", x, rows)


def latency_comparison_chart(pairs: Sequence[tuple[LatencyPoint, LatencyPoint]]) -> Markup:
    """Draw the median latency of points of two runs, with a line up to the 95th percentile."""
    rows: dict[str, list[tuple[float, float, float, str, str]]] = {}
    for pair in pairs:
        row = rows[f"{shape_text(pair[0])}, {load_text(pair[0])}"] = []
        for p50, p95 in ((each.latency.p50_ms, each.latency.p95_ms) for each in pair):
            text = milliseconds_text(p50)
            row.append((p50, p50, p95, text, f"p50 {text}, p95 {milliseconds_text(p95)}"))
    x = Axis(nice_ticks(1.05 * max(each.latency.p95_ms for pair in pairs for each in pair)))
    return draw("two_runs", "Latency of two runs", x, rows)


def stages_chart(stages: Sequence[StageTiming]) -> Markup:
    """Draw the time of each stage, one bar below the other, from its start where that is known.

    A stage without its own start follows the one before it.
    """
    bars: list[tuple[StageTiming, float]] = []
    end = 0.0
    for stage in stages:
        bars.append((stage, end if stage.start_s is None else stage.start_s))
        end = max(end, bars[-1][1] + stage.seconds)
    x = Axis(nice_ticks(end), "{:g} s".format, end=max(end, 1e-9))
    return draw("stages", x, bars)
