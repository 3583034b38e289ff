"""The answers that an evaluation got before it ended, from which the next one goes on.

<output_dir>/<task>.answered.jsonl: a line with what was asked, then an answer a line, each written
as it came: a Prediction, or of a task that words its own requests a request and its reply. The file
is gone once the report is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from export_scripts.files.journal import Journal
from export_scripts.files.json_content import Table
from inference.evaluation.environment import describe_weights
from inference.evaluation.record import from_json
from inference.evaluation.task import Dataset, Prediction, Sample, Task, sample_ids

logger = logging.getLogger(__name__)

_SUFFIX = ".answered.jsonl"
# The same address may serve another model today. Answers of few words agree by chance.
_SAMPLES_AGAIN, _REQUESTS_AGAIN = 16, 4
_NEARLY = 1e-3  # as far as the load moves a log probability
# Options that no answer depends on; the address of the pipeline's own server is new each time.
_NOT_ASKED = (
    "name", "time_limit", "ca", "token_file", "output_dir", "concurrency", "request_timeout_s",
    "retry_s", "reference", "gate", "advisory", "baseline", "baseline_path",
    "history_dir", "cpus_per_task", "mem_gb", "latency", "harness", "tasks", "url",
    "openai_url", "left_out",
)  # fmt: skip


def answer_journal(task: Task, dataset: Dataset, samples: Sequence[Sample]) -> Journal:
    """Return the journal of a task's answers; those to other questions are not read."""
    path = Path(task.options.output_dir) / f"{task.name}{_SUFFIX}"
    return Journal(path, _asked(task, dataset, samples))


def answered_samples(
    kept: Journal, samples: Sequence[Sample], ask: Callable[[Sample], Prediction]
) -> dict[int, Prediction]:
    """Return the answers of an earlier run by their sample's index; `ask` asks one anew.

    None are returned unless some that are asked again are answered as before.
    """
    by_index = {sample.index: sample for sample in samples}
    try:
        stored = [from_json(Prediction, line) for line in kept.lines()]
    except ValueError:
        stored = []
    found = {each.index: each for each in stored if each.index in by_index}
    again = sorted(found)[:: max(1, len(found) // _SAMPLES_AGAIN)][:_SAMPLES_AGAIN]
    for index in again:
        before, now = found[index], ask(by_index[index])
        is_like = _alike(dict(before.values), dict(now.values))
        if not is_like or before.answer != now.answer:
            _ask_anew(kept)
            return {}
    if not found:
        kept.forget()
    return found


class AnsweredRequests:
    """Asks each request once, over all runs until one ends; equal ones, as often as they came.

    `ask` sends a request; `reuse` is called with a reply of an earlier run that stands for one.

    Attributes:
        reused: how many did.
    """

    def __init__(
        self,
        kept: Journal,
        ask: Callable[[Table], Table],
        reuse: Callable[[Table], None],
    ) -> None:
        self._kept, self._ask, self._reuse, self._lock = kept, ask, reuse, threading.Lock()
        self._stored: dict[str, list[Table]] = defaultdict(list)
        self._unchecked, self.reused = _REQUESTS_AGAIN, 0
        try:
            for line in kept.lines():
                request, reply = json.loads(line)
                self._stored[request].append(reply)
        except (ValueError, TypeError):
            self._stored.clear()
        if not self._stored:
            kept.forget()

    def __call__(self, body: Table) -> Table:
        """Return the reply to a request. Raises what asking does."""
        request = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        with self._lock:
            if replies := self._stored.get(request):
                before = replies.pop(0)
                if not self._unchecked:
                    self.reused += 1
                    self._reuse(before)
                    return before
                self._unchecked -= 1
                reply = self._ask(body)
                if _alike(before.get("choices"), reply.get("choices")):
                    return reply
                self._stored.clear()
                _ask_anew(self._kept)
                self._kept.add([request, reply])
                return reply
        reply = self._ask(body)
        self._kept.add([request, reply])
        return reply


def _ask_anew(kept: Journal) -> None:
    logger.warning(f"{kept.path} is of another model; all is asked anew")
    kept.forget()


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
        task.name,
        task.version,
        dataset.sha256,
        sample_ids(samples),
        None if weights is None else describe_weights(weights),
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
