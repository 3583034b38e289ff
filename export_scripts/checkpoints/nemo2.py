"""NeMo 2 checkpoints: a distributed checkpoint in weights/, its description in context/.

Layout: NVIDIA/NeMo 2, nemo/lightning/ckpt_utils.py and nemo/lightning/io/mixin.py (io_dump).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from export_scripts.checkpoints.base import CheckpointReader, Region
from export_scripts.checkpoints.containers import Container, read_yaml
from export_scripts.checkpoints.distributed import METADATA_NAME, read_distributed
from export_scripts.checkpoints.tokenizers import HUGGINGFACE_FILES
from export_scripts.errors import CheckpointMismatchError

WEIGHTS = "weights/"
CONTEXT = "context/"
_MODEL = CONTEXT + "model.yaml"
# Folders of a Hugging Face tokenizer's files and of those that came with the model.
_TOKENIZER_FOLDERS = (CONTEXT + "nemo_tokenizer/", CONTEXT + "artifacts/")


def is_nemo2(container: Container) -> bool:
    """Return whether an archive or folder is a NeMo 2 checkpoint."""
    return container.find(WEIGHTS + METADATA_NAME) is not None


def open_nemo2(container: Container, remarks: tuple[str, ...] = ()) -> CheckpointReader:
    """Return the index of a NeMo 2 checkpoint.

    The configuration is that of its model, with the classes of both as `model_class` and
    `config_class`, and the settings of an adapter as `peft`.

    Raises:
        CheckpointMismatchError: The checkpoint is unsafe, damaged or incomplete.
    """
    if container.find(_MODEL) is None:
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
        "model_class": _class_name(model),
        "config_class": _class_name(config),
        "tokenizer": model.get("tokenizer") or {},
        "peft": model.get("model_transform"),
    }
    return dataclasses.replace(found, config=settings)


def _class_name(value: Mapping[str, Any]) -> str:
    return str(value.get("_target_") or "").rpartition(".")[2]


def huggingface_files(container: Container, *folders: str) -> dict[str, Region]:
    """Return the files of a Hugging Face tokenizer in a container's folders, the first of each."""
    found: dict[str, Region] = {}
    for folder in folders:
        for theirs, ours in HUGGINGFACE_FILES.items():
            if region := container.find(folder + theirs):
                found.setdefault(ours, region)
    return found


def _tokenizer_files(container: Container, settings: Any) -> dict[str, Region]:
    found = huggingface_files(container, *_TOKENIZER_FOLDERS)
    path = settings.get("model_path") if isinstance(settings, Mapping) else None
    region = container.find(CONTEXT + PurePosixPath(str(path)).name) if path else None
    return found | ({"tokenizer.model": region} if region else {})
