"""Two runs side by side: shared metrics, samples by their content, shared points of latency.

The comparison is text for the terminal and one HTML page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export_scripts.tables import text_table
from inference.evaluation.paired import compare_metric
from inference.evaluation.record import (
    Comparison,
    LatencyPoint,
    Prediction,
    Report,
    RequestStatistics,
    TaskReport,
)
from inference.evaluation.report.files import read_run
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

Pair = tuple[Prediction, Prediction]  # the same sample in the first and in the second run


@dataclass(frozen=True)
class ChangedSample:
    """A sample that the two runs scored differently, by `metrics`."""

    first: Prediction
    second: Prediction
    metrics: tuple[str, ...]

    def word(self, metric: str) -> str:
        """Return the change of a metric of this sample in two words."""
        before, after = self.first.values[metric], self.second.values[metric]
        if {before, after} == {0.0, 1.0}:
            return "now right" if after > before else "now wrong"
        return "better" if after > before else "worse"


@dataclass(frozen=True)
class TaskComparison:
    """The samples and the requests of one task in two runs.

    Attributes:
        both: samples of both runs, of which `same` have the same answer.
        only_first, only_second: samples that the other run did not ask.
    """

    name: str
    both: int
    only_first: int
    only_second: int
    same: int
    first: RequestStatistics
    second: RequestStatistics


@dataclass(frozen=True)
class RunComparison:
    """Two runs side by side; differences are the second minus the first.

    Attributes:
        metrics: those that both runs have.
        changed: samples of both runs that a fraction scores differently.
        latency: points measured in both.
        notes: why figures may not be comparable.
    """

    first: Report
    second: Report
    metrics: tuple[Comparison, ...]
    tasks: tuple[TaskComparison, ...]
    changed: tuple[ChangedSample, ...]
    latency: tuple[tuple[LatencyPoint, LatencyPoint], ...]
    notes: tuple[str, ...]

    def metric(self, name: str) -> Metric:
        """Return a metric of the second run."""
        return {metric.name: metric for metric in self.second.metrics}[name]


def load_comparison(first: Path, second: Path) -> RunComparison:
    """Compare two report.json files, with their predictions.jsonl where there is one.

    Raises:
        ValueError: a file is not a report, or the runs have no metric in common.
    """
    (old, old_predictions), (new, new_predictions) = read_run(first), read_run(second)
    return compare_runs(old, new, old_predictions, new_predictions)


def compare_runs(
    first: Report,
    second: Report,
    first_predictions: Sequence[Prediction] = (),
    second_predictions: Sequence[Prediction] = (),
) -> RunComparison:
    """Compare two runs.

    Raises:
        ValueError: they have no metric in common.
    """
    before = {metric.name: metric for metric in first.metrics}
    shared = [metric for metric in second.metrics if metric.name in before]
    if not shared:
        raise ValueError(
            f"{first.run_id} and {second.run_id} have no metric in common: the first has "
            f"{', '.join(before) or 'none'}, the second "
            f"{', '.join(metric.name for metric in second.metrics) or 'none'}."
        )
    earlier = {task.name: task for task in first.tasks}
    tasks, pairs = [], []
    notes = [
        f"{each.name} was measured in two ways: first, {before[each.name].method}; second, "
        f"{each.method}."
        for each in shared
        if each.method != before[each.name].method
    ]
    for task in second.tasks:
        if task.name not in earlier:
            continue
        old, new = (
            {_key(each): each for each in run if each.task == task.name}
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
            requests = earlier[task.name].requests, task.requests
            tasks.append(TaskComparison(task.name, *counts, *requests))
    found = [(new, old.values) for old, new in pairs]
    return RunComparison(
        first=first,
        second=second,
        metrics=tuple(compare_metric(each, before[each.name].value, found) for each in shared),
        tasks=tuple(tasks),
        changed=_changed(shared, pairs),
        latency=_shared_points(first.latency, second.latency),
        notes=tuple(notes),
    )


def _key(prediction: Prediction) -> str | int:
    return prediction.id or prediction.index  # earlier versions wrote no ids


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
        if differing := tuple(name for name in known if old.values[name] != new.values[name]):
            found.append(ChangedSample(old, new, differing))
    return tuple(found)


def _shared_points(
    first: Sequence[LatencyPoint], second: Sequence[LatencyPoint]
) -> tuple[tuple[LatencyPoint, LatencyPoint], ...]:
    def load(point: LatencyPoint) -> tuple[int, ...]:
        return (point.input_len, point.output_len, point.batch_size, point.concurrency)

    before = {load(each): each for each in first}
    return tuple((before[load(each)], each) for each in second if load(each) in before)


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
