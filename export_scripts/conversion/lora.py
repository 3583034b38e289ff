"""LoRA adapters, merged into their model's weights while a checkpoint is read.

A merged tensor is another kind of piece: readers, mappings and writers need not know adapters;
`conversion/peft.py` follows the pieces to write an adapter separately. Sums are computed in fp32,
as PEFT's `merge_and_unload` does for a model in fp32 (peft, tuners/lora/layer.py), and rounded
once, to the type on disk.

Adapters come from PEFT, NeMo 1, NeMo 2 and Megatron Bridge. Layout: huggingface/peft,
peft/utils/save_and_load.py; NVIDIA/NeMo 1.x,
nlp/modules/common/megatron/adapters/parallel_adapters.py; NeMo 2, nemo/collections/llm/peft;
Megatron Bridge, src/megatron/bridge/peft/lora.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from export_scripts.checkpoints import open_checkpoint, recognise_format
from export_scripts.checkpoints.base import (
    FLOATING_TYPES,
    CheckpointReader,
    ComputedPiece,
    FileMaps,
    IsAllowed,
    NamedPieces,
    Piece,
    Pieces,
    StoredParts,
    Tensors,
    json_file,
    last_name,
    rows_of,
)
from export_scripts.checkpoints.chunks import chunked
from export_scripts.checkpoints.huggingface import TIED_TABLES, index_tensors
from export_scripts.checkpoints.quantized import known_settings
from export_scripts.checkpoints.sharded_huggingface import in_huggingface_names
from export_scripts.conversion.request import PEFT_CONFIG
from foundations.errors import CheckpointMismatchError, first_names, listed, refuse
from foundations.files.json_content import Table, is_count
from foundations.files.yaml_content import read_table

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

_HEADS = ("lm_head.weight", "embed_out.weight")
# In gated layers, a training rank's rows are a part of the gate and a part of the other half. The
# size of the matrix that follows shows whether a layer is gated.
_GATED, _FOLLOWING = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"

# Files that state an adapter's scale; the last is verl's.
_PEFT_SCALES = (PEFT_CONFIG, f"lora_adapter/{PEFT_CONFIG}", "lora_train_meta.json")
_PEFT_ROOT = "base_model.model."
_PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# An adapter as torchtune trained it. torchtune (0.6.1) also writes it as PEFT's, but with the rows
# of a Qwen2's queries and keys in another order, DoRA's magnitudes in its own, and no use_dora.
TORCHTUNE_WEIGHTS = "adapter_model.pt"
_TORCHTUNE_SETTINGS = {
    "r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path", "use_dora",
}  # fmt: skip
# The experts and routers of axolotl's MixLoRA, without which the adapter is another model.
_MIXLORA_WEIGHTS = "mixlora_model.safetensors"

# Values of init_lora_weights that do not change the model's own weights.
_PEFT_INITS = (True, False, "gaussian", "eva", "orthogonal")
_PEFT_FACTOR = re.compile(
    r"^(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB]|magnitude_vector)"
    r"(?:\.default)?(?:\.weight)?$"
)
# For tables of tokens that are trained, PEFT saves the original, and the trained one twice.
_PEFT_ORIGINAL, _PEFT_TRAINED = ".original_module.", ".modules_to_save."
_PEFT_KEPT = re.compile(r"\.(?:base_layer|original_module)\.")
_PEFT_WRAPPERS = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
# Limits of an adapter's patterns: they are regular expressions, which could backtrack for ever.
_MAX_PATTERN, _MAX_REPEATED, _MAX_GROUPS = 200, 2, 4
_MODULE = r"(.*\.)?({})$"
# GPT-2's linear layers, which store their matrices as (in, out).
_CONV1D = re.compile(r"\.(?:c_attn|c_proj|c_fc|q_attn)$")

# NeMo 1's names of adapters -> (their layers, the axis on which ranks cut the first factor).
_NEMO_LAYERS = read_table(Path(__file__).with_name("nemo_adapters.yaml"))
_NEMO_FACTOR = re.compile(
    r"^(?P<block>.+)\.adapter_layer\.(?P<adapter>\w+)(?:\.(?P<part>q|k|v|gate|up)_adapter)?"
    r"\.linear_(?P<side>in|out)\.weight$"
)
_NEMO_SCHEMES = ("lora", "qlora")
_CORE_FACTOR = re.compile(
    r"^(?P<module>.+)\.adapter(?:\.adapter_(?P<part>q|k|v|gate|up))?"
    r"\.linear_(?P<side>in|out)\.weight$"
)
_GROUPED_EXPERTS = re.compile(r"(?<=\.mlp\.experts)\.linear_fc[12]\.weight$")
_CORE_KINDS = ("LoRA", "CanonicalLoRA")
_CORE_ALPHA = 32  # NeMo 2's default; it saves only what the user set
# The user allows this name to state that adapters of single projections are of Bridge >= 0.3.0.
CANONICAL = "canonical_lora"


class RowBlocks(NamedTuple):
    """Some rows of a matrix: those from `first` to before `end`, in each of `groups` of `size`."""

    groups: int
    size: int
    first: int
    end: int


@dataclass(frozen=True)
class Update:
    """A low-rank update of a matrix (out, in), or of some of its rows: scale * up @ down."""

    down: Pieces  # the first factor (r, in), in pieces along `down_axis`
    up: Pieces  # the second factor (out, r), in pieces along its rows
    scale: float  # multiplies the product
    down_axis: int = 0  # axis on which training ranks cut the first factor
    is_transposed: bool = False  # whether the matrix is stored as (in, out)
    part: RowBlocks | None = None  # the updated rows; None for all
    magnitude: Piece | None = None  # DoRA's norms of the rows of the sum (out,)

    @property
    def rank(self) -> int:
        """The number of columns of the second factor."""
        return self.up[0].shape[1]

    @property
    def stored(self) -> StoredParts:
        """The stored tensors of the factors and the magnitude."""
        pieces = (*self.down, *self.up, *filter(None, [self.magnitude]))
        return tuple(part for piece in pieces for part in piece.stored)

    def first_factor(self, maps: FileMaps) -> Array:
        """Return the whole first factor (r, in) in fp32."""
        import numpy as np

        from export_scripts.numeric.arrays import to_float32

        return np.concatenate([to_float32(piece.load(maps)) for piece in self.down], self.down_axis)

    def second_factor(self, maps: FileMaps, halves: int) -> Array:
        """Return the whole second factor (out, r) in fp32, with each of `halves` contiguous."""
        import numpy as np

        from export_scripts.numeric.arrays import to_float32

        halves = 1 if self.part else halves
        parts = [to_float32(piece.load(maps)) for piece in self.up]
        split = [part.reshape(halves, -1, part.shape[1]) for part in parts]
        return np.concatenate(split, 1).reshape(-1, self.rank)


# (names that a tensor may have in its model, its update or its new value)
_Change = tuple[tuple[str, ...], Update | Pieces]


@dataclass(frozen=True)
class _Adapter:
    """An adapter and its changes; a tensor's new value comes before its update."""

    path: Path
    changes: tuple[_Change, ...]
    files: tuple[Path, ...]
    reader: object = None  # keeps unpacked files alive
    assumption: str = ""

    def describe(self) -> str:
        """Return a remark on the merged adapter."""
        updates = [change for _, change in self.changes if isinstance(change, Update)]
        ranks = sorted({update.rank for update in updates})
        replaced = len(self.changes) - len(updates)
        also = f", {replaced} tensors replaced" if replaced else ""
        return (
            f"took {len(updates)} low-rank updates of {self.path} "
            f"(rank {', '.join(map(str, ranks))}{also})" + self.assumption
        )


