"""Comparison of two runs: shared metrics, changed samples, shared points of latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.evaluation.paired import compare_metric, values_by_sample
from inference.evaluation.record import (
    Comparison,
    LatencyPoint,
    Prediction,
    Report,
    read_predictions,
    read_report,
)
from inference.evaluation.report.files import PREDICTIONS
from inference.evaluation.task import Metric


@dataclass(frozen=True)
class ChangedSample:
    """A sample that one run got right and the other wrong."""

    first: Prediction
    second: Prediction
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class RunComparison:
    """Two runs side by side; differences are the second minus the first.

    Attributes:
        metrics: those that both runs have.
        latency: points measured in both.
        notes: why figures may not be comparable.
    """

    first: Report
    second: Report
    metrics: tuple[Comparison, ...]
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
    reports = [read_report(path) for path in (first, second)]
    predictions = [_predictions(path) for path in (first, second)]
    return compare_runs(reports[0], reports[1], predictions[0], predictions[1])


def _predictions(report_path: Path) -> list[Prediction]:
    path = report_path.with_name(PREDICTIONS)
    return read_predictions(path) if path.is_file() else []


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
    notes = _notes(first, second)
    paired = {} if notes else values_by_sample(first_predictions)
    return RunComparison(
        first=first,
        second=second,
        metrics=tuple(
            compare_metric(
                metric,
                before[metric.name].value,
                second_predictions,
                paired.get(metric.sample_value, {}),
            )
            for metric in shared
        ),
        changed=() if notes else _changed(shared, first_predictions, second_predictions),
        latency=_shared_points(first.latency, second.latency),
        notes=notes,
    )


def _notes(first: Report, second: Report) -> tuple[str, ...]:
    """Return the tasks whose samples differ between the runs."""
    before = {task.name: task for task in first.tasks}
    notes = []
    for task in second.tasks:
        other = before.get(task.name)
        if other is None:
            continue
        if other.dataset.sha256 != task.dataset.sha256:
            notes.append(
                f"{task.name}: the runs used other data ({other.dataset.name}, "
                f"{task.dataset.name}); differences are not paired."
            )
        elif other.version != task.version:
            notes.append(
                f"{task.name}: the runs used versions {other.version} and {task.version} of the "
                "task; differences are not paired."
            )
    return tuple(notes)


def _changed(
    metrics: Sequence[Metric], first: Sequence[Prediction], second: Sequence[Prediction]
) -> tuple[ChangedSample, ...]:
    names = [metric.sample_value for metric in metrics if metric.unit == "fraction"]
    before = {(each.task, each.index): each for each in first}
    found = []
    for prediction in second:
        other = before.get((prediction.task, prediction.index))
        if other is None:
            continue
        differing = tuple(name for name in names if _differs(other, prediction, name))
        if differing:
            found.append(ChangedSample(other, prediction, differing))
    return tuple(found)


def _differs(first: Prediction, second: Prediction, name: str) -> bool:
    return name in first.values.keys() & second.values and first.values[name] != second.values[name]


def _shared_points(
    first: Sequence[LatencyPoint], second: Sequence[LatencyPoint]
) -> tuple[tuple[LatencyPoint, LatencyPoint], ...]:
    before = {_place(each): each for each in first}
    return tuple((before[_place(each)], each) for each in second if _place(each) in before)


def _place(point: LatencyPoint) -> tuple[int, ...]:
    return (point.input_len, point.output_len, point.batch_size, point.concurrency)
