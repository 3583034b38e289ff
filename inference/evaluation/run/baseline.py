"""A stored baseline: the metrics of a run that later runs must not fall behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.files.json_content import json_object
from export_scripts.files.replace import replace_file
from inference.evaluation.record import SCHEMA_VERSION, Report, from_json, to_json
from inference.evaluation.task import Dataset, Metric

_REMEDY = "record it again with evaluate.baseline=update."


@dataclass(frozen=True)
class Baseline:
    """Metrics by name, and the samples they were measured on.

    Attributes:
        source: where they come from, in words.
        samples: per task: SHA-256 of its data set, limit and seed of the draw.
    """

    source: str
    metrics: Mapping[str, Metric]
    samples: Mapping[str, tuple[Any, ...]]

    @classmethod
    def of(cls, report: Report, *, source: str) -> Baseline:
        """Return the baseline that `report` would be."""
        return cls(
            source=source,
            metrics={metric.name: metric for metric in report.metrics},
            samples={task.name: _samples(task.dataset) for task in report.tasks},
        )

    def check(self, datasets: Mapping[str, Dataset]) -> None:
        """Raise ValueError if it was measured on other samples than those of `datasets`."""
        for task, dataset in datasets.items():
            mine, recorded = _samples(dataset), self.samples.get(task)
            if recorded is not None and recorded != mine:
                raise ValueError(
                    f"the baseline ({self.source}) was measured on other samples of {task}: data "
                    f"set, limit and seed {recorded}, this run {mine}; {_REMEDY}"
                )


def _samples(dataset: Dataset) -> tuple[Any, ...]:
    return (dataset.sha256, dataset.limit, dataset.seed)


def write_baseline(path: Path, report: Report) -> None:
    """Record the metrics of `report` as the baseline in `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "schema_version": SCHEMA_VERSION,
        "run_id": report.run_id,
        "started_at": report.started_at,
        "samples": {task.name: _samples(task.dataset) for task in report.tasks},
        "metrics": {metric.name: to_json(metric) for metric in report.metrics},
    }
    replace_file(path, json.dumps(values, indent=1) + "\n")


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        ValueError: the file is not a baseline of this schema.
    """
    values = json_object(path.read_bytes(), f"baseline {path}", remedy=_REMEDY)
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"baseline {path} is not of schema_version {SCHEMA_VERSION}; {_REMEDY}")
    try:
        return Baseline(
            source=f"run {values['run_id']} of {values['started_at']}",
            metrics={name: from_json(Metric, each) for name, each in values["metrics"].items()},
            samples={name: tuple(each) for name, each in values["samples"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a report.json, for example
        raise ValueError(f"{path} is not a baseline; {_REMEDY}") from error
