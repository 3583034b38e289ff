"""Files that each rank of a fully sharded training writes of its parts of a model.

verl writes `model_world_size_N_rank_R.pt`, accelerate `pytorch_model_fsdp_0_rankR.bin` if it is to
do without torch's distributed checkpoints; their tensors are torch's DTensor or ShardedTensor.
Layout: volcengine/verl, verl/utils/checkpoint/fsdp_checkpoint_manager.py; huggingface/accelerate,
utils/fsdp_utils.py; pytorch, torch/distributed/tensor/_api.py and
torch/distributed/_shard/sharded_tensor/api.py.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import StoredTensor
from export_scripts.checkpoints.chunks import ChunkedTensor, ChunkOffset, refuse_holes
from export_scripts.checkpoints.partitioned import without_wrappers
from export_scripts.checkpoints.pt_archive import read_torch_table
from export_scripts.errors import CheckpointMismatchError, first_names, listed, refuse
from export_scripts.numeric.dtypes import Shape

_RANK_FILE = re.compile(
    r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt|pytorch_model_fsdp(?:_\d+)?_rank(\d{1,6})\.bin"
)


def is_rank_file(path: Path) -> bool:
    """Return whether a file has the name of a rank's part of a model."""
    return _RANK_FILE.fullmatch(path.name) is not None


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor.

    Attributes:
        values: Of this rank.
        whole: The shape of the whole.
        begin: Where the part begins, if that is stated.
        places: Axis of the whole -> the rank's coordinate among those that share it.
    """

    values: StoredTensor
    whole: Shape
    begin: ChunkOffset | None
    places: Mapping[int, int]


def rank_tensors(folder: Path) -> dict[str, ChunkedTensor]:
    """Return the tensors that ranks have saved in files of their own.

    Raises:
        CheckpointMismatchError: Files are missing or damaged, or do not make the wholes.
    """
    parts: dict[str, list[_Part]] = {}
    problems: list[str] = []
    for file in _files(folder):
        for name, value in read_torch_table(file, "a rank's model").items():
            held = _parts(value)
            if held is None:
                problems.append(
                    f"{file.name}: {name} is {value!r:.200}: expected a tensor, a ShardedTensor, "
                    "or a DTensor cut along some axes, each once; save it in one of these forms"
                )
            else:
                parts.setdefault(str(name), []).extend(held)
    refuse(listed(problems, f"{folder}: "))
    found = {name: _whole(name, each, problems) for name, each in parts.items() if each}
    refuse(listed(problems, f"{folder}: "))
    refuse_holes(found, folder)
    return without_wrappers(found)


def _files(folder: Path) -> list[Path]:
    """Return the files of all ranks, in their order."""
    ranks: dict[str | None, dict[int, Path]] = {}
    for file in folder.iterdir():
        if match := _RANK_FILE.fullmatch(file.name):
            ranks.setdefault(match[1], {})[int(match[2] or match[3])] = file
    if len(ranks) != 1:
        raise CheckpointMismatchError(
            f"{folder} holds the files of several runs, of {', '.join(map(str, ranks))} ranks: "
            "copy those of one there alone"
        )
    ((stated, files),) = ranks.items()
    count = int(stated) if stated else 1 + max(files)
    if missing := [str(rank) for rank in range(count) if rank not in files]:
        raise CheckpointMismatchError(
            f"{folder} lacks the files of ranks {first_names(missing)} of {count}; copy them, too"
        )
    return [files[rank] for rank in range(count)]


def _parts(value: Any) -> list[_Part] | None:
    """Return a rank's parts of a tensor, which is plain data here; None of what is no tensor."""
    match value:
        case StoredTensor():
            return [_Part(value, value.shape, (0,) * len(value.shape), {})]
        case {"size": [*whole], "state": [[*shards], {"shards_metadata": _}, *_]}:
            found = [_shard(whole, shard) for shard in shards]
        case {"size": [*whole], "state": [None, {"_local_tensor": values, "_spec": spec}]}:
            found = [_cut(whole, values, spec)]
        case _:
            return None
    parts = [each for each in found if each is not None]
    return parts if len(parts) == len(found) else None


def _shard(whole: Sequence[Any], shard: Any) -> _Part | None:
    """Return a shard of a ShardedTensor."""
    match shard:
        case {"tensor": StoredTensor() as values, "metadata": {"shard_offsets": [*begin]}}:
            if _are_sizes(values, whole) and _are_sizes(values, begin):
                return _Part(values, tuple(whole), tuple(begin), {})
    return None


def _cut(whole: Sequence[Any], values: Any, spec: Any) -> _Part | None:
    """Return the part that a DTensor has of a rank."""
    match spec:
        case {"placements": [*kinds], "mesh": {"_coordinate_on_dim": [*coordinates]}} if isinstance(
            values, StoredTensor
        ) and _are_sizes(values, whole):
            places = _places(kinds, coordinates)
            if places is not None and set(places) <= set(range(len(whole))):
                return _Part(values, tuple(whole), None, places)
    return None


def _are_sizes(values: StoredTensor, numbers: Sequence[Any]) -> bool:
    return len(numbers) == len(values.shape) and all(type(n) is int and n >= 0 for n in numbers)


def _places(placements: Sequence[Any], coordinates: Sequence[Any]) -> dict[int, int] | None:
    """Return the axes that a mesh shares out, with a rank's coordinates; None of other kinds.

    A replica has no attributes, and a part of a part more than an axis.
    """
    places: dict[int, int] = {}
    for placement, coordinate in itertools.zip_longest(placements, coordinates):
        match placement:
            case None:
                continue
            case {"dim": int(axis), **others} if not others and axis not in places:
                if type(coordinate) is not int:
                    return None
                places[axis] = coordinate
            case _:
                return None
    return places


def _whole(name: str, parts: Sequence[_Part], problems: list[str]) -> ChunkedTensor:
    """Return a tensor of its parts; ranks that share a part hold it each."""
    first = parts[0]
    rank = len(first.whole)
    if any(
        (each.whole, each.values.dtype, len(each.values.shape))
        != (first.whole, first.values.dtype, rank)
        or each.places.keys() != first.places.keys()
        for each in parts
    ):
        problems.append(f"ranks hold parts of {name} of different shapes or types")
        return ChunkedTensor(first.values.dtype, first.whole, {})
    # Sizes along each axis in order of coordinates, whose sums are where parts begin.
    sizes: dict[int, dict[int, int]] = {axis: {} for axis in first.places}
    for each in parts:
        for axis, coordinate in each.places.items():
            size = each.values.shape[axis]
            if sizes[axis].setdefault(coordinate, size) != size:
                problems.append(f"ranks hold parts of {name} of different sizes at one place")
    begins = {
        axis: dict(
            zip(
                sorted(each),
                itertools.accumulate([each[n] for n in sorted(each)], initial=0),
                strict=False,
            )
        )
        for axis, each in sizes.items()
    }
    chunks: dict[ChunkOffset, StoredTensor] = {}
    for each in parts:
        begin = (
            each.begin
            if each.begin is not None
            else tuple(
                begins[axis][each.places[axis]] if axis in begins else 0 for axis in range(rank)
            )
        )
        if 0 not in each.values.shape:
            chunks.setdefault(begin, each.values)
    return ChunkedTensor(first.values.dtype, first.whole, chunks)
