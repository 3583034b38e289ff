"""Source of each FT tensor, with names and shapes checked before any is read."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from export_scripts.checkpoints.base import FLOATING_TYPES, Piece
from export_scripts.conversion.request import ConversionRequest
from export_scripts.errors import listed
from export_scripts.families.layout.config import FTConfig, Index
from export_scripts.families.layout.spec import FTTensor
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Get, Parts, TensorSource, View
from export_scripts.families.mapping.tensors import ShapeTensor

_REMEDY = (
    "fetch the checkpoint again if it is incomplete, or save the whole model if it was saved "
    "without a part such as its head"
)


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write."""

    tensor: FTTensor
    source: TensorSource
    index: Index


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor to write: tensors of the family, whose rows follow each other, or views of them.

    Without a view it is one tensor of the family, of which a file holds a rank's share.
    """

    key: str
    pieces: tuple[tuple[TensorPlan, View | None], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole."""
        shapes = [view.shape if view else item.tensor.shape for item, view in self.pieces]
        first = shapes[0]
        return (sum(shape[0] for shape in shapes), *first[1:]) if first else ()

    @property
    def items(self) -> tuple[TensorPlan, ...]:
        """The tensors of the family it consists of."""
        return tuple({item.tensor.name: item for item, _ in self.pieces}.values())


@dataclass(frozen=True)
class WrittenFile:
    """One file to write: a header, then its tensors without gaps."""

    name: str
    tensors: tuple[WrittenTensor, ...]
    data_type: str
    size_bytes: int
    header: bytes = b""
    tp_rank: int = 0


def plan_tensors(
    mapping: SourceMapping,
    facts: Facts,
    config: FTConfig,
    request: ConversionRequest,
    *,
    tp_size: int,
) -> tuple[tuple[TensorPlan, ...], list[str]]:
    """Return each tensor's source, and every missing, mis-shaped or unknown one."""
    table = mapping.sources(facts, config)
    plans: list[TensorPlan] = []
    used: set[str] = set()
    missing: list[str] = []
    shapes: list[str] = []
    stated: list[str] = []
    for spec, index, tensor in mapping.family.expand(config):
        source = table.get(tensor.name) or table.get(spec.name)
        if source is None:
            stated.append(
                f"{mapping.title} has no {tensor.name}, which a stated value of config.ini asks "
                "for: leave that value out"
            )
            continue
        plan = TensorPlan(tensor, source, index)
        plans.append(plan)
        keys = [(key.format(**index), cut) for key, cut in plan.source.reads]
        used.update(name for key, _ in keys if (name := facts.resolve(key)))
        absent = [key for key, _ in keys if not facts.has(key)]
        missing += [f"{key} is missing (needed for {tensor.name})" for key in absent]
        if not absent:
            shapes += _shape_problems(plan, facts, config, keys, tp_size)
    unknown = _unknown(mapping, facts, config, used, request)
    where = str(facts.reader.path)
    return tuple(plans), [
        *listed(missing, f"{where}: "),
        *([f"{where}: {_remedy(missing, facts)}"] if missing else []),
        *listed(shapes, f"{where}: "),
        *listed(stated, f"{where}: "),
        *listed(unknown, f"{where}: "),
    ]


def _remedy(missing: list[str], facts: Facts) -> str:
    """Return the remedy for missing tensors; a common prefix means a wrapper was saved."""
    wanted = missing[0].split(" ", 1)[0]
    for key in facts.keys():  # noqa: SIM118 - not a mapping
        if key.endswith(f".{wanted}"):
            return (
                f"names there begin with {key.removesuffix(wanted)!r}: save the model without "
                "its wrapper"
            )
    return _REMEDY


