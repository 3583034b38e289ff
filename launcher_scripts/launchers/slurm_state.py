"""The state of a job, asked of squeue, scontrol and sacct in turn."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from stages import record

_ASK_S = 20.0
_UNKNOWN_JOB = "Invalid job id"
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
_CANCELLED = ("CANCELLED", "PREEMPTED", "REVOKED")
# What a user can do about an end that only Slurm knows of.
_REMEDIES = {
    "TIMEOUT": "its time limit has passed; raise the stage's time_limit",
    "OUT_OF_MEMORY": "it needed more memory; raise the stage's mem_gb, or cluster.mem",
    "NODE_FAIL": "its node failed; submit it again, it continues from what is on disk",
}


@dataclass(frozen=True)
class SlurmJobState:
    """Slurm's words for a job; empty when Slurm no longer knows it.

    Attributes:
        word: its state.
        reason: why it is in that state.
        exit_code: `<status>:<signal>` of its batch process.
    """

    word: str = ""
    reason: str = ""
    exit_code: str = ""


def slurm_state(job_id: str) -> SlurmJobState | None:
    """Return what Slurm says of a job, or None when Slurm cannot be asked from here.

    squeue knows what is queued, scontrol what ended lately, sacct the rest, where there is
    accounting; its file form works without a database.
    """
    queue = _ask(["squeue", "-h", "-o", "JobState=%T Reason=%r", "-j", job_id])
    if queue is None or (queue.returncode != 0 and _UNKNOWN_JOB not in queue.stderr):
        return None
    questions = (
        ["scontrol", "show", "job", "-o", job_id],
        ["sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id],
        ["sacct", "-c", "-n", "-P", "-j", job_id, "--format=State"],
    )
    if found := _read(queue):
        return found
    return next((found for each in questions if (found := _read(_ask(each)))), SlurmJobState())


def our_state(word: str) -> str:
    """Return our state for Slurm's; a job that Slurm no longer knows is lost."""
    if not word:
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
    answer = slurm_state(found.job_id)
    again = record.read_record(record_path)
    if answer is None or again is None or again.is_final:
        return again
    state = our_state(answer.word)
    if state not in record.FINAL_STATES:
        return again
    if state == record.COMPLETED and again.ended_at:
        return record.correct_record(record_path, again, state=state, exit_code=0)
    return record.correct_record(
        record_path,
        again,
        state=record.LOST if state == record.COMPLETED else state,
        ended_at=record.now(),
        error=_explanation(again, answer),
    )


def waiting_for(job_id: str) -> str:
    """Return why a job is still in the queue, in Slurm's word; empty when it is not there."""
    answer = slurm_state(job_id)
    return answer.reason if answer is not None and answer.word in _QUEUED else ""


def cancel(job_id: str) -> str:
    """Take a job out of the queue, or end it; return what scancel objects to, empty if nothing."""
    done = _ask(["scancel", job_id])
    if done is None:
        return "scancel cannot be run here, or does not answer"
    return "" if done.returncode == 0 else done.stderr.strip()


def _explanation(found: record.JobRecord, answer: SlurmJobState) -> str:
    """Return why a job ended that says nothing itself."""
    if answer.reason == "DependencyNeverSatisfied":
        return f"never started: what it waited for ({found.dependency}) did not succeed"
    if answer.word in _CANCELLED:
        return "cancelled" if found.started_at else "cancelled before it started"
    if not answer.word:
        return "Slurm does not know the job any more, and it left no result of its own; see its log"
    code = f" with exit code {answer.exit_code}" if answer.exit_code not in ("", "0:0") else ""
    remedy = _REMEDIES.get(answer.word, "see its log")
    return f"the job left no result of its own; Slurm calls it {answer.word}{code}: {remedy}"


def _read(answer: subprocess.CompletedProcess[str] | None) -> SlurmJobState | None:
    """Return the state in an answer, None when there is none in it."""
    if answer is None or answer.returncode != 0:
        return None
    named = re.search(r"\bJobState=(\w+)", answer.stdout)
    word = named or re.match(r"(\w+)", answer.stdout)
    if word is None:
        return None
    others = {
        name: match[1] if (match := re.search(rf"\b{name}=([\w:]+)", answer.stdout)) else ""
        for name in ("Reason", "ExitCode")
    }
    return SlurmJobState(word[1], others["Reason"], others["ExitCode"])


def _ask(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
