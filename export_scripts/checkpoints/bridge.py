"""Megatron Bridge checkpoints: a distributed checkpoint with the settings of its run.

Layout: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/checkpointing.py and
training/utils/checkpoint_utils.py. `_target_` entries of the settings are names here: nothing that
they name is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import CheckpointReader, StoredTensor
from export_scripts.checkpoints.containers import open_container, read_yaml
from export_scripts.checkpoints.distributed import METADATA_NAME, read_distributed
from export_scripts.checkpoints.megatron import LATEST_NAME, iteration_folder
from export_scripts.checkpoints.nemo2 import huggingface_files
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.errors import CheckpointMismatchError

CONFIG_NAME = "run_config.yaml"
_LATEST = "latest_train_state.pt"
_TOKENIZER = "tokenizer/"
# Its vocabulary, of another form, is saved under the name of a Hugging Face tokenizer.
_TIKTOKEN = "TikTokenizer"


def is_bridge(path: Path) -> bool:
    """Return whether a path is a checkpoint of Megatron Bridge, or the folder of a run of it."""
    if (path / CONFIG_NAME).is_file() or (path / _LATEST).is_file():
        return True
    return (path / LATEST_NAME).is_file() and any(path.glob(f"iter_*/{CONFIG_NAME}"))


def open_bridge(path: Path) -> CheckpointReader:
    """Return the index of a Megatron Bridge checkpoint.

    The configuration is that of its model, with the class that provides it as `model_class`, the
    settings of its tokenizer as `tokenizer`, and those of an adapter as `peft`.

    Raises:
        CheckpointMismatchError: The checkpoint is unsafe, damaged or incomplete.
    """
    root, remarks = _checkpoint_folder(path)
    container = open_container(root)
    if container.find(METADATA_NAME) is None:
        raise CheckpointMismatchError(
            f"{root} lacks {METADATA_NAME}: it was not saved to the end, or with another "
            "checkpoint.ckpt_format than torch_dist; save it with that one"
        )
    run = read_yaml(container, CONFIG_NAME)
    model = run.get("model")
    if not isinstance(model, Mapping):
        raise CheckpointMismatchError(f"{root / CONFIG_NAME} has no model")
    # Newer versions keep what concerns megatron-core's layers apart.
    layers = model.get("transformer")
    settings = {**layers, **model} if isinstance(layers, Mapping) else dict(model)
    tokenizer = run.get("tokenizer")
    tokenizer = tokenizer if isinstance(tokenizer, Mapping) else {}
    kind = tokenizer.get("tokenizer_type")
    vocabulary = {} if kind == _TIKTOKEN else huggingface_files(container, _TOKENIZER)
    found = read_distributed(container, format="bridge", tokenizer=vocabulary, remarks=remarks)
    return dataclasses.replace(
        found,
        path=path,
        config={
            **settings,
            "model_class": str(model.get("_target_") or "none").rpartition(".")[2],
            "tokenizer": {"type": kind},
            "peft": run.get("peft"),
        },
        files=tuple(sorted({*found.files, root / CONFIG_NAME})),
    )


def _checkpoint_folder(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of a checkpoint: the path, or the last of a run's."""
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
    """Return the number of steps in the state of a run."""
    state: Any = read_torch_file(path)
    step = state.get("step") if isinstance(state, Mapping) else None
    if not isinstance(step, StoredTensor) or step.dtype not in ("int32", "int64") or step.shape:
        raise CheckpointMismatchError(f"{path} does not say how many steps the run has made")
    with step.path.open("rb") as file:
        file.seek(step.offset)
        return int.from_bytes(file.read(step.span_bytes), "little", signed=True)
