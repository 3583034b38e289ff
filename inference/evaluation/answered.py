"""The answers of an interrupted evaluation, with which the next one resumes.

<output_dir>/<task>.answered.jsonl starts with the identity of the questions. Each further line is a
request and its reply, written on arrival: a sample's index and its Prediction, or for a task that
sends its own requests, the request's hash and the server's reply. The report replaces the file.
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
# Number of stored replies that are requested again, because the address may serve another model by
# now. Short answers agree by chance, so one is not enough.
SAMPLES_AGAIN, REQUESTS_AGAIN = 16, 4
_LOAD_TOLERANCE = 1e-3  # the server's load moves a log probability so far, in nats
# Options that do not affect an answer; the address of the pipeline's own server changes each time.
_WITHOUT_EFFECT = (
    "name", "time_limit", "ca", "token_file", "output_dir", "concurrency", "request_timeout_s",
    "retry_s", "gate", "advisory", "baseline", "baseline_path",
    "cpus_per_task", "mem_gb", "latency", "harness", "tasks", "url",
    "openai_url", "left_out",
)  # fmt: skip


def answer_journal(task: Task, dataset: Dataset, samples: Sequence[Sample]) -> Journal:
    """Return the journal of a task's answers; answers to other questions are discarded."""
    path = task.options.output_dir / f"{task.name}{_SUFFIX}"
    return Journal(path, _identity(task, dataset, samples))


class Answers:
    """Sends each request that an earlier run has not answered, and journals the replies.

    Equal requests are answered as often as they occur. The first stored replies are requested again
    as a check; if one differs, all stored replies are discarded.

    Attributes:
        reused: stored replies that replaced a request.
    """

    def __init__(
        self,
        journal: Journal,
        compared: Sequence[str],
        *,
        again: int,
        reuse: Callable[[Table], None] = lambda _: None,
    ) -> None:
        """Read a journal; `compared` are the fields of a reply that the check compares.

        `again` is the number of replies to check; `reuse` is called with each reused reply.
        """
        self._journal, self._compared, self._unchecked = journal, compared, again
        self._reuse, self._lock, self.reused = reuse, threading.Lock(), 0
        self._stored: dict[str, list[Table]] = defaultdict(list)
        try:
            for line in journal.lines():
                request, reply = json.loads(line)
                self._compared_fields(reply)
                self._stored[request].append(reply)
        except (ValueError, TypeError, KeyError):
            self._stored.clear()
        if not self._stored:
            journal.forget()

    def reply(self, request: str, ask: Callable[[], Table]) -> Table:
        """Return the stored reply to a request, or that of `ask`, whose errors it raises."""
        with self._lock:
            if replies := self._stored.get(request):
                before = replies.pop(0)
                if not self._unchecked:
                    self.reused += 1
                    self._reuse(before)
                    return before
                self._unchecked -= 1
                reply = ask()
                if _is_close(self._compared_fields(before), self._compared_fields(reply)):
                    return reply
                logger.warning(
                    f"{self._journal.path} is of another model; its answers are discarded"
                )
                self._stored.clear()
                self._journal.forget()
                self._journal.add([request, reply])
                return reply
        reply = ask()
        self._journal.add([request, reply])
        return reply

    def _compared_fields(self, reply: Table) -> list[Any]:
        return [reply[name] for name in self._compared]


def forget_answered(output_dir: Path) -> None:
    """Remove the journals in a folder whose report was written."""
    for path in output_dir.glob(f"*{_SUFFIX}"):
        path.unlink()


def _identity(task: Task, dataset: Dataset, samples: Sequence[Sample]) -> str:
    """Return a hash of everything known to a client that affects the answers."""
    weights = task.options.weights_dir
    options = asdict(task.options)
    effective = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    facts = [
        [each.name for each in fields(Prediction)],  # they differ between releases
        task.name,
        task.version,
        dataset.sha256,
        sample_ids(samples),
        None if weights is None else checkpoint_hash(weights),
        effective,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _is_close(before: Any, after: Any) -> bool:
    """Return whether two answers are equal, with a tolerance for floating-point numbers."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(
            _is_close(value, after[name]) for name, value in before.items()
        )
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_is_close, before, after))
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=_LOAD_TOLERANCE, abs_tol=_LOAD_TOLERANCE)
    return bool(before == after)
