"""Checks of settings that no Slurm would accept, and against the cluster itself."""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher_scripts.configuration.checks import nearest_that_exists
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

# Local file systems; an ext4 or xfs disk may be exported to the nodes, these cannot be.
_OWN_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlayfs")
# Options that belong to the launcher, which would lose the job, its logs or its result.
_OWN = (
    "array", "clusters", "cpus_per_task", "error", "help", "input", "job_name",
    "kill_on_invalid_dep", "nodes", "ntasks", "ntasks_per_node", "open_mode", "output", "parsable",
    "quiet", "signal", "test_only", "time", "usage", "version", "wait", "wrap",
)  # fmt: skip
_DEPENDENCY_KEYS = ("cluster.dependency", "export.run.dependency")
# An option in a #SBATCH line of the script ends with its line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def problems_of_cluster(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return why the stages cannot run, as far as this machine can reach the cluster."""
    images: dict[str, str] = {}  # that the stages use, by the key that names them
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


def forgotten_jobs(config: Config) -> Iterator[str]:
    """Yield the jobs of a dependency that Slurm does not know, and so takes for done."""
    for key in _DEPENDENCY_KEYS:
        for job_id in re.findall(r":(\d+)", config.at(key) or ""):
            if queue_now(job_id).state(job_id) == SlurmJobState():
                yield (
                    f"{key}={config.at(key)}: Slurm does not know a job {job_id}, and takes the "
                    "dependency for satisfied; make sure that the job has ended as it should"
                )


def _problems_of_mpi(kind: str) -> Iterator[str]:
    """Yield that this cluster's srun lacks the MPI, as far as it says so."""
    answer = ask_slurm(["srun", "--mpi=list"])
    listed = f"{answer.text} {answer.error}".split()
    if answer.status == 0 and kind not in listed:
        known = [each for each in listed if each in ("none", "pmi2", "pmix")]
        yield (
            f"cluster.mpi={kind}: this Slurm does not have it, and without it every rank believes "
            f"it is alone; it has {', '.join(known) or 'none'}."
        )


def _options(config: Config) -> Iterator[str]:
    for name, value in config.cluster.additional_parameters.items():
        key, plain = f"cluster.{name}", str(name).replace("-", "_")
        if plain in _OWN or f"cluster.{plain}" in KEYS:
            yield (
                f"{key}={value}: the launcher sets this option itself, from the keys of the stages "
                "and of the cluster; leave it out."
            )
        if isinstance(value, (dict, list)):
            yield f"{key}={value}: expected a single value, as sbatch takes it after --{name}=."
        if isinstance(value, str) and _CONTROL.search(value):
            yield f"{key}={value!r}: an option of sbatch is one line; remove the line break."


def _paths(config: Config) -> Iterator[str]:
    """Yield the folders below which Slurm could write no log."""
    for key in ("base_results_dir", "export.run.results_dir"):
        if "\\" in (path := config.at(key)):
            yield (
                f"{key}={path}: Slurm writes no log to a path with a backslash; choose another "
                "folder."
            )


def _images(config: Config, images: Mapping[str, str]) -> Iterator[str]:
    """Yield the problems of images, and of folders that no container can see."""
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
        path = config.at(key)
        if ":" in path or "," in path:
            yield f"{key}={path}: pyxis mounts no folder with : or , in its name; choose another."


def _problems_of_steps(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield what srun would refuse on the command lines of the stages, such as options of pyxis."""
    steps = filter(None, (step_of(Job(stage, config)) for stage in stages))
    for prefix in dict.fromkeys(step.prefix for step in steps):  # stages may share one
        answer = ask_slurm([*prefix, "--version"])  # it reads the options before it ends
        if answer.status not in (None, 0, UNAVAILABLE) and answer.error:
            reason = answer.error.splitlines()[0]
            remedy = "correct cluster.srun_args"
            if "--container" in reason:
                remedy = "containers need pyxis: install it on the cluster, or use none"
            yield f"{reason}, says {shlex.join(prefix)}; {remedy}."


def own_file_system(path: Path) -> str | None:
    """Return the kind of file system of `path`, if other machines cannot share it."""
    kind = ask_slurm(["stat", "-f", "-c", "%T", str(nearest_that_exists(path))]).text.strip()
    return kind if kind in _OWN_FILE_SYSTEMS else None
