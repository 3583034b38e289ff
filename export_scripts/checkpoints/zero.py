"""DeepSpeed's checkpoints of ZeRO, stages 0 to 3, and their universal form.

Up to stage 2 the model lies whole in `mp_rank_00_model_states.pt`, in the type that it was trained
in; in stage 3 each rank's `zero_pp_rank_<R>_mp_rank_00_optim_states.pt` has its share of every
parameter in fp32. The universal form has a folder for each, `zero/<name>/fp32.pt`. Layout:
deepspeedai/DeepSpeed, deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import ComputedPiece, FileMaps, Piece, StoredTensor
from export_scripts.checkpoints.chunks import ChunkedTensor, ChunkOffset
from export_scripts.checkpoints.partitioned import flatten
from export_scripts.checkpoints.pt_archive import read_torch_file, read_torch_table
from export_scripts.errors import CheckpointMismatchError, first_names, refuse
from export_scripts.numeric.dtypes import SOURCE_TYPES, Shape

STATES = "*mp_rank_*_model_states.pt"
LATEST_NAME = "latest"
_OPTIMIZER = "*_optim_states.pt"
_RANKS = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(?:model|optim)_states\.pt$")
_UNIVERSAL = "zero/*/fp32.pt"


@dataclasses.dataclass(frozen=True)
class _Reshaped:
    """Values of a flat tensor in another shape."""

    flat: ChunkedTensor
    shape: Shape

    def __call__(self, maps: FileMaps) -> Any:
        return self.flat.load(maps).reshape(self.shape)


def zero_tensors(folder: Path) -> dict[str, Piece]:
    """Return the tensors of a model that DeepSpeed has saved.

    Raises:
        CheckpointMismatchError: Files are missing or damaged, or not of one tensor-parallel rank.
    """
    files = _by_rank(folder, STATES)
    states = [read_torch_table(file, "a DeepSpeed checkpoint") for file in files]
    first = states[0]
    found: dict[str, Piece] = {}
    if universal := sorted(folder.glob(_UNIVERSAL)):
        shapes = _shapes(first.get("param_shapes"), files[0])
        found = {file.parent.name: _universal(file, shapes) for file in universal}
    elif not files[0].name.startswith("zero_"):
        found = {**flatten(_table(first, "module", files[0]))}
    else:
        module = flatten(_table(first, "module", files[0]))
        buffers = first.get("buffer_names") or ()
        found = {name: module[name] for name in buffers if name in module}
        frozen = [state.get("frozen_param_fragments") or {} for state in states]
        found |= {
            name: _joined([[each.get(name)] for each in frozen], 0, shape, name, folder)
            for name, shape in _shapes([first.get("frozen_param_shapes") or {}], files[0]).items()
        }
        found |= _partitioned(folder, _shapes(first.get("param_shapes"), files[0]), len(files))
    for name, kept in (first.get("shared_params") or {}).items():
        if kept in found:
            found[name] = found[kept]  # ds_to_universal rounds a copy
    return found


def _table(state: Mapping[Any, Any], key: str, file: Path) -> Mapping[Any, Any]:
    if not isinstance(state.get(key), Mapping):
        raise CheckpointMismatchError(
            f"{file} has no {key}: a pipeline's layers lie elsewhere; save the model with "
            "save_pretrained, or convert its layers' files to Hugging Face's names first"
        )
    return state[key]  # type: ignore[no-any-return]


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Return the files of all data-parallel ranks, in their order."""
    found = {
        (int(match[2]), int(match[1] or 0)): file
        for file in folder.glob(pattern)
        if (match := _RANKS.search(file.name))
    }
    if any(rank for rank, _ in found):
        raise CheckpointMismatchError(
            f"{folder} is of {1 + max(found)[0]} tensor-parallel ranks (mp_rank_*), which cut "
            "tensors by rules of their own: save it with one, or with save_pretrained"
        )
    missing = [n for n in range(1 + max(found)[1]) if (0, n) not in found] if found else [0]
    if missing:
        raise CheckpointMismatchError(
            f"{folder} lacks the {pattern} of ranks {first_names([str(n) for n in missing])}; "
            "copy them, too"
        )
    return [found[rank] for rank in sorted(found)]


def _universal(file: Path, shapes: Mapping[str, Shape]) -> Piece:
    """Return a parameter of the universal form, which is flat if it comes from stage 3."""
    value, name = read_torch_file(file), file.parent.name
    value = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(value, StoredTensor):
        raise CheckpointMismatchError(f"{file} does not hold a tensor; copy it again")
    shape = shapes.get(name, value.shape)
    return value if value.shape == shape else _joined([[value]], 0, shape, name, file.parent)


def _shapes(tables: Any, file: Path) -> dict[str, Shape]:
    """Return the shapes of parameters in the order in which ranks hold their shares."""
    found: dict[str, Shape] = {}
    for table in tables if isinstance(tables, list) else (None,):
        for name, shape in table.items() if isinstance(table, Mapping) else (("", None),):
            if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
                raise CheckpointMismatchError(
                    f"{file}: param_shapes has {shape!r:.80} for {name}: expected sizes"
                )
            found[str(name)] = tuple(shape)
    return found


def _partitioned(folder: Path, shapes: Mapping[str, Shape], count: int) -> dict[str, Piece]:
    """Return the parameters of stage 3, of which each of `count` ranks has an equal share."""
    files = _by_rank(folder, _OPTIMIZER)
    ranks: list[Sequence[Any]] = []
    problems = []
    for file in files:
        state = read_torch_table(file, "a DeepSpeed checkpoint").get("optimizer_state_dict")
        state = state if isinstance(state, Mapping) else {}
        stated = state.get("partition_count"), len(files)
        if stated != (count, count):
            problems.append(
                f"{file}: partition_count = {stated[0]!r:.80} with {count} ranks' model states and "
                f"{len(files)} of their optimizer: copy the files of all ranks of one run"
            )
        flat = state.get("fp32_flat_groups")
        ranks.append(flat if isinstance(flat, list) else ())
    refuse(problems)
    shares = {name: -(-math.prod(shape) // count) for name, shape in shapes.items()}
    begins = itertools.accumulate(shares.values(), initial=0)
    found = {
        name: _joined(ranks, begin, shapes[name], name, folder)
        for name, begin in zip(shares, begins, strict=False)
    }
    held = {sum(math.prod(each.shape) for each in groups) for groups in ranks}
    if held != {sum(shares.values())}:
        raise CheckpointMismatchError(
            f"{folder}: ranks hold {sorted(held)} values of fp32_flat_groups, and param_shapes "
            f"says {sum(shares.values())}: its files are of different models; copy them again"
        )
    return found


def _joined(
    ranks: Sequence[Sequence[Any]], begin: int, shape: Shape, name: str, folder: Path
) -> Piece:
    """Return a parameter of which each rank holds a share, at `begin` of its flat groups."""
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
            first, end = max(begin - place, 0), min(last - place, values.shape[0])
            if end > first:
                step = SOURCE_TYPES[values.dtype][0]
                chunks[(at,)] = dataclasses.replace(
                    values, offset=values.offset + first * step, shape=(end - first,)
                )
                at += end - first
            place += values.shape[0]
    dtypes = {each.dtype for each in chunks.values()}
    if at != size or len(dtypes) > 1:
        raise CheckpointMismatchError(
            f"{folder}: ranks hold {at} of the {size} values of {name}; copy the files of one run"
        )
    flat = ChunkedTensor(next(iter(dtypes), "fp32"), (size,), chunks)
    return ComputedPiece(flat.dtype, shape, flat.stored, _Reshaped(flat, shape))
