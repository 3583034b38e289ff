"""Files in which the ranks of a fully sharded training save their parts of a model.

verl writes `model_world_size_N_rank_R.pt`; accelerate writes `pytorch_model_fsdp_0_rankR.bin` if
torch's distributed checkpoints are off. Their tensors are torch's DTensor or ShardedTensor.
Layout: volcengine/verl, verl/utils/checkpoint/fsdp_checkpoint_manager.py; huggingface/accelerate,
utils/fsdp_utils.py; pytorch, torch/distributed/tensor/_api.py and
torch/distributed/_shard/sharded_tensor/api.py.

Up to ZeRO stage 2, DeepSpeed saves the whole model in `mp_rank_00_model_states.pt`, in the type of
the training. In stage 3, `zero_pp_rank_<R>_mp_rank_00_optim_states.pt` has a rank's share of every
parameter in fp32. The universal form has a folder for each, `zero/<name>/fp32.pt`. With expert
parallelism (AutoEP), each expert has a file, `layer_<N>_expert_<E>_mp_rank_00_model_states.pt`.
Layout: deepspeedai/DeepSpeed, deepspeed/utils/zero_to_fp32.py, deepspeed/runtime/engine.py
(_save_moe_checkpoint) and deepspeed/checkpoint/ds_to_universal.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from export_scripts.checkpoints.base import (
    ComputedPiece,
    FileMaps,
    NamedPieces,
    Piece,
    StoredTensor,
)
from export_scripts.checkpoints.chunks import (
    ChunkedTensor,
    ChunkedTensors,
    ChunkOffset,
    refuse_holes,
)
from export_scripts.checkpoints.partitioned import flatten
from export_scripts.checkpoints.pt_archive import read_torch_file, read_torch_table
from export_scripts.numeric.dtypes import Shape, strides
from foundations.errors import CheckpointMismatchError, first_names, refuse
from foundations.files.json_content import Table, is_count, without_nulls

_Value = TypeVar("_Value")

_RANK_FILE = re.compile(
    r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt|pytorch_model_fsdp(?:_\d+)?_rank(\d{1,6})\.bin"
)


def is_rank_file(path: Path) -> bool:
    """Return whether a file is named like a rank's part of a model."""
    return _RANK_FILE.fullmatch(path.name) is not None


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor.

    Attributes:
        values: The values of this rank.
        whole: The shape of the whole tensor.
        begin: The offset of the part, if it is stated.
        coordinates: Sharded axis -> the rank's coordinates in the mesh dimensions that share it, in
            the order of the cuts.
        factors: Axis that was cut a second time -> number of parts after the first cut.
    """

    values: StoredTensor
    whole: Shape
    begin: ChunkOffset | None
    coordinates: Mapping[int, tuple[int, ...]]
    factors: Mapping[int, int] = field(default_factory=dict)


def rank_tensors(folder: Path) -> ChunkedTensors:
    """Return the tensors that ranks have saved in a file each.

    Raises:
        CheckpointMismatchError: Files are missing or damaged, or do not make up whole tensors.
    """
    parts: dict[str, list[_Part]] = {}
    problems = []
    for file in _files(folder):
        for name, value in read_torch_table(file, "a rank's model").items():
            held = _parts(value)
            if held is None:
                problems.append(
                    f"{file.name}: {name} is {value!r:.200}: expected a tensor, a ShardedTensor, "
                    "or a DTensor that is cut along some axes; save it in one of these forms"
                )
            else:
                parts.setdefault(str(name), []).extend(held)
    refuse(problems, folder)
    found = {name: _whole(name, each, problems) for name, each in parts.items() if each}
    refuse(problems, folder)
    refuse_holes(found, folder)
    return found


def _files(folder: Path) -> list[Path]:
    """Return the files of all ranks, in order of rank."""
    ranks: dict[str | None, dict[int, Path]] = {}
    for file in folder.iterdir():
        if match := _RANK_FILE.fullmatch(file.name):
            ranks.setdefault(match[1], {})[int(match[2] or match[3])] = file
    if len(ranks) != 1:
        raise CheckpointMismatchError(
            f"{folder} holds the files of several runs, of {', '.join(map(str, ranks))} ranks: "
            "keep the files of one run there"
        )
    ((stated, files),) = ranks.items()
    return _complete(
        files, int(stated) if stated else 1 + max(files), f"{folder} lacks the files of ranks"
    )


def _complete(files: Mapping[int, _Value], count: int, lacks: str) -> list[_Value]:
    """Return the files of ranks in order; `lacks` begins the message about missing ones."""
    if missing := [str(rank) for rank in range(count) if rank not in files]:
        raise CheckpointMismatchError(f"{lacks} {first_names(missing)} of {count}; copy them, too")
    return [files[rank] for rank in range(count)]


def _parts(value: Any) -> list[_Part] | None:
    """Return a rank's parts of a tensor from the unpickled data; None for anything else."""
    match value:
        case StoredTensor():
            return [_Part(value, value.shape, (0,) * len(value.shape), {})]
        case {"size": [*whole], "state": [[*shards], {"shards_metadata": _}, *_]}:
            found = [_shard_part(whole, shard) for shard in shards]
        case {"size": [*whole], "state": [None, {"_local_tensor": values, "_spec": spec}]}:
            found = [_dtensor_part(whole, values, spec)]
        case _:
            return None
    parts = [part for part in found if part is not None]
    return parts if len(parts) == len(found) else None


