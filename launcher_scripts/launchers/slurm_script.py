"""The batch script of a job, as text; nothing here talks to Slurm."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.config import Config
from launcher_scripts.launchers.base import Dependency, Job
from launcher_scripts.time_limit import slurm_notation
from stages.deploy import JOB_ID_VARIABLE
from stages.job import MARK_VARIABLE
from stages.step import Step

CHECKOUT = Path(__file__).resolve().parents[2]
# Cluster keys that go to sbatch under their own name.
_SAME_NAME = (
    "account", "comment", "constraint", "exclude", "exclusive", "gres", "nodelist", "overcommit",
    "partition", "qos", "reservation",
)  # fmt: skip
_CONTAINER_FLAGS = ("--container", "--no-container")


def batch_script(job: Job, config: Config, after: Sequence[Dependency]) -> str:
    """Return the script for sbatch: options, environment, and the job's Python in place of bash.

    Python replaces the shell, so that it gets the signal before the time limit and can requeue.
    """
    options = sbatch_options(job, config, after)
    flags = [flag(name, value) for name, value in sorted(options.items())]
    lines = [
        "#!/bin/bash",
        "",
        "# Parameters",
        *(f"#SBATCH {each}" for each in flags if each is not None),
        "",
        "# setup",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
        f"export {JOB_ID_VARIABLE}=$SLURM_JOB_ID",
        f"export {MARK_VARIABLE}=slurm-$SLURM_JOB_ID",
        "export SUBMITIT_EXECUTOR=slurm",
        f"export PYTHONPATH={shlex.quote(str(CHECKOUT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *config.cluster.setup,
        "",
        "# command",
        f"exec {driver_command(job)}",
    ]
    return "\n".join(lines) + "\n"


def driver_command(job: Job) -> str:
    """Return the command that runs the pickled stage."""
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(submitit_folder(job))]
    return shlex.join(command)


def submitit_folder(job: Job) -> Path:
    """Return where submitit keeps the pickles of a job."""
    return job.folder / "submitit"


def sbatch_options(job: Job, config: Config, after: Sequence[Dependency]) -> dict[str, Any]:
    """Return the options of sbatch by name; None and False mean that the option is left out."""
    cluster = config.cluster
    resources = job.stage.resources()
    log = job.folder / f"log-{job.prefix}{job.name}_%j"
    options: dict[str, Any] = {name: getattr(cluster, name) for name in _SAME_NAME}
    options |= {
        "job-name": f"{job.prefix}{job.name}",
        "nodes": resources.nodes,
        "ntasks-per-node": resources.tasks_per_node,
        "time": slurm_notation(resources.time_limit_min),
        "cpus-per-task": resources.cpus_per_task,
        "gpus-per-node": resources.gpus_per_node,
        "mem": memory(cluster.mem if resources.mem_gb is None else resources.mem_gb),
        "output": f"{log}.out",
        "error": f"{log}.err",
        "open-mode": "append",
        "requeue": True,
        "signal": f"B:USR2@{cluster.signal_delay_s}",
        "kill-on-invalid-dep": "yes" if after else None,
        "dependency": dependency(job, config, after),
    }
    if cluster.gpus_per_task is not None and resources.gpus_per_node is not None:
        # Slurm refuses --gpus-per-task without a number of tasks.
        options["gpus-per-task"] = cluster.gpus_per_task
        options["ntasks"] = resources.nodes * resources.tasks_per_node
    return options | {
        name.replace("_", "-"): value for name, value in cluster.additional_parameters.items()
    }


def dependency(job: Job, config: Config, after: Sequence[Dependency]) -> str | None:
    """Return what a job waits for: the pipeline, its own configuration and the cluster's."""
    own = config.export.run.dependency if job.stage.name in ("convert", "export") else None
    parts = [*map(str, after), own, config.cluster.dependency]
    return ",".join(part for part in parts if part) or None


def memory(value: Any) -> str | None:
    """Return memory as sbatch reads it: 0 for all, numbers in GB, texts as they are."""
    if value is None or isinstance(value, str):
        return value
    if value == 0:
        return "0"
    return f"{value:g}GB" if float(value).is_integer() else f"{int(value * 1024)}MB"


def flag(name: str, value: Any) -> str | None:
    """Return `--name=value`, a bare `--name` for True, and None for null and False."""
    if value is None or value is False:
        return None
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def step_of(job: Job, config: Config) -> Step | None:
    """Return the srun that runs a stage; None when the batch process can run it itself."""
    cluster = config.cluster
    arguments = [
        each for each in cluster.srun_args if config.container or not _is_about_containers(each)
    ]
    if config.container is None and not arguments:
        return None
    resources = job.stage.resources()
    command = ["srun", f"--nodes={resources.nodes}", f"--ntasks={resources.nodes}"]
    command += ["--wait=60", "--kill-on-bad-exit=1"]
    if resources.cpus_per_task is not None:
        command.append(f"--cpus-per-task={resources.cpus_per_task}")  # not inherited since 22.05
    if resources.nodes > 1 and cluster.mpi is not None:
        command.append(f"--mpi={cluster.mpi}")
    if config.container is not None:
        command.append(f"--container-image={config.container}")
        command.append(f"--container-mounts={','.join(mounts(config))}")
        if cluster.container_workdir is not None:
            command.append(f"--container-workdir={cluster.container_workdir}")
    python = cluster.container_python if config.container else sys.executable
    return Step((*command, *arguments), python)


def mounts(config: Config) -> list[str]:
    """Return `source:target` for every folder that a container needs."""
    own = [
        str(CHECKOUT),
        config.launcher_scripts_path,
        config.data_dir,
        config.base_results_dir,
        config.export.run.results_dir,
        config.export.model.checkpoint_path,
        config.export.triton_deployment.triton_model_dir,
    ]
    wanted = [*own, *(str(each) for each in config.container_mounts if each is not None)]
    pairs = [each if ":" in each else f"{each}:{each}" for each in dict.fromkeys(wanted)]
    return [pair for pair in pairs if not _lies_inside_another(pair, pairs)]


def _lies_inside_another(pair: str, pairs: Sequence[str]) -> bool:
    """Whether a folder is mounted already because one above it is, at the same place."""
    source, target = pair.split(":")[:2]
    if source != target:
        return False
    others: Mapping[str, str] = dict(each.split(":")[:2] for each in pairs)
    parents = (str(parent) for parent in Path(source).parents)
    return any(others.get(parent) == parent for parent in parents)


def _is_about_containers(argument: str) -> bool:
    return argument.startswith(_CONTAINER_FLAGS)
