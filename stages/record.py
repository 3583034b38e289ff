"""job.json: the record of one job, written by the launcher and by the job itself."""

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from foundations.files.disk import full_disk
from foundations.files.json_content import Fields
from stages.progress import DamagedFileError, read_as, write_json

RECORD_NAME = "job.json"

# States of a job in the order of its life; the last four are final.
SUBMITTED, RUNNING, READY = "submitted", "running", "ready"
COMPLETED, FAILED, CANCELLED, LOST = "completed", "failed", "cancelled", "lost"
FINAL_STATES = (COMPLETED, FAILED, CANCELLED, LOST)
_STATES = (SUBMITTED, RUNNING, READY, *FINAL_STATES)
# Job ids are passed to Slurm's commands, which would read one that begins with - as an option.
_JOB_ID = re.compile(r"(\w[\w.+-]*)?")


@dataclass(frozen=True)
class JobRecord:
    """The life of one job. Times are UTC in ISO 8601; paths are absolute.

    Attributes:
        job_id: the scheduler's id; without a scheduler, the start time.
        dependency: the jobs that it waits for, in the scheduler's notation.
        exit_code: exit status; None while unknown.
        process: without a scheduler, the id of the job's root process.
        error: reason of a failure, cause first.
        predecessor, successor: ids of the jobs before and after it in a server's chain.
        summary: the stage's summary of its result.
    """

    job_id: str
    stage: str
    name: str
    state: str
    cluster: str = ""
    dependency: str = ""
    host: str = ""
    log: str = ""
    submitted_at: str = ""
    started_at: str = ""
    ended_at: str = ""
    seconds: float | None = None
    exit_code: int | None = None
    process: int | None = None
    git_revision: str = ""
    error: str = ""
    predecessor: str = ""
    successor: str = ""
    outputs: tuple[str, ...] = ()
    summary: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError."""
        if self.state not in _STATES or not _JOB_ID.fullmatch(self.job_id):
            raise ValueError(f"invalid job id {self.job_id!r} or state {self.state!r}")
        for at in filter(None, (self.submitted_at, self.started_at, self.ended_at)):
            if datetime.fromisoformat(at).tzinfo is None:
                raise ValueError(f"{at} names no time zone")

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL_STATES


def now() -> str:
    """Return the current time as written in records."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_record(path: Path, record: JobRecord) -> None:
    """Replace the record at `path`."""
    with locked(path):
        write_json(path, record)


def read_record(path: Path) -> JobRecord | None:
    """Return the record at `path`, or None if it does not exist; unknown keys are ignored.

    Raises:
        DamagedFileError: the file does not hold a record.
    """
    return read_as(path, JobRecord, "the record of a job")


def update_record(path: Path, job_id: str, **changes: Any) -> JobRecord | None:
    """Change fields of the record of `job_id`, and return it; leave another job's record alone.

    A record without an id belongs to the job that is being submitted. A damaged record is left
    alone: it must not end the job, and its readers report it.
    """
    with locked(path):
        record = readable_record(path)
        if record is None or record.job_id not in ("", job_id):
            return None
        return _rewrite(path, replace(record, job_id=job_id, **changes))


def exchange_record(path: Path, found: JobRecord | None, new: JobRecord) -> JobRecord | None:
    """Replace a record by `new` if it is still `found` (None: missing or damaged).

    Return the record that is then valid. A record that has changed since, for example because the
    job recorded its end, is newer than the facts behind `new`: it stays and is returned. If the
    folder is not writable, as in another user's run, `new` is returned without being written.
    """
    try:
        with locked(path):
            present = readable_record(path)
            return _rewrite(path, new) if present == found else present
    except OSError:
        return new


def readable_record(path: Path) -> JobRecord | None:
    """Return the record at `path`, or None if it does not exist or is damaged."""
    with suppress(DamagedFileError):
        return read_record(path)
    return None


def _rewrite(path: Path, record: JobRecord) -> JobRecord:
    """Replace an existing record, even on a full disk, and return the new one."""
    try:
        write_json(path, record)
    except OSError as error:
        if full_disk(error, path) is None:
            raise
        # Overwriting the file in place needs no disk space. It is padded with blanks to the old
        # size, so that readers see complete JSON.
        text = json.dumps(asdict(record), indent=2).encode() + b"\n"
        with path.open("r+b", buffering=0) as file:
            file.write(text.ljust(path.stat().st_size))
    return record


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes, on all nodes, from changing a file during the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
