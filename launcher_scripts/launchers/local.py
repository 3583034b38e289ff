"""Jobs on this machine, run by submitit in the foreground of the command."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from submitit.core.utils import DelayedSubmission, JobPaths

from launcher_scripts.configuration.settings import CHECKOUT
from launcher_scripts.launchers.base import (
    Job,
    JobHandle,
    Launcher,
    clean_environment,
    job_script,
)
from stages import record
from stages.base import Stage
from stages.job import StageJob
from stages.job_process import (
    JOB_ID_VARIABLE,
    MARK_VARIABLE,
    OWNER_VARIABLE,
    end_processes_of_job,
)
from stages.step import JobStep

_GRACE_S = 30.0  # SIGTERM is sent this long before the time limit
_ASK_AGAIN_S = 1.0


@dataclass
class LocalHandle(JobHandle):
    """A job on this machine.

    Attributes:
        result_path: submitit's result file, which appears once the stage has ended.
        mark: identifies the job's processes by their environment.
        ends_at: monotonic time at which the job is asked to end.
    """

    process: subprocess.Popen[bytes]
    result_path: Path
    mark: str
    ends_at: float
    _state: str | None = None
    _ended_as: tuple[str, str] | None = None  # state and reason if this command ended the job

    def poll(self) -> str | None:
        """Return the final state, or None while the job runs; end it at its time limit."""
        if self._state is None and self._has_ended():
            end_processes_of_job(self.mark)
            self._state = self._final_state()
        elif self._ended_as is None and time.monotonic() > self.ends_at:
            limit = self.job.stage.job.resources.time_limit
            self._end(_GRACE_S, (record.FAILED, f"the time limit of {limit} has passed"))
        return self._state

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, repeatedly for `grace_s`, then kill every process of the job."""
        self._end(grace_s, self._ended_as or (record.CANCELLED, "stopped"))

    def _end(self, grace_s: float, ended_as: tuple[str, str]) -> None:
        self._ended_as = ended_as
        deadline = time.monotonic() + grace_s
        while not self._has_ended() and time.monotonic() < deadline:
            # Repeat: a process that is just starting may not handle the signal yet.
            self.process.terminate()
            waited_until = min(deadline, time.monotonic() + _ASK_AGAIN_S)
            while not self._has_ended() and time.monotonic() < waited_until:
                time.sleep(0.05)
        while not self._has_ended():
            # Repeat: the environment of a process in the middle of `exec` cannot be read.
            end_processes_of_job(self.mark)
            time.sleep(0.05)
        self.poll()

    def _has_ended(self) -> bool:
        """Return whether the process of the job has ended.

        If Ctrl-C interrupts Popen.poll while it holds its lock, the lock stays held, and poll no
        longer reports the end.
        """
        if self.process.poll() is not None:
            return True
        try:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return ended is not None

    def _final_state(self) -> str:
        """Return the final state from the job's record; record one if the job did not."""
        found = record.readable_record(self.job.record_path)
        noted = found.state if found is not None and found.job_id == self.job_id else record.RUNNING
        status = self.process.poll()  # the process may have ended after `_has_ended` called poll
        state, error = record.LOST, "the job ended without a result: killed, or out of memory"
        if status == -signal.SIGTERM:  # it came before the stage could handle it
            state, error = record.CANCELLED, "stopped by a signal"
        elif status == 0:
            error = "the stage did not run: a line of cluster.setup has ended the job's script"
            state = record.FAILED
        elif status is not None and status > 0:
            state, error = record.FAILED, "the job failed before the stage began"
        # A job that is asked to end at its time limit records a cancellation, and another command
        # may have recorded the job as lost.
        ended_as = noted if self._ended_as is None else self._ended_as[0]
        is_vague = noted in (record.CANCELLED, record.LOST) and noted != ended_as
        if noted in record.FINAL_STATES and not is_vague:
            return noted
        if self._ended_as is not None:
            state, error = self._ended_as
        elif status == 0 and self.result_path.exists():
            return record.COMPLETED  # by now the record is another job's
        changes = {"state": state, "ended_at": record.now(), "exit_code": 1, "error": error}
        record.update_record(self.job.record_path, self.job_id, **changes)
        return state


class LocalLauncher(Launcher):
    """Runs each job as a separate process with a time limit."""

    name = "local"
    handle_class: ClassVar[type[LocalHandle]] = LocalHandle

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return the problems of stages that need more than one node."""
        return [
            f"{stage.name} needs {nodes} nodes, and cluster_type=local has one; "
            "lower the parallel sizes, or raise cluster.gpus_per_node."
            for stage in stages
            if (nodes := stage.job.resources.nodes) > 1
        ]

    def render(self, job: Job, after: str) -> str:
        """Return the script, with JOB_ID in place of the start time."""
        del after
        return job_script(job, self.step(job), job.submitit_folder / "JOB_ID")

    def submit(self, job: Job, after: str = "", *, patience_s: float = 0.0) -> LocalHandle:
        """Start the script of a job at once, in its own session.

        The dependency must already be satisfied. The terminal's Ctrl-C reaches only the launcher,
        which stops the job gracefully. CUDA_VISIBLE_DEVICES stays as it is; submitit's own local
        launcher would empty it for a job that requests no GPU.
        """
        del after, patience_s
        job_id, step = f"{datetime.now():%m%d_%H%M%S_%f}", self.step(job)
        folder, mark = job.submitit_folder / job_id, uuid.uuid4().hex
        log_path = job.folder / f"log-{job.name}_{job_id}.out"
        folder.mkdir(parents=True)
        paths = JobPaths(folder, job_id)
        stage_job = StageJob(job.stage, job.record_path, self.name, step)
        DelayedSubmission(stage_job).dump(paths.submitted_pickle)
        script = folder / self.script_name
        script.write_text(job_script(job, step, folder), encoding="utf-8")
        environment = clean_environment(os.environ) | {
            JOB_ID_VARIABLE: job_id,
            MARK_VARIABLE: mark,
            OWNER_VARIABLE: str(os.getpid()),
            "TZ": "UTC",  # for submitit's lines in the log
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": job_id,
        }
        try:
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    ["bash", str(script)],
                    cwd=CHECKOUT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            place = {"host": os.uname().nodename, "log": str(log_path), "process": process.pid}
            record.update_record(job.record_path, job_id, **place)
        except BaseException:  # including Ctrl-C: without a handle nothing else stops the job
            end_processes_of_job(mark)
            raise
        limit_s = 60 * job.stage.job.resources.time_limit_min
        ends_at = time.monotonic() + max(limit_s - _GRACE_S, limit_s / 2)
        result = paths.result_pickle
        return self.handle_class(job, job_id, log_path, process, result, mark, ends_at)

    def step(self, job: Job) -> JobStep | None:
        """Return the step that runs the stage; None if the job's own process runs it."""
        del job
        return None
