"""Charts of a report, each from its part of the record.

A chart with a row for each name fills the width of the page; in a narrow one the names are above
their rows. A chart with a vertical axis fills half the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inference.evaluation.options import Bound
from inference.evaluation.record import (
    Distribution,
    HistoryPoint,
    LatencyPoint,
    RequestStatistics,
    StageTiming,
)
from inference.evaluation.report.formatting import (
    interval_text,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    seconds_text,
    shape_text,
    value_text,
)
from inference.evaluation.report.svg import (
    SERIES,
    Frame,
    Scale,
    diamond,
    dot,
    legend,
    legend_height,
    line,
    log_ticks,
    nice_ticks,
    polygon,
    polyline,
    rectangle,
    text,
)
from inference.evaluation.task import Metric

WIDE, NARROW = 1040.0, 360.0
_HALF = 440.0
_LABELLED_WIDTH = 28  # of a bar that has room for a number above it
_LOG_FROM = 15.0  # highest over lowest value, from which a linear axis hides the low ones

Draw = Callable[[float], str]  # a chart of a given width, WIDE or NARROW


def responsive(draw: Draw) -> str:
    """Return a chart of rows as HTML, in the width that the reader's window has room for."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


@dataclass(frozen=True)
class _Rows:
    """A chart with a row for each title above one horizontal axis; middles are the rows' own y."""

    frame: Frame
    scale: Scale
    middles: Sequence[float]
    body: list[str]


def _rows(
    titles: Sequence[str],
    ticks: Sequence[float],
    tick_text: Callable[[float], str],
    *,
    width: float,
    height: float,
    top: float = 12,
    right: float = 30,
    high: float | None = None,
) -> _Rows:
    """Return an empty chart of rows of `height`."""
    is_narrow = width < WIDE
    above = 22 if is_narrow else 0
    left = 22 if is_narrow else 34 + 7.6 * max(map(len, titles))
    whole = top + (height + above) * len(titles) + 36
    frame = Frame(width, whole, left=left, right=right, top=top, bottom=36)
    scale, body = frame.x_axis(ticks, tick_text, high=high, grid=True)
    middles = []
    for index, title in enumerate(titles):
        start = top + (height + above) * index
        middles.append(start + above + height / 2)
        if is_narrow:
            body.append(text((frame.left - 16, start + 16), title, kind="name"))
        else:
            end = (frame.left - 16, middles[-1] + 5)
            body.append(text(end, title, anchor="end", kind="name"))
    return _Rows(frame, scale, middles, body)


def accuracy_chart(
    metrics: Sequence[Metric],
    *,
    references: Mapping[str, float],
    baselines: Mapping[str, float],
    bounds: Mapping[str, Bound],
    width: float = WIDE,
) -> str:
    """Draw each fraction with its 95% interval, its reference, its baseline and its bound.

    Bounds and baselines of metrics that are not drawn are left out.
    """
    names = {metric.name for metric in metrics}
    lower = {name: bound.min for name, bound in bounds.items() if bound.min is not None}
    marks = {
        kind: {name: value for name, value in found.items() if name in names}
        for kind, found in (("reference", references), ("baseline", baselines), ("bound", lower))
    }
    values = [metric.high for metric in metrics]
    values += [value for each in marks.values() for value in each.values()]
    ticks = nice_ticks(min(1.0, max(values) * 1.05), count=6 if width == WIDE else 4)
    titles = [metric_title(metric.name) for metric in metrics]
    rows = _rows(titles, ticks, _tick_text("fraction", ticks), width=width, height=54)
    for metric, y in zip(metrics, rows.middles, strict=True):
        rows.body.extend(_interval(rows.scale, metric, y))
        for kind, found in marks.items():
            if metric.name in found:
                x = rows.scale(found[metric.name])
                rows.body.extend(_mark(kind, x, y, found[metric.name]))
    return rows.frame.svg(rows.body, label="Accuracies with 95% intervals")