def _shard_part(whole: Sequence[Any], shard: Any) -> _Part | None:
    """Return the part that a shard of a ShardedTensor holds; None if it has another form."""
    match shard:
        case {"tensor": StoredTensor() as values, "metadata": {"shard_offsets": [*begin]}}:
            if _are_sizes(values, whole) and _are_sizes(values, begin):
                return _Part(values, tuple(whole), tuple(begin), {})
    return None


def _dtensor_part(whole: Sequence[Any], values: Any, spec: Any) -> _Part | None:
    """Return the part that a rank's DTensor holds; None if it has another form."""
    match spec:
        case {"placements": [*kinds], "mesh": {"_coordinate_on_dim": [*coordinates]}} if isinstance(
            values, StoredTensor
        ) and _are_sizes(values, whole):
            factors: dict[int, int] = {}
            axes = _sharded_axes(kinds, coordinates, factors)
            if axes is not None and set(axes) <= set(range(len(whole))):
                return _Part(values, tuple(whole), None, axes, factors)
    return None


def _are_sizes(values: StoredTensor, numbers: Sequence[Any]) -> bool:
    return len(numbers) == len(values.shape) and all(map(is_count, numbers))


def _sharded_axes(
    placements: Sequence[Any], coordinates: Sequence[Any], factors: dict[int, int]
) -> dict[int, tuple[int, ...]] | None:
    """Return sharded axis -> a rank's coordinates; None for other placements.

    A placement without attributes is a replica. A strided shard, with which FSDP cuts a tensor that
    tensor parallelism has cut, comes after the shards of later mesh dimensions; the number of their
    parts is added to `factors`. torch/distributed/tensor/placement_types.py
    """
    axes: dict[int, tuple[int, ...]] = {}
    last: dict[int, int] = {}
    for placement, coordinate in zip_longest(placements, coordinates):
        match placement, coordinate:
            case None, _:
                continue
            case {"dim": int(axis), **others}, int() if not others:
                axes[axis] = (*axes.get(axis, ()), coordinate)
            case {"dim": int(axis), "split_factor": int(factor), **others}, int() if (
                not others and axis not in axes | last
            ):
                last[axis], factors[axis] = coordinate, factor
            case _:
                return None
    return axes | {axis: (*axes.get(axis, ()), own) for axis, own in last.items()}


