"""Jobs on Slurm: our batch script runs submitit's executor."""

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
    QueueSlots,
    SubmissionError,
)
from launcher_scripts.launchers.slurm_chain import serve_in_chain
from launcher_scripts.launchers.slurm_checks import (
    local_file_system,
    problems_of_cluster,
    unknown_dependencies,
)
from launcher_scripts.launchers.slurm_limits import free_queue_slots
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
    reconcile,
)
from stages import record
from stages.base import Stage, Summary
from stages.deploy import DeployStage
from stages.job import StageJob
from stages.job_process import log_line
from stages.progress import DamagedFileError
from stages.record import RECORD_NAME

# The poll interval grows from the first to the last value.
_FIRST_POLL_S, _LAST_POLL_S = 0.5, 5.0
_STOP_POLL_S = 0.5
_POLL_OTHER_S = 15.0  # interval at which a job polls another one
_SUBMIT_S = 120.0  # sbatch itself waits for a busy controller
_MOST_TIMEOUTS = 3  # submitit requeues a job at most so often after a time-out


class SlurmLauncher(Launcher):
    """Submits each job with sbatch; dependencies order the jobs of a run."""

    name = "bcm"
    in_foreground = False

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return the problems of the configuration, and those that the cluster reports."""
        return problems_of_cluster(self.config, stages)

    def notes(self, stages: Sequence[Stage]) -> list[str]:
        """Return notes on folders that nodes may not see, and on dependencies unknown to Slurm."""
        del stages
        folders = {
            "base_results_dir": self.config.base_results_dir,
            "export.model.checkpoint_path": self.config.export.model.checkpoint_path,
        }
        local = [
            f"{key}={path} is on a local file system of this machine ({kind}); every node must "
            "have it under the same path"
            for key, path in folders.items()
            if (kind := local_file_system(path)) is not None
        ]
        unknown = [] if self.config.is_dry_run else unknown_dependencies(self.config)
        return [*local, *unknown]

    def queue_slots(self) -> QueueSlots | None:
        """Return how many more jobs the user may queue; None if nothing limits them."""
        return free_queue_slots(self.config)

    def render(self, job: Job, after: str) -> str:
        """Return the batch script; Slurm is not needed."""
        return batch_script(job, after)

    def submit(self, job: Job, after: str = "", *, patience_s: float = PATIENCE_S) -> SlurmHandle:
        """Queue a job. Raises SubmissionError with sbatch's message."""
        place = job.submitit_folder.resolve()
        place.mkdir(parents=True, exist_ok=True)
        script = place / f"{uuid.uuid4().hex}.sh"
        script.write_text(batch_script(job, after))
        payload = DelayedSubmission(self._payload(job, after))
        # submitit decides by this limit whether a signal means a time-out.
        payload.set_timeout(job.stage.job.resources.time_limit_min, _MOST_TIMEOUTS)
        pickle = script.with_suffix(".pkl")
        payload.dump(pickle)
        try:
            environment = environment_of_sbatch(job) | {"TZ": "UTC"}  # for the log's timestamps
            job_id = _queue(script, environment, patience_s=patience_s)
            pickle.rename(JobPaths(place, job_id).submitted_pickle)
            log = log_path(job, job_id)
            record.update_record(job.record_path, job_id, log=str(log), host="", process=None)
        except (KeyboardInterrupt, OSError):  # Slurm may already have queued the job
            for job_id in _queued(script):
                cancel(job_id)
            raise
        return SlurmHandle(job, job_id, log)

    def _payload(self, job: Job, after: str) -> StageJob:
        stage = job.stage
        wrapper = partial(serve_in_chain, self, job) if stage.is_chained else None
        if isinstance(stage, DeployStage) and stage.ends_with_evaluation:
            wrapper = partial(run_and_poll, partial(end_without_evaluation, job), wrapper)
        elif any(condition.startswith(f"{AFTER_START}:") for condition in after.split(",")):
            # A server that was cancelled before it began could not record that itself.
            poll = partial(reconcile, job.folder.with_name("deploy") / RECORD_NAME)
            wrapper = partial(run_and_poll, poll, wrapper)
        return StageJob(stage, job.record_path, self.name, step_of(job), wrapper)


