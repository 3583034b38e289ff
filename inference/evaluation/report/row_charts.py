"""Charts of a report with a row for each name; they fill the width of the page.

In a narrow page the names are above their rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from inference.evaluation.options import Bound
from inference.evaluation.record import LatencyPoint, StageTiming
from inference.evaluation.report import svg
from inference.evaluation.report.formatting import (
    interval_hint,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    percent_axis,
    seconds_text,
    shape_text,
    value_text,
)
from inference.evaluation.task import Metric

WIDE, NARROW = 1040.0, 360.0


def responsive(draw: Callable[..., Markup], *given: Any, **named: Any) -> Markup:
    """Return a chart of rows as HTML, in the width that the reader's window has room for."""
    wide, narrow = (draw(*given, width=width, **named) for width in (WIDE, NARROW))
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(wide, narrow)


@dataclass
class _Rows:
    """A chart with a row for each title above one horizontal axis; middles are the rows' own y."""

    frame: svg.Frame
    scale: svg.Scale
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
    frame = svg.Frame(width, whole, left=left, right=right, top=top, bottom=36)
    ticks = svg.nice_ticks(highest, count=4 if is_narrow else 6)
    scale, body = frame.x_axis(ticks, tick_text(ticks), high=high, grid=True)
    middles = []
    for index, title in enumerate(titles):
        start = top + (height + above) * index
        middles.append(start + above + height / 2)
        at, anchor = (
            ((6.0, start + 16), "start") if is_narrow else ((left - 16, middles[-1] + 5), "end")
        )
        body.append(svg.text(at, title, anchor=anchor, kind="name"))
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
    rows = _rows(titles, min(1.0, max(values) * 1.05), percent_axis, width=width, height=54)
    for metric, y in zip(metrics, rows.middles, strict=True):
        low, high, x = map(rows.scale, (metric.low, metric.high, metric.value))
        estimate = _estimate(metric)
        rows.body += [
            svg.line((low, y), (high, y), kind="interval"),
            *(svg.line((end, y - 6), (end, y + 6), kind="interval") for end in (low, high)),
            svg.dot((x, y), 7, kind="value", hint=estimate.hint),
            svg.text((x, y - 13), estimate.text, anchor="middle", kind="figure"),
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
        strip = svg.rectangle((x - 4, y - 10), 8, 34, kind="hover", hint=hint)
        return [svg.line((x, y - 10), (x, y + 24), kind="bound"), strip]
    if kind == "baseline":
        return [svg.rectangle((x - 5, y + 11), 10, 10, kind="baseline", hint=hint)]
    diamond = ((x, y + 11), (x + 6, y + 17), (x, y + 23), (x - 6, y + 17))
    return [svg.polygon(diamond, kind="reference", hint=hint)]


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
    return _Estimate(metric.value, metric.low, metric.high, value, interval_hint(metric))


def _median(point: LatencyPoint) -> _Estimate:
    low, high = point.latency.p50_ms, point.latency.p95_ms
    p50, p95 = milliseconds_text(low), milliseconds_text(high)
    return _Estimate(low, low, high, p50, hint=f"p50 {p50}, p95 {p95}")


def comparison_chart(pairs: Sequence[tuple[Metric, Metric]], *, width: float = WIDE) -> Markup:
    """Draw each fraction of two runs, one interval above the other."""
    rows = [(metric_title(one.name), (_estimate(one), _estimate(two))) for one, two in pairs]
    return _paired(rows, percent_axis, label="Accuracies of two runs", most=1.0, width=width)


def latency_comparison_chart(
    pairs: Sequence[tuple[LatencyPoint, LatencyPoint]], *, width: float = WIDE
) -> Markup:
    """Draw the median latency of points of two runs, with a line up to the 95th percentile."""
    rows = [
        (f"{shape_text(one)}, {load_text(one)}", (_median(one), _median(two))) for one, two in pairs
    ]
    return _paired(rows, lambda _: number_text, label="Latency of two runs", width=width)


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
                svg.line((low, y), (high, y), kind=f"whisker s{series}"),
                svg.dot(at, 6, kind=f"point s{series}", hint=each.hint),
                svg.text((high + 8, y + 4), each.text, kind="note"),
            ]
    rows.body.extend(svg.legend(rows.frame, ["first run", "second run"], y=0))
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
    rows = _rows(titles, end, lambda _: "{:g} s".format, width=width, high=max(end, 1e-9), **form)
    for index, (start, stage, y) in enumerate(zip(starts, stages, rows.middles, strict=True)):
        x = rows.scale(start)
        long = max(rows.scale(start + stage.seconds) - x, 2)
        label, kind = seconds_text(stage.seconds), f"bar s{index % svg.SERIES}"
        hint = f"{stage.name}: {label}, {stage.state}"
        rows.body.append(svg.rectangle((x, y - 11), long, 22, kind=kind, hint=hint, radius=3))
        rows.body.append(svg.text((x + long + 7, y + 5), label, kind="note"))
    return rows.frame.svg(rows.body, label="Seconds per stage")