def _whole(name: str, parts: Sequence[_Part], problems: list[str]) -> ChunkedTensor:
    """Return a tensor made of its parts; replicas of a part must be the same."""
    first = parts[0]
    rank = len(first.whole)
    if any(
        (part.whole, part.values.dtype, len(part.values.shape))
        != (first.whole, first.values.dtype, rank)
        or part.coordinates.keys() != first.coordinates.keys()
        for part in parts
    ):
        problems.append(f"ranks hold parts of {name} of different shapes or types")
        return ChunkedTensor(first.values.dtype, first.whole, {})
    for axis, factor in first.factors.items():
        if (count := len({part.coordinates[axis][:-1] for part in parts})) != factor:
            problems.append(f"{name} was first cut into {factor} parts, but there are {count}")
    # Sizes along each axis by coordinates; their sums are the offsets of the parts.
    sizes: dict[int, dict[tuple[int, ...], int]] = {axis: {} for axis in first.coordinates}
    for part in parts:
        for axis, coordinate in part.coordinates.items():
            size = part.values.shape[axis]
            if sizes[axis].setdefault(coordinate, size) != size:
                problems.append(f"ranks hold parts of {name} of different sizes at one place")
    ordered = {axis: dict(sorted(of_axis.items())) for axis, of_axis in sizes.items()}
    offsets = {
        axis: dict(zip(of_axis, accumulate(of_axis.values(), initial=0), strict=False))
        for axis, of_axis in ordered.items()
    }
    chunks: dict[ChunkOffset, StoredTensor] = {}
    for part in parts:
        starts = {axis: offsets[axis][at] for axis, at in part.coordinates.items()}
        begin = part.begin or tuple(starts.get(axis, 0) for axis in range(rank))
        if 0 in part.values.shape:
            continue
        sums = {_checksum(part.values), _checksum(chunks.setdefault(begin, part.values))}
        if len(sums - {None}) > 1:
            problems.append(
                f"ranks hold different values of {name} at one place: their files are from "
                "different steps; copy the files of one step"
            )
    return ChunkedTensor(first.values.dtype, first.whole, chunks)


def _checksum(values: StoredTensor) -> int | None:
    """Return the archive's checksum of a tensor, if the tensor is a whole record."""
    record = values.record
    return record.crc32 if record and record.size == values.span_bytes else None


ZERO_STATES = "*mp_rank_*_model_states.pt"
ZERO_LATEST = "latest"
_ZERO_OPTIMIZER = "*_optim_states.pt"
_ZERO_RANKS = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(?:model|optim)_states\.pt$")
_ZERO_UNIVERSAL = "zero/*/fp32.pt"
_ZERO_EXPERTS = "layer_*_expert_*_mp_rank_*_model_states.pt"


@dataclass(frozen=True)
class _Unflattened(ComputedPiece):
    """A flat tensor's values in another shape; a part can be read without the rest."""

    flat: ChunkedTensor

    def load(self, maps: FileMaps) -> Any:
        """Return the values in the other shape."""
        return self.compute(maps).reshape(self.shape)

    def select(self, index: int) -> ComputedPiece:
        """Return the values at `index` of the first axis; nothing is read."""
        size = math.prod(self.shape[1:])
        chunks: dict[ChunkOffset, Piece] = {
            (max(at - index * size, 0),): part
            for (at,), values in self.flat.chunks.items()
            if isinstance(values, StoredTensor)
            and (part := _range(values, index * size - at, (index + 1) * size - at)).shape[0] > 0
        }
        return _unflattened(ChunkedTensor(self.dtype, (size,), chunks), self.shape[1:])


def _unflattened(flat: ChunkedTensor, shape: Shape) -> ComputedPiece:
    return _Unflattened(flat.dtype, shape, flat.stored, flat.load, flat)


def _range(values: StoredTensor, first: int, end: int) -> StoredTensor:
    """Return a flat tensor's values from `first` to before `end`, cut to what it has."""
    first = max(first, 0)
    return values.rows(first, max(min(end, values.shape[0]), first))