def _interval(scale: Scale, metric: Metric, y: float) -> list[str]:
    """Draw one metric: its 95% interval and its value."""
    low, high, x = scale(metric.low), scale(metric.high), scale(metric.value)
    value = value_text(metric.value, metric.unit)
    return [
        line((low, y), (high, y), kind="interval"),
        *(line((end, y - 6), (end, y + 6), kind="interval") for end in (low, high)),
        dot((x, y), 7, kind="value", hint=_estimate(metric).hint),
        text((x, y - 13), value, anchor="middle", kind="figure"),
    ]


def _mark(kind: str, x: float, y: float, value: float) -> list[str]:
    """Draw a value to compare with, below the interval."""
    hint = f"{kind} {value_text(value, 'fraction')}"
    if kind == "bound":
        strip = rectangle((x - 4, y - 10), 8, 34, kind="hover", hint=hint)
        return [line((x, y - 10), (x, y + 24), kind="bound"), strip]
    if kind == "baseline":
        return [rectangle((x - 5, y + 11), 10, 10, kind="baseline", hint=hint)]
    return [diamond((x, y + 17), 6, kind="reference", hint=hint)]


@dataclass(frozen=True)
class _Estimate:
    """A value with the interval that is drawn around it, its label and its hint."""

    value: float
    low: float
    high: float
    text: str
    hint: str


def _estimate(metric: Metric) -> _Estimate:
    value = value_text(metric.value, metric.unit)
    hint = f"{value} (95%: {interval_text(metric)})"
    return _Estimate(metric.value, metric.low, metric.high, value, hint)


def _median(point: LatencyPoint) -> _Estimate:
    low, high = point.latency.p50_ms, point.latency.p95_ms
    p50, p95 = milliseconds_text(low), milliseconds_text(high)
    return _Estimate(low, low, high, p50, hint=f"p50 {p50}, p95 {p95}")


def comparison_chart(pairs: Sequence[tuple[Metric, Metric]], *, width: float = WIDE) -> str:
    """Draw each fraction of two runs, one interval above the other."""
    rows = [
        (metric_title(first.name), (_estimate(first), _estimate(each))) for first, each in pairs
    ]
    return _paired(rows, unit="fraction", label="Accuracies of two runs", most=1.0, width=width)


def latency_comparison_chart(
    pairs: Sequence[tuple[LatencyPoint, LatencyPoint]], *, width: float = WIDE
) -> str:
    """Draw the median latency of points of two runs, with a line up to the 95th percentile."""
    rows = [
        (f"{shape_text(first)}, {load_text(first)}", (_median(first), _median(second)))
        for first, second in pairs
    ]
    return _paired(rows, unit="ms", label="Latency of two runs", width=width)


def _paired(
    pairs: Sequence[tuple[str, tuple[_Estimate, _Estimate]]],
    *,
    unit: str,
    label: str,
    width: float,
    most: float = math.inf,
) -> str:
    """Draw values of two runs under each title, one above the other; no tick exceeds `most`."""
    highest = max(each.high for _, pair in pairs for each in pair)
    ticks = nice_ticks(min(most, highest * 1.05), count=6 if width == WIDE else 4)
    rows = _rows(
        [title for title, _ in pairs],
        ticks,
        _tick_text(unit, ticks),
        width=width,
        height=58,
        top=22,
        right=70,
    )
    for (_, pair), middle in zip(pairs, rows.middles, strict=True):
        for series, (each, y) in enumerate(zip(pair, (middle - 10, middle + 12), strict=True)):
            low, high = rows.scale(each.low), rows.scale(each.high)
            rows.body.append(line((low, y), (high, y), kind=f"whisker s{series}"))
            place = (rows.scale(each.value), y)
            rows.body.append(dot(place, 6, kind=f"point s{series}", hint=each.hint))
            rows.body.append(text((high + 8, y + 4), each.text, kind="note"))
    rows.body.extend(legend(rows.frame, ["first run", "second run"], y=0))
    return rows.frame.svg(rows.body, label=label)


