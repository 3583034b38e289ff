"""Progress of a job, in a small file for the processes that wait for it.

The file is replaced as a whole, which shows a reader one state or the next, and at most a few times
a second, which costs little.
"""

import contextlib
import json
import time
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
            f"{path} is damaged ({reason}); put a copy back, or delete it: what it records is "
            "forgotten then."
        )


@dataclass(frozen=True)
class ProgressState:
    """One moment of a job.

    Attributes:
        phase: what the job is doing, in a few words.
        done, total: in `unit`; a total of 0 means that the end is not known.
        unit: `bytes`, or the plural of what is counted.
    """

    phase: str = ""
    done: float = 0
    total: float = 0
    unit: str = ""


class Progress:
    """Writes a job's progress to `path`; without a path it is silent."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.state = ProgressState()
        self._written_at = 0.0

    def update(self, phase: str, done: float = 0, total: float = 0, *, unit: str = "items") -> None:
        """Report progress; a change of phase and the end of one are always written."""
        is_turning_point = phase != self.state.phase or (total > 0 and done >= total)
        self.state = ProgressState(phase, done, total, unit)
        now = time.monotonic()
        if self.path is None or not (is_turning_point or now - self._written_at > _MIN_INTERVAL_S):
            return
        self._written_at = now
        with contextlib.suppress(OSError):  # a full disk ends no work that does not need it
            write_json(self.path, asdict(self.state))


def read_progress(path: Path) -> ProgressState:
    """Return the job's latest state, or an empty one before the first.

    Raises:
        DamagedFileError: it is not such a state.
    """
    return read_as(path, ProgressState, "a job's progress") or ProgressState()


def write_json(path: Path, values: Any) -> None:
    """Replace `path` by `values` in one step; a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(values, indent=2) + "\n")


def read_as(path: Path, kind: type[RecordT], what: str) -> RecordT | None:
    """Return the dataclass in a JSON file, or None when there is no such file.

    Keys that it lacks, such as those of a later version, are ignored. `what` names it in a message.

    Raises:
        DamagedFileError: it is not JSON, or does not hold one.
    """
    try:
        return record_in(kind, read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:  # also of what is not a file
        raise DamagedFileError(path, f"{error}; expected {what}") from error
