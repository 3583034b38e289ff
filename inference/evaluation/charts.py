"""The charts of a report, each from its part of the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from inference.evaluation.gate import Bound
from inference.evaluation.record import (
    Distribution,
    HistoryPoint,
    LatencyPoint,
    RequestStatistics,
    StageTiming,
)
from inference.evaluation.svg import (
    Frame,
    Scale,
    axis_names,
    diamond,
    dot,
    line,
    nice_ticks,
    polygon,
    polyline,
    rectangle,
    svg,
    text,
    x_axis,
    y_axis,
)
from inference.evaluation.task import Metric
from inference.evaluation.words import (
    interval_text,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    seconds_text,
    shape_text,
    value_text,
)

_SERIES = 4  # colours of the style sheet
_LABELLED_WIDTH = 28  # of a bar that has room for a number above it


def accuracy_chart(
    metrics: Sequence[Metric],
    *,
    references: Mapping[str, float],
    baselines: Mapping[str, float],
    bounds: Mapping[str, Bound],
) -> str:
    """Draw each fraction with its 95% interval, its reference, its baseline and its bound.

    Bounds and baselines of metrics that are not drawn are left out.
    """
    names = {metric.name for metric in metrics}
    marks = {
        "reference": {name: value for name, value in references.items() if name in names},
        "baseline": {name: value for name, value in baselines.items() if name in names},
        "bound": {
            name: bound.min
            for name, bound in bounds.items()
            if name in names and bound.min is not None
        },
    }
    row = 54
    frame = Frame(1040, 56 + row * len(metrics), left=150, right=30, top=12, bottom=36)
    values = [metric.high for metric in metrics]
    values += [value for each in marks.values() for value in each.values()]
    ticks = nice_ticks(min(1.0, max(values) * 1.05), count=6)
    scale = frame.x(0.0, ticks[-1])
    body = x_axis(frame, scale, ticks, lambda tick: _tick_text(tick, "fraction", ticks), grid=True)
    for index, metric in enumerate(metrics):
        y = frame.top + row * (index + 0.5)
        body += _interval(frame, scale, metric, y)
        for kind, found in marks.items():
            if metric.name in found:
                body += _mark(kind, scale(found[metric.name]), y, found[metric.name])
    return svg(frame.width, frame.height, body, label="Accuracies with 95% intervals")


def _interval(frame: Frame, scale: Scale, metric: Metric, y: float) -> list[str]:
    """Draw one metric: its name, its 95% interval and its value."""
    value = value_text(metric.value, metric.unit)
    body = [text(frame.left - 16, y + 5, metric_title(metric.name), anchor="end", kind="name")]
    body.append(line(scale(metric.low), y, scale(metric.high), y, kind="interval"))
    body += [
        line(scale(end), y - 6, scale(end), y + 6, kind="interval")
        for end in (metric.low, metric.high)
    ]
    x = scale(metric.value)
    hint = f"{value} (95%: {interval_text(metric)})"
    return [
        *body,
        dot(x, y, 7, kind="value", hint=hint),
        text(x, y - 13, value, anchor="middle", kind="figure"),
    ]


def _mark(kind: str, x: float, y: float, value: float) -> list[str]:
    """Draw a value to compare with, below the interval."""
    hint = f"{kind} {value_text(value, 'fraction')}"
    if kind == "bound":
        strip = rectangle(x - 4, y - 10, 8, 34, kind="hover", hint=hint)
        return [line(x, y - 10, x, y + 24, kind="bound"), strip]
    if kind == "baseline":
        return [rectangle(x - 5, y + 11, 10, 10, kind="baseline", hint=hint)]
    return [diamond(x, y + 17, 6, kind="reference", hint=hint)]


def comparison_chart(pairs: Sequence[tuple[Metric, Metric]]) -> str:
    """Draw each fraction of two runs, one interval above the other."""
    row = 58
    frame = Frame(1040, 56 + row * len(pairs), left=150, right=30, top=22, bottom=36)
    ticks = nice_ticks(min(1.0, max(each.high for pair in pairs for each in pair) * 1.05), count=6)
    scale = frame.x(0.0, ticks[-1])
    body = x_axis(frame, scale, ticks, lambda tick: _tick_text(tick, "fraction", ticks), grid=True)
    for index, pair in enumerate(pairs):
        middle = frame.top + row * (index + 0.5)
        title = metric_title(pair[0].name)
        body.append(text(frame.left - 16, middle + 5, title, anchor="end", kind="name"))
        for series, (metric, y) in enumerate(zip(pair, (middle - 10, middle + 12), strict=True)):
            value = value_text(metric.value, metric.unit)
            body.append(
                line(scale(metric.low), y, scale(metric.high), y, kind=f"whisker s{series}")
            )
            hint = f"{value} (95%: {interval_text(metric)})"
            body.append(dot(scale(metric.value), y, 6, kind=f"point s{series}", hint=hint))
            body.append(text(scale(metric.high) + 8, y + 4, value, kind="note"))
    body += _legend(Frame(1040, 0, left=frame.left), ["first run", "second run"], y=0)
    return svg(frame.width, frame.height, body, label="Accuracies of two runs")


def latency_histogram(latency: Distribution) -> str:
    """Draw how many requests took how long, with the median, 95th and 99th percentile."""
    frame = Frame(510, 270, top=44)
    edges, counts = latency.edges_ms, latency.counts
    ticks_y = nice_ticks(max(counts), count=4)
    top = max(edges[-1], latency.p99_ms)
    ticks_x = nice_ticks(top, count=5)
    scale_x, scale_y = frame.x(0.0, ticks_x[-1]), frame.y(0.0, ticks_y[-1])
    body = y_axis(frame, scale_y, ticks_y, number_text)
    body += x_axis(frame, scale_x, ticks_x, number_text)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        x, y = scale_x(low), scale_y(count)
        width = max(scale_x(high) - x - 1, 1)
        ending = " and above" if high == edges[-1] else f" to {milliseconds_text(high)}"
        hint = f"{count} requests, {milliseconds_text(low)}{ending}"
        body.append(rectangle(x, y, width, frame.y_end - y, kind="bar s0", hint=hint))
    for row, (name, value) in enumerate(
        (("p50", latency.p50_ms), ("p95", latency.p95_ms), ("p99", latency.p99_ms))
    ):
        body += _marker(scale_x(value), frame, f"{name} {milliseconds_text(value)}", row=row)
    body += axis_names(frame, x="latency, ms", y="requests")
    return svg(frame.width, frame.height, body, label="Histogram of request latency")


def _marker(x: float, frame: Frame, label: str, *, row: int) -> list[str]:
    """Draw a vertical line with its label above, on the side where there is room."""
    y = frame.top - 4 + 13 * row
    left = x > frame.width * 0.62
    return [
        line(x, y - 8, x, frame.y_end, kind="marker"),
        text(x - 5 if left else x + 5, y, label, anchor="end" if left else "start", kind="note"),
    ]


def throughput_chart(requests: RequestStatistics) -> str:
    """Draw the requests answered per second over the time of the run."""
    frame = Frame(510, 270, top=44)
    rates = [count / requests.interval_s for count in requests.completed]
    # The last interval is cut off by the end of the run.
    rest = requests.seconds - requests.interval_s * (len(rates) - 1)
    rates[-1] = requests.completed[-1] / max(rest, requests.interval_s / 4)
    ticks_y = nice_ticks(max(*rates, requests.per_s), count=4)
    ticks_x = nice_ticks(requests.seconds, count=5)
    scale_x = frame.x(0.0, max(requests.seconds, 1e-9))
    scale_y = frame.y(0.0, ticks_y[-1])
    points = [
        (scale_x(min((index + 0.5) * requests.interval_s, requests.seconds)), scale_y(rate))
        for index, rate in enumerate(rates)
    ]
    points = [(scale_x(0), points[0][1]), *points, (scale_x(requests.seconds), points[-1][1])]
    area = [(points[0][0], frame.y_end), *points, (points[-1][0], frame.y_end)]
    mean = scale_y(requests.per_s)
    body = y_axis(frame, scale_y, ticks_y, number_text)
    body += x_axis(
        frame, scale_x, [tick for tick in ticks_x if tick <= requests.seconds], number_text
    )
    body += [
        polygon(area, kind="area"),
        polyline(points, kind="curve s0"),
        line(frame.left, mean, frame.x_end, mean, kind="marker"),
        text(
            frame.x_end,
            frame.top - 22,
            f"mean {number_text(requests.per_s)}/s",
            anchor="end",
            kind="note",
        ),
    ]
    body += axis_names(frame, x="time, s", y="requests per second")
    return svg(frame.width, frame.height, body, label="Requests answered per second over time")


def sweep_latency_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the median latency of each shape, one mark per load, with a line up to p95."""
    frame = Frame(510, 290, top=52)
    ticks = nice_ticks(max(point.latency.p95_ms for point in points), count=4)
    scale = frame.y(0.0, ticks[-1])
    body = y_axis(frame, scale, ticks, number_text)
    slots = _Slots(frame, points)
    body += slots.names()
    for point, x, width, series in slots.places():
        y, high = scale(point.latency.p50_ms), scale(point.latency.p95_ms)
        hint = (
            f"{shape_text(point)} tokens, {load_text(point)}: p50 "
            f"{milliseconds_text(point.latency.p50_ms)}, p95 "
            f"{milliseconds_text(point.latency.p95_ms)}"
        )
        kind = f"s{series % _SERIES}"
        body.append(line(x, y, x, high, kind=f"whisker {kind}"))
        body.append(line(x - width / 4, high, x + width / 4, high, kind=f"whisker {kind}"))
        body.append(dot(x, y, 5, kind=f"point {kind}", hint=hint))
    body += _legend(frame, slots.loads)
    body += axis_names(frame, x="tokens in + out", y="latency p50 (to p95), ms")
    return svg(frame.width, frame.height, body, label="Latency by shape and load")


