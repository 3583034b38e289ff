"""Compare a task's samples, one by one, with figures of another implementation or a past run.

A reference is either a past report.json, next to its predictions.jsonl, or a recorded file:

    {"schema_version": 1, "source": "who measured, with what", "dataset_sha256": "...",
     "metrics": {"lambada_last_token": 0.13, ...},
     "per_sample": {"lambada_last_token": [1, 0, ...], ...}}      in the order of the data set
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from export_scripts.files.json_content import json_object
from inference.evaluation.paired import Values, compare_metric
from inference.evaluation.record import (
    Prediction,
    ReferenceComparison,
    RequestStatistics,
    TaskReport,
    from_json,
)
from inference.evaluation.report.files import read_run
from inference.evaluation.run.task_run import TaskRun
from inference.evaluation.task import Dataset, Score


@dataclass(frozen=True)
class _Recorded:
    """A recorded file."""

    schema_version: Literal[1]
    source: str
    dataset_sha256: str
    metrics: Mapping[str, float]
    per_sample: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Figures to compare with.

    Attributes:
        metrics: values over the whole data set, by metric name.
        per_sample: the quantities of each sample by its index.
        same_samples: whether `metrics` are over exactly the samples of the run, limit and all.
        requests: how long its answers took, where that is known.
    """

    source: str
    dataset_sha256: str
    metrics: Mapping[str, float]
    per_sample: Mapping[int, Values]
    same_samples: bool = False
    requests: RequestStatistics | None = None

    def mismatch(self, dataset: Dataset) -> str:
        """Return why the reference cannot be compared with `dataset`; empty if it can."""
        if self.dataset_sha256 == dataset.sha256:
            return ""
        return (
            f"Not compared with the reference ({self.source}): it was measured on a data set with "
            f"SHA-256 {self.dataset_sha256[:12]}..., but {dataset.path} has "
            f"{dataset.sha256[:12]}..."
        )


def read_reference(path: Path, *, task: str) -> Reference:
    """Read a reference for `task` from a recorded file or a past report.json.

    Raises:
        ValueError: the file is neither, or says nothing of this task.
    """
    content, remedy = path.read_bytes(), "expected a report or recorded file."
    if "tasks" in json_object(content, f"reference {path}", remedy=remedy):
        return _from_report(path, task)
    try:
        recorded = from_json(_Recorded, content)
    except ValueError as error:
        raise ValueError(
            f"reference {path} is not of schema_version 1 with source, "
            "dataset_sha256, metrics by name, and per_sample, where it is given, as lists of "
            f"numbers: {error}"
        ) from error
    rows: dict[int, dict[str, float]] = {}
    for name, column in recorded.per_sample.items():
        for index, value in enumerate(column):
            rows.setdefault(index, {})[name] = value
    return Reference(recorded.source, recorded.dataset_sha256, recorded.metrics, rows)


def _from_report(path: Path, task: str) -> Reference:
    report, predictions = read_run(path)
    found = [each for each in report.tasks if each.name == task]
    if not found:
        names = ", ".join(each.name for each in report.tasks)
        raise ValueError(f"report {path} has no task {task}; it has {names or 'none'}.")
    own = [each for each in predictions if each.task == task]
    return _of_task(found[0], own, source=f"run {report.run_id}")


def reference_of(run: TaskRun, *, source: str) -> Reference:
    """Return a finished run as the reference of others over the same samples."""
    return replace(_of_task(run, run.predictions, source=source), same_samples=True)


def _of_task(
    task: TaskReport | TaskRun, predictions: Sequence[Prediction], *, source: str
) -> Reference:
    return Reference(
        source=source,
        dataset_sha256=task.dataset.sha256,
        metrics={metric.name: metric.value for metric in task.metrics},
        per_sample={each.index: each.values for each in predictions},
        requests=task.requests,
    )


def compare_with_reference(run: TaskRun, reference: Reference) -> ReferenceComparison:
    """Compare every metric, sample by sample where the reference has samples."""
    values = _reference_values(run, reference)
    found = [(each, reference.per_sample.get(each.index, {})) for each in run.predictions]
    return ReferenceComparison(
        source=reference.source,
        metrics=tuple(
            compare_metric(metric, values[metric.name], found)
            for metric in run.metrics
            if metric.name in values
        ),
        requests=reference.requests,
    )


def with_reference_values(
    predictions: Sequence[Prediction], reference: Reference | None
) -> tuple[Prediction, ...]:
    """Return the predictions with the reference's values of the same samples."""
    if reference is None:
        return tuple(predictions)
    return tuple(replace(each, reference=_values_of(each, reference)) for each in predictions)


def _reference_values(run: TaskRun, reference: Reference) -> dict[str, float]:
    """Return the reference's metrics over the samples of this run.

    Those that sample values alone give are summed up anew, by the task's own rule, where the
    reference has all samples; whole-set figures are comparable only when this run asked the whole
    set.
    """
    comparable = reference.same_samples or run.dataset.limit is None
    values = dict(reference.metrics) if comparable else {}
    rows = [(each, _values_of(each, reference)) for each in run.predictions]
    known = [
        metric.name
        for metric in run.metrics
        if metric.from_samples
        and all({metric.sample_value, metric.weight} - {""} <= row.keys() for _, row in rows)
    ]
    scores = [Score({**each.values, **row}, answer="") for each, row in rows]
    again = run.task.metrics(run.samples, scores) if known else ()
    return {**values, **{metric.name: metric.value for metric in again if metric.name in known}}


def _values_of(prediction: Prediction, reference: Reference) -> dict[str, float]:
    """Return the reference's values of a sample, of those quantities that the run has too."""
    row = reference.per_sample.get(prediction.index, {})
    return {name: value for name, value in row.items() if name in prediction.values}
