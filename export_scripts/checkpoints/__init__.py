"""Source checkpoints: one reader for each container format, opened by `open_checkpoint`.

Readers know names, shapes and bytes; what a tensor means to a model is in `families`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.checkpoints.eleuther import layer_directory, open_eleuther
from export_scripts.checkpoints.huggingface import (
    foreign_weights,
    is_huggingface,
    open_huggingface,
    snapshot_folder,
    snapshots,
)
from export_scripts.checkpoints.jax import open_jax, step_directory
from export_scripts.checkpoints.megatron import is_megatron, open_megatron
from export_scripts.checkpoints.nemo import is_nemo, open_nemo
from export_scripts.errors import CheckpointMismatchError

Recognise = Callable[[Path], bool]
# (path, folder to unpack gzip archives in)
Open = Callable[[Path, Path | None], CheckpointReader]

# Tried in order; the first that recognises the path opens it.
FORMATS: dict[str, tuple[Recognise, Open]] = {
    "huggingface": (is_huggingface, lambda path, _: open_huggingface(path)),
    "jax": (
        lambda path: step_directory(path) is not None,
        lambda path, _: open_jax(path),
    ),
    "eleuther": (
        lambda path: layer_directory(path) is not None,
        lambda path, _: open_eleuther(path),
    ),
    "nemo": (is_nemo, lambda path, scratch_dir: open_nemo(path, scratch_dir=scratch_dir)),
    "megatron": (is_megatron, lambda path, _: open_megatron(path)),
}


def recognise_format(path: Path) -> str:
    """Return the format of a path; only names and first bytes are read.

    Raises:
        ValueError: The path does not exist, or is not a known checkpoint.
    """
    if not path.exists():
        raise ValueError(f"checkpoint {path} does not exist")
    for name, (recognise, _) in FORMATS.items():
        if recognise(path):
            return name
    if found := snapshots(path):
        raise ValueError(
            f"{path} is the root of a Hugging Face cache folder; give a snapshot in it: "
            + ", ".join(map(str, found))
        )
    raise ValueError(
        f"{path} is not a checkpoint of a known format ({', '.join(FORMATS)}); expected a .nemo "
        "archive, a folder with config.json and weights, one with mp_rank_* folders, or one with "
        "the metadata.json of a distributed checkpoint"
        + (f" ({foreign})" if (foreign := foreign_weights(path)) else "")
    )


def open_checkpoint(path: Path | str, *, scratch_dir: Path | None = None) -> CheckpointReader:
    """Return the index of a checkpoint; no tensor is read.

    Args:
        path: File or folder; the root of a Hugging Face cache folder stands for its snapshot.
        scratch_dir: Where a gzip archive is unpacked while the reader is in use.

    Raises:
        ValueError: The path does not exist, or is not a known checkpoint.
        CheckpointMismatchError: It is damaged, incomplete or unsafe.
    """
    path = snapshot_folder(Path(path))
    _, open_format = FORMATS[recognise_format(path)]
    try:
        return open_format(path, scratch_dir)
    except OSError as error:
        raise CheckpointMismatchError(f"{path} cannot be read: {error}") from error


def open_addition(
    path: Path | str, *, base: CheckpointReader, scratch_dir: Path | None = None
) -> CheckpointReader:
    """Return the index of an archive that was trained on top of another checkpoint.

    Such archives (prompt tables, adapters, IA3) do not state the depth of the model's stages.

    Args:
        path: The archive, or its unpacked folder.
        base: The model it belongs to.
        scratch_dir: Where a gzip archive is unpacked while the reader is in use.

    Raises:
        ValueError: The path does not exist, or is not a NeMo archive.
        CheckpointMismatchError: It is damaged, incomplete or unsafe.
    """
    path = Path(path)
    found = recognise_format(path)
    if found != "nemo":
        raise ValueError(f"{path} is a {found} checkpoint; expected a NeMo archive")
    try:
        return open_nemo(path, scratch_dir=scratch_dir, depths=base.config())
    except OSError as error:
        raise CheckpointMismatchError(f"{path} cannot be read: {error}") from error