@dataclass(frozen=True)
class Sum:
    """A training rank's piece of a matrix plus its share of an update, computed in fp32.

    `share` selects rows (axis 0), of each half of a gated matrix, or columns (axis 1).
    """

    base: Piece
    update: Update
    size: tuple[int, int]  # shape of the whole matrix
    axis: int
    share: slice
    halves: int

    def rows(self) -> Array:
        """Return for each row of the piece the row of the second factor; -1: none."""
        import numpy as np

        rows = np.arange(self.size[0], dtype=np.int32)
        if self.update.part:
            _, size, first, end = self.update.part
            group, inner = np.divmod(rows, size)
            is_in = (first <= inner) & (inner < end)
            rows = np.where(is_in, group * (end - first) + inner - first, -1).astype(np.int32)
        halves = rows.reshape(self.halves, -1)
        return (halves if self.axis else halves[:, self.share]).ravel()

    def columns(self) -> Array:
        """Return for each column of the piece the column of the first factor."""
        import numpy as np

        columns = np.arange(self.size[1], dtype=np.int32)
        return columns[self.share] if self.axis else columns

    def __call__(self, maps: FileMaps) -> Array:
        """Return the sum."""
        import numpy as np

        from export_scripts.numeric.arrays import to_float32

        rows = self.rows()
        up = self.update.second_factor(maps, self.halves)[rows]
        up[rows < 0] = 0
        down = self.update.first_factor(maps)[:, self.columns()]
        delta: Array = (up @ down) * np.float32(self.update.scale)
        values: Array = to_float32(self.base.load(maps))
        total = values + (delta.T if self.update.is_transposed else delta)
        if self.update.magnitude is None:
            return total
        # peft, tuners/lora/variants.py, DoraLinearVariant.merge_safe
        lengths = np.linalg.norm(total, axis=0 if self.update.is_transposed else 1, keepdims=True)
        wanted = to_float32(self.update.magnitude.load(maps)).reshape(lengths.shape)
        scaled: Array = wanted / lengths * total
        return scaled

    @property
    def piece(self) -> ComputedPiece:
        """The sum as a piece of a tensor."""
        return ComputedPiece(
            "fp32", self.base.shape, (*self.base.stored, *self.update.stored), self
        )


