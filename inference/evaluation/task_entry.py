"""A row of the table of tasks: what the evaluator has to know of a task besides the task itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from inference.evaluation.gate import Bound
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import Task


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """How a task is made, and what its options and metrics are.

    Attributes:
        make: the task of the options, which were found good.
        metrics: names of the metrics that the options ask for.
        check: every problem of its options, in the configuration's names.
        grouped: whether there is one more metric for each group of the data.
        only_served: whether it asks for what the source's library cannot do; it has no reference.
        bounds: those that hold without being asked for.
        remedy: what a person does about a breach, in a few words.
    """

    make: Callable[[EvaluationOptions], Task]
    metrics: Callable[[EvaluationOptions], tuple[str, ...]]
    check: Callable[[EvaluationOptions], list[str]]
    grouped: bool = False
    only_served: bool = False
    bounds: Callable[[EvaluationOptions], dict[str, Bound]] = lambda _: {}
    remedy: Callable[[EvaluationOptions], str] = lambda _: ""


def missing_files(task: str, files: Mapping[str, Path | None]) -> list[str]:
    """Return a problem for each file that is named and is none."""
    return [
        f"evaluate.{task}.{key}={path} is not a file; give an existing file, or null."
        for key, path in files.items()
        if path is not None and not path.is_file()
    ]