def sweep_throughput_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the generated tokens per second of each shape, one bar per load."""
    frame = Frame(510, 290, top=52)
    ticks = nice_ticks(max(point.tokens_per_s for point in points), count=4)
    scale = frame.y(0.0, ticks[-1])
    body = y_axis(frame, scale, ticks, number_text)
    slots = _Slots(frame, points)
    body += slots.names()
    for point, x, width, series in slots.places():
        y, rate = scale(point.tokens_per_s), number_text(point.tokens_per_s)
        hint = f"{shape_text(point)} tokens, {load_text(point)}: {rate} tokens/s"
        kind = f"bar s{series % _SERIES}"
        body.append(
            rectangle(x - width / 2 + 1, y, width - 2, frame.y_end - y, kind=kind, hint=hint)
        )
        if width >= _LABELLED_WIDTH:
            body.append(text(x, y - 5, rate, anchor="middle", kind="note"))
    body += _legend(frame, slots.loads)
    body += axis_names(frame, x="tokens in + out", y="tokens per second")
    return svg(frame.width, frame.height, body, label="Tokens per second by shape and load")


class _Slots:
    """Places on a horizontal axis: a slot per shape, in it a column per load."""

    def __init__(self, frame: Frame, points: Sequence[LatencyPoint]) -> None:
        self._points = points
        self._shapes = list(dict.fromkeys(map(shape_text, points)))
        self.loads = list(dict.fromkeys(map(load_text, points)))
        self._frame = frame
        self._slot = (frame.x_end - frame.left) / len(self._shapes)
        self._column = min(46.0, self._slot * 0.7 / len(self.loads))

    def names(self) -> list[str]:
        """Return the shapes below the axis."""
        return [
            text(self._centre(index), self._frame.y_end + 18, shape, anchor="middle")
            for index, shape in enumerate(self._shapes)
        ]

    def places(self) -> Iterator[tuple[LatencyPoint, float, float, int]]:
        """Yield each point, the middle and the width of its column, and the number of its load."""
        for point in self._points:
            series = self.loads.index(load_text(point))
            centre = self._centre(self._shapes.index(shape_text(point)))
            x = centre + (series - (len(self.loads) - 1) / 2) * self._column
            yield point, x, self._column, series

    def _centre(self, index: int) -> float:
        return self._frame.left + self._slot * (index + 0.5)


def _legend(frame: Frame, names: Sequence[str], *, y: float = 25) -> list[str]:
    body = []
    x = frame.left
    for index, name in enumerate(names):
        body.append(rectangle(x, y, 11, 11, kind=f"bar s{index % _SERIES}", radius=2))
        body.append(text(x + 16, y + 10, name, kind="note"))
        x += 34 + 6.6 * len(name)
    return body


def history_chart(points: Sequence[HistoryPoint], name: str) -> str:
    """Draw one metric over the runs of the store, with its 95% interval; the last is this run."""
    frame = Frame(510, 230, top=24)
    metrics = [point.metrics[name] for point in points if name in point.metrics]
    shown = [point for point in points if name in point.metrics]
    unit = metrics[-1].unit
    low, high = min(each.low for each in metrics), max(each.high for each in metrics)
    ticks = nice_ticks(high, low=max(0.0, low - (high - low) * 0.1), count=4)
    scale_x, scale_y = frame.x(-0.5, len(shown) - 0.5), frame.y(ticks[0], ticks[-1])
    body = y_axis(frame, scale_y, ticks, lambda tick: _tick_text(tick, unit, ticks))
    places = [(scale_x(i), scale_y(each.value)) for i, each in enumerate(metrics)]
    body.append(polyline(places, kind="curve s0"))
    for index, (point, metric, (x, y)) in enumerate(zip(shown, metrics, places, strict=True)):
        body.append(line(x, scale_y(metric.low), x, scale_y(metric.high), kind="whisker s0"))
        hint = f"{value_text(metric.value, unit)} ({interval_text(metric)}), {point.run_id}"
        kind = "value" if index == len(shown) - 1 else "point s0"
        body.append(dot(x, y, 6 if kind == "value" else 4, kind=kind, hint=hint))
    for index, anchor in ((0, "start"), (len(shown) - 1, "end")):
        body.append(
            text(
                frame.left if anchor == "start" else frame.x_end,
                frame.y_end + 18,
                shown[index].started_at[:16].replace("T", " "),
                anchor=anchor,
            )
        )
    return svg(frame.width, frame.height, body, label=f"{metric_title(name)} over runs")


def _tick_text(tick: float, unit: str, ticks: Sequence[float]) -> str:
    """Return a value of an axis, with as many digits as its steps need."""
    if unit != "fraction":
        return number_text(tick)
    step = 100 * (ticks[1] - ticks[0])
    return f"{100 * tick:.{0 if step >= 1 - 1e-9 else 1 if step >= 0.1 - 1e-9 else 2}f}%"


def stages_chart(stages: Sequence[StageTiming]) -> str:
    """Draw what each stage took, one bar below the other, from its start where that is known."""
    row = 34
    frame = Frame(1040, row * len(stages) + 48, left=110, right=96, top=6, bottom=34)
    starts = _starts(stages)
    end = max(start + stage.seconds for start, stage in zip(starts, stages, strict=True))
    ticks = nice_ticks(end, count=8)
    scale = frame.x(0.0, max(end, 1e-9))
    body = x_axis(
        frame, scale, [t for t in ticks if t <= end], lambda tick: f"{tick:g} s", grid=True
    )
    for index, (start, stage) in enumerate(zip(starts, stages, strict=True)):
        y = frame.top + row * index + 6
        x = scale(start)
        width = max(scale(start + stage.seconds) - x, 2)
        label = seconds_text(stage.seconds)
        hint = f"{stage.name}: {label}, {stage.state}"
        body.append(text(frame.left - 14, y + 16, stage.name, anchor="end", kind="name"))
        body.append(rectangle(x, y, width, 22, kind=f"bar s{index % _SERIES}", hint=hint, radius=3))
        body.append(text(x + width + 7, y + 16, label, kind="note"))
    return svg(frame.width, frame.height, body, label="Seconds per stage")


def _starts(stages: Sequence[StageTiming]) -> list[float]:
    """Return when each stage began; one that does not say follows the one before it."""
    starts: list[float] = []
    now = 0.0
    for stage in stages:
        start = now if stage.start_s is None else stage.start_s
        starts.append(start)
        now = max(now, start + stage.seconds)
    return starts
