"""NeMo 2 and Megatron Bridge: a distributed checkpoint, and the settings of its run.

Layout: NVIDIA/NeMo 2, nemo/lightning/ckpt_utils.py and nemo/lightning/io/mixin.py (io_dump);
NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/checkpointing.py and
training/utils/checkpoint_utils.py. `_target_` entries of the settings are only names: nothing is
imported.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    Files,
    Remarks,
    StoredTensor,
    last_name,
)
from export_scripts.checkpoints.containers import Container, open_container, read_yaml
from export_scripts.checkpoints.dcp import INDEX_NAME
from export_scripts.checkpoints.distributed import read_distributed
from export_scripts.checkpoints.megatron import LATEST_NAME, iteration_folder
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.checkpoints.tokenizers import huggingface_files
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import nested

# Files of NeMo 2.
WEIGHTS = "weights/"
CONTEXT = "context/"
_MODEL = CONTEXT + "model.yaml"
# Folders with the files of a Hugging Face tokenizer, or with those that came with the model.
_TOKENIZER_FOLDERS = (CONTEXT + "nemo_tokenizer/", CONTEXT + "artifacts/")
# Files of Megatron Bridge.
CONFIG_NAME = "run_config.yaml"
_LATEST = "latest_train_state.pt"
_TOKENIZER = "tokenizer/"


def open_nemo2(container: Container, remarks: Remarks = ()) -> CheckpointReader:
    """Return the index of a NeMo 2 checkpoint.

    The configuration is the model's, with the classes of model and configuration as `model_class`
    and `config_class`, the tokenizer's settings as `tokenizer`, and an adapter's as `peft`.

    Raises:
        CheckpointMismatchError: The checkpoint is unsafe, damaged or incomplete.
    """
    if _MODEL not in container.members:
        raise CheckpointMismatchError(
            f"{container.path} lacks {_MODEL}, which states its model's sizes; copy its context/ "
            "folder too, or save it with NeMo 2.0 or newer"
        )
    model = read_yaml(container, _MODEL)
    config = model.get("config")
    if not isinstance(config, Mapping):
        raise CheckpointMismatchError(f"{container.path}: {_MODEL} has no config of a model")
    found = read_distributed(
        container.within(WEIGHTS),
        format="nemo2",
        tokenizer=_tokenizer_files(container, model.get("tokenizer")),
        remarks=remarks,
    )
    settings = {
        **config,
        "model_class": last_name(model) or "none",
        "config_class": last_name(config) or "none",
        "tokenizer": model.get("tokenizer") or {},
        "peft": model.get("model_transform"),
    }
    return dataclasses.replace(found, config=settings)


def _huggingface_files(container: Container, *folders: str) -> Files:
    """Return the files of a Hugging Face tokenizer in a container's folders; earlier ones win."""
    return {
        name: region
        for folder in reversed(folders)
        for name, region in huggingface_files(container.within(folder).members).items()
    }


def _tokenizer_files(container: Container, settings: Any) -> Files:
    found = _huggingface_files(container, *_TOKENIZER_FOLDERS)
    path = nested(settings, "model_path")
    region = container.members.get(CONTEXT + PurePosixPath(str(path)).name) if path else None
    return found | ({"tokenizer.model": region} if region else {})


def is_bridge(path: Path) -> bool:
    """Return whether a path is a checkpoint of Megatron Bridge, or the folder of its run."""
    if (path / CONFIG_NAME).is_file() or (path / _LATEST).is_file():
        return True
    return (path / LATEST_NAME).is_file() and any(path.glob(f"iter_*/{CONFIG_NAME}"))


def open_bridge(path: Path) -> CheckpointReader:
    """Return the index of a Megatron Bridge checkpoint.

    The configuration is the model's, with the class of its provider as `model_class`, the
    tokenizer's settings as `tokenizer`, and an adapter's as `peft`.

    Raises:
        CheckpointMismatchError: The checkpoint is unsafe, damaged or incomplete.
    """
    root, remarks = _checkpoint_folder(path)
    container = open_container(root)
    if INDEX_NAME not in container.members:
        raise CheckpointMismatchError(
            f"{root} lacks {INDEX_NAME}: the save did not finish, or its checkpoint.ckpt_format is "
            "neither torch_dist nor fsdp_dtensor; save it with one of these"
        )
    run = read_yaml(container, CONFIG_NAME)
    model, tokenizer = run.get("model"), run.get("tokenizer")
    if not isinstance(model, Mapping):
        raise CheckpointMismatchError(f"{root / CONFIG_NAME} has no model")
    # Newer versions keep the settings of megatron-core's layers in a section.
    layers = model.get("transformer")
    tokenizer = tokenizer if isinstance(tokenizer, Mapping) else {}
    kind = tokenizer.get("tokenizer_type")
    vocabulary = _huggingface_files(container, _TOKENIZER)
    found = read_distributed(container, format="bridge", tokenizer=vocabulary, remarks=remarks)
    return dataclasses.replace(
        found,
        path=path,
        config={
            **(layers if isinstance(layers, Mapping) else {}),
            **model,
            "model_class": last_name(model) or "none",
            "tokenizer": {**tokenizer, "type": kind},
            "peft": run.get("peft"),
        },
        files=tuple(sorted({*found.files, root / CONFIG_NAME})),
    )


def _checkpoint_folder(path: Path) -> tuple[Path, Remarks]:
    """Return the folder of a checkpoint (the path, or a run's last), and remarks on the choice."""
    if (path / CONFIG_NAME).is_file():
        return path, ()
    if not (path / _LATEST).is_file():
        root, remarks = iteration_folder(path)
    else:
        name = f"iter_{_step(path / _LATEST):07d}"
        root, remarks = path / name, (f"took {name}, which {_LATEST} names",)
    if not (root / CONFIG_NAME).is_file():
        raise CheckpointMismatchError(f"{path} lacks {root.name}/{CONFIG_NAME}, its last settings")
    return root, remarks


def _step(path: Path) -> int:
    """Return the number of steps that a run's saved state has."""
    step = nested(read_torch_file(path), "step")
    if not isinstance(step, StoredTensor) or step.dtype not in ("int32", "int64") or step.shape:
        raise CheckpointMismatchError(f"{path} does not say how many steps the run has made")
    with step.path.open("rb") as file:
        file.seek(step.offset)
        return int.from_bytes(file.read(step.span_bytes), "little", signed=True)
