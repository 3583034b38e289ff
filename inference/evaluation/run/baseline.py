"""A baseline: the metrics and scores of a run that later ones must not fall behind."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from foundations.files.json_content import json_object, record_in
from foundations.files.replace import replace_file
from inference.evaluation.bounds import unsuited
from inference.evaluation.options import Bounds
from inference.evaluation.record import SCHEMA_VERSION, Report
from inference.evaluation.report.files import PREDICTIONS, read_run
from inference.evaluation.task import Dataset, Metric, Prediction, Sample, sample_ids

_REMEDY = "record it again with evaluate.baseline=update."
_SHOWN_SAMPLES = 3


@dataclass(frozen=True)
class TaskScores:
    """The scores of a task: `quantities` of each sample, by the id of its content."""

    version: int
    quantities: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.quantities) for row in self.rows.values()):
            raise ValueError("a row of scores is not whole")
        if not all(map(math.isfinite, chain.from_iterable(self.rows.values()))):
            raise ValueError("a score is not a finite number")


@dataclass(frozen=True)
class Baseline:
    """Metrics by name, and the samples they were measured on; a baseline's file is this as JSON.

    Attributes:
        samples: per task: SHA-256 of its data set, limit and seed of the draw.
        scores: per task; baselines of earlier versions have none.
    """

    schema_version: int
    run_id: str
    started_at: str
    samples: Mapping[str, tuple[str | int | None, ...]]
    metrics: Mapping[str, Metric]
    scores: Mapping[str, TaskScores] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The run that its figures come from, in words; empty where there is none."""
        return f"run {self.run_id} of {self.started_at}" if self.started_at else self.run_id

    def check(self, task: str, version: int, dataset: Dataset, samples: Sequence[Sample]) -> None:
        """Raise ValueError if it was measured on other samples, or scored by other rules."""
        stored = self.scores.get(task)
        if stored is None:
            mine, recorded = _samples(dataset), self.samples.get(task)
            if recorded is not None and recorded != mine:
                raise ValueError(
                    f"the baseline ({self.source}) was measured on other samples of {task}: data "
                    f"set, limit and seed {recorded}, this run {mine}; {_REMEDY}"
                )
            return
        if stored.version != version:
            raise ValueError(
                f"the baseline ({self.source}) was scored by version {stored.version} of {task}, "
                f"this run by {version}; {_REMEDY}"
            )
        ids = dict(zip(sample_ids(samples), samples, strict=True))
        missing = [*stored.rows.keys() - ids.keys()]
        added = [ids[each].index for each in ids if each not in stored.rows]
        if missing or added:
            raise ValueError(
                f"the baseline ({self.source}) was measured on other samples of {task}: "
                f"{len(missing)} of its {len(stored.rows)} are missing or changed in this run, and "
                f"{len(added)} of this run's {len(ids)} are not in it (rows {_some(added)}); "
                f"{_REMEDY}"
            )

    def problems(self, bounds: Bounds) -> list[str]:
        """Return the relative bounds that cannot be applied against it."""
        found = []
        for name, bound in bounds.items():
            if not bound.is_relative:
                continue
            key, metric = f"evaluate.gate.{name}.paired", self.metrics.get(name)
            if metric is None:
                known = ", ".join(self.metrics) or "none"
                found.append(f"{key}: the baseline has no {name}; it has {known}; {_REMEDY}")
                continue
            found += [f"{key}={each}" for each in unsuited(bound, metric)]
            stored = (each.quantities for each in self.scores.values())
            if metric.scale and not any(metric.sample_value in each for each in stored):
                found.append(
                    f"{key}: the baseline ({self.source}) keeps no scores of samples; {_REMEDY}"
                )
        return found

    def values(self, prediction: Prediction) -> dict[str, float]:
        """Return the stored quantities of a sample that it has, too; none where it is not known."""
        stored = self.scores.get(prediction.task)
        if stored is None or prediction.id not in stored.rows:
            return {}
        row = zip(stored.quantities, stored.rows[prediction.id], strict=True)
        return {name: value for name, value in row if name in prediction.values}


NO_BASELINE = Baseline(SCHEMA_VERSION, run_id="", started_at="", samples={}, metrics={})


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(map(str, values[:_SHOWN_SAMPLES])) or "none"
    return shown + ", ..." * (len(values) > _SHOWN_SAMPLES)


def _samples(dataset: Dataset) -> tuple[str | int | None, ...]:
    return (dataset.sha256, dataset.limit, dataset.seed)


def _baseline_of(report: Report, predictions: Iterable[Prediction]) -> Baseline:
    """Return the metrics of a report, and the scores that they are made of, by task."""
    by_task: dict[str, list[Prediction]] = {}
    for each in predictions:
        by_task.setdefault(each.task, []).append(each)
    scores = {}
    for task in report.tasks:
        scaled = [metric for metric in task.metrics if metric.scale]
        needed = [name for metric in scaled for name in (metric.sample_value, metric.weight)]
        quantities = tuple(dict.fromkeys(filter(None, needed)))
        if quantities:
            rows = {
                each.id: tuple(each.values[name] for name in quantities)
                for each in by_task.get(task.name, ())
            }
            scores[task.name] = TaskScores(task.version, quantities, rows)
    return Baseline(
        SCHEMA_VERSION,
        report.run_id,
        report.started_at,
        samples={task.name: _samples(task.dataset) for task in report.tasks},
        metrics={metric.name: metric for metric in report.metrics},
        scores=scores,
    )


def write_baseline(path: Path, report: Report, predictions: Iterable[Prediction]) -> Baseline:
    """Record the metrics of `report`, and the scores behind them, in `path`; return them."""
    found = _baseline_of(report, predictions)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(asdict(replace(found, scores={})), indent=1).removesuffix("{}\n}")
    scores = json.dumps({name: asdict(each) for name, each in found.scores.items()})
    # A line for each sample, which version control compares.
    replace_file(path, head + scores.replace("], ", "],\n   ") + "\n}\n")
    return found


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file, or take an earlier report.json and its predictions as one.

    Raises:
        ValueError: the file is not a baseline of this schema.
    """
    content = path.read_bytes()
    values = json_object(content, f"baseline {path}", remedy=_REMEDY)
    if "tasks" in values:
        report, predictions = read_run(path)
        if not predictions:
            raise ValueError(
                f"{path} cannot be a baseline without {PREDICTIONS} next to it; {_REMEDY}"
            )
        return _baseline_of(report, predictions)
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"baseline {path} is not of schema_version {SCHEMA_VERSION}; {_REMEDY}")
    try:
        return record_in(Baseline, content)
    except ValueError as error:
        raise ValueError(f"{path} is not a baseline ({error}); {_REMEDY}") from error
