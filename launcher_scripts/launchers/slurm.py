"""Jobs on Slurm, through submitit's executor with our batch script."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core.core import Job as SubmittedJob
from submitit.core.core import PicklingExecutor
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launcher_scripts.launchers.base import (
    Job,
    JobHandle,
    Launcher,
    SubmissionError,
    clean_environment,
)
from launcher_scripts.launchers.slurm_chain import serve_in_chain
from launcher_scripts.launchers.slurm_checks import own_file_system, problems_of_cluster
from launcher_scripts.launchers.slurm_script import batch_script, log_path, shape, step_of
from launcher_scripts.launchers.slurm_state import cancel, settle
from stages import record
from stages.base import Stage
from stages.job import StageJob

# Slurm is polled soon after a change, and then less and less often.
_FIRST_POLL_S, _LAST_POLL_S = 0.5, 5.0
_STOP_POLL_S = 0.5


class SlurmLauncher(Launcher):
    """Submits each job with sbatch; a chain waits by dependencies."""

    name = "bcm"
    in_foreground = False

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return the problems that the cluster reports, as far as this machine can reach it."""
        return problems_of_cluster(self.config, stages)

    def notes(self, stages: Sequence[Stage]) -> list[str]:
        """Return a note for each folder that the nodes may not see."""
        del stages
        folders = {
            "base_results_dir": self.config.base_results_dir,
            "export.model.checkpoint_path": self.config.export.model.checkpoint_path,
        }
        return [
            f"{key}={path} is on a local file system of this machine ({kind}); every node must "
            "see it under the same name"
            for key, path in folders.items()
            if (kind := own_file_system(Path(path))) is not None
        ]

    def render(self, job: Job, after: str) -> str:
        """Return the batch script; needs no Slurm."""
        return batch_script(job, after)

    def submit(self, job: Job, after: str) -> SlurmHandle:
        """Queue the job. Raises SubmissionError with sbatch's message."""
        return self.submit_array([job], after, None)[0]

    def fits_array(self, jobs: Sequence[Job]) -> bool:
        """Return whether jobs of several configurations request the same, and end by themselves."""
        first = shape(jobs[0])
        return len(jobs) > 1 and all(not each.is_server and shape(each) == first for each in jobs)

    def submit_array(
        self, jobs: Sequence[Job], after: str, folder: Path | None
    ) -> list[SlurmHandle]:
        """Queue jobs of one shape as an array with this folder, or a job alone without one.

        Raises:
            SubmissionError: sbatch refuses them; the message is its own.
        """
        text = batch_script(jobs[0], after, array=folder, size=len(jobs))
        executor = _Executor(folder or jobs[0].submitit_folder, text)
        # submitit counts time-outs with this number, which the script repeats.
        executor.update_parameters(time=jobs[0].stage.job.resources.time_limit_min)
        payloads = [
            StageJob(
                job.stage,
                job.record_path,
                step_of(job),
                partial(serve_in_chain, self, job) if job.stage.is_chained else None,
            )
            for job in jobs
        ]
        try:
            # The error quotes sbatch; submitit would print the same text again.
            with redirect_stderr(io.StringIO()):
                ids = [each.job_id for each in executor.submit_array(payloads)]
        except (FailedJobError, FailedSubmissionError) as error:
            raise SubmissionError(str(error).strip()) from error
        handles = []
        for job, job_id in zip(jobs, ids, strict=True):
            log = log_path(job, job_id, folder)
            record.update_record(job.record_path, job_id, log=str(log))
            handles.append(SlurmHandle(job, job_id, log))
        return handles


@dataclass
class SlurmHandle(JobHandle):
    """A job in Slurm's queue; its errors are in .err next to its output."""

    _asked_at: float = 0.0
    _pause_s: float = _FIRST_POLL_S
    _state: str = ""

    def poll(self) -> str | None:
        """Return the final state, or None; reads the record each time, and polls Slurm seldom."""
        found = record.read_record(self.job.record_path)
        if found is not None and not found.is_final:
            now = time.monotonic()
            if found.state != self._state:
                self._state, self._pause_s = found.state, _FIRST_POLL_S
            if now - self._asked_at < self._pause_s:
                return None
            self._asked_at = now
            self._pause_s = min(self._pause_s * 1.5, _LAST_POLL_S)
            found = settle(self.job.record_path)
        return found.state if found is not None and found.is_final else None

    def stop(self, grace_s: float) -> None:
        """Cancel the job and wait for its end, at most for `grace_s`."""
        cancel(self.job_id)
        deadline = time.monotonic() + grace_s
        self._asked_at = 0.0
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_STOP_POLL_S)
            self._asked_at = 0.0  # polls Slurm each time


class _Executor(SlurmExecutor):
    """submitit's Slurm executor with our batch script."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder)
        self._script = script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        """Return sbatch without the variables of an enclosing job, which it would pass on."""
        foreign = sorted(set(os.environ) - set(clean_environment(os.environ)))
        command: list[str] = super()._make_submission_command(submission_file_path)
        return ["env", *(f"--unset={name}" for name in foreign), *command]

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        del command, uid
        return self._script

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[SubmittedJob[Any]]:
        """Submit one job, or an array, whose script submitit itself would write anew."""
        if len(delayed_submissions) == 1:
            return PicklingExecutor._internal_process_submissions(self, delayed_submissions)
        self.folder.mkdir(parents=True, exist_ok=True)
        pickles = [self.folder / f".{number}.pkl" for number in range(len(delayed_submissions))]
        for path, each in zip(pickles, delayed_submissions, strict=True):
            each.set_timeout(self.parameters["time"], self.max_num_timeout)
            each.dump(path)
        array: SubmittedJob[Any] = self._submit_command(self._submitit_command_str)
        ids = (f"{array.job_id}_{number}" for number in range(len(pickles)))
        jobs: list[SubmittedJob[Any]] = [SlurmJob(self.folder, each) for each in ids]
        for path, job in zip(pickles, jobs, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs
