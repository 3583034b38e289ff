"""Megatron-LM checkpoints: a model_optim_rng.pt for each training rank, or a distributed one.

Layout: NVIDIA/Megatron-LM, megatron/checkpointing.py (get_checkpoint_names, checkpoint versions).
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from export_scripts.checkpoints.base import CheckpointReader, Files, Region, Remarks, read_name
from export_scripts.checkpoints.containers import open_container
from export_scripts.checkpoints.distributed import has_sizes, is_distributed, read_distributed
from export_scripts.checkpoints.partitioned import (
    RankName,
    count_of,
    join_ranks,
    parse_rank_folder,
    rank_states,
    ranks_by_place,
)
from export_scripts.checkpoints.pt_archive import read_torch_table
from export_scripts.checkpoints.tokenizers import folder_members, huggingface_files
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import Fields, Table

FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")
LATEST_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # names a checkpoint without a number of iterations
# Pattern of a tokenizer file -> its name in the FT folder.
_VOCABULARIES = {
    "*vocab.json": "vocab.json",
    "*vocab.txt": "vocab.txt",
    "*.model": "tokenizer.model",
    "*merges.txt": "merges.txt",
}


def is_megatron(path: Path) -> bool:
    """Return whether a path looks like a Megatron-LM checkpoint."""
    if path.is_file():
        return path.name in FILE_NAMES
    return path.is_dir() and (
        bool(_rank_files(path)) or (path / LATEST_NAME).is_file() or is_distributed(path)
    )


def open_megatron(path: Path) -> CheckpointReader:
    """Return the index of a Megatron-LM checkpoint.

    The configuration is the checkpoint's `args` with `checkpoint_version` added.

    Raises:
        CheckpointMismatchError: The checkpoint is damaged or incomplete.
    """
    root, remarks = iteration_folder(path)
    if is_distributed(root):
        return _open_distributed(path, root, remarks)
    files = _rank_files(root)
    by_experts = (
        f"{root} has a file for each rank of expert parallelism, whose experts are not "
        "numbered: save it as a distributed checkpoint (--ckpt-format torch_dist)"
    )
    if not files and any(root.glob("mp_rank_*_*_*")):
        raise CheckpointMismatchError(by_experts)
    if not files:
        raise CheckpointMismatchError(
            f"{root} has no {FILE_NAMES[0]} in mp_rank_<TP>[_<PP>] folders or itself, and no "
            "metadata.json of a distributed checkpoint"
        )
    trees = {rank: read_torch_table(file, "a Megatron checkpoint") for rank, file in files.items()}
    config = _config(trees[min(trees, key=lambda rank: (rank.pp_rank, rank.tp_rank))])
    if config.get("expert_model_parallel_size") not in (None, 1):
        raise CheckpointMismatchError(by_experts)
    tp_ranks, pp_ranks = [rank.tp_rank for rank in files], [rank.pp_rank for rank in files]
    for kind, ranks in (("tensor", tp_ranks), ("pipeline", pp_ranks)):
        key = f"{kind}_model_parallel_size"
        config[key] = count_of(config, key, default=1 + max(ranks), where=root)
    places = ranks_by_place(files, config, where=root)
    models = {place: _model(trees[rank], root) for place, rank in places.items()}
    states = rank_states(models, config, where=root)
    return CheckpointReader(
        format="megatron",
        path=path,
        config=config,
        tensors=join_ranks(states, where=root),
        files=tuple(sorted(files.values())),
        tokenizer=_tokenizer_files(root),
        remarks=remarks,
    )


def _open_distributed(path: Path, root: Path, remarks: Remarks) -> CheckpointReader:
    found = read_distributed(
        open_container(root),
        format="megatron",
        tokenizer=_tokenizer_files(root),
        remarks=remarks,
    )
    if not has_sizes(found.config):
        raise CheckpointMismatchError(
            f"{root} does not state its model's sizes: it lacks Megatron-LM's args; give {root} "
            "itself, with the config.json of its model (--model-config, convert.model_config)"
        )
    return dataclasses.replace(found, path=path, config=_config(found.config))


def iteration_folder(path: Path) -> tuple[Path, Remarks]:
    """Return the folder of a run's last checkpoint, and a remark on the choice.

    Raises:
        CheckpointMismatchError: latest_checkpointed_iteration.txt names a folder that is missing.
    """
    latest = path / LATEST_NAME
    if not latest.is_file() or _rank_files(path):
        return path, ()
    text = read_name(latest)
    is_number = re.fullmatch(r"[0-9]{1,18}", text) is not None
    name = text if text == RELEASE else f"iter_{int(text):07d}" if is_number else ""
    if not name or not (path / name).is_dir():
        raise CheckpointMismatchError(f"{latest} names {text[:100]!r}, which is not in {path}")
    return path / name, (f"took {name}, which {LATEST_NAME} names",)


def _rank_files(path: Path) -> dict[RankName, Path]:
    if path.is_file():
        return {RankName("", 0, 0): path}
    found = {
        rank: file
        for entry in sorted(path.iterdir())
        if (rank := parse_rank_folder(entry.name)) and (file := _weights(entry))
    }
    own = _weights(path)
    return found or ({RankName("", 0, 0): own} if own else {})


def _weights(folder: Path) -> Path | None:
    return next((folder / name for name in FILE_NAMES if (folder / name).is_file()), None)


def _config(tree: Table) -> Fields:
    args = tree.get("args")
    config = dict(args) if isinstance(args, Mapping) else {}
    config["checkpoint_version"] = tree.get("checkpoint_version", 0)
    return config


def _model(tree: Table, root: Path) -> Table:
    """Return a rank's model, or its parts if the pipeline schedule is interleaved."""
    found = {key: part for key, part in tree.items() if re.fullmatch(r"model\d*", str(key))}
    if not found or not all(isinstance(part, Mapping) for part in found.values()):
        raise CheckpointMismatchError(f"{root} has no 'model' entry in its checkpoints")
    return found.get("model") or found


def _tokenizer_files(root: Path) -> Files:
    """Return the tokenizer files next to the rank folders, Hugging Face's or Megatron-LM's."""
    return huggingface_files(folder_members(root)) | {
        name: Region(hits[0])
        for pattern, name in _VOCABULARIES.items()
        if len(hits := list(root.glob(pattern))) == 1
    }
