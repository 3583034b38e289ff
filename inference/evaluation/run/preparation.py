"""Prepare an evaluation before its first request: the server's abilities, data and baseline."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from inference.evaluation.bounds import check_bounds, parse_bounds
from inference.evaluation.options import Bounds, EvaluationOptions
from inference.evaluation.run.baseline import Baseline, read_baseline
from inference.evaluation.task import Dataset, EvaluationError, Sample, Task
from inference.evaluation.tasks import known_tasks

logger = logging.getLogger(__name__)


def within_abilities(options: EvaluationOptions, lacks: Mapping[str, str]) -> EvaluationOptions:
    """Return the options without the metrics and tasks that the server cannot answer.

    `lacks` maps each ability that the server lacks to the reason.

    Raises:
        EvaluationError: no task is left, or a bound is on a metric that is left out.
    """
    tasks = known_tasks(options)
    left_out = {
        name: lacks[task.needs[name]]
        for task in tasks
        for name in task.metric_names
        if task.needs.get(name) in lacks
    }
    remaining = [task.name for task in tasks if not {*task.metric_names} <= left_out.keys()]
    bounds, _ = parse_bounds(options.gate)
    problems = [
        f"evaluate.gate.{name} is on a metric that is left out: {left_out[name]}; remove it."
        for name in bounds
        if name in left_out
    ]
    sentences = tuple(f"{metric} is left out: {reason}" for metric, reason in left_out.items())
    if not remaining:
        problems += ["nothing that evaluate.tasks asks for can be measured:", *sentences]
    if problems:
        raise EvaluationError("\n".join(problems))
    for sentence in sentences:
        logger.warning(sentence)
    return replace(options, tasks=remaining, lacks=tuple(lacks), left_out=sentences)


@dataclass(frozen=True)
class Prepared:
    """A task with its data."""

    task: Task
    dataset: Dataset
    samples: Sequence[Sample]


def prepare_task(task: Task) -> Prepared:
    """Read the data of a task. Raises ValueError if it cannot be used."""
    return Prepared(task, *task.prepare())


def check_bounds_of_groups(bounds: Bounds, prepared: Sequence[Prepared]) -> Iterator[str]:
    """Yield the problems of bounds on metrics that the data does not have."""
    known = [
        f"{name}{end}"
        for each in prepared
        for end in ("", *sorted({f"_{sample.group}" for sample in each.samples if sample.group}))
        for name in each.task.metric_names
    ]
    return check_bounds(bounds, known=known)


def stored_baseline(options: EvaluationOptions, prepared: Sequence[Prepared]) -> Baseline:
    """Return the configured baseline, or an empty one. Raises ValueError if samples differ."""
    if options.baseline != "compare" or options.baseline_path is None:
        return Baseline()
    baseline = read_baseline(options.baseline_path)
    for each in prepared:
        baseline.check(each.task.name, each.task.version, each.dataset, each.samples)
    return baseline
