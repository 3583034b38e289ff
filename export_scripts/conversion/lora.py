"""LoRA adapters, merged into their model's weights while a checkpoint is read.

A merged tensor is one more kind of piece: the readers, mappings and writers on either side of it
do not know of adapters. Sums are made in fp32, as PEFT's `merge_and_unload` makes them for a model
in fp32 (peft, tuners/lora/layer.py), and rounded once, to the type on disk.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from export_scripts.checkpoints.base import (
    FLOATING_TYPES,
    CheckpointReader,
    ComputedPiece,
    FileMaps,
    Piece,
)
from export_scripts.checkpoints.huggingface import TIED_TABLES
from export_scripts.conversion.adapters import Adapter, Update, open_adapter
from export_scripts.errors import CheckpointMismatchError, first_names, listed, refuse

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

_HEADS = ("lm_head.weight", "embed_out.weight")
# Of gated layers, the rows of each training rank are a part of the gate and a part of the other
# half; the name of the matrix that follows shows whether a layer is gated.
_GATED, _FOLLOWING = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"

_Change = TypeVar("_Change")


@dataclass(frozen=True)
class _Share:
    """The rows or columns of a whole matrix that a piece holds: [begin, end) along an axis.

    Of a gated matrix, rows are counted in each half.
    """

    axis: int
    begin: int
    end: int
    is_gated: bool


def _merged(base: Piece, update: Update, share: _Share) -> Piece:
    """Return a training rank's piece of a matrix with its share of an update added, in fp32."""

    def compute(maps: FileMaps) -> Array:
        import numpy as np

        from export_scripts.numeric.arrays import to_float32

        down = np.concatenate(
            [to_float32(piece.load(maps)) for piece in update.down], update.down_axis
        )  # (r, in)
        parts = [to_float32(piece.load(maps)) for piece in update.up]
        taken = slice(share.begin, share.end)
        if share.is_gated and share.axis == 0:
            halves = np.concatenate([part.reshape(2, -1, part.shape[1]) for part in parts], 1)
            up = halves[:, taken].reshape(-1, down.shape[0])
        else:
            up = np.concatenate(parts)  # (out, r)
            up = up[taken] if share.axis == 0 else up
        down = down if share.axis == 0 else down[:, taken]
        delta: Array = (up @ down) * np.float32(update.scale)
        values: Array = to_float32(base.load(maps))
        return values + (delta.T if update.is_transposed else delta)

    pieces = (base, *update.down, *update.up)
    inputs = tuple(part for piece in pieces for part in piece.stored)
    return ComputedPiece(base.shape, inputs, compute)


def with_adapters(
    reader: CheckpointReader, paths: Sequence[Path], scratch_dir: Path | None
) -> CheckpointReader:
    """Return a checkpoint with adapters merged into it, in order; nothing is read yet.

    Args:
        reader: The model.
        paths: The adapters.
        scratch_dir: Where gzip archives are unpacked while the reader is in use.

    Raises:
        CheckpointMismatchError: An adapter cannot be merged; every reason is listed.
        ValueError: A path is not an adapter.
    """
    if not paths:
        return reader
    tensors = dict(reader.tensors)
    problems: list[str] = []
    adapters: list[Adapter] = []
    for path in paths:
        try:
            adapter = open_adapter(path, base=reader, scratch_dir=scratch_dir)
        except CheckpointMismatchError as error:
            problems += error.problems
            continue
        adapters.append(adapter)
        added = _by_key(adapter, ((u.keys, u) for u in adapter.updates), tensors, problems)
        named = (((name,), pieces) for name, pieces in adapter.replaced.items())
        replaced = _by_key(adapter, named, tensors, problems)
        problems += _tied_problems(adapter, added, replaced, reader)
        for key, pieces in replaced.items():
            problems += _replacement_problems(adapter, key, tensors[key], pieces)
            tensors[key] = pieces
        for key, update in added.items():
            shares = _shares(key, tensors, update)
            if shares is None:
                problems.append(
                    f"{path}: {key} is {_shapes(tensors[key])}, the adapter's factors are "
                    f"{_shapes(update.down)} and {_shapes(update.up)}; expected those of this model"
                )
                continue
            bases = zip(tensors[key], shares, strict=True)
            tensors[key] = tuple(_merged(base, update, share) for base, share in bases)
    refuse(listed(problems))
    files = (*reader.files, *(file for each in adapters for file in each.files))
    return dataclasses.replace(
        reader,
        tensors=tensors,
        files=tuple(dict.fromkeys(files)),
        remarks=(*reader.remarks, *(each.describe() for each in adapters)),
        kept=(*reader.kept, *adapters),
    )


