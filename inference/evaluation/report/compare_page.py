"""Two runs side by side, as text for the terminal and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from export_scripts.tables import text_table
from inference.evaluation.record import Comparison, LatencyPoint, Report
from inference.evaluation.report.compare import ChangedSample, RunComparison, TaskComparison
from inference.evaluation.report.formatting import (
    difference_text,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    shape_text,
    spread_text,
    value_text,
)
from inference.evaluation.report.page import render_page
from inference.evaluation.report.row_charts import (
    comparison_chart,
    latency_comparison_chart,
    responsive,
)

_ON_PAGE, _IN_TERMINAL = 500, 14  # changed samples that are listed
_MOST_TEXT = 32  # characters of an answer in the terminal
_METRIC_HEAD = ("metric", "first", "second", "difference", "95% of difference", "chance")
_TASK_HEAD = (
    "task", "samples in both", "only first", "only second", "same answer", "p50 first",
    "p50 second", "generated tokens/s",
)  # fmt: skip
_LATENCY_HEAD = ("tokens in + out", "load", "p50 first", "p50 second", "tokens/s", "change")
_CHANGED_HEAD = ("#", "expected", "first answered", "second answered", "changed")


def comparison_text(comparison: RunComparison) -> str:
    """Return the comparison as tables for the terminal."""
    parts = [
        f"first   {_described(comparison.first)}\nsecond  {_described(comparison.second)}",
        "\n".join(comparison.notes),
        _aligned(_METRIC_HEAD, [_metric_row(comparison, each) for each in comparison.metrics]),
        _aligned(_TASK_HEAD, [_task_row(each) for each in comparison.tasks]),
        _aligned(_LATENCY_HEAD, [_latency_row(*pair) for pair in comparison.latency]),
    ]
    if changed := comparison.changed:
        s = "s" * (len(changed) > 1)
        parts.append(f"{len(changed):,} sample{s} changed between right and wrong:")
        rows = [_changed_row(each) for each in changed[:_IN_TERMINAL]]
        parts.append(text_table(_CHANGED_HEAD, rows, rule=False))
    return "\n\n".join(part for part in parts if part)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return text_table(head, rows, right=range(1, len(head)), rule=False) if rows else ""


def _described(report: Report) -> str:
    run = report.run
    engine = f"{run.engine}, " if run.engine else ""
    size = f"TP {run.tp_size} x PP {run.pp_size}"
    return f"{report.run_id} ({engine}{size}, {run.data_type or 'type unknown'})"


def _metric_row(comparison: RunComparison, each: Comparison) -> tuple[str, ...]:
    unit = comparison.metric(each.metric).unit
    return (
        each.metric,
        value_text(each.reference, unit),
        value_text(each.value, unit),
        difference_text(each.difference, unit),
        spread_text(each, unit),
        "" if each.p_value is None else f"p = {each.p_value:.2g}",
    )


def _task_row(each: TaskComparison) -> tuple[str, ...]:
    counts = (each.both, each.only_first, each.only_second, each.same)
    medians = (milliseconds_text(run.latency.p50_ms) for run in (each.first, each.second))
    speeds = " to ".join(number_text(run.tokens_per_s) for run in (each.first, each.second))
    return each.name, *(f"{count:,}" for count in counts), *medians, speeds


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


def _changed_row(each: ChangedSample) -> tuple[str, ...]:
    texts = (each.second.target, each.first.answer, each.second.answer)
    words = ", ".join(f"{metric_title(name).lower()} {each.word(name)}" for name in each.metrics)
    return str(each.second.index), *(" ".join(t.split())[:_MOST_TEXT] for t in texts), words


def render_comparison(comparison: RunComparison) -> str:
    """Return the comparison as one self-contained HTML page."""
    first, second, latency = comparison.first, comparison.second, comparison.latency
    before = {metric.name: metric for metric in first.metrics}
    pairs = [
        (before[metric.name], metric)
        for metric in second.metrics
        if metric.unit == "fraction" and metric.name in before
    ]
    return render_page(
        "comparison.html",
        title=f"{second.run.name}: comparison",
        runs=(_described(first), _described(second)),
        comparison=comparison,
        accuracies=pairs and responsive(comparison_chart, pairs),
        metrics=(_METRIC_HEAD, [_metric_row(comparison, each) for each in comparison.metrics]),
        tasks=(_TASK_HEAD, [_task_row(each) for each in comparison.tasks]),
        latency_chart=latency and responsive(latency_comparison_chart, latency),
        latency=(_LATENCY_HEAD, [_latency_row(*pair) for pair in latency]),
        most=_ON_PAGE,
    )
