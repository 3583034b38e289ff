"""Jobs on Slurm, through submitit's executor with our batch script."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from submitit.core.utils import DelayedSubmission, JobPaths

from launcher_scripts.launchers.base import (
    AFTER_START,
    PATIENCE_S,
    SUBMISSION_S,
    Job,
    JobHandle,
    Launcher,
    Room,
    SubmissionError,
)
from launcher_scripts.launchers.slurm_chain import serve_in_chain
from launcher_scripts.launchers.slurm_checks import (
    forgotten_jobs,
    own_file_system,
    problems_of_cluster,
)
from launcher_scripts.launchers.slurm_limits import room_in_queue
from launcher_scripts.launchers.slurm_script import (
    batch_script,
    environment_of_sbatch,
    log_path,
    step_of,
)
from launcher_scripts.launchers.slurm_state import (
    SlurmAnswer,
    ask_slurm,
    attempts,
    cancel,
    jobs_below,
    queue_now,
    settle,
)
from stages import record
from stages.base import Stage, Summary
from stages.deploy import DeployStage
from stages.job import StageJob
from stages.job_process import log_line
from stages.progress import DamagedFileError
from stages.record import RECORD_NAME

# Slurm is polled soon, and then less and less often.
_FIRST_POLL_S, _LAST_POLL_S = 0.5, 5.0
_STOP_POLL_S = 0.5
_FOLLOW_S = 15.0  # another job, for as long as this one runs
_SUBMIT_S = 120.0  # sbatch itself waits for a busy controller
_MOST_TIMEOUTS = 3  # after which submitit puts a job into the queue no more


class SlurmLauncher(Launcher):
    """Submits each job with sbatch; a chain waits by dependencies."""

    name = "bcm"
    in_foreground = False

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return the problems that the cluster reports, as far as this machine can reach it."""
        return problems_of_cluster(self.config, stages)

    def notes(self, stages: Sequence[Stage]) -> list[str]:
        """Return notes on folders that the nodes may not see, and on dependencies."""
        del stages
        folders = {
            "base_results_dir": self.config.base_results_dir,
            "export.model.checkpoint_path": self.config.export.model.checkpoint_path,
        }
        local = [
            f"{key}={path} is on a local file system of this machine ({kind}); every node must "
            "see it under the same name"
            for key, path in folders.items()
            if (kind := own_file_system(Path(path))) is not None
        ]
        forgotten = [] if self.config.is_dry_run else forgotten_jobs(self.config)
        return [*local, *forgotten]

    def room(self) -> Room | None:
        """Return how many jobs more the user may have in the queue."""
        return room_in_queue(self.config)

    def render(self, job: Job, after: str) -> str:
        """Return the batch script; needs no Slurm."""
        return batch_script(job, after)

    def submit(self, job: Job, after: str = "", *, patience_s: float = PATIENCE_S) -> SlurmHandle:
        """Queue a job. Raises SubmissionError with sbatch's message."""
        place = job.submitit_folder.resolve()
        place.mkdir(parents=True, exist_ok=True)
        script = place / f"{uuid.uuid4().hex}.sh"
        script.write_text(batch_script(job, after))
        payload = DelayedSubmission(self._payload(job, after))
        # submitit counts time-outs with the limit, which the script repeats.
        payload.set_timeout(job.stage.job.resources.time_limit_min, _MOST_TIMEOUTS)
        pickle = script.with_suffix(".pkl")
        payload.dump(pickle)
        try:
            environment = environment_of_sbatch(job) | {"TZ": "UTC"}  # of its log
            job_id = _queue(script, environment, patience_s=patience_s)
            pickle.rename(JobPaths(place, job_id).submitted_pickle)
            log = log_path(job, job_id)
            record.update_record(job.record_path, job_id, log=str(log), host="", process=None)
        except (KeyboardInterrupt, OSError):  # Slurm may have taken the job
            for each in _queued(script):
                cancel(each)
            raise
        return SlurmHandle(job, job_id, log)

    def _payload(self, job: Job, after: str) -> StageJob:
        stage = job.stage
        around = partial(serve_in_chain, self, job) if stage.is_chained else None
        if isinstance(stage, DeployStage) and stage.ends_with_evaluation:
            around = partial(run_and_look, partial(end_without_evaluation, job), around)
        elif any(each.startswith(f"{AFTER_START}:") for each in after.split(",")):
            # A server that was cancelled before it began has not noted that itself.
            look = partial(settle, job.folder.with_name("deploy") / RECORD_NAME)
            around = partial(run_and_look, look, around)
        return StageJob(stage, job.record_path, self.name, step_of(job), around)


