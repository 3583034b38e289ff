"""The files of a training run's ranks, joined to one set of tensors with global layer numbers.

Each tensor-parallel rank holds a piece of a tensor; pipeline stages number their layers from 0.
The readers of NeMo, Megatron and others use it, so that families need not know ranks.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from export_scripts.checkpoints.base import (
    FileMaps,
    StoredParts,
    StoredTensor,
    StoredTensors,
    same_values,
)
from foundations.errors import CheckpointMismatchError, first_names, refuse
from foundations.files.json_content import Fields, Table, is_count, nested

_LAYER = re.compile(r"^(.*?(?:^|\.)layers\.)(\d+)(\..*|:.*)$")

# Prefixes from wrappers for data parallelism and mixed precision; not an adapter's `module.0`.
_WRAPPED = re.compile(r"^(model\.)?(?:module\.)+(?=[a-z])")
# Names that torch.compile, FSDP, activation checkpointing and Lightning insert for any module.
_WRAPPED_MODULE = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)

# Keys of the parts of a rank's model in an interleaved schedule, and the setting of their number.
_PART = re.compile(r"model(\d{1,4})")
_INTERLEAVED = "virtual_pipeline_model_parallel_size"

_Value = TypeVar("_Value")
State = Mapping[str, StoredTensor]  # the tensors of one rank
TrainingRank = tuple[int, int]  # tp_rank, pp_rank
LayerOffset = Callable[[str, int], int]  # (tensor's name, stage) -> global number of its layer 0

# With a damaged number of ranks, the list of missing ones would fill the memory.
_MAX_RANKS = 100_000


@dataclass(frozen=True)
class RankName:
    """A rank and the name of its folder."""

    folder: str
    tp_rank: int
    pp_rank: int


_RANK_FOLDERS = (
    re.compile(r"^tp_rank_(?P<tp>\d{2,})_pp_rank_(?P<pp>\d{3,})$"),
    re.compile(r"^mp_rank_(?P<tp>\d{2,})(?:_(?P<pp>\d{3,}))?$"),
)


def parse_rank_folder(name: str) -> RankName | None:
    """Return the rank that a folder's name states, or None for other folders."""
    match = next(filter(None, (pattern.match(name) for pattern in _RANK_FOLDERS)), None)
    return RankName(name, int(match["tp"]), int(match["pp"] or 0)) if match else None


def number_in(path: Path) -> int:
    """Return the first number in a file's name, -1 if there is none."""
    digits = re.search(r"\d+", path.name)
    return int(digits[0]) if digits else -1


def count_of(config: Table, key: str, *, default: int, where: object) -> int:
    """Return a positive whole number of a training configuration; `default` if absent or null.

    Raises:
        CheckpointMismatchError: The value is not such a number; the message begins with `where`.
    """
    value = config.get(key)
    value = default if value is None else value
    if not is_count(value, 1):
        raise CheckpointMismatchError(
            f"{where}: {key} is {value!r:.100}; expected a positive whole number"
        )
    return value


def ranks_by_place(
    found: Iterable[RankName], config: Table, *, where: Path
) -> dict[TrainingRank, RankName]:
    """Return the ranks by (tp_rank, pp_rank), after comparing them with a configuration's sizes.

    Raises:
        CheckpointMismatchError: Ranks are missing, superfluous or duplicated.
    """
    tp_size, pp_size = (
        count_of(config, f"{kind}_model_parallel_size", default=1, where=where)
        for kind in ("tensor", "pipeline")
    )
    if tp_size * pp_size > _MAX_RANKS:
        raise CheckpointMismatchError(
            f"{where}: its configuration says TP {tp_size}, PP {pp_size}: expected at most "
            f"{_MAX_RANKS} training ranks; the configuration is damaged"
        )
    by_rank: dict[TrainingRank, RankName] = {}
    problems = []
    for rank in sorted(found, key=lambda r: r.folder):
        place = (rank.tp_rank, rank.pp_rank)
        if place in by_rank:
            problems.append(f"{where}: {by_rank[place].folder} and {rank.folder} are the same rank")
        by_rank[place] = rank
    wanted = {(tp, pp) for tp in range(tp_size) for pp in range(pp_size)}
    missing = [_rank_folder(tp, pp, by_rank, pp_size) for tp, pp in sorted(wanted - set(by_rank))]
    if missing:
        have = len(wanted & set(by_rank))
        kind = "tensor-parallel ranks" if pp_size == 1 else "training ranks"
        verb = "is" if len(missing) == 1 else "are"
        problems.append(
            f"checkpoint has {have} of {len(wanted)} {kind}: {first_names(missing)} {verb} missing "
            f"under {where} (its configuration says TP {tp_size}, PP {pp_size})"
        )
    if extra := [by_rank[place].folder for place in sorted(set(by_rank) - wanted)]:
        problems.append(
            f"{where} holds {first_names(extra)}, but its configuration says TP {tp_size}, "
            f"PP {pp_size}; the folder mixes runs or the configuration is another's"
        )
    refuse(problems)
    return by_rank


def _rank_folder(tp_rank: int, pp_rank: int, known: Mapping[Any, RankName], pp_size: int) -> str:
    style = next(iter(known.values())).folder if known else "mp_rank"
    if style.startswith("tp_rank") or (not known and pp_size > 1):
        return f"tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:03d}"
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp_size > 1 else "")


