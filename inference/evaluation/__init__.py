"""Accuracy and latency through a running server; the report; the gate.

`TASKS` is the table of tasks: a name, and what builds it. Importing this package loads the
standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from inference.evaluation.end_to_end import EndToEnd
from inference.evaluation.identity import Identity
from inference.evaluation.lambada import Lambada
from inference.evaluation.options import EvaluationOptions, TextTaskOptions
from inference.evaluation.task import Task
from inference.evaluation.text_task import TEXT_TASKS, TextTask


def _lambada(options: EvaluationOptions) -> Task:
    return Lambada(
        options=options.lambada, data_dir=options.data_dir, limit=options.limit, seed=options.seed
    )


def _text_task(name: str, options: EvaluationOptions) -> Task:
    return TextTask(
        kind=TEXT_TASKS[name],
        options=options.text_tasks.get(name, TextTaskOptions()),
        limit=options.limit,
        seed=options.seed,
    )


def _end_to_end(options: EvaluationOptions) -> Task:
    return EndToEnd(limit=options.limit, seed=options.seed)


def _identity(options: EvaluationOptions) -> Task:
    assert options.source_path is not None, "checked before"
    return Identity(
        options=options.identity,
        source_path=options.source_path,
        limit=options.limit,
        seed=options.seed,
    )


TASKS: dict[str, Callable[[EvaluationOptions], Task]] = {
    "lambada": _lambada,
    "end_to_end": _end_to_end,
    "identity": _identity,
    "boolq": partial(_text_task, "boolq"),
    "mnli": partial(_text_task, "mnli"),
    "xnli": partial(_text_task, "xnli"),
    "squad": partial(_text_task, "squad"),
    "translation": partial(_text_task, "translation"),
    "summarization": partial(_text_task, "summarization"),
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