def _unknown(
    mapping: SourceMapping,
    facts: Facts,
    config: FTConfig,
    used: set[str],
    request: ConversionRequest,
) -> list[str]:
    copies = {facts.resolve(key) for key in mapping.copies(facts, config)}
    return [
        f"{key} {[list(piece.shape) for piece in facts.pieces(key)]} is not a tensor of "
        f"{mapping.title} (--allow '{key}' leaves it out)"
        for key in facts.keys()  # noqa: SIM118 - not a mapping
        if key not in used
        and key not in copies
        and not mapping.is_ignored(key)
        and not request.allows(key)
    ]


def _shape_problems(
    plan: TensorPlan,
    facts: Facts,
    config: FTConfig,
    keys: list[tuple[str, int | None]],
    tp_size: int,
) -> list[str]:
    problems = []
    for key, cut in keys:
        pieces = facts.pieces(key)
        first = pieces[0].shape
        for rank, piece in enumerate(pieces):
            if _without(piece.shape, cut) != _without(first, cut):
                problems.append(
                    f"{key}: training rank {rank} has shape {list(piece.shape)}, rank 0 has "
                    f"{list(first)}"
                )
        if kinds := {piece.dtype for piece in pieces} - FLOATING_TYPES:
            problems.append(
                f"{key} is stored as {', '.join(sorted(kinds))}, expected a floating type; convert "
                "the unquantised checkpoint"
            )
    if problems:
        return problems
    shapes = values_of(facts, plan.index, lambda piece: ShapeTensor(piece.shape))
    try:
        parts = plan.source.build(shapes, config)
        local_fine_shape(parts, plan.tensor, tp_size)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        stored = ", ".join(f"{key} {list(facts.pieces(key)[0].shape)}" for key, _ in keys)
        reason = "it has too few axes" if isinstance(error, IndexError) else error
        return [f"{stored} does not make {plan.tensor.name}: {reason}"]
    return []


def values_of(facts: Facts, index: Index, read: Callable[[Piece], Any] | None = None) -> Get:
    """Return the reader of pieces that `TensorSource.build` gets for the tensor of an index.

    It gives their values, or what `read` makes of them.
    """
    read = read or (lambda piece: piece.load(facts.maps))
    return lambda key, cut=None, unit=1: [
        read(slab) for piece in facts.pieces(key.format(**index)) for slab in piece.slabs(cut, unit)
    ]


def _without(shape: tuple[int, ...], axis: int | None) -> tuple[int | None, ...]:
    return tuple(None if i == axis else size for i, size in enumerate(shape))


def local_fine_shape(parts: Parts, tensor: FTTensor, tp_size: int) -> tuple[tuple[int, ...], int]:
    """Return one rank's shape in the parts' finer axes, and the index of the split one (-1: none).

    Raises:
        ValueError: The parts do not make the tensor, or a rank's share is not a whole number.
    """
    fine = parts.shape
    if len({_without(part.shape, parts.axis) for part in parts.tensors}) > 1:
        shapes = " and ".join(str(list(part.shape)) for part in parts.tensors)
        raise ValueError(f"parts of shapes {shapes} do not fit together")
    groups = _group_axes(fine, tensor.shape)
    if groups is None:
        raise ValueError(f"it gives shape {list(fine)}, expected {list(tensor.shape)}")
    if tensor.split is None:
        return fine, -1
    axis = groups[tensor.split][0]
    if fine[axis] % tp_size:
        raise ValueError(f"axis of {fine[axis]} does not divide by {tp_size} ranks")
    return (*fine[:axis], fine[axis] // tp_size, *fine[axis + 1 :]), axis


def _group_axes(fine: tuple[int, ...], coarse: tuple[int, ...]) -> list[range] | None:
    """Return the consecutive fine axes that make up each coarse one, or None if none do."""
    groups: list[range] = []
    axis = 0
    for size in coarse:
        end = axis + 1
        while end < len(fine) and math.prod(fine[axis:end]) < size:
            end += 1
        if end > len(fine) or math.prod(fine[axis:end]) != size:
            return None
        groups.append(range(axis, end))
        axis = end
    return groups if axis == len(fine) else None
