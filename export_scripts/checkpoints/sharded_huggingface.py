"""Trainers' sharded checkpoints of Hugging Face models, with a config.json nearby.

accelerate and transformers' Trainer (FSDP), AutoModel, NeMo-RL, verl, torchtitan, torchtune,
Composer and OLMo-core save them, each with another layout of folders, some with other tensor names
(trainer_names.yaml). Layout: pytorch, torch/distributed/checkpoint (dcp, and hf_storage.py for
shards of safetensors).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    ComputedPiece,
    FileMaps,
    NamedPieces,
    Piece,
    StoredTensor,
    Tensors,
    json_file,
    json_table,
    read_name,
    read_small,
    yaml_table,
)
from export_scripts.checkpoints.chunks import (
    ChunkedTensor,
    ChunkedTensors,
    ChunkOffset,
    chunked,
    refuse_holes,
)
from export_scripts.checkpoints.containers import open_container
from export_scripts.checkpoints.dcp import INDEX_NAME, read_index
from export_scripts.checkpoints.distributed import (
    CORE_TABLE,
    METADATA_NAME,
    has_arguments,
    model_tensors,
    without_prefixes,
)
from export_scripts.checkpoints.megatron import LATEST_NAME
from export_scripts.checkpoints.partitioned import renamed
from export_scripts.checkpoints.rank_files import (
    ZERO_LATEST,
    ZERO_STATES,
    is_rank_file,
    rank_tensors,
    zero_tensors,
)
from export_scripts.checkpoints.safetensors_file import read_safetensors
from foundations.errors import CheckpointMismatchError, first_names, listed, refuse
from foundations.files.json_content import Fields, Table, dotted, is_count, nested
from foundations.files.yaml_content import read_table

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

# Shards in which torch saves each rank's parts, and the metadata key of the parts' offsets.
_SHARDS = "shard-*.safetensors"
_OFFSETS_KEY = "DCP_SHARDING_INFO"
_RANK_FILES = ("*.pt", "*.bin")
_PARTS = "*.distcp"  # files that INDEX_NAME indexes
_NAMES = (INDEX_NAME, _PARTS, _SHARDS, ZERO_STATES, *_RANK_FILES)
# The depth at which a checkpoint is searched below a folder; NeMo-RL has policy/weights/model.
_DEPTH = 3
# Folders of the settings, relative to the checkpoint's: AutoModel, accelerate, verl.
_SETTINGS = (".", ".hf_metadata", "huggingface", "..", "../huggingface")
CONFIG_NAME = "config.json"
# (file or link that names a run's last checkpoint, form of its folder's name): DeepSpeed,
# AutoModel, verl, slime and ms-swift.
_LATEST = (
    (ZERO_LATEST, "{}"), ("LATEST", "{}"), ("LATEST.txt", "{}"),
    (LATEST_NAME, "global_step_{}"), (LATEST_NAME, "iter_{:0>7}"),
)  # fmt: skip
# Settings of Megatron Bridge and of NeMo, relative to the checkpoint's folder.
_STATED = ("run_config.yaml", "../context/model.yaml", "../model_config.yaml")


def sharded_folders(path: Path) -> list[Path]:
    """Return the folders at or below a path that hold a checkpoint without its settings."""
    path = _last_folder(path)
    if (path / LATEST_NAME).is_file():  # a run of Megatron-LM
        return []
    levels = ("", *("*/" * depth for depth in range(1, _DEPTH + 1)))
    found = {
        file.parent
        for level in levels
        for name in _NAMES
        for file in path.glob(level + name)
        if file.is_file() and (name not in _RANK_FILES or is_rank_file(file))
    }
    return sorted(
        folder for folder in found if not _states_settings(folder, is_given=folder == path)
    )


def _last_folder(path: Path) -> Path:
    """Return the folder of a run's last checkpoint if a file or link names it, else the path."""
    for name, form in _LATEST:
        if (path / name).is_dir():
            return (path / name).resolve()
        if (path / name).is_file():
            named = form.format(read_name(path / name))
            if named != ".." and named == Path(named).name and (path / named).is_dir():
                return path / named
    return path


def _states_settings(folder: Path, *, is_given: bool) -> bool:
    """Return whether a checkpoint is Megatron-LM's, Megatron Bridge's or NeMo's.

    To tell whether one without metadata.json is Megatron-LM's, its index must be read; that is
    done only if the user named this folder.
    """
    has_description = (folder / METADATA_NAME).is_file()
    if not (folder / INDEX_NAME).is_file():
        return has_description
    if any((folder / name).is_file() for name in _STATED):
        return True
    return (has_description or is_given) and has_arguments(open_container(folder))


def settings_folder(path: Path) -> Path | None:
    """Return the folder of a distributed checkpoint's config.json, if there is one."""
    places = [path, *(folder / name for folder in sharded_folders(path) for name in _SETTINGS)]
    found = (place.resolve() for place in places if is_configuration(place / CONFIG_NAME))
    return next(found, None)