def with_adapters(
    reader: CheckpointReader,
    paths: Sequence[Path],
    scratch_dir: Path | None,
    is_allowed: IsAllowed = lambda _: False,
) -> CheckpointReader:
    """Return a checkpoint with adapters merged into it, in order; no values are read yet.

    Gzip archives are unpacked in `scratch_dir` while the reader is in use; `is_allowed` says
    whether the user allows a setting that would be refused.

    Raises:
        CheckpointMismatchError: An adapter cannot be merged; every reason is listed.
        ValueError: A path is not an adapter.
    """
    if not paths:
        return reader
    tensors = dict(reader.tensors)
    problems = []
    adapters = []
    for path in paths:
        try:
            adapter = _open_adapter(path, reader, scratch_dir, is_allowed)
        except CheckpointMismatchError as error:
            problems += error.problems
            continue
        adapters.append(adapter)
        problems += _apply(adapter, tensors, reader)
    refuse(listed(problems))
    files = (*reader.files, *(file for adapter in adapters for file in adapter.files))
    return dataclasses.replace(
        reader,
        tensors=tensors,
        files=tuple(dict.fromkeys(files)),
        remarks=(*reader.remarks, *(adapter.describe() for adapter in adapters)),
        keepalive=(*reader.keepalive, *adapters),
    )


def _apply(adapter: _Adapter, tensors: Tensors, reader: CheckpointReader) -> list[str]:
    """Apply an adapter's changes to a model's tensors; return the problems."""
    problems = []
    unknown = []
    done = set()
    for names, change in adapter.changes:
        part = change.part if isinstance(change, Update) else None
        key = _matching_key(tensors, names)
        if key is None:
            unknown.append(names[0])
            continue
        if (key, type(change), part) in done:
            problems.append(
                f"{adapter.path} changes {key} twice, once as {names[0]}: "
                "expected one change of each matrix"
            )
            continue
        done.add((key, type(change), part))
        old = tensors[key]
        if isinstance(change, tuple):
            if [piece.shape for piece in old] != [piece.shape for piece in change]:
                problems.append(
                    f"{adapter.path}: {key} is {_shapes(change)}, the model's is {_shapes(old)}; "
                    "if training added tokens, save the model after resize_token_embeddings and "
                    "convert that"
                )
            tensors[key] = change
        elif merged := _with_update(key, tensors, change):
            tensors[key] = merged
        else:
            problems.append(
                f"{adapter.path}: {key} is {_shapes(old)}, the adapter's factors are "
                f"{_shapes(change.down)} and {_shapes(change.up)}; expected factors for this model"
            )
    heads = [name for name in unknown if name.endswith(_HEADS)]
    tied = _tied_tables({key for key, *_ in done}.union(heads), reader)
    if others := [name for name in dict.fromkeys(unknown) if name not in tied]:
        problems.append(
            f"{adapter.path} changes {first_names(others)}, which the model does not have: "
            "expected an adapter of this model, in its format"
        )
    return problems + [
        f"{adapter.path} changes {key}, which the model uses as embedding and as head, but "
        "training changed only one of them: save the model with a separate head "
        "(tie_word_embeddings = false, lm_head.weight a copy of the embedding), and merge into that"
        for key in tied
    ]