def stages_chart(stages: Sequence[StageTiming], *, width: float = WIDE) -> str:
    """Draw the time of each stage, one bar below the other, from its start where that is known."""
    starts = _starts(stages)
    end = max(start + stage.seconds for start, stage in zip(starts, stages, strict=True))
    ticks = nice_ticks(end, count=8 if width == WIDE else 4)
    rows = _rows(
        [stage.name for stage in stages],
        ticks,
        lambda tick: f"{tick:g} s",
        width=width,
        height=34,
        top=6,
        right=96,
        high=max(end, 1e-9),
    )
    for index, (start, stage, y) in enumerate(zip(starts, stages, rows.middles, strict=True)):
        x = rows.scale(start)
        long = max(rows.scale(start + stage.seconds) - x, 2)
        label, kind = seconds_text(stage.seconds), f"bar s{index % SERIES}"
        hint = f"{stage.name}: {label}, {stage.state}"
        rows.body.append(rectangle((x, y - 11), long, 22, kind=kind, hint=hint, radius=3))
        rows.body.append(text((x + long + 7, y + 5), label, kind="note"))
    return rows.frame.svg(rows.body, label="Seconds per stage")


def _starts(stages: Sequence[StageTiming]) -> list[float]:
    """Return the start of each stage; one without its own follows the one before it."""
    starts: list[float] = []
    now = 0.0
    for stage in stages:
        start = now if stage.start_s is None else stage.start_s
        starts.append(start)
        now = max(now, start + stage.seconds)
    return starts


def _tick_text(unit: str, ticks: Sequence[float]) -> Callable[[float], str]:
    """Return the text of an axis' values, with as many digits as its steps need."""
    if unit != "fraction":
        return number_text
    step = 100 * (ticks[1] - ticks[0])
    digits = 0 if step >= 1 - 1e-9 else 1 if step >= 0.1 - 1e-9 else 2
    return lambda tick: f"{100 * tick:.{digits}f}%"


def history_chart(points: Sequence[HistoryPoint], name: str) -> str:
    """Draw one metric over the runs of the store, with its 95% interval; the last is this run."""
    frame = Frame(_HALF, 230, top=24)
    shown = [point for point in points if name in point.metrics]
    metrics = [point.metrics[name] for point in shown]
    low, high = min(each.low for each in metrics), max(each.high for each in metrics)
    ticks = nice_ticks(high, low=max(0.0, low - (high - low) * 0.1), count=4)
    scale_x = frame.x(-0.5, len(shown) - 0.5)
    scale_y, body = frame.y_axis(ticks, _tick_text(metrics[-1].unit, ticks))
    places = [(scale_x(i), scale_y(each.value)) for i, each in enumerate(metrics)]
    body.append(polyline(places, kind="curve s0"))
    for point, metric, place in zip(shown, metrics, places, strict=True):
        ends = [(place[0], scale_y(end)) for end in (metric.low, metric.high)]
        body.append(line(ends[0], ends[1], kind="whisker s0"))
        hint = f"{_estimate(metric).hint}, {point.run_id}"
        is_last = point is shown[-1]
        kind = "value" if is_last else "point s0"
        body.append(dot(place, 6 if is_last else 4, kind=kind, hint=hint))
    for point, x, anchor in ((shown[0], frame.left, "start"), (shown[-1], frame.x_end, "end")):
        label = point.started_at[:16].replace("T", " ")
        body.append(text((x, frame.y_end + 18), label, anchor=anchor))
    return frame.svg(body, label=f"{metric_title(name)} over runs")


