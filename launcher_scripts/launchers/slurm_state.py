"""What has become of a job, asked in turn from whoever may still know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from stages import record

_ASK_S = 20.0
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
_CANCELLED = ("CANCELLED", "PREEMPTED", "REVOKED")


def slurm_state(job_id: str) -> str | None:
    """Return Slurm's word for the state of a job, or None when nobody remembers it.

    squeue knows what is queued, scontrol what ended lately, sacct the rest, where there is
    accounting; its file form works without a database.
    """
    questions = (
        (["squeue", "-h", "-o", "%T", "-j", job_id], r"^(\w+)"),
        (["scontrol", "show", "job", "-o", job_id], r"\bJobState=(\w+)"),
        (["sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id], r"^(\w+)"),
        (["sacct", "-c", "-n", "-P", "-j", job_id, "--format=State"], r"^(\w+)"),
    )
    for command, pattern in questions:
        answer = _ask(command)
        match = re.search(pattern, answer, re.MULTILINE)
        if match is not None:
            return match.group(1)
    return None


def our_state(word: str | None) -> str:
    """Return our state for Slurm's; a job that nobody remembers is lost."""
    if word is None:
        return record.LOST
    if word in _QUEUED:
        return record.SUBMITTED
    if word in _RUNNING:
        return record.RUNNING
    if word == "COMPLETED":
        return record.COMPLETED
    return record.CANCELLED if word in _CANCELLED else record.FAILED


def settle(record_path: Path) -> record.JobRecord | None:
    """Return a job's record after asking Slurm, and correct it when the job ended unnoticed.

    The job's own word counts first: it is the only one that knows whether the stage succeeded.
    """
    found = record.read_record(record_path)
    if found is None or found.is_final or not found.job_id:
        return found
    word = slurm_state(found.job_id)
    state = our_state(word)
    again = record.read_record(record_path)
    if again is None or again.is_final:
        return again
    if state not in record.FINAL_STATES:
        return again
    if state == record.COMPLETED and again.ended_at:
        return record.update_record(record_path, found.job_id, state=state, exit_code=0)
    return record.update_record(
        record_path,
        found.job_id,
        state=record.LOST if state == record.COMPLETED else state,
        ended_at=record.now(),
        exit_code=1,
        error=f"the job left no result of its own; Slurm calls it {word or 'unknown'}",
    )


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