def is_configuration(file: Path) -> bool:
    """Return whether a file is a config.json of transformers, not of another program."""
    if not file.is_file():
        return False
    try:
        return not {"model_type", "architectures"}.isdisjoint(json_file(file))
    except CheckpointMismatchError:
        return True  # reading it later reports the problem


def with_sharded_weights(configuration: CheckpointReader, path: Path) -> CheckpointReader:
    """Return a model with the tensors of the distributed checkpoint at or below a path.

    Raises:
        CheckpointMismatchError: There is no checkpoint, there are several, or it is damaged.
    """
    folders = sharded_folders(path)
    models = {folder: found for folder in folders if (found := _tensors(folder))}
    if len(models) != 1:
        lost = [str(folder) for folder in folders if not (folder / INDEX_NAME).is_file()]
        raise CheckpointMismatchError(
            f"{path} holds several distributed checkpoints of models: "
            f"{first_names([str(folder) for folder in models])}; name one"
            if models
            else f"{first_names(lost)} lacks {INDEX_NAME}, the index of its {_PARTS}: copy this "
            "hidden file, too; if there is none, the save did not finish: take another checkpoint"
            if lost
            else f"{path} holds no distributed checkpoint of a model, only of its training"
        )
    ((folder, tensors),) = models.items()
    stored = {tensor.path for (piece,) in tensors.values() for tensor in piece.stored}
    index = {file for name in (INDEX_NAME, ZERO_STATES) for file in folder.glob(name)}
    form: Fields = {"tensors": tensors}
    if CORE_TABLE in tensors:
        settings = configuration.config
        form |= {"format": "megatron", "config": {}, "settings": settings, "is_distributed": True}
    return dataclasses.replace(
        configuration,
        **form,
        path=path,
        settings_dir=configuration.path,
        files=(*configuration.files, *sorted(stored | index)),
        remarks=(
            *configuration.remarks,
            f"took the weights in {folder}, and the settings in {configuration.path}",
        ),
    )


def _tensors(folder: Path) -> Tensors:
    """Return the model's tensors in a folder, whatever form they are saved in."""
    found: Mapping[str, Piece]
    if any(folder.glob(ZERO_STATES)):
        found = zero_tensors(folder)
    elif (folder / INDEX_NAME).is_file():
        found = model_tensors(read_index(open_container(folder)))
    else:
        has_ranks = any(map(is_rank_file, folder.iterdir()))
        found = (rank_tensors if has_ranks else _shard_tensors)(folder)
    return {name: piece.pieces for name, piece in without_prefixes(found, folder).items()}


def _shard_tensors(folder: Path) -> ChunkedTensors:
    """Return the tensors in safetensors shards, whose metadata has the offsets of parts."""
    chunks: dict[str, dict[ChunkOffset, StoredTensor]] = {}
    problems = []
    for file in sorted(folder.glob(_SHARDS)):
        found, facts = read_safetensors(file)
        begins = json_table(facts.get(_OFFSETS_KEY, "{}"), f"{file}: {_OFFSETS_KEY}")
        for name, tensor in found.items():
            begin = nested(begins, name, "saved_offsets")
            others = chunks.setdefault(name, {})
            if not isinstance(begin, list) or [*map(type, begin)] != [int] * len(tensor.shape):
                problems.append(f"{file}: {_OFFSETS_KEY} does not say where {name} begins")
            elif tuple(begin) in others or any(tensor.dtype != o.dtype for o in others.values()):
                problems.append(f"{file}: {name} at {begin} contradicts another shard")
            else:
                others[tuple(begin)] = tensor
    refuse(listed(problems))
    tensors = {name: _whole(places) for name, places in chunks.items()}
    refuse_holes(tensors, folder)
    return tensors


def _whole(chunks: Mapping[ChunkOffset, StoredTensor]) -> ChunkedTensor:
    """Return the smallest tensor that contains its chunks."""
    ends = [map(operator.add, begin, values.shape) for begin, values in chunks.items()]
    dtype = next(iter(chunks.values())).dtype
    return ChunkedTensor(dtype, tuple(map(max, zip(*ends, strict=True))), chunks)


# Projections whose rows follow the rotary embedding, and the settings of their number of heads.
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(?!lora_A)")
_HEADS = {
    "q": ("num_attention_heads",),
    "k": ("num_key_value_heads", "num_attention_heads"),
}
_EXPERT = "{}"  # stands for the expert's number if a tensor holds all experts of a layer
_JOINED = re.compile(r"\{(\w+(?:,\w+)+)\}")  # names of two or three tensors that are stored as one
_IN_MEMORY = "transformers"  # transformers' names in memory, which no tensor identifies


_TRAINERS: Table = read_table(Path(__file__).with_name("trainer_names.yaml"))