def _queue(script: Path, environment: Mapping[str, str], *, patience_s: float) -> str:
    """Put a batch script into the queue, and return the id of its job.

    A job may be queued although sbatch has failed; Slurm then knows it by the path of its script.

    Raises:
        SubmissionError: sbatch refuses it, or Slurm does not answer for so long.
    """
    answer = SlurmAnswer(None)
    for number in attempts(patience_s):
        answer = ask_slurm(
            ["sbatch", str(script)],
            timeout_s=_SUBMIT_S,
            environment=environment,
        )
        said = re.search(r"\bjob (\d+)", answer.text) if answer.status == 0 else None
        if said and number == 0:
            return said[1]
        # Slurm may have taken it more than once, when an answer was lost.
        found = _queued(script)
        job_id = said[1] if said else min(found, key=int, default="")
        for other in found:
            if other != job_id:
                cancel(other)
        if job_id:
            return job_id
        if answer.status is not None:
            raise SubmissionError(answer.error or f"sbatch says no job's id: {answer.text}")
    raise SubmissionError(
        f"Slurm has not answered for {patience_s:g} s ({answer.error}); should the job be in its "
        "queue all the same, action=status finds it"
    )


def _queued(script: Path) -> list[str]:
    """Return the jobs in Slurm's queue that run a batch script."""
    return [job_id for job_id, job in queue_now().jobs.items() if job.script == str(script)]


def run_and_look(
    look: Callable[[], object],
    around: Callable[[Callable[[], Summary], threading.Event], Summary] | None,
    run: Callable[[], Summary],
    stopped: threading.Event,
) -> Summary:
    """Run a stage, by `around` if given; `look` after another job every few seconds meanwhile."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(_FOLLOW_S):
            with suppress(DamagedFileError, OSError):
                look()

    threading.Thread(target=repeat, name="other job", daemon=True).start()
    try:
        return around(run, stopped) if around else run()
    finally:
        is_over.set()


def end_without_evaluation(job: Job) -> None:
    """Ask a server to end whose evaluation has ended, or was never submitted.

    An evaluation that has begun asks for that itself. One that is cancelled before, killed, or
    whose node is lost cannot, and the server would run until its time limit.
    """
    own = record.read_record(job.record_path)
    evaluation = settle(job.folder.with_name("evaluate") / RECORD_NAME)
    if own is None:
        return
    if evaluation and evaluation.job_id and evaluation.submitted_at >= own.submitted_at:
        if not evaluation.is_final:
            return
        reason = f"job {evaluation.job_id} of the evaluation has {evaluation.state}"
    else:
        # It is submitted next, unless the command was killed or a user has deleted its record.
        age = datetime.now(timezone.utc) - datetime.fromisoformat(own.submitted_at)
        if abs(age.total_seconds()) < SUBMISSION_S:  # a clock may have been set back
            return
        queue = queue_now()
        if not queue.has_answered or "evaluate" in jobs_below(job.folder.parent, queue):
            return
        reason = "the evaluation has no job"
    log_line(f"{reason}: the server is no longer needed")
    job.stage.ask_to_stop()


@dataclass
class SlurmHandle(JobHandle):
    """A job in Slurm's queue; its errors are in .err next to its output."""

    _ask_at: float = 0.0
    _pause_s: float = _FIRST_POLL_S

    def poll(self) -> str | None:
        """Return the final state, or None; reads the record each time, and polls Slurm seldom."""
        path = self.job.record_path
        found = record.read_record(path)
        is_own = found is not None and found.job_id == self.job_id
        if found is not None and is_own and found.is_final:
            return found.state
        if time.monotonic() < self._ask_at:
            return None
        self._ask_at = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 1.5, _LAST_POLL_S)
        if is_own and (found := settle(path)) is not None:
            return found.state if found.is_final else None
        # Its record is gone, or another job's: a chain goes on, or a user has deleted it.
        answer = queue_now(self.job_id).state(self.job_id)
        return answer.state if answer is not None and answer.has_ended else None

    def stop(self, grace_s: float) -> None:
        """Cancel the job and wait for its end, at most for `grace_s`."""
        cancel(self.job_id)
        deadline = time.monotonic() + grace_s
        self._ask_at = 0.0
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_STOP_POLL_S)
            self._ask_at = 0.0  # polls Slurm each time