def zero_tensors(folder: Path) -> NamedPieces:
    """Return the tensors of a model that DeepSpeed has saved.

    Raises:
        CheckpointMismatchError: Files are missing or damaged, or do not state how tensor-parallel
            ranks cut the tensors.
    """
    universal = sorted(folder.glob(_ZERO_UNIVERSAL))
    ranks = [
        _zero_rank(folder, number, files, has_shares=not universal)
        for number, files in enumerate(_zero_files(folder, ZERO_STATES))
    ]
    first, found, shapes = ranks[0]
    if len(ranks) > 1:
        shapes = {}
        found = {} if universal else _merge_tp_ranks(folder, first, [own for _, own, _ in ranks])
    found |= {file.parent.name: _universal(file, shapes) for file in universal}
    for file in sorted(folder.glob(_ZERO_EXPERTS)):
        expert = flatten(read_torch_table(file, "a DeepSpeed checkpoint"))
        if twice := sorted(expert.keys() & found.keys()):
            raise CheckpointMismatchError(
                f"{file} holds {first_names(twice)}, and so does another file: copy the files of "
                "one run again; experts of tensor-parallel ranks are not supported"
            )
        found |= expert
    for name, kept in _zero_table(first, "shared_params", folder).items():
        if isinstance(kept, str) and kept in found:
            found[str(name)] = found[kept]  # not the copy, which ds_to_universal rounds
    return found


def _zero_rank(
    folder: Path, number: int, files: Sequence[Path], *, has_shares: bool
) -> tuple[Table, NamedPieces, dict[str, Shape]]:
    """Return a tensor-parallel rank's first state, its tensors, and its parameters' shapes."""
    states = [read_torch_table(file, "a DeepSpeed checkpoint") for file in files]
    first = states[0]
    module = flatten(_zero_table(first, "module", files[0]))
    found: NamedPieces = {**module}
    shapes = _shapes(first.get("param_shapes") or [], files[0])
    if files[0].name.startswith("zero_"):  # stage 3: the module's parameters are placeholders
        buffers = first.get("buffer_names")
        found = {n: module[n] for n in module if isinstance(buffers, list) and n in buffers}
        frozen = [_zero_table(state, "frozen_param_fragments", folder) for state in states]
        _refuse_copies(folder, [[*fragments.values()] for fragments in frozen])
        found |= {
            name: _joined([[fragments.get(name)] for fragments in frozen], 0, shape, name, folder)
            for name, shape in _shapes([first.get("frozen_param_shapes") or {}], files[0]).items()
        }
        if has_shares:
            if first.get("ds_autoep_layers"):
                raise CheckpointMismatchError(
                    f"{folder} has parts of experts (AutoEP in ZeRO stage 3): make its universal "
                    "form (ds_to_universal)"
                )
            found |= _partitioned(folder, shapes, len(files), number)
    return first, found, shapes


def _merge_tp_ranks(
    folder: Path, first: Table, ranks: Sequence[Mapping[str, Piece]]
) -> NamedPieces:
    """Return whole tensors from the parts of tensor-parallel ranks.

    DeepSpeed 0.19 states each part as arguments of as_strided: `source` in the whole tensor, `dest`
    in the rank's. deepspeed/checkpoint/affine.py
    """
    match _zero_table(first, "universal_checkpoint_info", folder).get("affine_map"):
        case {"version": 1, "params": {**params}}:
            stated = {re.sub(r"\\(.)", r"\1", str(key)[1:-1]): each for key, each in params.items()}
        case _:
            raise CheckpointMismatchError(
                f"{folder} is of {len(ranks)} tensor-parallel ranks (mp_rank_*) and does not say "
                "how they cut tensors (affine_map of DeepSpeed 0.19): make its universal form "
                "(ds_to_universal), or save the model with save_pretrained"
            )
    parts = [[stored for piece in own.values() for stored in piece.stored] for own in ranks]
    _refuse_copies(folder, parts)
    whole = {
        name: _from_boxes(stated.get(name), [own.get(name) for own in ranks]) for name in ranks[0]
    }
    problems = [
        f"{name} is not cut into one box for each tensor-parallel rank: make the universal form "
        "(ds_to_universal), or save the model with save_pretrained"
        for name, each in whole.items()
        if each is None
    ]
    refuse(problems, folder)
    found = without_nulls(whole)
    refuse_holes(found, folder)
    return found


