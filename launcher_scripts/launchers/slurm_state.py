"""Slurm's commands and their answers: the states of jobs, and the jobs of a results folder."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foundations.files.yaml_content import read_table
from launcher_scripts.launchers.base import SUBMITIT_NAME, clean_environment
from stages import record

UNAVAILABLE = 127  # exit status of a missing command, as in a shell
_ASK_S = 20.0  # Slurm's clients give up after 10 s by default
# Retry time of scancel: a controller that restarts or fails over is unavailable for a while.
PATIENCE_S = 90.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 10.0
_UNKNOWN_JOB = "Invalid job id"
# Errors of a controller or database that is unavailable, busy or restarting: the same command may
# succeed later. Slurm, src/common/slurm_errno.c and slurm_persist_conn.c; the last line: strerror.
_TEMPORARY_ERRORS = re.compile(
    "Unable to contact slurm controller|Socket timed out on send/recv|Zero Bytes were transmitted"
    "|in standby mode|temporarily unable to accept job|Rate limit exceeded|[Cc]onnection failure"
    "|Unable to (contact|connect to) database|slurm_persist_conn_open|Unexpected message received"
    "|Resource temporarily unavailable|Connection (refused|reset|timed out)|Broken pipe"
)
_TABLE = read_table(Path(__file__).with_name("slurm_states.yaml"))
_STATE_OF = {word: state for state, words in _TABLE["states"].items() for word in words}
# A field of scontrol. A reason may contain blanks; a path ends with its line.
_FIELD = re.compile(
    r"\b(JobState|Reason|ExitCode|Command)=((?<=Command=).*|.*?(?= \w+=|$))", re.MULTILINE
)
UNREACHABLE = "Slurm does not answer; jobs are shown as last recorded"


@dataclass(frozen=True)
class SlurmAnswer:
    """The result of a Slurm command.

    Attributes:
        status: exit status; None if Slurm did not answer.
        text, error: contents of stdout and stderr.
    """

    status: int | None
    text: str = ""
    error: str = ""


def ask_slurm(
    command: Sequence[str],
    *,
    timeout_s: float = _ASK_S,
    patience_s: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> SlurmAnswer:
    """Run a Slurm command; retry it for `patience_s` while Slurm does not answer.

    By default, it does not see the user's variables that filter its answers.
    """
    answer = SlurmAnswer(None)
    for _ in attempts(patience_s):
        answer = _run_once(command, timeout_s, environment)
        if answer.status is not None:
            break
    return answer


def _run_once(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None
) -> SlurmAnswer:
    if shutil.which(command[0]) is None:
        return SlurmAnswer(UNAVAILABLE, error=f"{command[0]} is unavailable here")
    try:
        done = subprocess.run(
            command,
            env=clean_environment(os.environ) if environment is None else environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return SlurmAnswer(None, error=f"{command[0]} did not answer within {timeout_s:g} s")
    except OSError as error:
        return SlurmAnswer(126, error=f"{command[0]}: {error.strerror}")
    is_lost = done.returncode != 0 and _TEMPORARY_ERRORS.search(done.stderr)
    return SlurmAnswer(None if is_lost else done.returncode, done.stdout, done.stderr.strip())


def attempts(patience_s: float) -> Iterator[int]:
    """Yield attempt numbers from 0, with growing pauses, for `patience_s`; at least one."""
    number, pause_s, deadline = 0, _FIRST_PAUSE_S, time.monotonic() + patience_s
    while True:
        yield number
        if time.monotonic() + pause_s > deadline:
            return
        time.sleep(pause_s)
        number, pause_s = number + 1, min(2 * pause_s, _LAST_PAUSE_S)


@dataclass(frozen=True)
class SlurmJobState:
    """Slurm's description of a job; empty if Slurm no longer knows the job.

    Attributes:
        word: Slurm's name of the state.
        reason: why the job is in that state.
        script: path of the batch script, if Slurm reports it.
        exit_code: `<status>:<signal>` of the batch process.
    """

    word: str = ""
    reason: str = ""
    script: str = ""
    exit_code: str = ""

    @property
    def state(self) -> str | None:
        """The state of our record for it; None for an unknown state of a newer Slurm."""
        return _STATE_OF.get(self.word)

    @property
    def has_ended(self) -> bool:
        """Whether the job is known to have ended."""
        return self.state in record.FINAL_STATES

    @property
    def waits_for(self) -> str:
        """Slurm's reason why the job waits; empty if it runs or has ended."""
        if self.has_ended or self.state == record.RUNNING:
            return ""
        if self.state is None:
            return f"{self.word}, a state that this version does not know"
        reason = "" if self.reason == "None" else self.reason
        if self.word == "PENDING" and reason:
            return reason
        return f"{self.word} ({reason})" if reason else self.word


@dataclass(frozen=True)
class SlurmQueue:
    """Slurm's queue: the jobs of all users, by id.

    Attributes:
        has_answered: whether Slurm answered; if not, no job's state is known.
    """

    jobs: Mapping[str, SlurmJobState]
    has_answered: bool = True

    def state(self, job_id: str) -> SlurmJobState | None:
        """Return Slurm's description of a job; None if Slurm does not answer."""
        if not self.has_answered:
            return None
        return self.jobs.get(job_id) or _state_of_ended(job_id)


