"""Checks of settings that no Slurm and no pyxis would accept, without calling them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.server_config import image_of
from launcher_scripts.configuration.settings import is_dry_run
from stages.base import Stage

_MEMORY = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
# An option in a #SBATCH line of the script ends with its line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def problems_of_options(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return every setting that cannot work on any Slurm."""
    return [
        *_further_options(config),
        *_memory(config.cluster.mem),
        *_gpus(config, stages),
        *_images(config, stages),
    ]


def images_of(config: Config, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the images that the stages use, by the key that names them."""
    found = {}
    for stage in stages:
        image = image_of(stage.name, config)
        if image is not None:
            is_own = stage.name == "deploy" and config.deploy.container is not None
            found["deploy.container" if is_own else "container"] = image
    return found


def _further_options(config: Config) -> Iterator[str]:
    for name, value in config.cluster.additional_parameters.items():
        key = f"cluster.{name}"
        if not _OPTION.fullmatch(str(name)):
            yield f"{key}: {name} is not an option of sbatch."
        if isinstance(value, (dict, list)):
            yield f"{key}={value}: expected a single value, as sbatch takes it after --{name}=."
        if isinstance(value, str) and _CONTROL.search(value):
            yield f"{key}={value!r}: an option of sbatch is one line; remove the line break."


def _memory(value: Any) -> Iterator[str]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or (is_number and value >= 0):
        return
    if not (isinstance(value, str) and _MEMORY.fullmatch(value)):
        yield (
            f"cluster.mem={value} is not an amount of memory; write 0 for all of a node, a number "
            "of GB, a text such as 500M, or null."
        )


def _gpus(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    """Compare the stages' GPUs with those of a node and of a task in the configuration."""
    most, per_task = config.cluster.gpus_per_node, config.cluster.gpus_per_task
    for stage in stages:
        resources = stage.resources()
        asked, tasks = resources.gpus_per_node or 0, resources.tasks_per_node
        if most is not None and asked > most:
            yield (
                f"{stage.name} requests {asked} GPUs of a node, and cluster.gpus_per_node={most}; "
                "lower deploy.gpus_per_node or export.run.gpus_per_node, or correct the cluster's."
            )
        if per_task and asked and tasks * per_task != asked:
            fitting = f"{asked // tasks} or null" if asked % tasks == 0 else "null"
            yield (
                f"cluster.gpus_per_task={per_task}: {stage.name} needs {asked} GPUs of a node for "
                f"{tasks} {'task' if tasks == 1 else 'tasks'}, and Slurm refuses a job whose "
                f"numbers disagree; set cluster.gpus_per_task={fitting}."
            )


def _images(config: Config, stages: Sequence[Stage]) -> Iterator[str]:
    for key, image in images_of(config, stages).items():
        if image.startswith(("/", "./")):
            if not (is_dry_run(config) or Path(image).is_file()):
                yield f"{key}={image} is not a file; give an existing image, or a registry path."
        elif image.endswith(".sqsh"):
            yield (
                f"{key}={image} would be searched in a registry; write a file with its absolute "
                f"path, such as {Path(image).absolute()}."
            )
