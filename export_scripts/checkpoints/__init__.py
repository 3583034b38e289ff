"""Source checkpoints: a reader for each container format, chosen by `open_checkpoint`.

Readers know names, shapes and bytes; `families` knows what a tensor means to a model.
"""

import fnmatch
import functools
from collections.abc import Callable
from pathlib import Path

from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.checkpoints.eleuther import layer_directory, open_eleuther
from export_scripts.checkpoints.huggingface import (
    foreign_weights,
    is_huggingface,
    is_trainer_checkpoint,
    open_huggingface,
    open_sharded,
    snapshot_folder,
    snapshots,
)
from export_scripts.checkpoints.jax import open_jax, step_directory
from export_scripts.checkpoints.megatron import is_megatron, open_megatron
from export_scripts.checkpoints.megatron_layers import as_gpt_model
from export_scripts.checkpoints.nemo import is_nemo, open_nemo
from export_scripts.checkpoints.nemo2 import is_bridge, open_bridge
from export_scripts.checkpoints.partitioned import parse_rank_folder
from foundations.errors import CheckpointMismatchError

LATEST = "latest"  # as the NeMo launcher's configurations write it

# Format -> (recognises a path, opens it). Tried in order; the first that recognises a path wins.
FORMATS: dict[str, tuple[Callable[[Path], object], Callable[..., CheckpointReader]]] = {
    "huggingface": (is_huggingface, open_huggingface),
    "jax": (step_directory, open_jax),
    "eleuther": (layer_directory, open_eleuther),
    "bridge": (is_bridge, open_bridge),
    "nemo": (is_nemo, open_nemo),
    "torch_dcp": (is_trainer_checkpoint, open_sharded),
    "megatron": (is_megatron, open_megatron),
}


def recognise_format(path: Path) -> str:
    """Return the format of a checkpoint; only file names and first bytes are read.

    Raises:
        ValueError: The path does not exist, or is not a checkpoint of a known format.
    """
    if not path.exists():
        raise ValueError(f"checkpoint {path} does not exist")
    for name, (recognise, _) in FORMATS.items():
        if recognise(path):
            return name
    if archives := sorted(archive.name for archive in path.glob("*.nemo")):
        raise ValueError(
            f"{path} holds {len(archives)} archives: {', '.join(archives)}; name one of them"
        )
    if found := snapshots(path):
        raise ValueError(
            f"{path} is the root of a Hugging Face cache folder; give a snapshot in it: "
            + ", ".join(map(str, found))
        )
    raise ValueError(
        f"{path} is not a checkpoint of a known format ({', '.join(FORMATS)}); expected a .nemo "
        "archive, a folder with config.json and weights, one with mp_rank_* folders, or one with "
        "the .metadata of a distributed checkpoint" + foreign_weights(path)
    )


def open_checkpoint(
    path: Path | str,
    *,
    scratch_dir: Path | None = None,
    name: str | None = None,
    base: CheckpointReader | None = None,
    settings: Path | None = None,
) -> CheckpointReader:
    """Return the index of a checkpoint; no tensor is read.

    Args:
        path: File or folder; the root of a Hugging Face cache folder stands for its snapshot.
        scratch_dir: The folder in which a gzip archive is unpacked while the reader is in use.
        name: The name, or a shell pattern, of one of several checkpoints in the folder; None or
            latest for the last.
        base: The base model of a NeMo archive of prompt tables, adapters or IA3, which does not
            state the depth of the model's stages.
        settings: The config.json, or its folder, for a trainer's checkpoint without one.

    Raises:
        ValueError: The path does not exist, or is not a known checkpoint; no checkpoint has the
            name, or several have it; `base` is given for another format than NeMo's, or `settings`
            for a checkpoint that has some.
        CheckpointMismatchError: The checkpoint is damaged, incomplete or unsafe.
    """
    path, name = chosen_entry(Path(path), name)
    try:
        found = recognise_format(path)
    except OSError as error:  # a file was deleted while its folder was listed
        raise CheckpointMismatchError(f"{path} cannot be read: {error}") from error
    _, open_format = FORMATS[found]
    if found == "nemo":
        depths = base.config if base else None
        open_format = functools.partial(
            open_nemo, scratch_dir=scratch_dir, depths=depths, name=name
        )
    elif base is not None:
        raise ValueError(
            f"{path} is a {found} checkpoint; expected a NeMo archive" + foreign_weights(path)
        )
    elif settings is not None and found != "torch_dcp":
        raise ValueError(
            f"{path} is a {found} checkpoint with its own settings: leave --model-config out"
        )
    elif name is not None:
        raise ValueError(f"{path} is a single {found} checkpoint; it holds none named {name}")
    elif settings is not None:
        open_format = functools.partial(open_format, settings=settings)
    try:
        return as_gpt_model(open_format(path))
    except OSError as error:
        raise CheckpointMismatchError(f"{path} cannot be read: {error}") from error


def chosen_entry(path: Path, name: str | None) -> tuple[Path, str | None]:
    """Return the entry of a folder that `name` selects; else the folder, and the name.

    Raises:
        ValueError: No checkpoint has the name, or several have it.
    """
    path = snapshot_folder(path)
    if name in (None, LATEST):
        return path, None
    if not path.is_dir():
        if fnmatch.fnmatchcase(path.name, name):
            return path, None
        raise ValueError(f"{path} holds no checkpoint {name}: it is a single checkpoint")
    found = [
        entry
        for entry in sorted(path.iterdir())
        if fnmatch.fnmatchcase(entry.name, name)
        and (entry.suffix == ".nemo" or (entry.is_dir() and not parse_rank_folder(entry.name)))
    ]
    if len(found) > 1:
        raise ValueError(
            f"{path}: {name} names several checkpoints, "
            f"{', '.join(entry.name for entry in found)}; name one"
        )
    return (found[0], None) if found else (path, name)
