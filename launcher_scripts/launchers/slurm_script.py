"""The batch script of a Slurm job, as text; nothing here calls Slurm."""

import math
import os
import shlex
import sys
from pathlib import Path

from foundations.files.json_content import Fields
from foundations.time_limit import slurm_notation
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.settings import CHECKOUT, CI, is_set
from launcher_scripts.launchers.base import Job, as_options, clean_environment, job_script
from stages.deploy_config import FASTERTRANSFORMER
from stages.job_process import JOB_ID_VARIABLE, MARK_VARIABLE
from stages.step import JobStep

# Keys of `cluster` that are sbatch options of the same name.
_SAME_NAME = (
    "account", "comment", "constraint", "exclude", "exclusive", "gres", "nodelist", "overcommit",
    "partition", "qos", "reservation",
)  # fmt: skip
# Keys of folders that are mounted in containers under the same path.
MOUNTED = (
    "launcher_scripts_path", "data_dir", "base_results_dir", "export.run.results_dir",
    "export.model.checkpoint_path", "export.triton_deployment.triton_model_dir",
)  # fmt: skip
_CONTAINER_FLAGS = ("--container", "--no-container")
# Flags that name a container: an image, or one that already exists on the nodes.
_CONTAINERS = ("--container-image", "--container-name")


def batch_script(job: Job, after: str) -> str:
    """Return the script for sbatch: options, environment, and `exec` of the job's Python.

    Python replaces the shell so that it receives the signal before the time limit and can requeue.
    """
    folder, job_id = job.submitit_folder, "$SLURM_JOB_ID"
    flags = map(_script_line, as_options(sbatch_options(job, after)))
    variables = {
        JOB_ID_VARIABLE: job_id,
        # Two clusters that share this machine as a node may use the same job id.
        MARK_VARIABLE: f"slurm-{job_id}:{shlex.quote(str(folder))}",
        "SUBMITIT_EXECUTOR": "slurm",
    }
    return job_script(job, step_of(job), folder, flags=[*flags], variables=variables)


def _needs_gpus(job: Job) -> bool:
    return job.stage.name == "deploy" or job.stage.job.resources.gpus_per_node is not None


def log_path(job: Job, job_id: str) -> Path:
    """Return the path of a job's log; its name is shorter with the NeMo launcher's CI switch."""
    name = f"slurm_{job_id}" if is_set(CI) else f"log-{job.full_name}_{job_id}"
    return job.folder / f"{name}.out"


def sbatch_options(job: Job, after: str) -> Fields:
    """Return the options of sbatch by name; an option with the value None or False is left out."""
    cluster = job.config.cluster
    resources = job.stage.job.resources
    options = {name: getattr(cluster, name) for name in _SAME_NAME}
    own = job.config.export.run.dependency if job.stage.name in ("convert", "export") else None
    # A later job of a chain depends on either of two conditions (`?`), which Slurm cannot combine
    # with others; the configured dependencies were met when the first job began.
    configured = [] if "?" in after else [own, cluster.dependency]
    dependency = ",".join(filter(None, [after, *configured]))
    options |= {
        "job-name": job.full_name,
        "nodes": resources.nodes,
        "ntasks-per-node": resources.tasks_per_node,
        "time": slurm_notation(resources.time_limit_min),
        "cpus-per-task": resources.cpus_per_task,
        "gpus-per-node": resources.gpus_per_node,
        "mem": memory(cluster.mem if resources.mem_gb is None else resources.mem_gb),
        **_logs(log_path(job, "%j")),
        "open-mode": "append",
        # In a chain, the next job replaces a lost one.
        "no-requeue" if job.stage.is_chained else "requeue": True,
        "signal": f"B:USR2@{cluster.signal_delay_s}",
        "kill-on-invalid-dep": None if dependency in ("", "singleton") else "yes",
        "dependency": dependency or None,
    }
    if cluster.gpus_per_task and _needs_gpus(job):
        # Slurm refuses --gpus-per-task without --ntasks.
        options["gpus-per-task"] = cluster.gpus_per_task
        options["ntasks"] = resources.nodes * resources.tasks_per_node
    return options | cluster.additional_parameters