def queue_now(job_id: str = "") -> SlurmQueue:
    """Return Slurm's queue as it is now, or only one job of it."""
    one = ["-j", job_id] if job_id else []
    answer = ask_slurm(["squeue", "-a", "-h", "-r", "-o", "%i|%T|%r|%o", *one])
    if answer.status != 0:
        return SlurmQueue({}, has_answered=_UNKNOWN_JOB in answer.error)
    rows = (line.split("|", 3) for line in answer.text.splitlines())
    return SlurmQueue({row[0]: SlurmJobState(*row[1:]) for row in rows})


def _state_of_ended(job_id: str) -> SlurmJobState | None:
    """Return the state of a job that is no longer in the queue.

    scontrol knows recent jobs; sacct knows all if the cluster has accounting, in a database or
    (-c) in a file.
    """
    shown = ask_slurm(["scontrol", "show", "job", job_id])
    # Reversed, so that the first occurrence of each field wins: a comment may repeat one.
    found = dict(reversed(_FIELD.findall(shown.text)))
    if "JobState" in found:
        facts = (found.get(name, "") for name in ("JobState", "Reason", "Command", "ExitCode"))
        return SlurmJobState(*facts)
    has_answered = _UNKNOWN_JOB in shown.error
    for command in (
        ["sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id],
        ["sacct", "-c", "-n", "-P", "-j", job_id, "--format=State"],
    ):
        answer = ask_slurm(command)
        has_answered = has_answered and answer.status is not None
        if answer.status == 0 and (word := re.split(r"\W", answer.text, maxsplit=1)[0]):
            return SlurmJobState(word)
    return SlurmJobState() if has_answered else None


def reconcile(record_path: Path, queue: SlurmQueue | None = None) -> record.JobRecord | None:
    """Return a job's record, corrected from Slurm if the job ended without recording it.

    A final record stands: only the job knows whether its stage succeeded. A record in a copied
    folder describes a job of the original folder. An old record, or one of another Slurm cluster,
    may have the id of an unrelated job.
    """
    found = record.read_record(record_path)
    if found is None or found.is_final or not found.job_id:
        return found
    answer = (queue or queue_now(found.job_id)).state(found.job_id)
    if answer is None:
        return found
    if error := _ownership_problem(found.job_id, answer.script, record_path.parent):
        new = replace(found, state=record.LOST, error=error)
    elif not answer.has_ended:
        return found
    elif answer.state == record.COMPLETED and found.ended_at:
        new = replace(found, state=record.COMPLETED, exit_code=0)
    else:
        state = record.LOST if answer.state == record.COMPLETED else str(answer.state)
        error = _reason_of_end(found, answer)
        new = replace(found, state=state, ended_at=record.now(), error=error)
    return record.exchange_record(record_path, found, new)


def jobs_below(results_dir: Path, queue: SlurmQueue) -> dict[str, list[str]]:
    """Return the ids of the queued jobs of a results folder, by stage.

    The folder is part of the path of a job's batch script, so no record is needed.
    """
    found: dict[str, list[str]] = {}
    for job_id, job in queue.jobs.items():
        script = Path(job.script)
        if script.parent.name != SUBMITIT_NAME:
            continue
        folder = script.parent.parent
        if folder.parent == results_dir.resolve():
            found.setdefault(folder.name, []).append(job_id)
    return found


def _ownership_problem(job_id: str, script: str, folder: Path) -> str:
    """Return why Slurm's job is not the one recorded in `folder`; empty if it may be."""
    place = Path(script).parent
    if not script or place.parent == folder.resolve():
        return ""
    if place.name != SUBMITIT_NAME:
        return f"Slurm no longer knows the job: id {job_id} is now another job's ({script})"
    # The folder may have been moved.
    if not place.is_dir():
        return ""
    return f"{folder} is a copy of {place.parent}, to which job {job_id} belongs"


def cancel(job_id: str, *, patience_s: float = PATIENCE_S) -> str:
    """Cancel a job; return the error of scancel, empty if none."""
    answer = ask_slurm(["scancel", job_id], patience_s=patience_s)
    has_ended = _UNKNOWN_JOB in answer.error or "already completi" in answer.error
    return "" if answer.status == 0 or has_ended else answer.error


def _reason_of_end(found: record.JobRecord, answer: SlurmJobState) -> str:
    """Return why a job ended that did not record its end."""
    if answer.reason == "DependencyNeverSatisfied":
        return f"never started: its dependency ({found.dependency}) did not succeed"
    if answer.state == record.CANCELLED:
        return "cancelled" if found.started_at else "cancelled before it started"
    if not answer.word:
        return "Slurm no longer knows the job, which left no result; see its log"
    code = f" with exit code {answer.exit_code}" if answer.exit_code not in ("", "0:0") else ""
    remedy = _TABLE["remedies"].get(answer.word, "see its log")
    begun = (
        "recorded no result" if found.started_at else "did not begin its stage (see cluster.setup)"
    )
    return f"the job {begun}; Slurm reports {answer.word}{code}: {remedy}"
