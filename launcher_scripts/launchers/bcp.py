"""Jobs inside a Base Command Platform job, started at once in the foreground through bcprun.

Inside the job there is neither a queue nor job ids: the command on the first replica starts each
stage as a job on its own machine, and the job's step runs on the replicas.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from inference.system.launch_environment import VISIBLE_VARIABLE
from launcher_scripts.configuration.settings import CHECKOUT
from launcher_scripts.launchers.base import Job, copy_from
from launcher_scripts.launchers.local import LocalHandle, LocalLauncher
from stages.base import Stage
from stages.job import LOG_LEVEL_VARIABLE
from stages.job_process import JOB_ID_VARIABLE, MARK_VARIABLE
from stages.step import JobStep

_BCPRUN, _MPIRUN = "bcprun", "mpirun"
_AS_ROOT = "--allow-run-as-root"
# Variables to pass on, since processes of bcprun do not inherit them. Secrets are listed by name
# only: no file contains their values.
_PASSED_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", VISIBLE_VARIABLE, LOG_LEVEL_VARIABLE, JOB_ID_VARIABLE,
    MARK_VARIABLE, "HF_TOKEN", "NGC_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
)  # fmt: skip
# Each replica has its own /results.
_PRIVATE_RESULTS = "/results"
# Folders that all replicas must share.
_SHARED = (
    "base_results_dir", "export.run.results_dir", "export.triton_deployment.triton_model_dir",
    "deploy.repository",
)  # fmt: skip


class BcpHandle(LocalHandle):
    """A job on the replicas; its output is also printed, so that the command's log has it."""

    _shown = 0

    def poll(self) -> str | None:
        """Return the final state, or None while the job runs."""
        state = super().poll()
        self._shown = copy_from(self.log_path, self._shown, sys.stdout.write)
        sys.stdout.flush()
        return state


class BcpLauncher(LocalLauncher):
    """Runs each job on the replicas of this Base Command job."""

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
        if self._runner() is None:
            problems.append(
                f"cluster_type=bcp needs {_BCPRUN} or {_MPIRUN}, and neither is "
                "on PATH; run inside a Base Command job, or use cluster_type=local."
            )
        return problems

    def step(self, job: Job) -> JobStep:
        """Return the step that starts a stage's ranks by bcprun, or mpirun if that is missing."""
        cluster, resources = self.config.cluster, job.stage.job.resources
        program, per_node = self._runner() or _BCPRUN, str(resources.tasks_per_node)
        ranks = resources.nodes * resources.tasks_per_node
        by_mpirun = Path(program).name == _MPIRUN
        if by_mpirun:
            prefix = [program, _AS_ROOT, "-np", str(ranks), "-npernode", per_node]
            variable_option, line_option = ("-x", "{name}"), None
        else:
            prefix = [program, "--nnodes", str(resources.nodes), "--npernode", per_node]
            if os.environ.get("NGC_ARRAY_TYPE", "").upper().startswith("MPI"):
                prefix += ["--launcher", shlex.join([_MPIRUN, _AS_ROOT])]
            prefix += ["-no_redirect"] * self.config.bcp_no_redirect
            prefix += ["--workdir", str(CHECKOUT), *cluster.bcprun_args]
            variable_option, line_option = ("--env", "{name}={value}"), "--cmd"
        return JobStep(
            tuple(prefix),
            sys.executable,
            ranks,
            launcher=_MPIRUN if by_mpirun else "",
            passed_variables=[*dict.fromkeys([*_PASSED_VARIABLES, *job.environment])],
            variable_option=variable_option,
            line_option=line_option,
        )

    def _runner(self) -> str | None:
        """Return the program that starts processes on the replicas, or None."""
        return next(filter(shutil.which, (_BCPRUN, _MPIRUN)), None)
