"""Jobs inside a Base Command Platform job: now, in the foreground, through bcprun.

There is no queue and no job id: the command runs on the first replica and starts each stage itself.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher_scripts.config import Config
from launcher_scripts.launchers.base import Dependency, Job
from launcher_scripts.launchers.local import CHECKOUT, LocalLauncher
from stages.base import Stage
from stages.deploy import JOB_ID_VARIABLE
from stages.job import LOG_LEVEL_VARIABLE, MARK_VARIABLE
from stages.step import Step

# A process that bcprun starts does not inherit these.
_PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", JOB_ID_VARIABLE, MARK_VARIABLE,
    LOG_LEVEL_VARIABLE,
)  # fmt: skip
# Written by each replica for itself; the others do not see it.
_PRIVATE_RESULTS = Path("/results")


class BcpLauncher(LocalLauncher):
    """Runs each job on this replica, started by bcprun or, where there is none, by mpirun."""

    name = "bcp"

    def __init__(self, config: Config) -> None:
        self._config = config

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return what cannot work inside this Base Command job."""
        replicas = int(os.environ.get("NGC_ARRAY_SIZE", "1"))
        problems = [
            f"{stage.name} needs {stage.resources().nodes} nodes, and this job has {replicas} "
            "(NGC_ARRAY_SIZE); this version serves on one: choose parallel sizes whose product is "
            f"at most cluster.gpus_per_node={self._config.cluster.gpus_per_node}."
            for stage in stages
            if stage.resources().nodes > 1
        ]
        index = os.environ.get("NGC_ARRAY_INDEX", "0")
        if index != "0":
            problems.append(
                f"this is replica {index} of the job; run the command on the first one only "
                "(NGC_ARRAY_INDEX=0)."
            )
        results = Path(self._config.base_results_dir)
        if replicas > 1 and _PRIVATE_RESULTS in (results, *results.parents):
            problems.append(
                f"base_results_dir={results} is private to each replica; choose a folder in a "
                "workspace, such as /mount/results."
            )
        if not self._config.dry_run and self._runner() is None:
            problems.append(
                f"cluster_type=bcp needs {self._config.cluster.bcprun} or mpirun, and neither is "
                "on PATH; run inside a Base Command job, or use cluster_type=local."
            )
        return problems

    def render(self, job: Job, after: Sequence[Dependency]) -> str:
        """Return a script that does by hand what the job does."""
        del after
        config = job.whole_config_path
        line = shlex.join(
            [
                sys.executable, str(CHECKOUT / "main.py"), f"--config-path={config.parent}",
                f"--config-name={config.name}", f"stages=[{job.stage.name}]", "cluster_type=local",
            ]
        )  # fmt: skip
        step = self.step(job)
        lines = [
            "#!/bin/bash",
            f"# Repeats the job {job.name} ({job.stage.name}).",
            "set -euo pipefail",
            *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
            shlex.join([*step.prefix, *_env_flags(step, job.environment), *step.line_flag, line]),
        ]
        return "\n".join(lines) + "\n"

    def step(self, job: Job) -> Step:
        """Return the command that starts the stage on the first replica."""
        if self._runner() == "mpirun":
            prefix = ("mpirun", "--allow-run-as-root", "-np", "1", "-npernode", "1")
            return Step(prefix, sys.executable, line_flag=("bash", "-c"))
        return Step(
            (self._config.cluster.bcprun, "--nnodes", "1", "--npernode", "1"),
            sys.executable,
            line_flag=("--cmd",),
            env_flag="--env",
            variables=(*_PASSED_ON, *job.environment),
        )

    def _runner(self) -> str | None:
        """Return the program that starts processes of this job, or None."""
        candidates = (self._config.cluster.bcprun, "mpirun")
        return next((each for each in candidates if shutil.which(each)), None)


def _env_flags(step: Step, environment: Mapping[str, str]) -> list[str]:
    """Return the variables of the configuration as the step hands them on."""
    if step.env_flag is None:
        return []
    return [
        word for name, value in environment.items() for word in (step.env_flag, f"{name}={value}")
    ]
