"""The figures that a task is compared with: of another implementation, or of a past run.

A reference is either a past report.json, next to its predictions.jsonl, or a recorded file:

    {"schema_version": 1, "source": "who measured, with what", "dataset_sha256": "...",
     "metrics": {"lambada_last_token": 0.13, ...},
     "per_sample": {"lambada_last_token": [1, 0, ...], ...}}      in the order of the data set
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from export_scripts.files.json_content import json_object
from inference.evaluation.record import RequestStatistics, from_json
from inference.evaluation.report.files import read_run
from inference.evaluation.task import Dataset, Prediction, Values


@dataclass(frozen=True)
class _Recorded:
    schema_version: Literal[1]
    source: str
    dataset_sha256: str
    metrics: Values
    per_sample: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Figures to compare with.

    Attributes:
        metrics: values over the whole data set, by metric name.
        per_sample: the quantities of each sample by its index.
        requests: how long its answers took, where that is known.
    """

    source: str
    dataset_sha256: str
    metrics: Values
    per_sample: Mapping[int, Values]
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

    def values(self, prediction: Prediction) -> dict[str, float]:
        """Return the values of a sample, of those quantities that its prediction has too."""
        row = self.per_sample.get(prediction.index, {})
        return {name: value for name, value in row.items() if name in prediction.values}


def read_reference(path: Path, *, task: str) -> Reference:
    """Read a reference for `task` from a recorded file or a past report.json.

    Raises:
        ValueError: the file is neither, or says nothing of this task.
    """
    content, remedy = path.read_bytes(), "expected a report or recorded file."
    if "tasks" in json_object(content, f"reference {path}", remedy=remedy):
        report, predictions = read_run(path)
        found = next((each for each in report.tasks if each.name == task), None)
        if found is None:
            known = ", ".join(each.name for each in report.tasks) or "none"
            raise ValueError(f"report {path} has no task {task}; it has {known}.")
        return Reference(
            source=f"run {report.run_id}",
            dataset_sha256=found.dataset.sha256,
            metrics={metric.name: metric.value for metric in found.metrics},
            per_sample={each.index: each.values for each in predictions if each.task == task},
            requests=found.requests,
        )
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
