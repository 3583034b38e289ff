"""Comparison of two runs: shared metrics, samples by their content, shared points of latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from inference.evaluation.task import Metric

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