def _queue(script: Path, environment: Mapping[str, str], *, patience_s: float) -> str:
    """Submit a batch script and return the id of its job.

    A job may be queued although sbatch failed; it is then found by the path of its script.

    Raises:
        SubmissionError: sbatch refuses the script, or Slurm does not answer within `patience_s`.
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
        # If an answer was lost, Slurm may have queued the script more than once.
        found = _queued(script)
        job_id = said[1] if said else min(found, key=int, default="")
        for other in found:
            if other != job_id:
                cancel(other)
        if job_id:
            return job_id
        if answer.status is not None:
            raise SubmissionError(answer.error or f"sbatch printed no job id: {answer.text}")
    raise SubmissionError(
        f"Slurm has not answered for {patience_s:g} s ({answer.error}); if the job was queued "
        "nevertheless, action=status finds it"
    )


def _queued(script: Path) -> list[str]:
    """Return the ids of the jobs in Slurm's queue that run a batch script."""
    return [job_id for job_id, job in queue_now().jobs.items() if job.script == str(script)]


def run_and_poll(
    poll: Callable[[], object],
    wrapper: Callable[[Callable[[], Summary], threading.Event], Summary] | None,
    run: Callable[[], Summary],
    stopped: threading.Event,
) -> Summary:
    """Run a stage, by `wrapper` if given; meanwhile call `poll` every `_POLL_OTHER_S`."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(_POLL_OTHER_S):
            with suppress(DamagedFileError, OSError):
                poll()

    threading.Thread(target=repeat, name="other job", daemon=True).start()
    try:
        return wrapper(run, stopped) if wrapper else run()
    finally:
        is_over.set()


def end_without_evaluation(job: Job) -> None:
    """Ask a server to end if its evaluation has ended or was never submitted.

    An evaluation normally stops the server itself. It cannot if it was cancelled before it began,
    was killed, or lost its node; the server would then run until its time limit.
    """
    own = record.read_record(job.record_path)
    evaluation = reconcile(job.folder.with_name("evaluate") / RECORD_NAME)
    if own is None:
        return
    if evaluation and evaluation.job_id and evaluation.submitted_at >= own.submitted_at:
        if not evaluation.is_final:
            return
        reason = f"job {evaluation.job_id} of the evaluation has {evaluation.state}"
    else:
        # It is still to be submitted, unless the command was killed or a user deleted its record.
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
    """A job in Slurm's queue; its stderr is in a .err file next to its output."""

    _ask_at: float = 0.0
    _pause_s: float = _FIRST_POLL_S

    def poll(self) -> str | None:
        """Return the final state, or None; reads the record each time, polls Slurm less often."""
        path = self.job.record_path
        found = record.readable_record(path)
        is_ours = found is not None and found.job_id == self.job_id
        if found is not None and is_ours and found.is_final:
            return found.state
        if time.monotonic() < self._ask_at:
            return None
        self._ask_at = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 1.5, _LAST_POLL_S)
        if is_ours and (found := reconcile(path)) is not None:
            return found.state if found.is_final else None
        # A user has deleted the record, or it is another job's, such as the next of a chain.
        answer = queue_now(self.job_id).state(self.job_id)
        return answer.state if answer is not None and answer.has_ended else None

    def stop(self, grace_s: float) -> None:
        """Cancel the job and wait at most `grace_s` for its end."""
        cancel(self.job_id)
        deadline = time.monotonic() + grace_s
        self._ask_at = 0.0
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_STOP_POLL_S)
            self._ask_at = 0.0  # polls Slurm each time
