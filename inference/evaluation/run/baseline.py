"""A baseline: a stored run with which later runs are compared."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from foundations.errors import first_names
from foundations.files.json_content import json_object
from foundations.files.replace import replace_file
from inference.evaluation.bounds import unsuited
from inference.evaluation.options import Bounds
from inference.evaluation.record import Report, RunFacts
from inference.evaluation.report.files import PREDICTIONS, read_run
from inference.evaluation.task import Dataset, Metric, Prediction, Sample, Values, sample_ids

_REMEDY = "record it again with evaluate.baseline=update."
_SHOWN_SAMPLES = 3
_STORED_FIELDS = ("task", "index", "id", "group", "values")  # of a prediction in a baseline's file


@dataclass(frozen=True)
class Baseline:
    """A stored run, or an empty one; the file of a baseline is a report with predictions."""

    report: Report | None = None
    predictions: Sequence[Prediction] = ()

    @property
    def metrics(self) -> dict[str, Metric]:
        """Its metrics by name."""
        found = () if self.report is None else self.report.metrics
        return {metric.name: metric for metric in found}

    @property
    def source(self) -> str:
        """The run of its metrics, in words; empty without one."""
        if (run := self.report) is None:
            return ""
        return f"run {run.run_id} of {run.started_at}" if run.started_at else run.run_id

    @cached_property
    def _values(self) -> dict[tuple[str, str], Values]:
        return {(each.task, each.id): each.values for each in self.predictions}

    def check(self, task: str, version: int, dataset: Dataset, samples: Sequence[Sample]) -> None:
        """Raise ValueError if it was measured on other samples, or by another version of a task."""
        tasks = () if self.report is None else self.report.tasks
        stored = next((each for each in tasks if each.name == task), None)
        if stored is None:
            return
        if stored.version != version:
            raise ValueError(
                f"the baseline ({self.source}) was scored by version {stored.version} of {task}, "
                f"this run by {version}; {_REMEDY}"
            )
        if not any(metric.scale for metric in stored.metrics):  # it has no values by sample
            recorded, current = map(_selection, (stored.dataset, dataset))
            if recorded != current:
                raise ValueError(
                    f"the baseline ({self.source}) was measured on other samples of {task}: data "
                    f"set, limit and seed {recorded}, this run {current}; {_REMEDY}"
                )
            return
        ids = dict(zip(sample_ids(samples), samples, strict=True))
        known = {sample_id for name, sample_id in self._values if name == task}
        missing = known - ids.keys()
        added = [str(sample.index) for sample_id, sample in ids.items() if sample_id not in known]
        if missing or added:
            rows = first_names(added, _SHOWN_SAMPLES) or "none"
            raise ValueError(
                f"the baseline ({self.source}) was measured on other samples of {task}: "
                f"{len(missing)} of its {len(known)} are missing or changed in this run, and "
                f"{len(added)} of this run's {len(ids)} are not in it (rows {rows}); "
                f"{_REMEDY}"
            )

    def problems(self, bounds: Bounds) -> list[str]:
        """Return the problems of relative bounds that cannot be applied to it."""
        found, metrics = [], self.metrics
        for name, bound in bounds.items():
            key = f"evaluate.gate.{name}.paired"
            if bound.is_relative and name not in metrics:
                known = ", ".join(metrics) or "none"
                found.append(f"{key}: the baseline has no {name}; it has {known}; {_REMEDY}")
            elif bound.is_relative:
                found += [f"{key}={problem}" for problem in unsuited(bound, metrics[name])]
        return found

    def values(self, prediction: Prediction) -> dict[str, float]:
        """Return the stored values of a prediction's quantities; empty if it is unknown."""
        stored = self._values.get((prediction.task, prediction.id), {})
        return {name: value for name, value in stored.items() if name in prediction.values}


def _selection(dataset: Dataset) -> tuple[str | int | None, ...]:
    return (dataset.sha256, dataset.limit, dataset.seed)


def write_baseline(path: Path, report: Report, predictions: Sequence[Prediction]) -> Baseline:
    """Write a run as a baseline: metrics and scores, without texts and facts of the machine."""
    tasks = [
        replace(task, dataset=replace(task.dataset, path=task.dataset.name))
        for task in report.tasks
    ]
    facts = RunFacts(report.run.name)
    stored = Report(report.run_id, facts, report.started_at, report.seconds, tuple(tasks))
    head = json.dumps(asdict(stored), indent=1).removesuffix("[]\n}")
    # One line for each sample, for diffs in version control.
    samples = ({name: getattr(each, name) for name in _STORED_FIELDS} for each in predictions)
    rows = ",\n  ".join(map(json.dumps, samples))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{head}[\n  {rows}\n ]\n}}\n")
    return Baseline(stored, predictions)


def read_baseline(path: Path) -> Baseline:
    """Read the file of a baseline, or a report.json with the predictions next to it.

    Raises:
        ValueError: the file is not a report, or has no predictions.
    """
    values = json_object(path.read_bytes(), f"baseline {path}", remedy=_REMEDY)
    if "tasks" not in values:
        raise ValueError(f"{path} is not a stored run (an earlier version's format?); {_REMEDY}")
    report, predictions = read_run(path)
    if not predictions:
        raise ValueError(f"{path} cannot be a baseline without {PREDICTIONS} next to it; {_REMEDY}")
    return Baseline(report, predictions)
