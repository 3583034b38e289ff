"""Charts of a report with a vertical axis, each from its part of the record; two fill the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from inference.evaluation.record import Distribution, HistoryPoint, LatencyPoint, RequestStatistics
from inference.evaluation.report import svg
from inference.evaluation.report.formatting import (
    interval_hint,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    percent_axis,
    shape_text,
)

_HALF = 440.0
_LABELLED_WIDTH = 28  # of a bar that has room for a number above it
_LOG_FROM = 15.0  # highest over lowest value, from which a linear axis hides the low ones


def history_chart(points: Sequence[HistoryPoint], name: str) -> Markup:
    """Draw one metric over the runs of the store, with its 95% interval; the last is this run."""
    frame = svg.Frame(_HALF, 230, top=24)
    shown = [point for point in points if name in point.metrics]
    metrics = [point.metrics[name] for point in shown]
    low, high = min(each.low for each in metrics), max(each.high for each in metrics)
    ticks = svg.nice_ticks(high, low=max(0.0, low - (high - low) * 0.1), count=4)
    scale_x = frame.x(-0.5, len(shown) - 0.5)
    tick_text = percent_axis(ticks) if metrics[-1].unit == "fraction" else number_text
    scale_y, body = frame.y_axis(ticks, tick_text)
    places = [(scale_x(i), scale_y(each.value)) for i, each in enumerate(metrics)]
    body.append(svg.polyline(places, kind="curve s0"))
    for point, metric, at in zip(shown, metrics, places, strict=True):
        ends = [(at[0], scale_y(end)) for end in (metric.low, metric.high)]
        body.append(svg.line(ends[0], ends[1], kind="whisker s0"))
        hint = f"{interval_hint(metric)}, {point.run_id}"
        radius, kind = (6, "value") if point is shown[-1] else (4, "point s0")
        body.append(svg.dot(at, radius, kind=kind, hint=hint))
    for point, x, anchor in ((shown[0], frame.left, "start"), (shown[-1], frame.x_end, "end")):
        label = point.started_at[:16].replace("T", " ")
        body.append(svg.text((x, frame.y_end + 18), label, anchor=anchor))
    return frame.svg(body, label=f"{metric_title(name)} over runs")


def latency_histogram(latency: Distribution) -> Markup:
    """Draw the distribution of the requests' latency, with its median, 95th and 99th percentile."""
    frame = svg.Frame(_HALF, 270, top=44)
    edges, counts = latency.edges_ms, latency.counts
    scale_y, body = frame.y_axis(svg.nice_ticks(max(counts), count=4), number_text)
    scale_x, marks = frame.x_axis(
        svg.nice_ticks(max(edges[-1], latency.p99_ms), count=5), number_text
    )
    body += marks
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        x, y = scale_x(low), scale_y(count)
        ending = " and above" if high == edges[-1] else f" to {milliseconds_text(high)}"
        hint = f"{count} requests, {milliseconds_text(low)}{ending}"
        width = max(scale_x(high) - x - 1, 1)
        body.append(svg.rectangle((x, y), width, frame.y_end - y, kind="bar s0", hint=hint))
    percentiles = (("p50", latency.p50_ms), ("p95", latency.p95_ms), ("p99", latency.p99_ms))
    for row, (name, value) in enumerate(percentiles):
        x, y = scale_x(value), frame.top - 4 + 13 * row
        # The label is on the side where there is room.
        step, anchor = (-5, "end") if x > frame.width * 0.62 else (5, "start")
        label = f"{name} {milliseconds_text(value)}"
        body.append(svg.line((x, y - 8), (x, frame.y_end), kind="marker"))
        body.append(svg.text((x + step, y), label, anchor=anchor, kind="note"))
    body += frame.axis_names(x="latency, ms", y="requests")
    return frame.svg(body, label="Histogram of request latency")


