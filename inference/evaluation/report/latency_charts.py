"""Charts of latency and throughput: of a task's requests, and of the sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inference.evaluation.record import Distribution, LatencyPoint, RequestStatistics
from inference.evaluation.report.formatting import (
    load_text,
    milliseconds_text,
    number_text,
    shape_text,
)
from inference.evaluation.report.svg import (
    SERIES,
    Frame,
    axis_names,
    dot,
    legend,
    legend_height,
    line,
    log_ticks,
    nice_ticks,
    polygon,
    polyline,
    rectangle,
    svg,
    text,
    x_axis,
    y_axis,
)

_LABELLED_WIDTH = 28  # of a bar that has room for a number above it
_LOG_FROM = 15.0  # times the lowest value; from there on an even axis would hide the low ones
_SWEEP_WIDTH = 510


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
    marks = [(point, point.latency.p50_ms, point.latency.p95_ms) for point in points]
    return _marks_chart(marks, axis="latency p50 (to p95), ms", label="Latency by shape and load")


def sweep_first_token_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the median time to the first token, with a line up to p95."""
    marks = [
        (point, point.first_token_ms, point.first_token_p95_ms or point.first_token_ms)
        for point in points
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
    frame, slots = _sweep_frame([point for point, _, _ in marks])
    scale = frame.y(ticks[0], ticks[-1], is_log=is_log)
    body = y_axis(frame, scale, ticks, number_text)
    for (point, value, high), (x, width, series) in zip(marks, slots.places(), strict=True):
        y, y_high = scale(value), scale(high)
        hint = f"{shape_text(point)} tokens, {load_text(point)}: {milliseconds_text(value)}"
        kind = f"s{series % SERIES}"
        if high > value:
            hint += f", p95 {milliseconds_text(high)}"
            body.append(line(x, y, x, y_high, kind=f"whisker {kind}"))
            body.append(line(x - width / 4, y_high, x + width / 4, y_high, kind=f"whisker {kind}"))
        body.append(dot(x, y, 5, kind=f"point {kind}", hint=hint))
    body += [*slots.names(), *legend(frame, slots.loads)]
    body += axis_names(frame, x="tokens in + out", y=f"{axis}, log scale" if is_log else axis)
    return svg(frame.width, frame.height, body, label=label)


def sweep_throughput_chart(points: Sequence[LatencyPoint]) -> str:
    """Draw the generated tokens per second of each shape, one bar per load."""
    frame, slots = _sweep_frame(points)
    ticks = nice_ticks(max(point.tokens_per_s for point in points), count=4)
    scale = frame.y(0.0, ticks[-1])
    body = y_axis(frame, scale, ticks, number_text)
    for point, (x, width, series) in zip(points, slots.places(), strict=True):
        y, rate = scale(point.tokens_per_s), number_text(point.tokens_per_s)
        hint = f"{shape_text(point)} tokens, {load_text(point)}: {rate} tokens/s"
        kind = f"bar s{series % SERIES}"
        body.append(
            rectangle(x - width / 2 + 1, y, width - 2, frame.y_end - y, kind=kind, hint=hint)
        )
        if width >= _LABELLED_WIDTH:
            body.append(text(x, y - 5, rate, anchor="middle", kind="note"))
    body += [*slots.names(), *legend(frame, slots.loads)]
    body += axis_names(frame, x="tokens in + out", y="tokens per second")
    return svg(frame.width, frame.height, body, label="Tokens per second by shape and load")


def _sweep_frame(points: Sequence[LatencyPoint]) -> tuple[Frame, _Slots]:
    """Return the frame of a chart of the sweep, with room for its legend, and its places."""
    loads = list(dict.fromkeys(map(load_text, points)))
    top = 34 + legend_height(Frame(_SWEEP_WIDTH, 0), loads)
    frame = Frame(_SWEEP_WIDTH, 238 + top, top=top)
    return frame, _Slots(frame, points, loads)


class _Slots:
    """Places on a horizontal axis: a slot per shape, in it a column per load."""

    def __init__(self, frame: Frame, points: Sequence[LatencyPoint], loads: Sequence[str]) -> None:
        self._points = points
        self._shapes = list(dict.fromkeys(map(shape_text, points)))
        self.loads = loads
        self._frame = frame
        self._slot = (frame.x_end - frame.left) / len(self._shapes)
        self._column = min(46.0, self._slot * 0.7 / len(self.loads))

    def names(self) -> list[str]:
        """Return the shapes below the axis."""
        return [
            text(self._centre(index), self._frame.y_end + 18, shape, anchor="middle")
            for index, shape in enumerate(self._shapes)
        ]

    def places(self) -> Iterator[tuple[float, float, int]]:
        """Yield for each point the middle and width of its column, and the number of its load."""
        for point in self._points:
            series = self.loads.index(load_text(point))
            centre = self._centre(self._shapes.index(shape_text(point)))
            x = centre + (series - (len(self.loads) - 1) / 2) * self._column
            yield x, self._column, series

    def _centre(self, index: int) -> float:
        return self._frame.left + self._slot * (index + 0.5)
