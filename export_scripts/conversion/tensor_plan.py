"""The source of each FT tensor; names and shapes are checked before values are read."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.checkpoints.base import FLOATING_TYPES, Piece
from export_scripts.conversion.request import ConversionRequest
from export_scripts.conversion.torch_archive import Archive
from export_scripts.families.layout.config import FTConfig, Index
from export_scripts.families.layout.spec import FTTensor
from export_scripts.families.mapping.source_mapping import ENTRY, Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Parts, TensorSource, View
from export_scripts.families.mapping.tensors import ShapeTensor
from export_scripts.numeric.dtypes import Shape
from foundations.errors import listed

_REMEDY = (
    "fetch the checkpoint again if it is incomplete, or save the whole model if it was saved "
    "without a part such as its head"
)
_KEEPS_FP8 = (
    "--keep-fp8 (convert.keep_fp8) needs FP8 for every matrix of the layers: leave the option out "
    "to widen all weights"
)

Window = list[tuple[int, int]]  # a box of a tensor: (first index, end) on each axis


@dataclass(frozen=True, eq=False)
class TensorPlan:
    """A tensor of the family, and its source. Compared by identity."""

    tensor: FTTensor
    source: TensorSource
    index: Index

    @property
    def reads(self) -> list[tuple[str, int | None]]:
        """(key, axis on which training ranks cut it; None: replicated) of every tensor read."""
        return [(key.format(**self.index), cut) for key, cut in self.source.reads]

    def pieces(self, facts: Facts, key: str) -> Sequence[Piece]:
        """Return the pieces of a key; of a matrix kept in FP8, its values or its scales."""
        part = self.tensor.fp8_part
        found = None if part is None else facts.fp8(key)
        return facts.pieces(key) if found is None or part is None else (found[part],)

    def build(
        self, facts: Facts, config: FTConfig | None, read: Callable[[Piece], Any] | None = None
    ) -> Parts:
        """Return the tensor's parts from its pieces; `read` may replace the values of a piece."""
        read = read or (lambda piece: piece.load(facts.maps))

        def get(key: str, cut: int | None = None, unit: int = 1) -> list[Any]:
            pieces = self.pieces(facts, key.format(**self.index))
            return [read(slab) for piece in pieces for slab in piece.slabs(cut, unit)]

        return self.source.build(get, config)


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to write: views of the family's tensors, concatenated along their rows.

    Without a view it is one tensor of the family, and a file holds a rank's share of it.
    """

    key: str
    pieces: tuple[tuple[TensorPlan, View | None], ...]
    data_type: str | None = None  # None for the file's type
    archive: Archive | None = None  # the archive around the tensor, if there is one
    # Size of a new first axis, whose entries have an equal number of consecutive pieces; 0: none.
    entries: int = 0

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""
        shapes = [view.shape if view else item.tensor.shape for item, view in self.pieces]
        first = shapes[0]
        if self.entries:
            rows = sum(shape[1] for shape in shapes) // self.entries
            return (self.entries, rows, *first[2:])
        return (sum(shape[0] for shape in shapes), *first[1:]) if first else ()

    @property
    def items(self) -> tuple[TensorPlan, ...]:
        """The tensors of the family that it consists of."""
        return tuple(dict.fromkeys(item for item, _ in self.pieces))


@dataclass(frozen=True)
class WrittenFile:
    """A file to write: a header, and its tensors or their archives without gaps."""

    name: str
    tensors: tuple[WrittenTensor, ...]
    data_type: str
    size_bytes: int
    header: bytes = b""
    tp_rank: int = 0

    def type_of(self, tensor: WrittenTensor) -> str:
        """Return the type of a tensor in the file."""
        return tensor.data_type or self.data_type


def plan_tensors(
    mapping: SourceMapping,
    facts: Facts,
    config: FTConfig,
    request: ConversionRequest,
    *,
    tp_size: int,
) -> tuple[tuple[TensorPlan, ...], list[str]]:
    """Return each tensor's source, and a problem for each missing, mis-shaped or unknown one."""
    table = mapping.sources(facts, config)
    plans = []
    used = {facts.resolve(key) for key in mapping.copies(facts, config)}
    missing = []
    shapes = []
    stated = []
    entries: dict[str, set[str]] = {}
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
        used.update(facts.resolve(key) for key, _ in plan.reads)
        absent = [key for key, _ in plan.reads if not facts.has(key)]
        if tensor.fp8_part == 0:
            wide = [key for key, _ in plan.reads if facts.has(key) and facts.fp8(key) is None]
            stated += [f"{key} is not in FP8: {_KEEPS_FP8}" for key in wide]
            if not isinstance(source, Copy):
                stated.append(f"{tensor.name} is computed from stored tensors: {_KEEPS_FP8}")
        missing += [f"{key} is missing (needed for {tensor.name})" for key in absent]
        for key in (key for key, _ in plan.reads if ENTRY in key and facts.has(key)):
            entries.setdefault(facts.resolve(key) or "", set()).add(key)
        if not absent:
            shapes += _shape_problems(plan, facts, config, tp_size)
    unknown = [
        f"{key} {[list(piece.shape) for piece in facts.pieces(key)]} is not a tensor of "
        f"{mapping.title} (--allow '{key}' leaves it out)"
        for key in facts.keys()  # noqa: SIM118 - not a mapping
        if not (key in used or mapping.is_ignored(key) or request.allows(key))
    ]
    shapes += [
        f"{key} has {facts.rows(key)} entries, and the model needs {len(found)}"
        for key, found in entries.items()
        if len(found) != facts.rows(key)
    ]
    where = str(facts.reader.path)
    return tuple(plans), [
        *listed(missing, f"{where}: "),
        *([f"{where}: {_remedy(missing, facts)}"] if missing else []),
        *listed(shapes, f"{where}: "),
        *listed(stated, f"{where}: "),
        *listed(unknown, f"{where}: "),
    ]