def _matching_key(keys: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the key that is one of the names, or the only one that differs by a prefix."""
    for name in names:
        if name in keys:
            return name
        found = [key for key in keys if key.endswith(f".{name}") or name.endswith(f".{key}")]
        if len(found) == 1:
            return found[0]
    return None


def _shapes(pieces: Sequence[Piece]) -> str:
    return " + ".join(str(list(piece.shape)) for piece in pieces)


def _tied_tables(changed: Iterable[str], reader: CheckpointReader) -> list[str]:
    """Return the changed tensors that are one use of an embedding which is also the head.

    PEFT trains one and merges into both.
    """
    has_head = any(key.endswith(_HEADS) for key in reader.tensors)
    if reader.format != "huggingface" or not reader.config.get("tie_word_embeddings", not has_head):
        return []
    return sorted(key for key in changed if key.endswith(TIED_TABLES))


def _with_update(key: str, tensors: Tensors, update: Update) -> Pieces | None:
    """Return a matrix's pieces with an update added, or None if it does not fit."""
    pieces = tensors[key]
    every = (*pieces, *update.down, *update.up)
    if any(len(p.shape) != 2 or p.dtype not in FLOATING_TYPES for p in every):
        return None
    rank = _size(update.down, 0, cut=update.down_axis == 0)
    columns = _size(update.down, 1, cut=update.down_axis == 1)
    rows = _size(update.up, 0, cut=True)
    if None in (rank, rows, columns) or {p.shape[1] for p in update.up} != {rank}:
        return None
    if (part := update.part) is not None:
        if rows != part.groups * (part.end - part.first):
            return None
        rows = part.groups * part.size
    size = (rows or 0, columns or 0)
    if update.magnitude and (update.magnitude.shape != size[:1] or len(pieces) != 1):
        return None
    if update.is_transposed:
        fits = [p.shape for p in pieces] == [size[::-1]]
        return (Sum(pieces[0], update, size, 0, slice(rows), 1).piece,) if fits else None
    for axis in (0, 1):
        sums = (_size(pieces, 0, cut=axis == 0), _size(pieces, 1, cut=axis == 1))
        halves = 2 if axis == 0 and _is_gated(key, tensors) else 1
        halved = pieces if part else (*pieces, *update.up)
        if sums == size and not any(piece.shape[0] % halves for piece in halved):
            sizes = [piece.shape[axis] // halves for piece in pieces]
            return tuple(
                Sum(piece, update, size, axis, slice(end - size_of_piece, end), halves).piece
                for piece, size_of_piece, end in zip(
                    pieces, sizes, itertools.accumulate(sizes), strict=True
                )
            )
    return None


def _size(pieces: Sequence[Piece], axis: int, *, cut: bool) -> int | None:
    """Return the size of a tensor on an axis from its pieces; None if they differ."""
    sizes = [piece.shape[axis] for piece in pieces]
    if cut:
        return sum(sizes)
    return sizes[0] if len(set(sizes)) == 1 else None


def _is_gated(key: str, tensors: Tensors) -> bool:
    """Return whether a matrix holds both halves of a gated layer."""
    if not key.endswith(_GATED):
        return False
    following = tensors.get(key.removesuffix(_GATED) + _FOLLOWING, ())
    rows = rows_of(tensors[key])
    return rows == 2 * sum(piece.shape[1] for piece in following if len(piece.shape) == 2)


def _open_adapter(
    path: Path, base: CheckpointReader, scratch_dir: Path | None, is_allowed: IsAllowed
) -> _Adapter:
    """Return an adapter of the model `base`: a folder of PEFT, or a checkpoint of a trainer.

    Raises:
        CheckpointMismatchError: The adapter is damaged, or cannot be merged.
        ValueError: The path is not an adapter.
    """
    # AutoModel saves an adapter in model/.
    for folder in (path, path / "model"):
        if (folder / PEFT_CONFIG).is_file():
            return _open_peft(folder, base)
    if path.is_dir() and any(path.glob("adapter_model.*")):
        raise ValueError(
            f"{path} lacks {PEFT_CONFIG}, which states the adapter's scale: copy it, "
            "or write it with peft_type, r and lora_alpha"
        )
    own_base = None if recognise_format(path) in ("bridge", "torch_dcp") else base
    reader = open_checkpoint(path, base=own_base, scratch_dir=scratch_dir)
    if own := _own_factors(reader):
        return _own_adapter(reader, own, base)
    problems: list[str] = []
    alpha = _alpha(path, reader, problems)
    # (names that a matrix may have, axis on which training ranks cut its first factor, part of its
    # rows) -> side -> key of the factor.
    found: dict[tuple[tuple[str, ...], int, str | None], dict[str, str]] = {}
    unknown = []
    names: tuple[str, ...]
    for key in reader.tensors:
        if match := _CORE_FACTOR.match(key):
            names, axis = (f"{match['module']}.weight",), 0
        elif (match := _NEMO_FACTOR.match(key)) and match["adapter"] in _NEMO_LAYERS:
            layers, axis = _NEMO_LAYERS[match["adapter"]]
            names = tuple(f"{match['block']}.{layer}.weight" for layer in layers)
        else:
            unknown.append(key)
            continue
        found.setdefault((names, axis, match["part"]), {})[match["side"]] = key
    if unknown:
        problems.append(f"{path} holds {first_names(unknown)}, no factors of LoRA")
    named = {" ".join(filter(None, (names[0], part))): f for (names, _, part), f in found.items()}
    problems += _incomplete(path, named, "in", "out")
    if not found and not problems:
        problems.append(f"{path} has no factors of LoRA; expected an adapter")
    refuse(listed(problems))
    changes = []
    for (names, axis, part), sides in found.items():
        down, up = (reader.tensors[sides[side]] for side in ("in", "out"))
        rank = up[0].shape[-1] if up[0].shape else 0
        scale = alpha / rank if rank else 0.0
        rows = rows_of(up)
        blocks = _row_blocks(part, rows, base, reader, is_allowed, problems) if part else None
        update = Update(down, up, scale, axis, part=blocks)
        changes += _expert_updates(names, update) or [(names, update)]
    refuse(listed(list(dict.fromkeys(problems))))
    return _Adapter(path, tuple(changes), reader.files, reader)


def _expert_updates(names: Sequence[str], update: Update) -> list[_Change]:
    """Return an update for each expert if the factors are stacked, as Megatron Bridge does."""
    factors = (*update.down, *update.up)
    counts = {piece.shape[0] for piece in factors if len(piece.shape) == 3}
    is_whole = len(factors) == 2 and all(len(piece.shape) == 3 for piece in factors)
    if not (is_whole and len(counts) == 1 and _GROUPED_EXPERTS.search(names[0])):
        return []
    down, up = map(chunked, factors)
    return [
        (
            tuple(_GROUPED_EXPERTS.sub(rf".local_experts.{number}\g<0>", name) for name in names),
            dataclasses.replace(
                update, down=down.select(number).pieces, up=up.select(number).pieces
            ),
        )
        for number in range(*counts)
    ]


def _row_blocks(
    part: str,
    rows: int,
    base: CheckpointReader,
    adapter: CheckpointReader,
    is_allowed: IsAllowed,
    problems: list[str],
) -> RowBlocks:
    """Return the rows of a matrix that an adapter of a part of it, with `rows`, updates.

    The matrix's rows are grouped by heads. NeMo 2, and Megatron Bridge before 0.3.0 (its pull
    request 1818), add all queries, then all keys and all values of a training rank to them in this
    order; NeMo 1 and newer releases of Bridge add each to its own rows.
    """
    if part in ("gate", "up"):
        return RowBlocks(1, 2 * rows, *((0, rows) if part == "gate" else (rows, 2 * rows)))
    settings = base.config
    heads: Any = settings.get("num_attention_heads")
    groups = settings.get("num_query_groups") or heads
    ranks = adapter.config.get("tensor_model_parallel_size") or 1
    if settings.get("group_query_attention") is False:
        groups = heads
    counts: Mapping[str, int] = {"q": heads, "k": groups, "v": groups}
    if not all(is_count(n, 1) for n in (heads, groups, ranks)) or rows % counts[part]:
        problems.append(
            f"{adapter.path}: {rows} rows of an adapter of {part} do not fit {heads!r:.20} heads "
            f"in {groups!r:.20} groups of {base.path} on {ranks!r:.20} ranks"
        )
        return RowBlocks(1, rows, 0, rows)
    if adapter.format == "bridge" and groups > 1 and not is_allowed(CANONICAL):
        problems.append(
            f"{adapter.path} has separate adapters of queries, keys and values, which Megatron "
            "Bridge before 0.3.0 added to rows in another order; if a newer release trained it, "
            f"pass --allow-setting {CANONICAL}"
        )
    blocks = ranks if adapter.format == "nemo2" else groups
    size = rows // counts[part]  # rows per head
    ends = [0, *itertools.accumulate(size * counts[part_name] // blocks for part_name in "qkv")]
    number = "qkv".index(part)
    return RowBlocks(blocks, ends[-1], ends[number], ends[number + 1])


def _incomplete(path: Path, factors: Mapping[str, Table], *sides: str) -> list[str]:
    names = [name for name, found in factors.items() if set(found) != set(sides)]
    expected = ", ".join(sides)
    return [f"{path}: {first_names(names)}: expected each of {expected}"] if names else []


def _number(value: Any, what: str, problems: list[str]) -> float:
    """Return a finite number, or 1.0 after adding a problem."""
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    problems.append(f"{what} = {value!r:.100} is not a number")
    return 1.0


def _table(value: Any) -> Table:
    return value if isinstance(value, Mapping) else {}


def _alpha(path: Path, reader: CheckpointReader, problems: list[str]) -> float:
    """Return the alpha (scale times rank) of an adapter of NeMo or Megatron Bridge."""
    settings = _table(reader.config.get("peft"))
    if reader.format != "nemo":
        kind = last_name(settings) or "none"
        if kind not in _CORE_KINDS:
            problems.append(f"{path} is trained with {kind}; expected {' or '.join(_CORE_KINDS)}")
        return _number(settings.get("alpha", _CORE_ALPHA), f"{path}: alpha", problems)
    tuning = _table(settings.get("lora_tuning"))
    if (scheme := settings.get("peft_scheme")) not in _NEMO_SCHEMES:
        problems.append(f"{path}: peft.peft_scheme = {scheme!r}; expected lora")
    if tuning.get("weight_tying"):
        problems.append(f"{path}: peft.lora_tuning.weight_tying = true is not supported")
    # Without alpha, the scale is 1.
    alpha = tuning.get("adapter_dim") if tuning.get("alpha") is None else tuning["alpha"]
    if alpha is None and not problems:
        problems.append(f"{path}: peft.lora_tuning states neither alpha nor adapter_dim")
    return 1.0 if alpha is None else _number(alpha, f"{path}: peft.lora_tuning.alpha", problems)


def _open_peft(path: Path, base: CheckpointReader) -> _Adapter:
    where = path / PEFT_CONFIG
    config = json_file(where)
    names = (TORCHTUNE_WEIGHTS, *_PEFT_WEIGHTS)
    weights = next((path / name for name in names if (path / name).is_file()), None)
    if weights is None:
        problems = peft_problems(config, where)
        problems.append(f"{path} has no weights; expected {' or '.join(_PEFT_WEIGHTS)}")
        raise CheckpointMismatchError(listed(problems))
    if (path / _MIXLORA_WEIGHTS).is_file():
        raise CheckpointMismatchError(
            f"{path / _MIXLORA_WEIGHTS} makes each MLP a mixture of LoRA experts, which cannot be "
            "merged: serve the model with axolotl"
        )
    stored: Mapping[str, Piece] = index_tensors(weights)
    if weights.name == TORCHTUNE_WEIGHTS:
        theirs = {name: (piece,) for name, piece in stored.items()}
        ours = in_huggingface_names(dataclasses.replace(base, tensors=theirs), "torchtune").tensors
        stored = {name: piece for name, (piece,) in ours.items()}
        config = {**config, "use_dora": _has_magnitudes(stored)}
    elif config.keys() <= _TORCHTUNE_SETTINGS and (
        base.config.get("model_type") == "qwen2" or _has_magnitudes(stored)
    ):
        raise CheckpointMismatchError(
            f"{where} only has settings that torchtune writes, which stores rows of a Qwen2's or "
            f"DoRA's adapter in another order: copy its {TORCHTUNE_WEIGHTS}, too; if another "
            'program wrote it, add "bias": "none"'
        )
    return _Adapter(path, tuple(_peft_changes(config, where, stored, base)), (where, weights))


def _has_magnitudes(names: Iterable[str]) -> bool:
    return any("lora_magnitude" in name for name in names)


def with_own_adapter(reader: CheckpointReader) -> CheckpointReader:
    """Return a model that was saved in PEFT's wrapper, with its adapter merged.

    Trainers save such models with all ranks' parts; a file nearby states the adapter's scale.

    Raises:
        CheckpointMismatchError: The model or that file is missing, or the adapter cannot be merged.
    """
    own = _own_factors(reader)
    if not own:
        return reader
    names = {key: key.removeprefix(_PEFT_ROOT) for key in reader.tensors}
    plain = {
        _PEFT_KEPT.sub(".", name): reader.tensors[key]
        for key, name in names.items()
        if key not in own
    }
    factors = filter(None, map(_PEFT_FACTOR.match, names.values()))
    if not any(f"{match['module']}.weight" in plain for match in factors):
        raise CheckpointMismatchError(
            f"{reader.path} is an adapter without its model: convert its model, and name this as "
            "its adapter (--lora, convert.lora_checkpoints)"
        )
    adapter = _own_adapter(reader, own, reader)
    merged = dataclasses.replace(reader, tensors=plain)
    refuse(listed(_apply(adapter, plain, merged)))
    return dataclasses.replace(
        merged,
        files=adapter.files,
        remarks=(*reader.remarks, adapter.describe()),
    )


def _own_factors(reader: CheckpointReader) -> set[str]:
    """Return the names of what PEFT has trained among a trainer's tensors."""
    own = {key for key in reader.tensors if _PEFT_FACTOR.match(key.removeprefix(_PEFT_ROOT))}
    return own | {key for key in reader.tensors if own and _PEFT_TRAINED in key}


def _own_adapter(reader: CheckpointReader, own: set[str], base: CheckpointReader) -> _Adapter:
    """Return the adapter that a trainer's checkpoint holds; a file nearby states its scale."""
    folder = reader.files[-1].parent
    places = [
        place / name for place in (reader.home, folder, folder.parent) for name in _PEFT_SCALES
    ]
    where = next((file for file in places if file.is_file()), None)
    if where is None:
        raise CheckpointMismatchError(
            f"{reader.path} holds an adapter that is not merged ({first_names(sorted(own))}), but "
            f"no {PEFT_CONFIG}, which states its scale: copy it into {folder}, or write it with "
            "peft_type, r and lora_alpha"
        )
    config = {"peft_type": "LORA", **json_file(where)}
    stored = {key: piece for key in own for piece in reader.tensors[key]}
    changes = tuple(_peft_changes(config, where, stored, base))
    assumed = "" if where.name == PEFT_CONFIG else "; it does not state use_rslora: taken as off"
    files = tuple(dict.fromkeys((*reader.files, where)))
    return _Adapter(where, changes, files, reader, assumed)


def _peft_changes(
    config: Table, where: Path, stored: Mapping[str, Piece], base: CheckpointReader
) -> list[_Change]:
    """Return the changes of a PEFT adapter, from its configuration and its tensors."""
    refuse(listed(peft_problems(config, where)))
    problems: list[str] = []
    factors: dict[str, NamedPieces] = {}
    embeddings: set[str] = set()
    replaced: Tensors = {}
    roles: dict[tuple[str, str], str] = {}
    source = next((tensor.stored[0].path for tensor in stored.values()), where.parent)
    for name, tensor in stored.items():
        if _PEFT_ORIGINAL in name or (
            _PEFT_TRAINED in name and name.replace(_PEFT_TRAINED, ".") in stored
        ):
            continue
        bare = name.removeprefix(_PEFT_ROOT)
        if match := _PEFT_FACTOR.match(bare):
            role = (match["module"], match["side"])
            factors.setdefault(match["module"], {})[match["side"]] = tensor
            embeddings |= {match["module"]} if match["embedding"] else set()
        else:
            role = (_PEFT_WRAPPERS.sub("", bare), "")
            replaced[role[0]] = (tensor,)
        if (other := roles.setdefault(role, name)) != name:
            problems.append(f"{source}: {other} and {name} are two values of one tensor")
    sides = ("A", "B", *(["magnitude_vector"] if config.get("use_dora") else []))
    problems += _incomplete(where.parent, factors, *sides)
    if not factors and not replaced:
        problems.append(f"{source} holds no tensors")
    changes: list[_Change] = [((name,), pieces) for name, pieces in replaced.items()]
    is_gpt2 = base.config.get("model_type") == "gpt2"
    for module, found in factors.items():
        if {"A", "B"} <= found.keys():
            scale = _peft_scale(config, module, found["B"], where, problems)
            is_conv1d = is_gpt2 and _CONV1D.search(module) is not None
            update = Update(
                (found["A"],),
                (found["B"],),
                scale,
                is_transposed=module in embeddings or is_conv1d,
                magnitude=found.get("magnitude_vector"),
            )
            changes.append(((f"{module}.weight",), update))
    refuse(listed(problems))
    return changes


def peft_problems(config: Table, where: Path) -> list[str]:
    """Return a problem for each setting of PEFT's with which an adapter cannot be merged."""
    problems = []
    if (kind := config.get("peft_type")) != "LORA":
        return [f"{where}: peft_type = {kind!r}; expected LORA"]
    remedy = "load it with peft, merge_and_unload, and convert what save_pretrained leaves"
    start = config.get("init_lora_weights", True)
    if not any(start is value or start == value for value in _PEFT_INITS):
        problems.append(
            f"{where}: init_lora_weights = {start!r} changes the model's own weights: {remedy}"
        )
    problems += [
        f"{where}: {key} = {value!r:.100} is not supported: {remedy}"
        for key, value in config.items()
        if value and key not in known_settings("peft")
    ]
    for key in ("rank_pattern", "alpha_pattern"):
        table = config.get(key) or {}
        if not isinstance(table, Mapping):
            problems.append(f"{where}: {key} is not a table")
            continue
        problems += [
            f"{where}: {key}: {pattern!r:.100} is not a pattern of modules; name them one by one"
            for pattern in table
            if not _is_pattern(pattern)
        ]
    return problems


def _is_pattern(pattern: str) -> bool:
    repeated = len(re.findall(r"[*+{]|(?<!\()\?", pattern))
    if len(pattern) > _MAX_PATTERN or repeated > _MAX_REPEATED:
        return False
    # A repeated group, or global flags, which are only valid at the beginning of an expression.
    if re.search(r"\)[*+{]|\(\?[aiLmsux]+\)", pattern):
        return False
    try:
        re.compile(pattern)  # alone: it must not close a group of _MODULE
        return re.compile(_MODULE.format(pattern)).groups <= _MAX_GROUPS + 2
    except re.error:
        return False


def _peft_scale(config: Table, module: str, up: Piece, where: Path, problems: list[str]) -> float:
    """Return the scale of a module's update; patterns override the general rank and alpha."""
    rank = up.shape[-1] if up.shape else 0
    stated = _module_value(config, "rank_pattern", module, config.get("r"))
    if stated != rank or not rank:
        problems.append(f"{where}: r = {stated!r}, but the factors of {module} are of rank {rank}")
        return 1.0
    alpha = _module_value(config, "alpha_pattern", module, config.get("lora_alpha"))
    alpha = _number(alpha, f"{where}: lora_alpha of {module}", problems)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _module_value(config: Table, table: str, module: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches a module's name or its end."""
    for pattern, value in (config.get(table) or {}).items():
        if re.match(_MODULE.format(pattern), module):
            return value
    return usual
