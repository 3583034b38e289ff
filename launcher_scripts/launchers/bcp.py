"""Jobs inside a Base Command Platform job, started at once in the foreground through bcprun.

Base Command has no queue and no job id: the command on the first replica starts each stage.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from submitit.core.utils import pickle_load

from launcher_scripts.launchers.base import Job, clean_environment
from launcher_scripts.launchers.bcp_executor import (
    MPIRUN,
    TIMED_OUT,
    BcpExecutor,
    BcpJob,
    runner,
)
from launcher_scripts.launchers.local import LocalHandle, LocalLauncher, log_of
from stages import record
from stages.base import Stage
from stages.job import LOG_LEVEL_VARIABLE, StageJob
from stages.job_process import JOB_ID_VARIABLE, MARK_VARIABLE

# Folders that each replica has to itself.
_PRIVATE_RESULTS = "/results"
# Folders that all replicas need.
_SHARED = (
    "base_results_dir", "export.run.results_dir", "export.triton_deployment.triton_model_dir",
    "deploy.repository",
)  # fmt: skip


class BcpHandle(LocalHandle):
    """A job on the replicas; its output is also printed, for the log of the command."""

    _shown = 0

    def poll(self) -> str | None:
        """Return the final state, or None while the job runs."""
        state = super().poll()
        if self.log_path.exists():
            with self.log_path.open(encoding="utf-8", errors="replace") as log:
                log.seek(self._shown)
                sys.stdout.write(log.read())
                self._shown = log.tell()
            sys.stdout.flush()
        return state

    def _settle(self) -> str:
        """Return the state; the cause of a failure may be the time limit or another task."""
        state = super()._settle()
        if self.process.poll() == TIMED_OUT:
            limit = self.job.stage.job.resources.time_limit
            return self._end(record.FAILED, f"the time limit of {limit} has passed")
        for number in range(1, self.submitted.num_tasks):
            path = self.submitted.task(number).paths.result_pickle
            outcome, value = pickle_load(path) if path.exists() else ("", "")
            if outcome == "error":
                cause = value.strip().splitlines()[-1]
                return self._end(record.FAILED, f"rank {number} failed: {cause}")
        return state


class BcpLauncher(LocalLauncher):
    """Runs each job on replicas of this Base Command job."""

    name = "bcp"
    handle_class = BcpHandle

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return the problems of the stages inside this Base Command job."""
        size = os.environ.get("NGC_ARRAY_SIZE", "1")
        count = int(size) if size.isdigit() else 1
        problems = []
        if count > 1:
            problems = [
                f"{key}={path} is private to each replica; choose a folder in a workspace, such as "
                "/mount/results."
                for key in _SHARED
                if (path := self.config.at(key)) is not None
                and Path(path).is_relative_to(_PRIVATE_RESULTS)
            ]
        if self.config.is_dry_run:
            return problems
        problems += [
            f"{stage.name} needs {nodes} nodes, and this job has {count} (NGC_ARRAY_SIZE); start "
            "it with more replicas, or lower the parallel sizes."
            for stage in stages
            if (nodes := stage.job.resources.nodes) > count
        ]
        if runner(self.config.cluster.bcprun) is None:
            problems.append(
                f"cluster_type=bcp needs {self.config.cluster.bcprun} or {MPIRUN}, and neither is "
                "on PATH; run inside a Base Command job, or use cluster_type=local."
            )
        return problems

    def render(self, job: Job, after: str) -> str:
        """Return the script, with JOB_ID in place of the start time."""
        del after
        executor = self._executor(job, "JOB_ID", "JOB_ID")
        return executor._make_submission_file_text(executor._submitit_command_str, "JOB_ID")

    def _start(self, job: Job, job_id: str, mark: str) -> BcpJob:
        started = self._executor(job, job_id, mark).submit(StageJob(job.stage, job.record_path))
        assert isinstance(started, BcpJob)
        return started

    def _executor(self, job: Job, job_id: str, mark: str) -> BcpExecutor:
        config, resources = self.config, job.stage.job.resources
        executor = BcpExecutor(
            job.submitit_folder / job_id,
            bcprun=config.cluster.bcprun,
            environment=clean_environment(os.environ),
        )
        exports = {**job.environment, JOB_ID_VARIABLE: job_id, MARK_VARIABLE: mark}
        if (level := os.environ.get(LOG_LEVEL_VARIABLE)) is not None:
            exports[LOG_LEVEL_VARIABLE] = level
        executor.update_parameters(
            nodes=resources.nodes,
            tasks_per_node=resources.tasks_per_node,
            timeout_min=resources.time_limit_min,
            job_id=job_id,
            log_path=str(log_of(job, job_id)),
            exports=exports,
            setup=config.cluster.setup,
            no_redirect=config.bcp_no_redirect,
            arguments=config.cluster.bcprun_args,
        )
        return executor
