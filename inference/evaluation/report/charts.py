"""Charts of a report, each from its part of the record.

A chart with a row for each name fills the width of the page; in a narrow one the names are above
their rows. A chart with a vertical axis fills half the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

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


def responsive(draw: Callable[[float], Markup]) -> Markup:
    """Return a chart of rows as HTML, in the width that the reader's window has room for."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(
        draw(WIDE), draw(NARROW)
    )


@dataclass
class _Rows:
    """A chart with a row for each title above one horizontal axis; middles are the rows' own y."""

    frame: Frame
    scale: Scale
    middles: Sequence[float]
    body: list[str]


def _rows(
    titles: Sequence[str],
    highest: float,
    tick_text: Callable[[Sequence[float]], Callable[[float], str]],
    *,
    width: float,
    height: float,
    top: float = 12,
    right: float = 30,
    high: float | None = None,
) -> _Rows:
    """Return an empty chart of rows of `height`, on an axis from 0 to `highest` or beyond."""
    is_narrow = width < WIDE
    above = 22 if is_narrow else 0
    left = 22 if is_narrow else 34 + 7.6 * max(map(len, titles))
    whole = top + (height + above) * len(titles) + 36
    frame = Frame(width, whole, left=left, right=right, top=top, bottom=36)
    ticks = nice_ticks(highest, count=4 if is_narrow else 6)
    scale, body = frame.x_axis(ticks, tick_text(ticks), high=high, grid=True)
    middles = []
    for index, title in enumerate(titles):
        start = top + (height + above) * index
        middles.append(start + above + height / 2)
        at, anchor = (
            ((6.0, start + 16), "start") if is_narrow else ((left - 16, middles[-1] + 5), "end")
        )
        body.append(text(at, title, anchor=anchor, kind="name"))
    return _Rows(frame, scale, middles, body)


def accuracy_chart(
    metrics: Sequence[Metric],
    *,
    references: Mapping[str, float],
    baselines: Mapping[str, float],
    bounds: Mapping[str, Bound],
    width: float = WIDE,
) -> Markup:
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
    titles = [metric_title(metric.name) for metric in metrics]
    rows = _rows(titles, min(1.0, max(values) * 1.05), _percent, width=width, height=54)
    for metric, y in zip(metrics, rows.middles, strict=True):
        low, high, x = map(rows.scale, (metric.low, metric.high, metric.value))
        estimate = _estimate(metric)
        rows.body += [
            line((low, y), (high, y), kind="interval"),
            *(line((end, y - 6), (end, y + 6), kind="interval") for end in (low, high)),
            dot((x, y), 7, kind="value", hint=estimate.hint),
            text((x, y - 13), estimate.text, anchor="middle", kind="figure"),
        ]
        for kind, found in marks.items():
            if metric.name in found:
                value = found[metric.name]
                rows.body += _mark(kind, rows.scale(value), y, value)
    return rows.frame.svg(rows.body, label="Accuracies with 95% intervals")


def _mark(kind: str, x: float, y: float, value: float) -> list[str]:
    """Draw a value to compare with, below the interval."""
    hint = f"{kind} {value_text(value, 'fraction')}"
    if kind == "bound":
        strip = rectangle((x - 4, y - 10), 8, 34, kind="hover", hint=hint)
        return [line((x, y - 10), (x, y + 24), kind="bound"), strip]
    if kind == "baseline":
        return [rectangle((x - 5, y + 11), 10, 10, kind="baseline", hint=hint)]
    diamond = ((x, y + 11), (x + 6, y + 17), (x, y + 23), (x - 6, y + 17))
    return [polygon(diamond, kind="reference", hint=hint)]


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


def comparison_chart(pairs: Sequence[tuple[Metric, Metric]], *, width: float = WIDE) -> Markup:
    """Draw each fraction of two runs, one interval above the other."""
    rows = [(metric_title(one.name), (_estimate(one), _estimate(two))) for one, two in pairs]
    return _paired(rows, _percent, label="Accuracies of two runs", most=1.0, width=width)


def latency_comparison_chart(
    pairs: Sequence[tuple[LatencyPoint, LatencyPoint]], *, width: float = WIDE
) -> Markup:
    """Draw the median latency of points of two runs, with a line up to the 95th percentile."""
    rows = [
        (f"{shape_text(one)}, {load_text(one)}", (_median(one), _median(two))) for one, two in pairs
    ]
    return _paired(rows, _number, label="Latency of two runs", width=width)


