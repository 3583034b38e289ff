"""Two runs side by side: shared metrics, samples by their content, shared points of latency.

The comparison is text for the terminal and one HTML page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.tables import text_table
from inference.evaluation.paired import compare_metric
from inference.evaluation.record import (
    Comparison,
    LatencyPoint,
    Prediction,
    Report,
    TaskReport,
)
from inference.evaluation.report.charts import comparison_chart, latency_comparison_chart
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
from inference.evaluation.task import Metric

_ON_PAGE, _IN_TERMINAL = 500, 14  # changed samples that are listed
_MOST_TEXT = 32  # characters of an answer in the terminal
_METRIC_HEAD = ("metric", "first", "second", "difference", "95% of difference", "chance")
_TASK_HEAD = (
    "task", "samples in both", "only first", "only second", "same answer", "p50 first",
    "p50 second", "generated tokens/s",
)  # fmt: skip
_LATENCY_HEAD = ("tokens in + out", "load", "p50 first", "p50 second", "tokens/s", "change")
_CHANGED_HEAD = ("#", "expected", "first answered", "second answered", "changed")

Run = tuple[Report, Sequence[Prediction]]
Pair = tuple[Prediction, Prediction]  # the same sample in the first and in the second run


@dataclass(frozen=True)
class ChangedSample:
    """A sample that the two runs scored differently; `words` say how, by metric."""

    first: Prediction
    second: Prediction
    words: Mapping[str, str]


@dataclass(frozen=True)
class RunComparison:
    """Two runs side by side; differences are the second minus the first.

    Attributes:
        shared: the metrics that both runs have, of the first and of the second.
        metrics: their comparisons, in the same order.
        tasks: the samples and the requests of each, as a row of text.
        changed: samples of both runs that a fraction scores differently.
        latency: points measured in both.
        notes: why figures may not be comparable.
    """

    first: Report
    second: Report
    shared: tuple[tuple[Metric, Metric], ...]
    metrics: tuple[Comparison, ...]
    tasks: tuple[tuple[str, ...], ...]
    changed: tuple[ChangedSample, ...]
    latency: tuple[tuple[LatencyPoint, LatencyPoint], ...]
    notes: tuple[str, ...]


def compare_runs(first_run: Run, second_run: Run) -> RunComparison:
    """Compare two runs.

    Raises:
        ValueError: they have no metric in common.
    """
    (first, first_predictions), (second, second_predictions) = first_run, second_run
    before = {metric.name: metric for metric in first.metrics}
    shared = [(before[new.name], new) for new in second.metrics if new.name in before]
    if not shared:
        raise ValueError(
            f"{first.run_id} and {second.run_id} have no metric in common: the first has "
            f"{', '.join(before) or 'none'}, the second "
            f"{', '.join(metric.name for metric in second.metrics) or 'none'}."
        )
    earlier = {task.name: task for task in first.tasks}
    tasks, pairs = [], []
    notes = [
        f"{new.name} was measured in two ways: first, {old.method}; second, {new.method}."
        for old, new in shared
        if old.method != new.method
    ]
    for task in second.tasks:
        if task.name not in earlier:
            continue
        old, new = (
            # Earlier versions wrote no ids.
            {each.id or each.index: each for each in run if each.task == task.name}
            for run in (first_predictions, second_predictions)
        )
        own = [(old[key], each) for key, each in new.items() if key in old]
        if reason := _not_paired(earlier[task.name], task, own):
            notes.append(f"{task.name}: {reason}; differences are not paired.")
            continue
        pairs += own
        if old or new:
            same = sum(one.answer == two.answer for one, two in own)
            counts = (len(own), len(old) - len(own), len(new) - len(own), same)
            both = (earlier[task.name].requests, task.requests)
            medians = (milliseconds_text(each.latency.p50_ms) for each in both)
            speeds = " to ".join(number_text(each.tokens_per_s) for each in both)
            tasks.append((task.name, *(f"{count:,}" for count in counts), *medians, speeds))
    points = {(shape_text(each), load_text(each)): each for each in first.latency}
    shared_points = [
        (points[key], each)
        for each in second.latency
        if (key := (shape_text(each), load_text(each))) in points
    ]
    found = [(new, old.values) for old, new in pairs]
    return RunComparison(
        first=first,
        second=second,
        shared=tuple(shared),
        metrics=tuple(compare_metric(new, old.value, found) for old, new in shared),
        tasks=tuple(tasks),
        changed=_changed([new for _, new in shared], pairs),
        latency=tuple(shared_points),
        notes=tuple(notes),
    )


def _not_paired(first: TaskReport, second: TaskReport, pairs: Sequence[Pair]) -> str:
    """Return why a task's samples cannot be compared one by one; empty if they can."""
    if first.version != second.version:
        return f"the runs used versions {first.version} and {second.version} of the task"
    is_other = first.dataset.sha256 != second.dataset.sha256
    if is_other and not any(new.id for _, new in pairs):
        return f"the runs used other data ({first.dataset.name}, {second.dataset.name})"
    return ""


