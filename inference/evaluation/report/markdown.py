"""report.md and changes.md: the report for terminals, pull requests and chat."""

from __future__ import annotations

from collections.abc import Sequence

from inference.evaluation.record import Prediction, Report, TaskReport
from inference.evaluation.report.formatting import (
    difference_text,
    interval_text,
    metric_title,
    milliseconds_text,
    number_text,
    seconds_text,
    spread_text,
    value_text,
)
from inference.evaluation.report.page import render_text
from inference.evaluation.task import Metric

_MOST_CHANGED = 20
_MOST_TEXT = 120  # characters of a sample's end


def render_changes(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the gate's verdicts and the samples that changed, as a comment of a pull request."""
    return _render("changes.md", report, predictions)


def render_markdown(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the report as Markdown."""
    return _render("report.md", report, predictions)


def _render(template: str, report: Report, predictions: Sequence[Prediction]) -> str:
    changed = [each for each in predictions if each.changes]
    # Right and wrong first, then the largest differences.
    changed.sort(key=lambda each: -max(abs(new - old) for old, new in each.changes.values()))
    text = render_text(
        template,
        report=report,
        asked=_asked,
        metric_rows=lambda task: map(_metric_row, task.metrics),
        reference_rows=_reference_rows,
        changed=changed,
        changed_rows=[_changed_row(each) for each in changed[:_MOST_CHANGED]],
        samples=len(predictions),
    )
    return text.rstrip("\n") + "\n"


def _asked(task: TaskReport) -> str:
    data, requests = task.dataset, task.requests
    asked = f"{data.count:,} of {data.total:,} samples of `{data.name}`"
    if data.limit is not None:
        asked += f" (limit {data.limit}, seed {data.seed})"
    return (
        f"{asked}; {requests.count:,} requests in {seconds_text(requests.seconds)} "
        f"({requests.per_s:.1f}/s, {requests.concurrency} in flight, p50 "
        f"{milliseconds_text(requests.latency.p50_ms)}, p99 "
        f"{milliseconds_text(requests.latency.p99_ms)}, "
        f"{number_text(requests.tokens_per_s)} generated tokens/s), {task.through}."
    )


def _metric_row(metric: Metric) -> tuple[str, ...]:
    value = f"**{value_text(metric.value, metric.unit)}**"
    return f"`{metric.name}`", value, interval_text(metric), f"{metric.count:,}"


def _reference_rows(task: TaskReport) -> list[tuple[str, ...]]:
    units = {metric.name: metric.unit for metric in task.metrics}
    return [
        (
            f"`{each.metric}`",
            value_text(each.reference, units[each.metric]),
            difference_text(each.difference, units[each.metric]),
            spread_text(each, units[each.metric]),
            ""
            if each.agreeing is None
            else f"{each.agreeing:,} of {each.agreeing + (each.disagreeing or 0):,}",
        )
        for each in (() if task.reference is None else task.reference.metrics)
    ]


def _changed_row(each: Prediction) -> tuple[str, ...]:
    changes = ", ".join(
        f"{metric_title(name).lower()} {old:.4g} -> {new:.4g}"
        for name, (old, new) in each.changes.items()
    )
    end = each.text[-_MOST_TEXT:]
    text = end if end == each.text else f"...{end}"
    return str(each.index), *map(_one_line, (text, each.target, each.answer)), changes


def _one_line(text: str) -> str:
    """Return data as a cell that cannot hold markup."""
    for character in "\\`*_[]<>&@#":
        text = text.replace(character, f"\\{character}" if character != "@" else "&#64;")
    return " ".join(text.split())
