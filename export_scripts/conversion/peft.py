"""The plan of a PEFT folder: a LoRA adapter without its model, from any trainer's adapter.

The adapter is merged into its model, and a Hugging Face folder of the result is planned but not
written. Each matrix of that folder is a rearrangement of the source's matrices. The same operations
applied to row and column numbers, not values, show which rows of the second factor and which
columns of the first one make up the matrix's update. A matrix is refused if an operation computes
values, or does not move whole rows and columns: no low-rank update has the same effect.

Layout: huggingface/peft 0.21, peft/utils/save_and_load.py, tuners/lora/config.py and layer.py; its
ParamWrapper has the experts of transformers 5, one parameter for all. vLLM 0.32, vllm/lora, reads
the same, without DoRA; earlier releases ignore patterns of ranks and alphas, so none are written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from export_scripts.checkpoints.base import ComputedPiece, FileMaps, Piece
from export_scripts.conversion.huggingface import copied_tensor, plan_huggingface, weights_file
from export_scripts.conversion.lora import TORCHTUNE_WEIGHTS, Sum, Update
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.request import PEFT_CONFIG
from export_scripts.conversion.tensor_plan import TensorPlan, WrittenTensor
from export_scripts.families.mapping.sources import rearranged
from foundations.errors import first_names, listed, refuse
from foundations.files.json_content import json_bytes

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WEIGHT = ".weight"
_TABLES = ("model.wte", "shared.weight_T")


@dataclass(frozen=True)
class _Share:
    """The part of an update that applies to a matrix of the model."""

    update: Update
    halves: int  # number of halves of the second factor's rows
    rows: Array  # for each row of the matrix the row of the second factor, or -1
    columns: Array  # for each column of the matrix the column of the first factor


@dataclass(frozen=True)
class _Module:
    """A matrix (out, in) of the model, and its updates."""

    name: str
    shape: tuple[int, int]
    shares: tuple[_Share, ...]
    is_transposed: bool  # whether the model stores it as (in, out)

    @property
    def rank(self) -> int:
        """The sum of the updates' ranks."""
        return sum(share.update.rank for share in self.shares)

    def pieces(self, rank: int, scale: float) -> Iterator[tuple[str, Piece]]:
        """Yield (name, values) of the factors, padded to `rank`, for a common `scale`."""
        inputs = tuple(stored for share in self.shares for stored in share.update.stored)
        padding = (0, rank - self.rank)

        def first(maps: FileMaps) -> Array:
            import numpy as np

            parts = [share.update.first_factor(maps)[:, share.columns] for share in self.shares]
            return np.pad(np.concatenate(parts), (padding, (0, 0)))

        def second(maps: FileMaps) -> Array:
            import numpy as np

            parts = []
            for share in self.shares:
                values = share.update.second_factor(maps, share.halves)[share.rows]
                values[share.rows < 0] = 0
                if share.update.scale != scale:
                    values = values * np.float32(share.update.scale / scale)
                parts.append(values)
            return np.pad(np.concatenate(parts, 1), ((0, 0), padding))

        for side, compute, shape in (
            ("A", first, (rank, self.shape[1])),
            ("B", second, (self.shape[0], rank)),
        ):
            key = f"{_PREFIX}{self.name}.lora_{side}{_WEIGHT}"
            yield key, ComputedPiece("fp32", shape, inputs, compute)