def throughput_chart(requests: RequestStatistics) -> Markup:
    """Draw the requests answered per second over the time of the run."""
    frame = svg.Frame(_HALF, 270, top=44)
    rates = [count / requests.interval_s for count in requests.completed]
    # The last interval is cut off by the end of the run.
    rest = requests.seconds - requests.interval_s * (len(rates) - 1)
    rates[-1] = requests.completed[-1] / max(rest, requests.interval_s / 4)
    end = max(requests.seconds, 1e-9)
    scale_y, body = frame.y_axis(svg.nice_ticks(max(*rates, requests.per_s), count=4), number_text)
    scale_x, marks = frame.x_axis(svg.nice_ticks(end, count=5), number_text, high=end)
    points = [
        (scale_x(min((index + 0.5) * requests.interval_s, end)), scale_y(rate))
        for index, rate in enumerate(rates)
    ]
    points = [(frame.left, points[0][1]), *points, (frame.x_end, points[-1][1])]
    area = [(frame.left, frame.y_end), *points, (frame.x_end, frame.y_end)]
    mean, label = scale_y(requests.per_s), f"mean {number_text(requests.per_s)}/s"
    body += [
        *marks,
        svg.polygon(area, kind="area"),
        svg.polyline(points, kind="curve s0"),
        svg.line((frame.left, mean), (frame.x_end, mean), kind="marker"),
        svg.text((frame.x_end, frame.top - 22), label, anchor="end", kind="note"),
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
    top = 34 + svg.legend_height(svg.Frame(_HALF, 0), loads)
    frame = svg.Frame(_HALF, 238 + top, top=top)
    step = (frame.x_end - frame.left) / len(shapes)
    width = min(46.0, step * 0.7 / len(loads))
    values = [(value or 0.0, high or value or 0.0) for value, high in map(chart.value, points)]
    lowest, highest = min(low for low, _ in values), max(high for _, high in values)
    is_log = chart is not THROUGHPUT and lowest > 0 and highest / lowest > _LOG_FROM
    ticks = svg.log_ticks(lowest, highest) if is_log else svg.nice_ticks(highest, count=4)
    scale, body = frame.y_axis(ticks, number_text, is_log=is_log)
    for point, (value, high) in zip(points, values, strict=True):
        series = loads.index(load_text(point))
        place = shapes.index(shape_text(point)) + 0.5
        x = frame.left + step * place + (series - (len(loads) - 1) / 2) * width
        y, kind = scale(value), f"s{series % svg.SERIES}"
        hint = f"{shape_text(point)} tokens, {load_text(point)}: "
        if chart is THROUGHPUT:
            hint += f"{number_text(value)} tokens/s"
            corner, height = (x - width / 2 + 1, y), frame.y_end - y
            body.append(svg.rectangle(corner, width - 2, height, kind=f"bar {kind}", hint=hint))
            if width >= _LABELLED_WIDTH:
                body.append(svg.text((x, y - 5), number_text(value), anchor="middle", kind="note"))
            continue
        hint += milliseconds_text(value)
        if high > value:
            hint += f", p95 {milliseconds_text(high)}"
            ends = (x - width / 4, scale(high)), (x + width / 4, scale(high))
            body.append(svg.line((x, y), (x, scale(high)), kind=f"whisker {kind}"))
            body.append(svg.line(*ends, kind=f"whisker {kind}"))
        body.append(svg.dot((x, y), 5, kind=f"point {kind}", hint=hint))
    for index, shape in enumerate(shapes):
        at = (frame.left + step * (index + 0.5), frame.y_end + 18)
        body.append(svg.text(at, shape, anchor="middle"))
    inputs_only = not any(point.output_len for point in points)
    body += svg.legend(frame, loads)
    body += frame.axis_names(
        x="tokens in" if inputs_only else "tokens in + out",
        y=f"{chart.axis}, log scale" if is_log else chart.axis,
    )
    return frame.svg(body, label=f"{chart.title} by shape and load")