def latency_histogram(latency: Distribution) -> str:
    """Draw the distribution of the requests' latency, with its median, 95th and 99th percentile."""
    frame = Frame(_HALF, 270, top=44)
    edges, counts = latency.edges_ms, latency.counts
    scale_y, body = frame.y_axis(nice_ticks(max(counts), count=4), number_text)
    scale_x, marks = frame.x_axis(nice_ticks(max(edges[-1], latency.p99_ms), count=5), number_text)
    body += marks
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        x, y = scale_x(low), scale_y(count)
        ending = " and above" if high == edges[-1] else f" to {milliseconds_text(high)}"
        hint = f"{count} requests, {milliseconds_text(low)}{ending}"
        width = max(scale_x(high) - x - 1, 1)
        body.append(rectangle((x, y), width, frame.y_end - y, kind="bar s0", hint=hint))
    percentiles = (("p50", latency.p50_ms), ("p95", latency.p95_ms), ("p99", latency.p99_ms))
    for row, (name, value) in enumerate(percentiles):
        body += _marker(scale_x(value), frame, f"{name} {milliseconds_text(value)}", row=row)
    body += frame.axis_names(x="latency, ms", y="requests")
    return frame.svg(body, label="Histogram of request latency")


def _marker(x: float, frame: Frame, label: str, *, row: int) -> list[str]:
    """Draw a vertical line with its label above, on the side where there is room."""
    y = frame.top - 4 + 13 * row
    step, anchor = (-5, "end") if x > frame.width * 0.62 else (5, "start")
    return [
        line((x, y - 8), (x, frame.y_end), kind="marker"),
        text((x + step, y), label, anchor=anchor, kind="note"),
    ]


def throughput_chart(requests: RequestStatistics) -> str:
    """Draw the requests answered per second over the time of the run."""
    frame = Frame(_HALF, 270, top=44)
    rates = [count / requests.interval_s for count in requests.completed]
    # The last interval is cut off by the end of the run.
    rest = requests.seconds - requests.interval_s * (len(rates) - 1)
    rates[-1] = requests.completed[-1] / max(rest, requests.interval_s / 4)
    end = max(requests.seconds, 1e-9)
    scale_y, body = frame.y_axis(nice_ticks(max(*rates, requests.per_s), count=4), number_text)
    scale_x, marks = frame.x_axis(nice_ticks(end, count=5), number_text, high=end)
    points = [
        (scale_x(min((index + 0.5) * requests.interval_s, end)), scale_y(rate))
        for index, rate in enumerate(rates)
    ]
    points = [(frame.left, points[0][1]), *points, (frame.x_end, points[-1][1])]
    area = [(frame.left, frame.y_end), *points, (frame.x_end, frame.y_end)]
    mean, label = scale_y(requests.per_s), f"mean {number_text(requests.per_s)}/s"
    body += [
        *marks,
        polygon(area, kind="area"),
        polyline(points, kind="curve s0"),
        line((frame.left, mean), (frame.x_end, mean), kind="marker"),
        text((frame.x_end, frame.top - 22), label, anchor="end", kind="note"),
        *frame.axis_names(x="time, s", y="requests per second"),
    ]
    return frame.svg(body, label="Requests answered per second over time")


def sweep_latency_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the median latency of each shape, one mark per load, with a line up to p95."""
    marks = [(point, point.latency.p50_ms, point.latency.p95_ms) for point in points]
    return _marks_chart(marks, axis="latency p50 (to p95), ms", label="Latency by shape and load")


def sweep_first_token_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the median time to the first token where there is one, with a line up to p95."""
    marks = [
        (point, point.first_token_ms, point.first_token_p95_ms or point.first_token_ms)
        for point in points
        if point.first_token_ms is not None
    ]
    return _marks_chart(marks, axis="first token p50 (to p95), ms", label="Time to the first token")