def rank_states(
    models: Mapping[TrainingRank, Table], config: Fields, *, where: Path
) -> dict[TrainingRank, State]:
    """Return the tensors of each (tensor rank, stage) from the models of ranks.

    In an interleaved schedule a rank has several parts, model0, model1, ...: layers go from part 0
    of the first pipeline rank to part 0 of the last one, then on to part 1. Part v of rank p is
    thus stage v x PP + p, however many layers it has; the schedule is removed from `config`.
    NVIDIA/Megatron-LM, megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset

    Raises:
        CheckpointMismatchError: A rank has other parts than `config` states.
    """
    parts = {place: _parts(model) for place, model in models.items()}
    if not any(parts.values()):
        return {place: flatten(model) for place, model in models.items()}
    count = count_of(config, _INTERLEAVED, default=1, where=where)
    problems = [
        f"{where}: tensor rank {tp_rank} of pipeline rank {pp_rank} has the parts "
        f"{first_names([f'model{number}' for number in found]) or 'none'}, but {_INTERLEAVED} = "
        f"{config.get(_INTERLEAVED)}: copy the ranks of one run again"
        for (tp_rank, pp_rank), found in parts.items()
        if list(found) != list(range(count))
    ]
    refuse(problems)
    config[_INTERLEAVED] = None
    pp_size = 1 + max(pp_rank for _, pp_rank in models)
    return {
        (tp_rank, number * pp_size + pp_rank): flatten(part)
        for (tp_rank, pp_rank), found in parts.items()
        for number, part in found.items()
    }


def _parts(model: Table) -> dict[int, Any]:
    found = {int(m[1]): part for key, part in model.items() if (m := _PART.fullmatch(str(key)))}
    return dict(sorted(found.items()))


def _layers_before(states: Mapping[TrainingRank, State]) -> LayerOffset:
    """Return the rule for a stage's first layer: the number of layers in all earlier stages."""
    held: dict[tuple[str, int], set[str]] = {}
    for (_, pp_rank), state in states.items():
        for key in state:
            if match := _LAYER.match(key):
                held.setdefault((match[1], pp_rank), set()).add(match[2])

    def offset(key: str, pp_rank: int) -> int:
        match = _LAYER.match(key)
        stack = match[1] if match else ""
        return sum(len(held.get((stack, stage), ())) for stage in range(pp_rank))

    return offset


def join_ranks(
    states: Mapping[TrainingRank, State], *, where: Path, layer_offset: LayerOffset | None = None
) -> dict[str, StoredParts]:
    """Return each tensor's pieces in tensor-rank order, with layers numbered globally.

    `layer_offset` gives the global number of a stage's layer 0; None counts the stages' layers.

    Raises:
        CheckpointMismatchError: Ranks of a stage hold different tensors, or stages hold different
            values under one name.
    """
    tp_size, pp_size = (1 + max(ranks) for ranks in zip(*states, strict=True))
    layer_offset = layer_offset or _layers_before(states)
    maps = FileMaps()
    joined = {}
    problems = []
    for pp_rank in range(pp_size):
        stage = [states[tp, pp_rank] for tp in range(tp_size)]
        names = set(stage[0]).union(*stage)
        problems += [
            f"{where}: tensor rank {tp_rank} of stage {pp_rank} lacks {first_names(lacking)}"
            for tp_rank, rank in enumerate(stage)
            if (lacking := sorted(names - set(rank)))
        ]
        for key in stage[0]:
            if not all(key in rank for rank in stage):
                continue
            match, name = _LAYER.match(key), key
            if match and pp_rank:
                name = f"{match[1]}{int(match[2]) + layer_offset(key, pp_rank)}{match[3]}"
            pieces = tuple(rank[key] for rank in stage)
            if name not in joined:
                joined[name] = pieces
            elif not same_values(joined[name], pieces, maps):
                problems.append(f"{where}: pipeline stages hold different values of {name}")
    refuse(problems)
    return joined


def flatten(tree: Any) -> StoredTensors:
    """Return the tensors of nested dicts by joined keys, without the names of wrapping modules.

    Other values are left out, and everything outside of a `state_dict` if there is one.
    """
    inner = nested(tree, "state_dict")
    tree = inner if isinstance(inner, Mapping) else tree
    flat = {}
    stack = [("", tree, 0)]
    while stack:
        prefix, node, depth = stack.pop()
        if isinstance(node, StoredTensor):
            flat[prefix] = node
        elif isinstance(node, Mapping) and depth < 12:
            items = [(f"{prefix}.{k}" if prefix else str(k), v) for k, v in node.items()]
            stack += [(name, value, depth + 1) for name, value in reversed(items)]
    return without_wrappers(flat)


def renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    """Return a name after the substitutions of a table (pattern, replacement), in order."""
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name


# The first ports of BERT named the parameters of a norm gamma and beta.
_NORM_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


def bare_name(name: str) -> str:
    """Return a tensor's name without wrapping modules, and with the usual names of norms."""
    return renamed(_WRAPPED.sub(r"\1", _WRAPPED_MODULE.sub("", name)), _NORM_NAMES)


def without_wrappers(table: dict[str, _Value]) -> dict[str, _Value]:
    """Return a table by tensor name with bare names, or unchanged if two would become the same."""
    bare = {bare_name(name): value for name, value in table.items()}
    return bare if len(bare) == len(table) else table