def _changed(metrics: Sequence[Metric], pairs: Sequence[Pair]) -> tuple[ChangedSample, ...]:
    fractions = dict.fromkeys(each.sample_value for each in metrics if each.unit == "fraction")
    found = []
    for old, new in pairs:
        known = [name for name in fractions if name in old.values.keys() & new.values.keys()]
        both = {name: (old.values[name], new.values[name]) for name in known}
        words = {name: _word(*each) for name, each in both.items() if each[0] != each[1]}
        if words:
            found.append(ChangedSample(old, new, words))
    return tuple(found)


def _word(before: float, after: float) -> str:
    if {before, after} == {0.0, 1.0}:
        return "now right" if after > before else "now wrong"
    return "better" if after > before else "worse"


def comparison_text(comparison: RunComparison) -> str:
    """Return the comparison as tables for the terminal."""
    parts = [
        f"first   {_described(comparison.first)}\nsecond  {_described(comparison.second)}",
        "\n".join(comparison.notes),
        *(
            text_table(head, rows, right=range(1, len(head)), rule=False)
            for head, rows in _tables(comparison).values()
            if rows
        ),
    ]
    if changed := comparison.changed:
        s = "s" * (len(changed) > 1)
        parts.append(f"{len(changed):,} sample{s} changed between right and wrong:")
        rows = [_changed_row(each) for each in changed[:_IN_TERMINAL]]
        parts.append(text_table(_CHANGED_HEAD, rows, rule=False))
    return "\n\n".join(part for part in parts if part)


def _tables(comparison: RunComparison) -> dict[str, Any]:
    """Return head and rows of each table, by its name in the page's template."""
    metrics = zip(comparison.metrics, comparison.shared, strict=True)
    return {
        "metrics": (_METRIC_HEAD, [_metric_row(each, new.unit) for each, (_, new) in metrics]),
        "tasks": (_TASK_HEAD, comparison.tasks),
        "latency": (_LATENCY_HEAD, [_latency_row(*pair) for pair in comparison.latency]),
    }


def _described(report: Report) -> str:
    run = report.run
    known = (run.engine or run.server, run.parallelism, run.weights, run.data_type)
    return f"{report.run_id} ({', '.join(filter(None, known)) or 'of an unknown model'})"


def _metric_row(each: Comparison, unit: str) -> tuple[str, ...]:
    return (
        each.metric,
        value_text(each.reference, unit),
        value_text(each.value, unit),
        difference_text(each.difference, unit),
        spread_text(each, unit),
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


def _changed_row(each: ChangedSample) -> tuple[str, ...]:
    texts = (each.second.target, each.first.answer, each.second.answer)
    words = ", ".join(f"{metric_title(n).lower()} {word}" for n, word in each.words.items())
    return str(each.second.index), *(" ".join(t.split())[:_MOST_TEXT] for t in texts), words


def render_comparison(comparison: RunComparison) -> str:
    """Return the comparison as one self-contained HTML page."""
    first, second, latency = comparison.first, comparison.second, comparison.latency
    fractions = [pair for pair in comparison.shared if pair[1].unit == "fraction"]
    return render_page(
        "comparison.html",
        title=f"{second.run.name}: comparison",
        runs=(_described(first), _described(second)),
        comparison=comparison,
        accuracies=fractions and comparison_chart(fractions),
        latency_chart=latency and latency_comparison_chart(latency),
        most=_ON_PAGE,
        **_tables(comparison),
    )
