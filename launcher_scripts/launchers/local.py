"""Jobs on this machine, through submitit's local executor, in the foreground of the command."""

import itertools
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from submitit.core.utils import DelayedSubmission, JobPaths, pickle_load

from launcher_scripts.configuration.settings import CHECKOUT
from launcher_scripts.launchers.base import (
    Job,
    JobHandle,
    Launcher,
    clean_environment,
    fill,
)
from stages import record
from stages.base import Stage
from stages.job import StageJob
from stages.job_process import JOB_ID_VARIABLE, MARK_VARIABLE, end_processes_of_job, owner_variables
from stages.step import JobStep

_PICKLE = "job"  # until the id of its process names it
_SIGNAL_DELAY_S = 30
_ASK_AGAIN_S = 1.0
_RESULT_WAIT_S = 2.0


@dataclass
class LocalHandle(JobHandle):
    """A job on this machine, whose processes have `mark` in their environment."""

    process: subprocess.Popen[bytes]
    result_path: Path  # submitit's
    mark: str
    _state: str | None = None
    _was_stopped: bool = False

    def poll(self) -> str | None:
        """Return the final state, or None while the job runs."""
        if self._state is None and self._has_ended():
            end_processes_of_job(self.mark)
            self._state = self._settle()
        return self._state

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM for up to `grace_s`, then kill every process of the job."""
        self._was_stopped = True
        deadline = time.monotonic() + grace_s
        while not self._has_ended() and time.monotonic() < deadline:
            # Repeated: a process that is just starting may not handle the signal yet.
            self.process.terminate()
            waited_until = min(deadline, time.monotonic() + _ASK_AGAIN_S)
            while not self._has_ended() and time.monotonic() < waited_until:
                time.sleep(0.05)
        end_processes_of_job(self.mark)
        while not self._has_ended():
            time.sleep(0.05)
        self.poll()

    def _has_ended(self) -> bool:
        """Return whether the process of the job has ended.

        Popen.poll cannot say so any more once Ctrl-C came while it held its lock, which stays held.
        """
        if self.process.poll() is not None:
            return True
        try:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return ended is not None

    def _settle(self) -> str:
        """Return the state from the job's result, and correct the record."""
        found = record.read_record(self.job.record_path)
        result = self._result()
        if result == "success":
            return record.COMPLETED
        if found is not None and found.job_id == self.job_id and found.is_final:
            return found.state
        if self._was_stopped:
            state, error = record.CANCELLED, "stopped"
        elif result is None:
            state, error = record.LOST, "the job ended without a result: killed, or out of memory"
        else:
            state, error = record.FAILED, "the job failed before the stage began"
        changes = {"state": state, "ended_at": record.now(), "exit_code": 1, "error": error}
        record.update_record(self.job.record_path, self.job_id, **changes)
        return state

    def _result(self) -> str | None:
        """Return `success` or `error`, or None when the job left no result."""
        path = self.result_path
        deadline = time.monotonic() + _RESULT_WAIT_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return str(pickle_load(path)[0]) if path.exists() else None


class LocalLauncher(Launcher):
    """Runs each job as a process of its own, with a time limit."""

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
        """Return a script that repeats the job by hand."""
        del after
        config = job.whole_config_path
        command = [
            sys.executable, "main.py", f"--config-path={config.parent}",
            f"--config-name={config.name}", f"stages=[{job.stage.name}]",
        ]  # fmt: skip
        return fill("local.sh.j2", job=job, checkout=str(CHECKOUT), command=command)

    def submit(self, job: Job, after: str, *, patience_s: float = 0.0) -> LocalHandle:
        """Start the job. Its dependency must be satisfied: nothing is queued."""
        del after, patience_s
        # The start time, with a number if that exists.
        stamp, folder = f"{datetime.now():%m%d_%H%M%S}", job.submitit_folder
        names = itertools.chain([stamp], (f"{stamp}_{number}" for number in itertools.count(2)))
        job_id = next(each for each in names if not (folder / each).exists())
        mark = uuid.uuid4().hex
        log_path = job.folder / f"log-{job.name}_{job_id}.out"
        record.update_record(job.record_path, job_id, host=os.uname().nodename, log=str(log_path))
        process = self._start(job, job_id, mark)
        paths = JobPaths(folder / job_id, str(process.pid))
        (folder / job_id / _PICKLE).rename(paths.submitted_pickle)
        if not log_path.exists():
            log_path.symlink_to(os.path.relpath(paths.stdout, log_path.parent))
        record.update_record(job.record_path, job_id, process=process.pid)
        return self.handle_class(job, job_id, log_path, process, paths.result_pickle, mark)

    def command(self, job: Job, folder: Path) -> list[str]:
        """Return the command of the job's first process, whose pickle is in `folder`."""
        del job
        return [sys.executable, "-u", "-m", "submitit.core._submit", str(folder)]

    def step(self, job: Job) -> JobStep | None:
        """Return what starts the processes of the stage; None for the job's first process."""
        del job
        return None

    def _start(self, job: Job, job_id: str, mark: str) -> subprocess.Popen[bytes]:
        """Start the program of submitit that runs a job here, in a session of its own.

        The terminal's Ctrl-C therefore reaches only the launcher, which stops the job gracefully.
        CUDA_VISIBLE_DEVICES is left as it is; submitit empties it for a job that requests no GPU.
        """
        folder, limit_min = job.submitit_folder / job_id, job.stage.job.resources.time_limit_min
        folder.mkdir(parents=True)
        stage_job = StageJob(job.stage, job.record_path, self.name, self.step(job))
        payload = DelayedSubmission(stage_job)
        payload.set_timeout(limit_min, 0)  # the time limit is the end
        payload.dump(folder / _PICKLE)
        environment = clean_environment(os.environ) | job.environment | owner_variables()
        paths = filter(None, [str(CHECKOUT), environment.get("PYTHONPATH")])
        environment |= {
            JOB_ID_VARIABLE: job_id,
            MARK_VARIABLE: mark,
            "PYTHONPATH": os.pathsep.join(paths),
            "TZ": "UTC",  # of its log, in which submitit writes first
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": shlex.join(self.command(job, folder)),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(min(_SIGNAL_DELAY_S, limit_min * 30)),
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * limit_min),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        with (folder / "controller.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "submitit.local._local", str(folder)],
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