def _paired(
    pairs: Sequence[tuple[str, tuple[_Estimate, _Estimate]]],
    tick_text: Callable[[Sequence[float]], Callable[[float], str]],
    *,
    label: str,
    width: float,
    most: float = math.inf,
) -> Markup:
    """Draw values of two runs under each title, one above the other; no tick exceeds `most`."""
    highest = max(each.high for _, pair in pairs for each in pair)
    titles = [title for title, _ in pairs]
    axis = min(most, highest * 1.05)
    rows = _rows(titles, axis, tick_text, width=width, height=58, top=22, right=70)
    for (_, pair), middle in zip(pairs, rows.middles, strict=True):
        for series, (each, y) in enumerate(zip(pair, (middle - 10, middle + 12), strict=True)):
            low, high = rows.scale(each.low), rows.scale(each.high)
            at = (rows.scale(each.value), y)
            rows.body += [
                line((low, y), (high, y), kind=f"whisker s{series}"),
                dot(at, 6, kind=f"point s{series}", hint=each.hint),
                text((high + 8, y + 4), each.text, kind="note"),
            ]
    rows.body.extend(legend(rows.frame, ["first run", "second run"], y=0))
    return rows.frame.svg(rows.body, label=label)


def stages_chart(stages: Sequence[StageTiming], *, width: float = WIDE) -> Markup:
    """Draw the time of each stage, one bar below the other, from its start where that is known.

    A stage without its own start follows the one before it.
    """
    starts: list[float] = []
    end = 0.0
    for stage in stages:
        starts.append(end if stage.start_s is None else stage.start_s)
        end = max(end, starts[-1] + stage.seconds)
    titles, form = [stage.name for stage in stages], {"height": 34, "top": 6, "right": 96}
    rows = _rows(titles, end, _seconds, width=width, high=max(end, 1e-9), **form)
    for index, (start, stage, y) in enumerate(zip(starts, stages, rows.middles, strict=True)):
        x = rows.scale(start)
        long = max(rows.scale(start + stage.seconds) - x, 2)
        label, kind = seconds_text(stage.seconds), f"bar s{index % SERIES}"
        hint = f"{stage.name}: {label}, {stage.state}"
        rows.body.append(rectangle((x, y - 11), long, 22, kind=kind, hint=hint, radius=3))
        rows.body.append(text((x + long + 7, y + 5), label, kind="note"))
    return rows.frame.svg(rows.body, label="Seconds per stage")


def _percent(ticks: Sequence[float]) -> Callable[[float], str]:
    """Return the text of an axis of fractions, with as many digits as its steps need."""
    step = 100 * (ticks[1] - ticks[0])
    digits = 0 if step >= 1 - 1e-9 else 1 if step >= 0.1 - 1e-9 else 2
    return lambda tick: f"{100 * tick:.{digits}f}%"


def _number(_: Sequence[float]) -> Callable[[float], str]:
    return number_text


def _seconds(_: Sequence[float]) -> Callable[[float], str]:
    return lambda tick: f"{tick:g} s"


def history_chart(points: Sequence[HistoryPoint], name: str) -> Markup:
    """Draw one metric over the runs of the store, with its 95% interval; the last is this run."""
    frame = Frame(_HALF, 230, top=24)
    shown = [point for point in points if name in point.metrics]
    metrics = [point.metrics[name] for point in shown]
    low, high = min(each.low for each in metrics), max(each.high for each in metrics)
    ticks = nice_ticks(high, low=max(0.0, low - (high - low) * 0.1), count=4)
    scale_x = frame.x(-0.5, len(shown) - 0.5)
    tick_text = _percent(ticks) if metrics[-1].unit == "fraction" else number_text
    scale_y, body = frame.y_axis(ticks, tick_text)
    places = [(scale_x(i), scale_y(each.value)) for i, each in enumerate(metrics)]
    body.append(polyline(places, kind="curve s0"))
    for point, metric, at in zip(shown, metrics, places, strict=True):
        ends = [(at[0], scale_y(end)) for end in (metric.low, metric.high)]
        body.append(line(ends[0], ends[1], kind="whisker s0"))
        hint = f"{_estimate(metric).hint}, {point.run_id}"
        radius, kind = (6, "value") if point is shown[-1] else (4, "point s0")
        body.append(dot(at, radius, kind=kind, hint=hint))
    for point, x, anchor in ((shown[0], frame.left, "start"), (shown[-1], frame.x_end, "end")):
        label = point.started_at[:16].replace("T", " ")
        body.append(text((x, frame.y_end + 18), label, anchor=anchor))
    return frame.svg(body, label=f"{metric_title(name)} over runs")