def in_huggingface_names(reader: CheckpointReader, trainer_name: str = "") -> CheckpointReader:
    """Return a model with transformers' names and order of rows in place of a trainer's.

    `trainer_name` is the trainer's if its tensors do not identify it, as those of an adapter.

    Raises:
        CheckpointMismatchError: The names of this model are not known, its settings contradict
            the trainer's, or it has a tensor that transformers' model cannot use.
    """
    tensors = reader.tensors
    kind = str(reader.config.get("model_type"))
    named = (name for name, each in _TRAINERS.items() if not tensors.keys().isdisjoint(each["has"]))
    name = trainer_name or next(named, _IN_MEMORY)
    trainer = _TRAINERS[name]
    order = trainer["models"].get(kind)
    if not isinstance(order, list):
        if name == _IN_MEMORY:
            return reader
        known = [model for model, rows in trainer["models"].items() if isinstance(rows, list)]
        raise CheckpointMismatchError(
            f"{reader.home}: {name}'s names with model_type = {kind!r:.100}: known are "
            f"{', '.join(known)}; {order or trainer['others']}"
        )
    names = (*trainer.get("own", {}).get(kind, ()), *trainer["names"])
    zeros = trainer.get("zeros", {})
    found: NamedPieces = {}
    problems = _contradictions(reader, trainer)
    maps = FileMaps()
    for theirs, (piece,) in tensors.items():
        if any(re.search(form, theirs) for form in trainer.get("left_out", ())):
            continue
        if (form := next((form for form in zeros if re.search(form, theirs)), None)) is not None:
            if piece.load(maps).any():
                problems.append(f"{reader.home}: {theirs} is not zero: {zeros[form]}")
            continue
        ours = renamed(theirs, names)
        parts: NamedPieces = {}
        if _EXPERT in ours and len(piece.shape) == 3:
            whole = chunked(piece)
            for number in range(whole.shape[0]):
                (expert,) = whole.select(number).pieces
                parts |= _parts(ours.replace(_EXPERT, str(number)), expert, reader)
        else:
            parts = _parts(ours, piece, reader)
        if twice := sorted(parts.keys() & found.keys()):
            problems.append(
                f"{reader.home}: {theirs} is {first_names(twice)}, as another tensor is: "
                "keep one of them"
            )
        found |= parts
    for ours, piece in found.items():
        if (match := _ROTATED.search(ours)) and match[1] in order:
            found[ours] = _in_halves(ours, piece, _heads(reader, match[1]))
    refuse(listed(problems))
    return dataclasses.replace(
        reader,
        tensors={ours: (piece,) for ours, piece in found.items()},
        settings_dir=reader.settings_dir if found.keys() == tensors.keys() else reader.home,
    )


def _heads(reader: CheckpointReader, projection: str) -> Any:
    """Return the number of heads of queries or keys, as config.json states it."""
    return next(filter(None, map(reader.config.get, _HEADS[projection])), None)


def _contradictions(reader: CheckpointReader, trainer: Table) -> list[str]:
    """Return a problem for each of the trainer's own settings that config.json contradicts."""
    problems = []
    folder = reader.path.parent if reader.path.is_file() else reader.path
    ours = dotted(reader.config)
    for name, settings in trainer.get("settings", {}).items():
        file = folder / name
        if not file.is_file():
            continue
        theirs = dotted(yaml_table(read_small(file), file))
        for key, (expected, *places) in settings.items():
            wanted = next(filter(None, map(ours.get, places)), expected)
            stated = theirs.get(key) or None
            if stated != wanted and not (stated is None and key in trainer["may_lack"]):
                problems.append(
                    f"{file}: {key} = {stated!r:.100}; expected {wanted!r:.100}"
                    + (f", {places[0]} of {reader.home / CONFIG_NAME}" if places else "")
                    + f": take the {CONFIG_NAME} of the model that was trained"
                )
    return problems


def _parts(name: str, rows: Piece, reader: CheckpointReader) -> NamedPieces:
    """Return a tensor by name, or those that its rows hold."""
    match = _JOINED.search(name)
    if match is None:
        return {name: rows}
    names = match[1].split(",")
    counts = [1, 1] if len(names) == 2 else [_heads(reader, key) for key in "qkk"]
    if not all(is_count(count, 1) for count in counts) or rows.shape[0] % sum(counts):
        return {name: rows}
    size = rows.shape[0] // sum(counts)
    ends = itertools.accumulate(count * size for count in counts)
    return {
        name.replace(match[0], part): rows.rows(end - count * size, end)
        for part, count, end in zip(names, counts, ends, strict=True)
    }


def _in_halves(name: str, rows: Piece, heads: Any) -> Piece:
    """Return a projection whose rows are in the order for rotating halves, not neighbours.

    Row 2 i + j of a head becomes row j * size / 2 + i, as in transformers' conversion of Llama.

    Args:
        name: The projection's name, for messages.
        rows: The projection (heads x size, hidden), in the order for rotating neighbours.
        heads: The number of heads.

    Raises:
        CheckpointMismatchError: The rows do not divide into `heads` heads of an even size.
    """
    if not is_count(heads, 1) or not rows.shape or rows.shape[0] % (2 * heads):
        raise CheckpointMismatchError(
            f"{name} is {list(rows.shape)}, which {heads!r:.100} heads do not divide"
        )

    def gather(maps: FileMaps) -> Array:
        pairs = rows.load(maps).reshape(heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return ComputedPiece(rows.dtype, rows.shape, rows.stored, gather)
