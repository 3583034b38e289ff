"""Tasks: their data, the requests that answer a sample, scores and metrics.

A task knows a model only by the protocol `inference.evaluation.task`; servers and reports are
elsewhere. Importing this package loads the standard library only.
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
    """Return a task, None if there is none of this name."""
    if name.startswith(PREFIX):
        return HarnessTask(name, options)
    return TASKS[name](options) if name in TASKS else None


def known_tasks(options: EvaluationOptions) -> list[Task]:
    """Return the tasks of evaluate.tasks, each once, without those of unknown names."""
    found = (make_task(name, options) for name in dict.fromkeys(options.tasks))
    return [task for task in found if task is not None]
