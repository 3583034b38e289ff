"""Two runs side by side, as text for the terminal and as one HTML page."""

from __future__ import annotations

from html import escape

from inference.evaluation.record import Comparison, LatencyPoint, Report
from inference.evaluation.report.charts import (
    comparison_chart,
    latency_comparison_chart,
    responsive,
)
from inference.evaluation.report.compare import ChangedSample, RunComparison
from inference.evaluation.report.formatting import (
    difference_text,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    shape_text,
    value_text,
)
from inference.evaluation.report.page import page, table

_MAX_CHANGED = 500
_METRIC_HEAD = ("metric", "first", "second", "difference", "95% of difference", "chance")
_LATENCY_HEAD = ("tokens in + out", "load", "p50 first", "p50 second", "tokens/s", "change")


def comparison_text(comparison: RunComparison) -> str:
    """Return the comparison as a table for the terminal."""
    rows: list[tuple[str, ...]] = [_METRIC_HEAD]
    rows += [_metric_row(comparison, each) for each in comparison.metrics]
    lines = [
        f"first   {_described(comparison.first)}",
        f"second  {_described(comparison.second)}",
        *comparison.notes,
        "",
        *_columns(rows),
    ]
    if comparison.changed:
        lines += ["", f"{len(comparison.changed):,} samples changed between right and wrong."]
    if comparison.latency:
        lines += [
            "",
            *_columns([_LATENCY_HEAD, *(_latency_row(*pair) for pair in comparison.latency)]),
        ]
    return "\n".join(lines)


def _described(report: Report) -> str:
    run = report.run
    return (
        f"{report.run_id} (TP {run.tp_size} x PP {run.pp_size}, {run.data_type or 'type unknown'})"
    )


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns, the first to the left."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _metric_row(comparison: RunComparison, each: Comparison) -> tuple[str, ...]:
    unit = comparison.metric(each.metric).unit
    interval = ""
    if each.low is not None and each.high is not None:
        interval = f"{difference_text(each.low, unit)} to {difference_text(each.high, unit)}"
    return (
        each.metric,
        value_text(each.reference, unit),
        value_text(each.value, unit),
        difference_text(each.difference, unit),
        interval,
        "" if each.p_value is None else f"p = {each.p_value:.2g}",
    )


def _latency_row(first: LatencyPoint, second: LatencyPoint) -> tuple[str, ...]:
    change = second.tokens_per_s / first.tokens_per_s - 1 if first.tokens_per_s else 0.0
    return (
        shape_text(second),
        load_text(second),
        milliseconds_text(first.latency.p50_ms),
        milliseconds_text(second.latency.p50_ms),
        f"{number_text(first.tokens_per_s)} to {number_text(second.tokens_per_s)}",
        f"{change:+.1%}",
    )


def render_comparison(comparison: RunComparison) -> str:
    """Return the comparison as one self-contained HTML page."""
    first, second = comparison.first, comparison.second
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in comparison.notes)
    rows = [tuple(map(escape, _metric_row(comparison, each))) for each in comparison.metrics]
    sections = [
        f"<h2>Metrics</h2>{notes}",
        _drawn(comparison),
        f'<div class="card scroll">{table(_METRIC_HEAD, rows)}</div>',
        _latency(comparison),
        _changes(comparison),
    ]
    header = (
        '<header><div><div class="brand">Slipway comparison</div>'
        f"<h1>{escape(second.run.name)}</h1>"
        f'<ul class="chips"><li>first <b>{escape(_described(first))}</b></li>'
        f"<li>second <b>{escape(_described(second))}</b></li></ul></div></header>\n"
    )
    footer = f"{escape(first.run_id)} and {escape(second.run_id)}"
    return page(f"{second.run.name}: comparison", header, sections, footer=footer)


def _drawn(comparison: RunComparison) -> str:
    fractions = [m for m in comparison.second.metrics if m.unit == "fraction"]
    before = {metric.name: metric for metric in comparison.first.metrics}
    pairs = [(before[metric.name], metric) for metric in fractions if metric.name in before]
    if not pairs:
        return ""
    chart = responsive(lambda width: comparison_chart(pairs, width=width))
    return f'<div class="card">{chart}</div>'


def _latency(comparison: RunComparison) -> str:
    if not comparison.latency:
        return ""
    rows = [_latency_row(*pair) for pair in comparison.latency]
    chart = responsive(lambda width: latency_comparison_chart(comparison.latency, width=width))
    return (
        f'<h2>Latency</h2><p class="lead">Points that both runs measured: median of a request, '
        f"with a line up to its 95th percentile, in milliseconds.</p>\n"
        f'<div class="card">{chart}</div>'
        f'<div class="card scroll">{table(_LATENCY_HEAD, rows)}</div>'
    )


def _changes(comparison: RunComparison) -> str:
    if not comparison.changed:
        return ""
    shown = comparison.changed[:_MAX_CHANGED]
    head = ("#", "passage", "expected", "first answered", "second answered", "changed")
    rows = [_changed_row(each) for each in shown]
    left_out = len(comparison.changed) - len(shown)
    more = f" The first {len(shown)} are listed." if left_out else ""
    return (
        f'<h2>Changed samples</h2><p class="lead">{len(comparison.changed):,} samples that one run '
        f"got right and the other wrong.{more}</p>"
        f'<div class="card scroll">{table(head, rows, numbers=(0,))}</div>'
    )


def _changed_row(each: ChangedSample) -> tuple[str, ...]:
    marks = ", ".join(
        f'{metric_title(name).lower()} <b class="{kind}">{word}</b>'
        for name in each.metrics
        for kind, word in (
            (("good", "now right") if each.second.values[name] else ("bad", "now wrong")),
        )
    )
    return (
        str(each.second.index),
        escape(each.second.text),
        escape(each.second.target),
        escape(each.first.answer),
        escape(each.second.answer),
        marks,
    )
