"""Accuracy and latency through a running server; the report; the gate.

`TASKS` is the table of tasks: a name and what builds it. Importing this package loads
the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable

from inference.evaluation.lambada import Lambada
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import Task


def _lambada(options: EvaluationOptions) -> Task:
    return Lambada(
        options=options.lambada, data_dir=options.data_dir, limit=options.limit, seed=options.seed
    )


TASKS: dict[str, Callable[[EvaluationOptions], Task]] = {
    "lambada": _lambada,
}


def make_task(name: str, options: EvaluationOptions) -> Task:
    """Return a task by its name.

    Raises:
        ValueError: the name is not in the table; the message lists those that are.
    """
    if name not in TASKS:
        known = ", ".join(sorted(TASKS))
        raise ValueError(f"unknown task {name!r} in evaluate.tasks; known tasks: {known}.")
    return TASKS[name](options)
