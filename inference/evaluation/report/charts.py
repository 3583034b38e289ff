"""Charts of accuracies, their history and the stages, each from its part of the record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference.evaluation.options import Bound
from inference.evaluation.record import HistoryPoint, LatencyPoint, StageTiming
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
    line,
    nice_ticks,
    polyline,
    rectangle,
    svg,
    text,
    x_axis,
    y_axis,
)
from inference.evaluation.task import Metric


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


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that is drawn around it, and how it is written."""

    value: float
    low: float
    high: float
    text: str
    hint: str


def comparison_chart(pairs: Sequence[tuple[Metric, Metric]]) -> str:
    """Draw each fraction of two runs, one interval above the other."""
    return _paired_chart(
        [
            (metric_title(first.name), _estimate(first), _estimate(second))
            for first, second in pairs
        ],
        unit="fraction",
        label="Accuracies of two runs",
        most=1.0,
    )


def _estimate(metric: Metric) -> Estimate:
    value = value_text(metric.value, metric.unit)
    hint = f"{value} (95%: {interval_text(metric)})"
    return Estimate(metric.value, metric.low, metric.high, value, hint)


def latency_comparison_chart(pairs: Sequence[tuple[LatencyPoint, LatencyPoint]]) -> str:
    """Draw the median latency of points of two runs, with a line up to the 95th percentile."""
    rows = [
        (f"{shape_text(first)}, {load_text(first)}", _median(first), _median(second))
        for first, second in pairs
    ]
    return _paired_chart(rows, unit="ms", label="Latency of two runs")


def _median(point: LatencyPoint) -> Estimate:
    p50, p95 = milliseconds_text(point.latency.p50_ms), milliseconds_text(point.latency.p95_ms)
    low, high = point.latency.p50_ms, point.latency.p95_ms
    return Estimate(low, low, high, p50, hint=f"p50 {p50}, p95 {p95}")


def _paired_chart(
    rows: Sequence[tuple[str, Estimate, Estimate]],
    *,
    unit: str,
    label: str,
    most: float = math.inf,
) -> str:
    """Draw values of two runs under each title, one above the other; none is beyond `most`."""
    height = 58
    left = 30 + 7.6 * max(len(title) for title, _, _ in rows)
    frame = Frame(1040, 56 + height * len(rows), left=left, right=70, top=22, bottom=36)
    highest = max(each.high for _, *pair in rows for each in pair)
    ticks = nice_ticks(min(most, highest * 1.05), count=6)
    scale = frame.x(0.0, ticks[-1])
    body = x_axis(frame, scale, ticks, lambda tick: _tick_text(tick, unit, ticks), grid=True)
    for index, (title, *pair) in enumerate(rows):
        middle = frame.top + height * (index + 0.5)
        body.append(text(frame.left - 16, middle + 5, title, anchor="end", kind="name"))
        for series, (each, y) in enumerate(zip(pair, (middle - 10, middle + 12), strict=True)):
            kind = f"s{series}"
            body.append(line(scale(each.low), y, scale(each.high), y, kind=f"whisker {kind}"))
            body.append(dot(scale(each.value), y, 6, kind=f"point {kind}", hint=each.hint))
            body.append(text(scale(each.high) + 8, y + 4, each.text, kind="note"))
    body += legend(Frame(1040, 0, left=frame.left), ["first run", "second run"], y=0)
    return svg(frame.width, frame.height, body, label=label)


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
        body.append(rectangle(x, y, width, 22, kind=f"bar s{index % SERIES}", hint=hint, radius=3))
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