def environment_of_sbatch(job: Job) -> dict[str, str]:
    """Return the environment of sbatch, without SBATCH_* variables that override the script."""
    decided = {f"SBATCH_{name.upper()}" for name, value in sbatch_options(job, "").items() if value}
    found = clean_environment(os.environ)
    return {name: value for name, value in found.items() if name not in decided}


def _logs(log: Path) -> dict[str, str | None]:
    error = None if is_set(CI) else _pattern(log.with_suffix(".err"))
    return {"output": _pattern(log), "error": error}


def _pattern(log: Path) -> str:
    """Return the path of a log for sbatch, with every % escaped except that of the job id (%j)."""
    before, _, after = str(log).rpartition("%j")
    return f"{before.replace('%', '%%')}%j{after}"


def memory(value: float | str | None) -> str | None:
    """Return memory as sbatch takes it: 0 is all of it, numbers are GB, units stay unchanged."""
    if value is None or (isinstance(value, str) and value[-1].isalpha()):
        return value
    size = float(value)
    if size == 0:
        return "0"
    return f"{size:g}GB" if size.is_integer() else f"{math.ceil(size * 1024)}MB"


def _script_line(word: str) -> str:
    """Return an option as written in an #SBATCH line.

    In these lines sbatch reads a backslash as an escape even within quotes (Slurm, _get_argument
    in src/sbatch/opt.c).
    """
    name, is_set, value = word.partition("=")
    return name + is_set + (shlex.quote(value).replace("\\", "\\\\") if is_set else "")


def step_of(job: Job) -> JobStep | None:
    """Return the srun step that runs a stage; None if the batch process can run it itself."""
    config, cluster = job.config, job.config.cluster
    image = config.image_of(job.stage.name)
    is_named = any(argument.startswith(_CONTAINERS) for argument in cluster.srun_args)
    is_inside = is_named or image is not None
    arguments = [
        argument
        for argument in cluster.srun_args
        if is_inside or not argument.startswith(_CONTAINER_FLAGS)
    ]
    resources = job.stage.job.resources
    ranks = resources.nodes * resources.tasks_per_node
    # NVIDIA's server initializes MPI even as a single process.
    needs_mpi = ranks > 1 or (
        job.stage.name == "deploy" and config.deploy.engine == FASTERTRANSFORMER
    )
    if not (is_inside or arguments or needs_mpi):
        return None
    command = ["srun", f"--nodes={resources.nodes}", f"--ntasks={ranks}"]
    command += ["--label"] * (ranks > 1)
    command += ["--wait=60", "--kill-on-bad-exit=1"]
    if resources.cpus_per_task is not None:
        command.append(f"--cpus-per-task={resources.cpus_per_task}")  # not inherited since 22.05
    if needs_mpi and cluster.mpi is not None:
        command.append(f"--mpi={cluster.mpi}")
    if image is not None:
        command.append(f"--container-image={image}")
    if is_inside:
        command.append(f"--container-mounts={','.join(mounts(config))}")
    python = cluster.container_python if is_inside else sys.executable
    return JobStep((*command, *arguments), python, ranks=ranks, mpi=cluster.mpi)


def mounts(config: Config) -> list[str]:
    """Return the mounts, `source:target`, of all folders that a container needs."""
    own = (str(config.at(key)) for key in MOUNTED)
    further = (str(mount) for mount in config.container_mounts if mount is not None)
    wanted = [str(CHECKOUT), *own, *further]
    pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in wanted]
    halves = {each: each.split(":")[:2] for each in pairs}
    # A path below a folder that is mounted under its own name needs no separate mount.
    same = {source for source, target in halves.values() if source == target}
    return [
        pair
        for pair, (source, target) in halves.items()
        if source != target or same.isdisjoint(map(str, Path(source).parents))
    ]
