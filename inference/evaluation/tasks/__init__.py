"""Tasks: their data, the requests for a sample, scores and metrics.

A task knows a model only by the protocol `inference.evaluation.task`, and knows neither servers nor
reports. Importing this package loads no library of models.
"""

from collections.abc import Callable
from functools import partial

from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import Task
from inference.evaluation.tasks.harness import PREFIX, HarnessTask
from inference.evaluation.tasks.lambada import Lambada
from inference.evaluation.tasks.text_task import TEXT_TASKS, TextTask

TASKS: dict[str, Callable[[EvaluationOptions], Task]] = {
    "lambada": Lambada,
    **{name: partial(TextTask, kind) for name, kind in TEXT_TASKS.items()},
}


def make_task(name: str, options: EvaluationOptions) -> Task | None:
    """Return the task of a name; None if it is unknown."""
    if name.startswith(PREFIX):
        return HarnessTask(name, options)
    return TASKS[name](options) if name in TASKS else None


def known_tasks(options: EvaluationOptions) -> list[Task]:
    """Return the distinct tasks of evaluate.tasks, without unknown names."""
    found = (make_task(name, options) for name in dict.fromkeys(options.tasks))
    return [task for task in found if task is not None]
