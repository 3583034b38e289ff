"""Accuracy and latency through a running server; the report; the gate.

`TASKS` is the table of tasks. Importing this package loads the standard library only.
"""

from __future__ import annotations

from inference.evaluation.end_to_end import END_TO_END
from inference.evaluation.identity import IDENTITY
from inference.evaluation.lambada import LAMBADA
from inference.evaluation.task_entry import TaskEntry
from inference.evaluation.text_task import text_entry
from inference.evaluation.text_tasks import TEXT_TASKS

TASKS: dict[str, TaskEntry] = {
    "lambada": LAMBADA,
    "end_to_end": END_TO_END,
    "identity": IDENTITY,
    **{name: text_entry(kind) for name, kind in TEXT_TASKS.items()},
}
