"""Checks of settings that no Slurm accepts, and checks against the cluster itself."""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from foundations.files.disk import nearest_existing
from launcher_scripts.configuration.schema import KEYS, Config
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.slurm_limits import (
    problems_of_accounting,
    problems_of_partition,
    refusals,
)
from launcher_scripts.launchers.slurm_script import MOUNTED, step_of
from launcher_scripts.launchers.slurm_state import (
    UNAVAILABLE,
    SlurmJobState,
    ask_slurm,
    queue_now,
)
from stages.base import Stage

# File systems that cannot be shared with the nodes, unlike an exported ext4 or xfs disk.
_LOCAL_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlayfs")
# Options that the launcher sets; with other values it would lose the job, its logs or its result.
_LAUNCHER_OPTIONS = (
    "array", "clusters", "cpus_per_task", "error", "help", "input", "job_name",
    "kill_on_invalid_dep", "nodes", "ntasks", "ntasks_per_node", "open_mode", "output", "parsable",
    "quiet", "signal", "test_only", "time", "usage", "version", "wait", "wrap",
)  # fmt: skip
_DEPENDENCY_KEYS = ("cluster.dependency", "export.run.dependency")
# Characters that would break a #SBATCH line of the script.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def problems_of_cluster(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return why the stages cannot run; without a dry run, the cluster is queried as well."""
    images = {}  # images of the stages, by configuration key
    for each in stages:
        is_own = each.name == "deploy" and config.deploy.container is not None
        if (image := config.image_of(each.name)) is not None:
            images["deploy.container" if is_own else "container"] = image
    problems = [*_options(config), *_images(config, images), *_paths(config)]
    if config.is_dry_run:
        return problems
    if shutil.which("sbatch") is None:
        return [
            *problems,
            "cluster_type=bcm needs sbatch, which is not on PATH; run on a login node, or use "
            "cluster_type=local or dry_run=true.",
        ]
    problems += refusals(config, stages)
    problems += _problems_of_steps(config, stages)
    problems += problems_of_partition(config, stages)
    problems += problems_of_accounting(config, stages)
    if config.cluster.mpi is not None and any(stage.job.resources.nodes > 1 for stage in stages):
        problems += _problems_of_mpi(config.cluster.mpi)
    return problems


def unknown_dependencies(config: Config) -> Iterator[str]:
    """Yield the jobs in configured dependencies that Slurm does not know, and so ignores."""
    for key in _DEPENDENCY_KEYS:
        for job_id in re.findall(r":(\d+)", config.at(key) or ""):
            if queue_now(job_id).state(job_id) == SlurmJobState():
                yield (
                    f"{key}={config.at(key)}: Slurm does not know job {job_id} and considers the "
                    "dependency satisfied; make sure that the job has ended as intended"
                )


def _problems_of_mpi(kind: str) -> Iterator[str]:
    """Yield a problem if this cluster's srun does not list the MPI flavour."""
    answer = ask_slurm(["srun", "--mpi=list"])
    listed = f"{answer.text} {answer.error}".split()
    if answer.status == 0 and kind not in listed:
        known = [each for each in listed if each in ("none", "pmi2", "pmix")]
        yield (
            f"cluster.mpi={kind}: this Slurm does not have it, and without it every rank would "
            f"believe it is alone; use one of those it has: {', '.join(known) or 'none'}."
        )


def _options(config: Config) -> Iterator[str]:
    for name, value in config.cluster.additional_parameters.items():
        key, plain = f"cluster.{name}", str(name).replace("-", "_")
        if plain in _LAUNCHER_OPTIONS or f"cluster.{plain}" in KEYS:
            yield (
                f"{key}={value}: the launcher sets this option itself, from the keys of the stages "
                "and of the cluster; leave it out."
            )
        if isinstance(value, (dict, list)):
            yield f"{key}={value}: expected a single value, as sbatch takes it after --{name}=."
        if isinstance(value, str) and _CONTROL.search(value):
            yield f"{key}={value!r}: an option of sbatch is one line; remove the line break."


def _paths(config: Config) -> Iterator[str]:
    """Yield the folders below which Slurm cannot write logs."""
    for key in ("base_results_dir", "export.run.results_dir"):
        if "\\" in str(path := config.at(key)):
            yield (
                f"{key}={path}: Slurm writes no log to a path with a backslash; choose another "
                "folder."
            )


def _images(config: Config, images: Mapping[str, str]) -> Iterator[str]:
    """Yield the problems of images, and of folders that cannot be mounted."""
    for key, image in images.items():
        if image.startswith(("/", "./")):
            if not (config.is_dry_run or Path(image).is_file()):
                yield f"{key}={image} is not a file; give an existing image, or a registry path."
        elif image.endswith(".sqsh"):
            yield (
                f"{key}={image} would be searched in a registry; write a file with its absolute "
                f"path, such as {Path(image).absolute()}."
            )
    for key in MOUNTED if images else ():
        path = str(config.at(key))
        if ":" in path or "," in path:
            yield f"{key}={path}: pyxis mounts no folder with : or , in its name; choose another."


def _problems_of_steps(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the options that srun refuses, such as those of a missing pyxis."""
    steps = filter(None, (step_of(Job(stage, config)) for stage in stages))
    for prefix in dict.fromkeys(step.prefix for step in steps):  # stages may share one
        answer = ask_slurm([*prefix, "--version"])  # srun parses its options before it exits
        if answer.status not in (None, 0, UNAVAILABLE) and answer.error:
            reason = answer.error.splitlines()[0]
            remedy = "correct cluster.srun_args"
            if "--container" in reason:
                remedy = "containers need pyxis: install it on the cluster, or use none"
            yield f"{reason}, says {shlex.join(prefix)}; {remedy}."


def local_file_system(path: Path) -> str | None:
    """Return the type of the file system of `path` if it cannot be shared with other machines."""
    kind = ask_slurm(["stat", "-f", "-c", "%T", str(nearest_existing(path))]).text.strip()
    return kind if kind in _LOCAL_FILE_SYSTEMS else None