def plan_peft(source: ConversionPlan) -> ConversionPlan:
    """Return the plan of a PEFT folder from the plan of a source with a merged adapter.

    Raises:
        CheckpointMismatchError: Hugging Face has no equal model, or no low-rank update of its
            matrices has the adapter's effect; every reason is listed.
    """
    (path,) = source.request.lora_checkpoints
    if (path / PEFT_CONFIG).is_file() and not (path / TORCHTUNE_WEIGHTS).is_file():
        refuse([f"{path} holds {PEFT_CONFIG}: it is a PEFT folder already; serve it as it is"])
    folder = plan_huggingface(source)
    written = [tensor for (file,) in folder.files for tensor in file.tensors]
    follow = _Follower(source)
    problems = []
    modules = []
    for tensor in written:
        found = follow(tensor)
        if isinstance(found, str):
            problems.append(f"{path}: {tensor.key}: {found}")
        elif found is not None:
            modules.append(found)
    refuse(listed(problems))
    rank = max(module.rank for module in modules)
    # With the scale of most updates, the values of these do not change.
    scales = [share.update.scale for module in modules for share in module.shares]
    scale = max(sorted(set(scales)), key=scales.count)
    new = {key: (piece,) for module in modules for key, piece in module.pieces(rank, scale)}
    tensors = tuple(copied_tensor(key, piece.shape) for key, (piece,) in new.items())
    facts = dataclasses.replace(
        source.facts, reader=dataclasses.replace(source.facts.reader, tensors=new)
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": _whole(scale * rank),
        "target_modules": _targets([m.name for m in modules], written),
        "fan_in_fan_out": any(module.is_transposed for module in modules),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    kind = source.config.weight_data_type
    return dataclasses.replace(
        source,
        facts=facts,
        files=((weights_file(WEIGHTS_NAME, tensors, kind),),),
        extra_files={PEFT_CONFIG: json_bytes(config)},
        remarks=(*source.remarks, *_remarks(modules, rank, scale)),
    )


def _whole(value: float) -> float:
    return round(value) if abs(value - round(value)) < 1e-9 * abs(value) else value


def _remarks(modules: Sequence[_Module], rank: int, scale: float) -> list[str]:
    """Return remarks on what differs from the adapter as trained."""
    padded = [module.name for module in modules if module.rank != rank]
    scaled = [m.name for m in modules if any(s.update.scale != scale for s in m.shares)]
    return [
        *([f"{first_names(padded)}: padded with zeros to rank {rank}"] if padded else []),
        *([f"{first_names(scaled)}: lora_B is multiplied, to share one scale"] if scaled else []),
    ]


def _targets(names: Sequence[str], written: Sequence[WrittenTensor]) -> list[str]:
    """Return the last parts of names if they match only these modules, else the whole names."""
    ends = {name.rpartition(".")[2] for name in names}
    every = [tensor.key.removesuffix(_WEIGHT) for tensor in written if len(tensor.shape) == 2]
    meant = {name for name in every if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == set(names) else names)


class _Follower:
    """Finds the rows and columns of updates in the tensors of a folder.

    Layers whose pieces have the same shapes share a result.
    """

    def __init__(self, source: ConversionPlan) -> None:
        self._source = source
        # (rows, columns, whether the matrix is transposed) or a reason. No rows: no update.
        self._known: dict[str, tuple[Array, Array, bool] | str] = {}

    def __call__(self, tensor: WrittenTensor) -> _Module | str | None:
        """Return the module of a tensor, the reason against it, or None if nothing updates it."""
        sums = {
            id(total.update): total
            for item in tensor.items
            for piece in self._read(item)
            for total in _sums(piece)
        }
        if not sums:
            return None
        if any(total.update.magnitude for total in sums.values()):
            return "an update of DoRA, which is only merged"
        if any(item.tensor.name in _TABLES for item in tensor.items):
            return "an update of the embedding, which is not supported"
        if len(tensor.shape) != 2 or not tensor.key.endswith(_WEIGHT):
            return f"an update of {list(tensor.shape)}; expected an update of a matrix"
        shares = []
        orders = set()
        for total in sums.values():
            found = self._found(tensor, total.update)
            if isinstance(found, str):
                return found
            rows, columns, is_transposed = found
            if len(rows):
                orders.add(is_transposed)
                shares.append(_Share(total.update, total.halves, rows, columns))
        if not shares:
            return None
        if len(orders) > 1:
            return "one of its updates is transposed, another is not"
        is_transposed = True in orders
        out, width = tensor.shape[::-1] if is_transposed else tensor.shape
        name = tensor.key.removesuffix(_WEIGHT)
        return _Module(name, (out, width), tuple(shares), is_transposed)

    def _read(self, item: TensorPlan) -> Iterator[Piece]:
        for key, _ in item.reads:
            yield from self._source.facts.pieces(key)

    def _found(self, tensor: WrittenTensor, update: Update) -> tuple[Array, Array, bool] | str:
        """Return `_searched` of an update, from an equal layer if it is known."""
        places = [
            (id(item.source), view, piece.shape, total.share, total.axis, total.halves, update.part)
            if total
            else (id(item.source), view, piece.shape)
            for item, view in tensor.pieces
            for piece in self._read(item)
            for total in (next(_sums(piece, update), None),)
        ]
        place = repr(places)
        if place not in self._known:
            self._known[place] = self._searched(tensor, update)
        return self._known[place]

    def _searched(self, tensor: WrittenTensor, update: Update) -> tuple[Array, Array, bool] | str:
        """Return the rows and columns of an update, and whether the matrix is transposed."""
        import numpy as np

        rows, columns = (self._numbers(tensor, update, axis) for axis in (0, 1))
        if rows.dtype != np.int32 or columns.dtype != np.int32:
            return "its values are computed from the source's, not rearranged"
        if is_transposed := not _is_constant(rows):
            rows, columns = rows.T, columns.T
        updated = rows[:, 0] >= 0
        columns = columns[updated]
        if not (_is_constant(rows) and _is_constant(columns.T)):
            return "it is not rearranged by whole rows and columns"
        if not updated.any():
            return np.empty(0), np.empty(0), is_transposed
        return rows[:, 0].copy(), columns[0].copy(), is_transposed

    def _numbers(self, tensor: WrittenTensor, update: Update, axis: int) -> Array:
        """Return for each value of a tensor the row (axis 0) or column of an update; -1: none."""
        import numpy as np

        found = []
        read = functools.partial(_numbered, update, axis)
        for item, view in tensor.pieces:
            assert view is not None
            parts = rearranged(item.build(self._source.facts, self._source.config, read), view)
            numbers = [
                part if hasattr(part, "dtype") else _no_update(part) for part in parts.tensors
            ]
            found.append(np.concatenate(numbers, parts.axis).reshape(view.shape))
        return np.concatenate(found)


def _sums(piece: Piece, update: Update | None = None) -> Iterator[Sum]:
    """Yield the sums that a piece is made of, the last first; of one update if it is given."""
    while isinstance(piece, ComputedPiece) and isinstance(piece.compute, Sum):
        if update is None or piece.compute.update is update:
            yield piece.compute
        piece = piece.compute.base


def _numbered(update: Update, axis: int, piece: Piece) -> Array:
    """Return for each value of a piece the row (axis 0) or column of an update; -1: none."""
    import numpy as np

    found = next(_sums(piece, update), None)
    if found is None:
        return _no_update(piece)
    numbers = found.columns() if axis else found.rows()[:, None]
    if update.is_transposed:
        numbers = numbers.T
    return np.broadcast_to(numbers, piece.shape)


def _no_update(tensor: Any) -> Array:
    import numpy as np

    return np.broadcast_to(np.int32(-1), tensor.shape)


def _is_constant(rows: Array) -> bool:
    """Return whether all values of each row are the same."""
    return bool((rows == rows[:, :1]).all())