def latency_histogram(latency: Distribution) -> Markup:
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
        x, y = scale_x(value), frame.top - 4 + 13 * row
        # The label is on the side where there is room.
        step, anchor = (-5, "end") if x > frame.width * 0.62 else (5, "start")
        label = f"{name} {milliseconds_text(value)}"
        body.append(line((x, y - 8), (x, frame.y_end), kind="marker"))
        body.append(text((x + step, y), label, anchor=anchor, kind="note"))
    body += frame.axis_names(x="latency, ms", y="requests")
    return frame.svg(body, label="Histogram of request latency")


def throughput_chart(requests: RequestStatistics) -> Markup:
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


@dataclass(frozen=True)
class SweepChart:
    """A chart of the latency sweep.

    Attributes:
        value: of a point, and the higher one up to which a line is drawn; None where it has none.
    """

    title: str
    axis: str
    value: Callable[[LatencyPoint], tuple[float | None, float | None]]


THROUGHPUT = SweepChart("Throughput", "tokens per second", lambda p: (p.tokens_per_s, None))
SWEEP_CHARTS = (
    SweepChart(
        "Latency of a request",
        "latency p50 (to p95), ms",
        lambda point: (point.latency.p50_ms, point.latency.p95_ms),
    ),
    THROUGHPUT,
    SweepChart(
        "Time to the first token",
        "first token p50 (to p95), ms",
        lambda point: (point.first_token_ms, point.first_token_p95_ms),
    ),
    SweepChart("Each further token", "each further token, ms", lambda p: (p.per_token_ms, None)),
)


def sweep_charts(points: Sequence[LatencyPoint]) -> list[tuple[str, Markup]]:
    """Return the title and the drawing of each chart that has a point."""
    known = {each: [p for p in points if each.value(p)[0] is not None] for each in SWEEP_CHARTS}
    return [(each.title, _sweep_chart(each, found)) for each, found in known.items() if found]


def _sweep_chart(chart: SweepChart, points: Sequence[LatencyPoint]) -> Markup:
    """Draw a place per shape and in it a column per load: a bar of throughput, a mark of a time."""
    shapes = list(dict.fromkeys(map(shape_text, points)))
    loads = list(dict.fromkeys(map(load_text, points)))
    top = 34 + legend_height(Frame(_HALF, 0), loads)
    frame = Frame(_HALF, 238 + top, top=top)
    step = (frame.x_end - frame.left) / len(shapes)
    width = min(46.0, step * 0.7 / len(loads))
    values = [(value or 0.0, high or value or 0.0) for value, high in map(chart.value, points)]
    lowest, highest = min(low for low, _ in values), max(high for _, high in values)
    is_log = chart is not THROUGHPUT and lowest > 0 and highest / lowest > _LOG_FROM
    ticks = log_ticks(lowest, highest) if is_log else nice_ticks(highest, count=4)
    scale, body = frame.y_axis(ticks, number_text, is_log=is_log)
    for point, (value, high) in zip(points, values, strict=True):
        series = loads.index(load_text(point))
        place = shapes.index(shape_text(point)) + 0.5
        x = frame.left + step * place + (series - (len(loads) - 1) / 2) * width
        y, kind = scale(value), f"s{series % SERIES}"
        hint = f"{shape_text(point)} tokens, {load_text(point)}: "
        if chart is THROUGHPUT:
            hint += f"{number_text(value)} tokens/s"
            corner, height = (x - width / 2 + 1, y), frame.y_end - y
            body.append(rectangle(corner, width - 2, height, kind=f"bar {kind}", hint=hint))
            if width >= _LABELLED_WIDTH:
                body.append(text((x, y - 5), number_text(value), anchor="middle", kind="note"))
            continue
        hint += milliseconds_text(value)
        if high > value:
            hint += f", p95 {milliseconds_text(high)}"
            ends = (x - width / 4, scale(high)), (x + width / 4, scale(high))
            body.append(line((x, y), (x, scale(high)), kind=f"whisker {kind}"))
            body.append(line(*ends, kind=f"whisker {kind}"))
        body.append(dot((x, y), 5, kind=f"point {kind}", hint=hint))
    for index, shape in enumerate(shapes):
        at = (frame.left + step * (index + 0.5), frame.y_end + 18)
        body.append(text(at, shape, anchor="middle"))
    inputs_only = not any(point.output_len for point in points)
    body += legend(frame, loads)
    body += frame.axis_names(
        x="tokens in" if inputs_only else "tokens in + out",
        y=f"{chart.axis}, log scale" if is_log else chart.axis,
    )
    return frame.svg(body, label=f"{chart.title} by shape and load")
