"""The state of a job from squeue, scontrol and sacct, in this order."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import record

ASK_S = 20.0
_UNKNOWN_JOB = "Invalid job id"
# Slurm's states -> ours; all others are failures.
_OURS = {
    "": record.LOST,  # Slurm no longer knows the job
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"), record.SUBMITTED),
    **dict.fromkeys(("SUSPENDED", "RESV_DEL_HOLD"), record.SUBMITTED),
    **dict.fromkeys(("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"), record.RUNNING),
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), record.CANCELLED),
    "COMPLETED": record.COMPLETED,
}
# Remedies for ends that only Slurm records.
_REMEDIES = {
    "TIMEOUT": "its time limit has passed; raise the stage's time_limit",
    "OUT_OF_MEMORY": "it needed more memory; raise the stage's mem_gb, or cluster.mem",
    "NODE_FAIL": "its node failed; submit it again, it continues from what is on disk",
}


@dataclass(frozen=True)
class SlurmJobState:
    """Slurm's description of a job; empty when Slurm no longer knows it.

    Attributes:
        word: its state.
        reason: why it is in that state.
        exit_code: `<status>:<signal>` of its batch process.
    """

    word: str = ""
    reason: str = ""
    exit_code: str = ""

    @property
    def state(self) -> str:
        """The job's state in our words."""
        return _OURS.get(self.word, record.FAILED)


def slurm_state(job_id: str) -> SlurmJobState | None:
    """Return Slurm's description of a job, or None when Slurm is unreachable from here.

    squeue lists queued jobs, scontrol recent ones, and sacct the rest, if the cluster has
    accounting, for which a file without a database is enough.
    """
    queue = ask_slurm(["squeue", "-h", "-o", "JobState=%T Reason=%r", "-j", job_id])
    if queue is None or (queue.returncode != 0 and _UNKNOWN_JOB not in queue.stderr):
        return None
    questions = (
        ["scontrol", "show", "job", "-o", job_id],
        ["sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id],
        ["sacct", "-c", "-n", "-P", "-j", job_id, "--format=State"],
    )
    if found := _read(queue):
        return found
    return next((found for each in questions if (found := _read(ask_slurm(each)))), SlurmJobState())


def settle(record_path: Path) -> record.JobRecord | None:
    """Return a job's record, corrected from Slurm when the job ended unnoticed.

    The job's own record comes first: only the job knows whether the stage succeeded.
    """
    found = record.read_record(record_path)
    if found is None or found.is_final or not found.job_id:
        return found
    answer = slurm_state(found.job_id)
    again = record.read_record(record_path)
    if answer is None or again is None or again.is_final:
        return again
    state = answer.state
    if state not in record.FINAL_STATES:
        return again
    if state == record.COMPLETED and again.ended_at:
        return record.correct_record(record_path, again, state=state, exit_code=0)
    if state == record.COMPLETED:
        state = record.LOST
    error = _explanation(again, answer)
    return record.correct_record(
        record_path, again, state=state, ended_at=record.now(), error=error
    )


def waiting_for(job_id: str) -> str:
    """Return Slurm's reason why a job is still queued; empty when it is not."""
    answer = slurm_state(job_id)
    return answer.reason if answer and answer.state == record.SUBMITTED else ""


def jobs_below(folder: Path) -> list[str]:
    """Return the ids of the user's jobs whose batch scripts lie below a folder."""
    answer = ask_slurm(["squeue", "-h", "--me", "-o", "%i %o"])
    pairs = [line.split(maxsplit=1) for line in (answer.stdout if answer else "").splitlines()]
    return [pair[0] for pair in pairs if len(pair) == 2 and Path(pair[1]).is_relative_to(folder)]


def cancel(job_id: str) -> str:
    """Cancel a job; return scancel's error, empty if none."""
    return _order(["scancel", job_id])


def release(job_id: str) -> str:
    """Let a job start before what it depends on; return scontrol's error, empty if none."""
    return _order(["scontrol", "update", f"JobId={job_id}", "Dependency="])


def _order(command: list[str]) -> str:
    done = ask_slurm(command)
    if done is None:
        return f"{command[0]} is unavailable here, or does not answer"
    return "" if done.returncode == 0 else done.stderr.strip()


def _explanation(found: record.JobRecord, answer: SlurmJobState) -> str:
    """Return why a job ended that has not recorded its end."""
    if answer.reason == "DependencyNeverSatisfied":
        return f"never started: its dependency ({found.dependency}) did not succeed"
    if answer.state == record.CANCELLED:
        return "cancelled" if found.started_at else "cancelled before it started"
    if not answer.word:
        return "Slurm no longer knows the job, which left no result; see its log"
    code = f" with exit code {answer.exit_code}" if answer.exit_code not in ("", "0:0") else ""
    remedy = _REMEDIES.get(answer.word, "see its log")
    return f"the job left no result of its own; Slurm calls it {answer.word}{code}: {remedy}"


def _read(answer: subprocess.CompletedProcess[str] | None) -> SlurmJobState | None:
    """Return the state in an answer, None when there is none in it."""
    if answer is None or answer.returncode != 0:
        return None
    fields = re.findall(r"\b(JobState|Reason|ExitCode)=([\w:]+)", answer.stdout)
    found = dict(reversed(fields))  # the first of each: a command or a comment may hold others
    word = found.get("JobState") or re.split(r"\W", answer.stdout, maxsplit=1)[0]
    if not word:
        return None
    return SlurmJobState(word, found.get("Reason", ""), found.get("ExitCode", ""))


def ask_slurm(
    command: list[str], *, timeout_s: float = ASK_S
) -> subprocess.CompletedProcess[str] | None:
    """Run a command of Slurm; return None where it is missing or does not answer."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        return subprocess.run(command, **options, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