def _remedy(missing: list[str], facts: Facts) -> str:
    """Return the remedy for missing tensors; if all have a prefix, a wrapper was saved."""
    if facts.has_any("*_flat_param"):  # torch/distributed/fsdp/_flat_param.py
        return (
            "it has the flat parameters of FSDP's LOCAL_STATE_DICT, without their shapes: save it "
            "with SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    wanted = missing[0].split(" ", 1)[0]
    for key in facts.keys():  # noqa: SIM118 - not a mapping
        if key.endswith(f".{wanted}"):
            return (
                f"names there begin with {key.removesuffix(wanted)!r}: save the model without "
                "its wrapper"
            )
    return _REMEDY


def _shape_problems(plan: TensorPlan, facts: Facts, config: FTConfig, tp_size: int) -> list[str]:
    problems = []
    for key, cut in plan.reads:
        pieces = plan.pieces(facts, key)
        first = pieces[0].shape
        for rank, piece in enumerate(pieces):
            if _without(piece.shape, cut) != _without(first, cut):
                problems.append(
                    f"{key}: training rank {rank} has shape {list(piece.shape)}, rank 0 has "
                    f"{list(first)}"
                )
        known = {"fp8"} if plan.tensor.fp8_part == 0 else FLOATING_TYPES
        if kinds := {piece.dtype for piece in pieces} - known:
            problems.append(
                f"{key} is stored as {', '.join(sorted(kinds))}, expected a floating type; convert "
                "the unquantised checkpoint"
            )
    if problems:
        return problems
    try:
        parts = plan.build(facts, config, lambda piece: ShapeTensor(piece.shape))
        rank_window(parts, plan.tensor, tp_size)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        stored = ", ".join(
            f"{key} {list(plan.pieces(facts, key)[0].shape)}" for key, _ in plan.reads
        )
        reason = "it has too few axes" if isinstance(error, IndexError) else error
        return [f"{stored} does not make {plan.tensor.name}: {reason}"]
    return []


def _without(shape: Shape, axis: int | None) -> tuple[int | None, ...]:
    return tuple(None if i == axis else size for i, size in enumerate(shape))


def rank_window(parts: Parts, tensor: FTTensor, tp_size: int, tp_rank: int = 0) -> Window:
    """Return one rank's share of a tensor, in the finer axes of its parts.

    Raises:
        ValueError: The parts do not make up the tensor, or the ranks do not divide its axis.
    """
    fine = parts.shape
    if len({_without(part.shape, parts.axis) for part in parts.tensors}) > 1:
        shapes = " and ".join(str(list(part.shape)) for part in parts.tensors)
        raise ValueError(f"parts of shapes {shapes} do not fit together")
    groups = _group_axes(fine, tensor.shape)
    if groups is None:
        raise ValueError(f"it gives shape {list(fine)}, expected {list(tensor.shape)}")
    window = whole_window(fine)
    if tensor.split is not None:
        axis = groups[tensor.split][0]
        size, rest = divmod(fine[axis], tp_size)
        if rest:
            raise ValueError(f"axis of {fine[axis]} does not divide by {tp_size} ranks")
        window[axis] = (tp_rank * size, (tp_rank + 1) * size)
    return window


def whole_window(shape: Sequence[int]) -> Window:
    """Return the window of a whole tensor."""
    return [(0, size) for size in shape]


def _group_axes(fine: Shape, coarse: Shape) -> list[range] | None:
    """Return for each coarse axis the consecutive fine axes that make it up; None if none do."""
    groups = []
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
