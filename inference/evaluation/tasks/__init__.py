"""Tasks: their data, the requests that answer a sample, scores and metrics.

A task knows a model only by the protocol `inference.evaluation.task`; servers and reports are
elsewhere. Importing this package loads the standard library only.
"""

from __future__ import annotations

from inference.evaluation.task import TaskEntry
from inference.evaluation.tasks.end_to_end import END_TO_END
from inference.evaluation.tasks.harness import PREFIX, harness_entry
from inference.evaluation.tasks.identity import IDENTITY
from inference.evaluation.tasks.lambada import LAMBADA
from inference.evaluation.tasks.text_task import text_entry
from inference.evaluation.tasks.text_tasks import TEXT_TASKS

TASKS: dict[str, TaskEntry] = {
    "lambada": LAMBADA,
    "end_to_end": END_TO_END,
    "identity": IDENTITY,
    **{name: text_entry(kind) for name, kind in TEXT_TASKS.items()},
}


def task_entry(name: str) -> TaskEntry | None:
    """Return the row of a task, None if there is no task of this name."""
    if name.startswith(PREFIX):
        return harness_entry(name)
    return TASKS.get(name)
