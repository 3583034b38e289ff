"""The samples that an evaluation was answered before it ended, from which the next one goes on.

<output_dir>/<task>.answered.jsonl: a line with what was asked, then a Prediction a line, each
written as it came. The file is gone once the report is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from inference.evaluation.record import Prediction, from_json
from inference.evaluation.run.environment import describe_weights
from inference.evaluation.run.preparation import Prepared
from inference.evaluation.task import sample_ids

logger = logging.getLogger(__name__)

_SUFFIX = ".answered.jsonl"
_ASKED_AGAIN = 4  # of those answered: the same address may serve another model today
_NEARLY = 1e-3  # as far as the load moves a log probability
# Options that no answer depends on; the address of the pipeline's own server is new each time.
_NOT_ASKED = (
    "name", "time_limit", "ca", "token_file", "output_dir", "concurrency", "request_timeout_s",
    "retry_s", "reference", "gate", "advisory", "baseline", "baseline_path",
    "history_dir", "cpus_per_task", "mem_gb", "latency", "harness", "tasks", "url",
    "openai_url", "left_out",
)  # fmt: skip


class AnsweredSamples:
    """Keeps the answers of one task, and gives those back that an earlier run has left."""

    def __init__(self, path: Path, prepared: Prepared) -> None:
        self._path, self._prepared = path, prepared
        self._asked = _asked(prepared)

    @classmethod
    def of(cls, output_dir: Path, prepared: Prepared) -> AnsweredSamples:
        """Return those of a task in the folder of its report."""
        return cls(output_dir / f"{prepared.task.name}{_SUFFIX}", prepared)

    def read(self, ask: Callable[[int], Mapping[str, float]]) -> dict[int, Prediction]:
        """Return the answers of an earlier run by their sample's index; `ask` scores one anew.

        None are returned unless they are of the same samples, asked in the same way, and some that
        are asked again are answered as before.
        """
        found = self._stored()
        again = sorted(found)[:: max(1, len(found) // _ASKED_AGAIN)][:_ASKED_AGAIN]
        if any(not _alike(found[index].values, ask(index)) for index in again):
            logger.warning(f"{self._path} is of another model; all samples are asked anew")
            found = {}
        if not found:
            self._path.unlink(missing_ok=True)
        return found

    def add(self, prediction: Prediction) -> None:
        """Keep an answer."""
        with self._path.open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write(json.dumps(self._asked) + "\n")
            file.write(json.dumps(asdict(prediction)) + "\n")

    def _stored(self) -> dict[int, Prediction]:
        if not self._path.is_file():
            return {}
        first, *lines = self._path.read_bytes().split(b"\n")
        try:
            if json.loads(first) != self._asked:
                return {}
            # The text after the last line feed was not written whole.
            found = [from_json(Prediction, line) for line in lines[:-1]]
        except ValueError:
            return {}
        indices = {sample.index for sample in self._prepared.samples}
        return {each.index: each for each in found if each.index in indices}


def forget_answered(output_dir: Path) -> None:
    """Remove what was kept in the folder of a report that is now there."""
    for path in output_dir.glob(f"*{_SUFFIX}"):
        path.unlink()


def _asked(prepared: Prepared) -> str:
    """Return a hash of all that the answers depend on, as far as a client knows it."""
    task, options = prepared.task, asdict(prepared.task.options)
    weights = prepared.task.options.weights_dir
    kept = {name: value for name, value in options.items() if name not in _NOT_ASKED}
    facts = [
        task.name,
        task.version,
        prepared.dataset.sha256,
        sample_ids(prepared.samples),
        None if weights is None else describe_weights(weights),
        kept,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _alike(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    return before.keys() == after.keys() and all(
        math.isclose(value, after[name], rel_tol=_NEARLY, abs_tol=_NEARLY)
        for name, value in before.items()
    )