def _named(keys: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the only key that has one of the names, or one with more or less before it."""
    for name in names:
        if name in keys:
            return name
        found = [key for key in keys if key.endswith(f".{name}") or name.endswith(f".{key}")]
        if len(found) == 1:
            return found[0]
    return None


def _by_key(
    adapter: Adapter,
    changes: Iterable[tuple[Sequence[str], _Change]],
    keys: Iterable[str],
    problems: list[str],
) -> dict[str, _Change]:
    """Return an adapter's changes by the model's names."""
    found: dict[str, _Change] = {}
    unknown = []
    for names, change in changes:
        key = _named(keys, names)
        if key is None:
            unknown.append(names[0])
        elif key in found:
            problems.append(
                f"{adapter.path} changes {key} twice, once as {names[0]}: "
                "expected one change of each matrix"
            )
        else:
            found[key] = change
    if unknown:
        problems.append(
            f"{adapter.path} changes {first_names(unknown)}, which the model does not have: "
            "expected an adapter of this model, in its format"
        )
    return found


def _shapes(pieces: Sequence[Piece]) -> str:
    return " + ".join(str(list(piece.shape)) for piece in pieces)


def _tied_problems(
    adapter: Adapter, added: Iterable[str], replaced: Iterable[str], reader: CheckpointReader
) -> list[str]:
    """Return a reason if an adapter changes one of a shared embedding and head alone."""
    has_head = any(key.endswith(_HEADS) for key in reader.tensors)
    if reader.format != "huggingface" or not reader.config.get("tie_word_embeddings", not has_head):
        return []
    changed = {*replaced, *(added if has_head else ())}
    return [
        f"{adapter.path} changes {key}, which the model uses as embedding and as head: load it "
        "with peft, merge_and_unload, and convert what save_pretrained leaves"
        for key in sorted(changed)
        if key.endswith(TIED_TABLES)
    ]


def _replacement_problems(
    adapter: Adapter, key: str, old: tuple[Piece, ...], new: tuple[Piece, ...]
) -> list[str]:
    if len(old) == len(new) and [p.shape for p in old] == [p.shape for p in new]:
        return []
    return [
        f"{adapter.path}: {key} is {_shapes(new)}, the model's is {_shapes(old)}; for a model that "
        "was given tokens, save it after resize_token_embeddings and convert that"
    ]


def _shares(
    key: str, tensors: Mapping[str, tuple[Piece, ...]], update: Update
) -> tuple[_Share, ...] | None:
    """Return the share of each of a matrix's pieces, or None if an update does not fit."""
    pieces = tensors[key]
    if any(len(p.shape) != 2 or p.dtype not in FLOATING_TYPES for p in pieces):
        return None
    factors = (*update.down, *update.up)
    if any(len(p.shape) != 2 or p.dtype not in FLOATING_TYPES for p in factors):
        return None
    rank = _size(update.down, 0, cut=update.down_axis == 0)
    columns = _size(update.down, 1, cut=update.down_axis == 1)
    rows = _size(update.up, 0, cut=True)
    if None in (rank, rows, columns) or {p.shape[1] for p in update.up} != {rank}:
        return None
    if update.is_transposed:
        fits = [p.shape for p in pieces] == [(columns, rows)]
        return (_Share(0, 0, rows or 0, is_gated=False),) if fits else None
    for axis in (0, 1):
        sums = (_size(pieces, 0, cut=axis == 0), _size(pieces, 1, cut=axis == 1))
        is_gated = axis == 0 and _is_gated(key, tensors)
        is_odd = any(piece.shape[0] % 2 for piece in (*pieces, *update.up))
        if sums == (rows, columns) and not (is_gated and is_odd):
            sizes = [piece.shape[axis] // (1 + is_gated) for piece in pieces]
            ends = itertools.accumulate(sizes)
            return tuple(
                _Share(axis, end - size, end, is_gated)
                for size, end in zip(sizes, ends, strict=True)
            )
    return None


def _size(pieces: Sequence[Piece], axis: int, *, cut: bool) -> int | None:
    """Return the size of pieces together on an axis; None if those that must agree do not."""
    sizes = [piece.shape[axis] for piece in pieces]
    if cut:
        return sum(sizes)
    return sizes[0] if len(set(sizes)) == 1 else None


def _is_gated(key: str, tensors: Mapping[str, tuple[Piece, ...]]) -> bool:
    """Return whether a matrix holds both halves of a gated layer."""
    if not key.endswith(_GATED):
        return False
    following = tensors.get(key.removesuffix(_GATED) + _FOLLOWING, ())
    rows = sum(piece.shape[0] for piece in tensors[key])
    return rows == 2 * sum(piece.shape[1] for piece in following if len(piece.shape) == 2)