def _from_boxes(stated: Any, shards: Sequence[Piece | None]) -> ChunkedTensor | None:
    """Return a tensor of which each rank has a box; None if `stated` describes something else."""
    chunks: dict[ChunkOffset, Piece] = {}
    match stated:
        case {"logical_shape": [*sizes], "ranks": {**ranks}} if all(
            is_count(size, 1) for size in sizes
        ) and len(ranks) == len(shards):
            whole = tuple(sizes)
        case _:
            return None
    for number, shard in enumerate(shards):
        match ranks.get(number):
            case {
                "pieces": [{"shape": box, "source": [int(at), steps], "dest": dest, **others}]
            } if (
                shard is not None
                and (box, dest) == ([*shard.shape], [0, [*strides(shard.shape)]])
                and steps == [*strides(whole)]
                and others.keys() <= {"locations"}
            ):
                begin = (at // stride % size for stride, size in zip(steps, whole, strict=True))
                chunks.setdefault(tuple(begin), shard)
            case _:
                return None
    dtypes = {chunk.dtype for chunk in chunks.values()}
    return ChunkedTensor(dtypes.pop(), whole, chunks) if len(dtypes) == 1 else None


def _zero_table(state: Table, key: str, file: Path) -> Table:
    """Return a table in a rank's state, empty if it is missing; the model's module must exist."""
    found = state.get(key)
    if isinstance(found, Mapping):
        return found
    if found is None and key != "module":
        return {}
    raise CheckpointMismatchError(
        f"{file} has {found!r:.80} as {key}: expected a table; if the model was trained as a "
        "pipeline, whose layers are in separate files, save it with save_pretrained"
    )


def _zero_files(folder: Path, pattern: str) -> list[list[Path]]:
    """Return each tensor-parallel rank's files, in order of data-parallel rank."""
    found: dict[int, dict[int, Path]] = {}
    for file in {*folder.glob(pattern)}.difference(folder.glob(_ZERO_EXPERTS)):
        if match := _ZERO_RANKS.search(file.name):
            found.setdefault(int(match[2]), {})[int(match[1] or 0)] = file
    counts = [1 + max(files) for files in found.values()]
    lacks = f"{folder} lacks the {pattern} of"
    ranks = _complete(found, 1 + max(found, default=0), f"{lacks} tensor-parallel ranks")
    return [_complete(files, max(counts), f"{lacks} ranks") for files in ranks]


def _universal(file: Path, shapes: Mapping[str, Shape]) -> Piece:
    """Return a parameter of the universal form; one from stage 3 may be flat in the file.

    `shapes` has those of one rank, which are smaller for experts; these are whole in the file.
    """
    value, name = read_torch_file(file), file.parent.name
    value = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(value, StoredTensor):
        raise CheckpointMismatchError(f"{file} does not hold a tensor; copy it again")
    shape = shapes.get(name, value.shape)
    is_whole = value.shape == shape or len(value.shape) > 1
    return value if is_whole else _joined([[value]], 0, shape, name, file.parent)


def _shapes(tables: Any, file: Path) -> dict[str, Shape]:
    """Return name -> shape of parameters, in the order of the shares in a rank's flat groups."""
    found = {}
    for table in tables if isinstance(tables, list) else (None,):
        for name, shape in table.items() if isinstance(table, Mapping) else (("", None),):
            if not isinstance(shape, list) or not all(map(is_count, shape)):
                raise CheckpointMismatchError(
                    f"{file}: param_shapes has {shape!r:.80} for {name}: expected sizes"
                )
            found[str(name)] = tuple(shape)
    return found


def _partitioned(
    folder: Path, shapes: Mapping[str, Shape], count: int, tp_rank: int
) -> NamedPieces:
    """Return the parameters of stage 3; each of `count` ranks has an equal share of each."""
    files = next(iter(_zero_files(folder, _ZERO_OPTIMIZER)[tp_rank:]), [])
    ranks = []
    problems = []
    for file in files:
        whole = read_torch_table(file, "a DeepSpeed checkpoint")
        state = _zero_table(whole, "optimizer_state_dict", file)
        stated = state.get("partition_count"), len(files)
        if stated != (count, count):
            problems.append(
                f"{file}: partition_count = {stated[0]!r:.80} with {count} ranks' model states and "
                f"{len(files)} of their optimizer: copy the files of all ranks of one run"
            )
        flat = state.get("fp32_flat_groups")
        ranks.append(flat if isinstance(flat, list) else ())
    refuse(problems)
    _refuse_copies(folder, ranks)
    shares = {name: -(-math.prod(shape) // count) for name, shape in shapes.items()}
    begins = accumulate(shares.values(), initial=0)
    found = {
        name: _joined(ranks, begin, shapes[name], name, folder)
        for name, begin in zip(shares, begins, strict=False)
    }
    held = {sum(math.prod(values.shape) for values in groups) for groups in ranks}
    if held != {sum(shares.values())}:
        raise CheckpointMismatchError(
            f"{folder}: ranks hold {sorted(held)} values of fp32_flat_groups, and param_shapes "
            f"says {sum(shares.values())}: its files are of different models; copy them again"
        )
    return found


def _refuse_copies(folder: Path, ranks: Sequence[Sequence[Any]]) -> None:
    """Check, by the checksums of their archives, that no rank's file is a copy of another's.

    Shares of a tensor of ones, such as a frozen norm's, are the same in all files.

    Raises:
        CheckpointMismatchError: Two ranks hold the same values.
    """
    first: dict[Any, int] = {}
    for number, rank in enumerate(ranks):
        held = [tensor for tensor in rank if isinstance(tensor, StoredTensor)]
        sums = tuple((tensor.record.crc32, tensor.span_bytes) for tensor in held if tensor.record)
        other = first.setdefault(sums, number)
        if other != number and any(map(_varies, held)):
            raise CheckpointMismatchError(
                f"{folder}: rank {number} holds the values of rank {other}: its file was copied "
                "under another name; copy all ranks again"
            )


def _varies(tensor: StoredTensor) -> bool:
    """Return whether a tensor holds different values."""
    values = tensor.load(FileMaps())
    return bool((values != values[:1]).any())


def _joined(
    ranks: Sequence[Sequence[Any]], begin: int, shape: Shape, name: str, folder: Path
) -> Piece:
    """Return a parameter joined from the ranks' shares, at `begin` of their flat groups."""
    size = math.prod(shape)
    share = -(-size // len(ranks))
    chunks: dict[ChunkOffset, StoredTensor] = {}
    at = 0
    for groups in ranks:
        place = 0
        last = min(share, size - at) + begin
        for values in groups:
            if not isinstance(values, StoredTensor) or len(values.shape) != 1 or values.stride:
                raise CheckpointMismatchError(f"{folder}: no rank's share of {name} is flat")
            part = _range(values, begin - place, last - place)
            if part.shape[0]:
                chunks[(at,)] = part
                at += part.shape[0]
            place += values.shape[0]
    dtypes = {chunk.dtype for chunk in chunks.values()}
    if at != size or len(dtypes) > 1:
        raise CheckpointMismatchError(
            f"{folder}: ranks hold {at} of the {size} values of {name}; copy the files of one run"
        )
    flat = ChunkedTensor(next(iter(dtypes), "fp32"), (size,), chunks)
    return _unflattened(flat, shape)
