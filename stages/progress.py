"""Progress of a job, in a small file for the processes that wait for the job.

The file is replaced atomically, so that readers never see a partial state, and at most ten times a
second.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundations.files.json_content import RecordT, record_in
from foundations.files.replace import read_file, replace_file

PROGRESS_NAME = "progress.json"
_MIN_INTERVAL_S = 0.1


class DamagedFileError(ValueError):
    """A file of an earlier run is unreadable or incomplete."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} is damaged ({reason}); restore a copy, or delete the file, which loses what "
            "it records."
        )


@dataclass(frozen=True)
class ProgressState:
    """One moment of a job.

    Attributes:
        phase: what the job is doing, in a few words.
        done, total: amounts in `unit`; a total of 0 means that it is unknown.
        unit: `bytes`, or a plural noun.
    """

    phase: str = ""
    done: float = 0
    total: float = 0
    unit: str = ""


class Progress:
    """Writes a job's progress to `path`; nothing is written without a path."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.state = ProgressState()
        self._written_at = 0.0

    def update(self, phase: str, done: float = 0, total: float = 0, *, unit: str = "items") -> None:
        """Report progress; the beginning and the end of a phase are always written."""
        is_turning_point = phase != self.state.phase or (total > 0 and done >= total)
        self.state = ProgressState(phase, done, total, unit)
        now = time.monotonic()
        if self.path is None or not (is_turning_point or now - self._written_at > _MIN_INTERVAL_S):
            return
        self._written_at = now
        with suppress(OSError):  # a full disk must not end the job
            write_json(self.path, self.state)


def read_progress(path: Path) -> ProgressState:
    """Return the job's latest state; an empty one if none was written.

    Raises:
        DamagedFileError: the file does not hold a state.
    """
    return read_as(path, ProgressState, "a job's progress") or ProgressState()


def write_json(path: Path, values: Any) -> None:
    """Replace `path` by `values`, which may be a record, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(values, indent=2, default=asdict) + "\n")


def read_as(path: Path, kind: type[RecordT], what: str) -> RecordT | None:
    """Return a dataclass read from a JSON file, or None if the file does not exist.

    Unknown keys, such as those of a later version, are ignored. `what` names the expected contents
    in messages.

    Raises:
        DamagedFileError: the file is not JSON, or has other contents.
    """
    try:
        return record_in(kind, read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:  # including a path that is not a file
        raise DamagedFileError(path, f"{error}; expected {what}") from error
