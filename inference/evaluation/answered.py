"""The answers that an evaluation got before it ended, from which the next one goes on.

<output_dir>/<task>.answered.jsonl: a line with what was asked, then a request and its reply a line,
each written as it came: a sample's index and its Prediction, or of a task that words its own
requests a hash and the server's words. The file is gone once the report is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from export_scripts.ft.identity import checkpoint_hash
from foundations.files.journal import Journal
from foundations.files.json_content import Table
from inference.evaluation.task import Dataset, Prediction, Sample, Task, sample_ids

logger = logging.getLogger(__name__)

_SUFFIX = ".answered.jsonl"
# The same address may serve another model today. Answers of few words agree by chance.
SAMPLES_AGAIN, REQUESTS_AGAIN = 16, 4
_NEARLY = 1e-3  # as far as the load moves a log probability
# Options that no answer depends on; the address of the pipeline's own server is new each time.
_NOT_ASKED = (
    "name", "time_limit", "ca", "token_file", "output_dir", "concurrency", "request_timeout_s",
    "retry_s", "gate", "advisory", "baseline", "baseline_path",
    "cpus_per_task", "mem_gb", "latency", "harness", "tasks", "url",
    "openai_url", "left_out",
)  # fmt: skip


def answer_journal(task: Task, dataset: Dataset, samples: Sequence[Sample]) -> Journal:
    """Return the journal of a task's answers; those to other questions are not read."""
    path = Path(task.options.output_dir) / f"{task.name}{_SUFFIX}"
    return Journal(path, _asked(task, dataset, samples))


class Answers:
    """Asks each request once, over all runs until one ends; equal ones, as often as they came.

    The first replies of an earlier run are asked for again; unless they are as before, all are.

    Attributes:
        reused: replies of an earlier run that stood for a request.
    """

    def __init__(
        self,
        kept: Journal,
        compared: Sequence[str],
        *,
        again: int,
        reuse: Callable[[Table], None] = lambda _: None,
    ) -> None:
        """`compared` are what every reply has; `reuse` is called with each that stands for one."""
        self._kept, self._compared, self._unchecked = kept, compared, again
        self._reuse, self._lock, self.reused = reuse, threading.Lock(), 0
        self._stored: dict[str, list[Table]] = defaultdict(list)
        try:
            for line in kept.lines():
                request, reply = json.loads(line)
                self._of(reply)
                self._stored[request].append(reply)
        except (ValueError, TypeError, KeyError):
            self._stored.clear()
        if not self._stored:
            kept.forget()

    def reply(self, request: str, ask: Callable[[], Table]) -> Table:
        """Return the reply to a request. Raises what asking does."""
        with self._lock:
            if replies := self._stored.get(request):
                before = replies.pop(0)
                if not self._unchecked:
                    self.reused += 1
                    self._reuse(before)
                    return before
                self._unchecked -= 1
                reply = ask()
                if _alike(self._of(before), self._of(reply)):
                    return reply
                logger.warning(f"{self._kept.path} is of another model; all is asked anew")
                self._stored.clear()
                self._kept.forget()
                self._kept.add([request, reply])
                return reply
        reply = ask()
        self._kept.add([request, reply])
        return reply

    def _of(self, reply: Table) -> list[Any]:
        return [reply[name] for name in self._compared]


def forget_answered(output_dir: Path) -> None:
    """Remove what was kept in the folder of a report that is now there."""
    for path in output_dir.glob(f"*{_SUFFIX}"):
        path.unlink()


def _asked(task: Task, dataset: Dataset, samples: Sequence[Sample]) -> str:
    """Return a hash of all that the answers depend on, as far as a client knows it."""
    weights = task.options.weights_dir
    options = asdict(task.options)
    kept = {name: value for name, value in options.items() if name not in _NOT_ASKED}
    facts = [
        [each.name for each in fields(Prediction)],  # which differ from release to release
        task.name,
        task.version,
        dataset.sha256,
        sample_ids(samples),
        None if weights is None else checkpoint_hash(weights),
        kept,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _alike(before: Any, after: Any) -> bool:
    """Return whether two answers are equal, numbers in them nearly."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(
            _alike(value, after[name]) for name, value in before.items()
        )
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_alike, before, after))
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=_NEARLY, abs_tol=_NEARLY)
    return bool(before == after)
