"""EleutherAI GPT-NeoX checkpoints: a layer_<LL>-model_<RR>-model_states.pt per layer and rank.

File numbers order the layers. A file's keys identify its contents, because the file numbers of the
embedding, the final norm and the head differ between releases.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    StoredTensor,
    StoredTensors,
    read_name,
    read_small,
    yaml_table,
)
from export_scripts.checkpoints.partitioned import TrainingRank, join_ranks, number_in
from export_scripts.checkpoints.pt_archive import read_torch_table
from foundations.errors import CheckpointMismatchError, first_names
from foundations.files.json_content import Fields

_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_MAX_RANKS = 10_000
# Keys that identify the contents of a file.
_EMBEDDING = "word_embeddings.weight"
_LAYER = "attention.query_key_value.weight"
# bigscience-workshop/Megatron-DeepSpeed, which trained BLOOM.
_LAYER_OF_MEGATRON = "self_attention.query_key_value.weight"

RankFiles = dict[int, Path]


def layer_directory(path: Path) -> Path | None:
    """Return the folder of layer files that `path` is or contains, or None.

    A release names its step folder in a text file called latest.
    """
    if not path.is_dir():
        return None
    latest = path / "latest"
    if latest.is_file():
        name = read_name(latest)
        inside = [path / Path(name).name]
    else:
        inside = sorted(path.glob("global_step*"), key=number_in, reverse=True)
    return next((folder for folder in (path, *inside) if _layer_files(folder)), None)


def open_eleuther(path: Path) -> CheckpointReader:
    """Return the index of a GPT-NeoX checkpoint.

    Tensors are named <part>.<name>, with the parts embedding, layers.<N> and final.

    Raises:
        CheckpointMismatchError: Ranks or layers are missing, or files disagree.
    """
    folder = layer_directory(path)
    assert folder is not None, path
    files = _layer_files(folder)
    config_files, config = _model_config(folder)
    count = _rank_count(folder, files, config.get("model-parallel-size"))
    states: dict[TrainingRank, StoredTensors] = {(rank, 0): {} for rank in range(count)}
    numbers: list[int] = []
    for number, ranks in files.items():
        contents = [read_torch_table(ranks[rank], "a table of tensors") for rank in range(count)]
        if _LAYER_OF_MEGATRON in contents[0]:
            raise CheckpointMismatchError(
                f"{ranks[0]} is a layer of Megatron-DeepSpeed's GPT or BLOOM "
                f"({_LAYER_OF_MEGATRON}), not of GPT-NeoX: convert_bloom_original_checkpoint_"
                "to_pytorch.py of transformers' repository (src/transformers/models/bloom) makes a "
                "Hugging Face folder of a BLOOM, which is converted"
            )
        if _LAYER in contents[0]:
            part = f"layers.{len(numbers)}."
            numbers.append(number)
        elif _EMBEDDING in contents[0]:
            part = "embedding."
        else:  # some releases keep norm and head in one file
            part = "final."
        for state, table in zip(states.values(), contents, strict=True):
            own = {
                f"{part}{k}": value for k, value in table.items() if isinstance(value, StoredTensor)
            }
            if twice := sorted(own.keys() & state.keys()):
                raise CheckpointMismatchError(
                    f"{folder}/layer_{number:02d}: another file holds {first_names(twice)}, too"
                )
            state |= own
    _check_layers(folder, numbers, config.get("num-layers"))
    return CheckpointReader(
        format="eleuther",
        path=path,
        config=config,
        tensors=join_ranks(states, where=folder),
        files=(*(file for ranks in files.values() for file in ranks.values()), *config_files),
        remarks=() if folder == path else (f"{folder.name} of {path} is read",),
    )


def _layer_files(folder: Path) -> dict[int, RankFiles]:
    """Return layer number -> rank -> file, in order of number."""
    found: dict[int, RankFiles] = {}
    for entry in folder.glob("layer_*"):
        if match := _FILE.fullmatch(entry.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = entry
    return dict(sorted(found.items()))


def _rank_count(folder: Path, files: Mapping[int, RankFiles], declared: Any) -> int:
    """Return the number of training ranks, after checking that each has a file for every layer."""
    count = max(max(ranks) for ranks in files.values()) + 1
    if count > _MAX_RANKS:
        raise CheckpointMismatchError(
            f"{folder} has a file of rank {count - 1}; expected at most {_MAX_RANKS} ranks"
        )
    if isinstance(declared, int) and declared != count:
        raise CheckpointMismatchError(
            f"{folder} has files of {count} training ranks, its configuration says "
            f"model-parallel-size: {declared}"
        )
    missing = [
        f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
        for number, ranks in files.items()
        for rank in range(count)
        if rank not in ranks
    ]
    if missing:
        raise CheckpointMismatchError(f"{folder} lacks {first_names(missing)}")
    return count


def _check_layers(folder: Path, numbers: Sequence[int], declared: Any) -> None:
    first, count = (numbers[0], len(numbers)) if numbers else (0, 0)
    if missing := sorted(set(range(first, first + count)) - set(numbers)):
        names = first_names([f"layer_{number:02d}" for number in missing])
        raise CheckpointMismatchError(f"{folder} lacks the files of {names}")
    if isinstance(declared, int) and declared != count:
        raise CheckpointMismatchError(
            f"{folder} holds {count} transformer layers, its configuration says "
            f"num-layers: {declared}"
        )


def _model_config(folder: Path) -> tuple[list[Path], Fields]:
    """Return the files configs/*.yml and their settings, with dashes in the keys.

    GPT-NeoX accepts dashes and underscores in keys.
    """
    for place in (folder / "configs", folder.parent / "configs"):
        files = sorted([*place.glob("*.yml"), *place.glob("*.yaml")])
        merged: Fields = {}
        for file in files:
            config = yaml_table(read_small(file), file)
            merged |= {str(key).replace("_", "-"): value for key, value in config.items()}
        if files:
            return files, merged
    return [], {}