def sweep_per_token_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the median time of each further token, where it is known."""
    marks = [
        (point, point.per_token_ms, point.per_token_ms)
        for point in points
        if point.per_token_ms is not None
    ]
    return _marks_chart(marks, axis="each further token, ms", label="Time of a further token")


def _marks_chart(
    marks: Sequence[tuple[LatencyPoint, float, float]], *, axis: str, label: str
) -> str:
    """Draw a time in milliseconds for each point, with a line up to a higher one."""
    lowest, highest = min(each[1] for each in marks), max(each[2] for each in marks)
    is_log = lowest > 0 and highest / lowest > _LOG_FROM
    ticks = log_ticks(lowest, highest) if is_log else nice_ticks(highest, count=4)
    columns = _Columns([point for point, _, _ in marks])
    scale, body = columns.frame.y_axis(ticks, number_text, is_log=is_log)
    for (point, value, high), (x, width, kind) in zip(marks, columns.places(), strict=True):
        y, y_high = scale(value), scale(high)
        hint = f"{shape_text(point)} tokens, {load_text(point)}: {milliseconds_text(value)}"
        if high > value:
            hint += f", p95 {milliseconds_text(high)}"
            ends = (x - width / 4, y_high), (x + width / 4, y_high)
            body.append(line((x, y), (x, y_high), kind=f"whisker {kind}"))
            body.append(line(*ends, kind=f"whisker {kind}"))
        body.append(dot((x, y), 5, kind=f"point {kind}", hint=hint))
    return columns.svg(body, axis=f"{axis}, log scale" if is_log else axis, label=label)


def sweep_throughput_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the tokens per second of each shape, one bar per load."""
    columns = _Columns(points)
    ticks = nice_ticks(max(point.tokens_per_s for point in points), count=4)
    scale, body = columns.frame.y_axis(ticks, number_text)
    for point, (x, width, kind) in zip(points, columns.places(), strict=True):
        y, rate = scale(point.tokens_per_s), number_text(point.tokens_per_s)
        hint = f"{shape_text(point)} tokens, {load_text(point)}: {rate} tokens/s"
        corner, height = (x - width / 2 + 1, y), columns.frame.y_end - y
        body.append(rectangle(corner, width - 2, height, kind=f"bar {kind}", hint=hint))
        if width >= _LABELLED_WIDTH:
            body.append(text((x, y - 5), rate, anchor="middle", kind="note"))
    return columns.svg(body, axis="tokens per second", label="Tokens per second by shape and load")


class _Columns:
    """A horizontal axis with a place per shape, and in it a column per load."""

    def __init__(self, points: Sequence[LatencyPoint]) -> None:
        self._points = points
        self._shapes = list(dict.fromkeys(map(shape_text, points)))
        self._loads = list(dict.fromkeys(map(load_text, points)))
        top = 34 + legend_height(Frame(_HALF, 0), self._loads)
        self.frame = Frame(_HALF, 238 + top, top=top)
        self._step = (self.frame.x_end - self.frame.left) / len(self._shapes)

    def places(self) -> Iterator[tuple[float, float, str]]:
        """Yield for each point the middle and width of its column, and the class of its load."""
        width = min(46.0, self._step * 0.7 / len(self._loads))
        for point in self._points:
            series = self._loads.index(load_text(point))
            centre = self._centre(self._shapes.index(shape_text(point)))
            yield (
                centre + (series - (len(self._loads) - 1) / 2) * width,
                width,
                f"s{series % SERIES}",
            )

    def svg(self, body: Sequence[str], *, axis: str, label: str) -> str:
        """Return the chart around its marks, with its shapes, its legend and its axes' names."""
        shapes = [
            text((self._centre(index), self.frame.y_end + 18), shape, anchor="middle")
            for index, shape in enumerate(self._shapes)
        ]
        inputs_only = not any(point.output_len for point in self._points)
        names = self.frame.axis_names(x="tokens in" if inputs_only else "tokens in + out", y=axis)
        return self.frame.svg(
            [*body, *shapes, *legend(self.frame, self._loads), *names], label=label
        )

    def _centre(self, index: int) -> float:
        return self.frame.left + self._step * (index + 0.5)
