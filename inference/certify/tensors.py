"""Compare every stored tensor of a folder with what its source says it should hold, block by block.

Shapes: flat values in C order; a row is what follows one index of the first axis.
"""

import concurrent.futures
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from export_scripts.checkpoints.base import FLOATING_TYPES, Piece
from export_scripts.checkpoints.huggingface import TIED_TABLES
from export_scripts.conversion.lora import Sum
from export_scripts.conversion.sharding import file_chunks
from export_scripts.conversion.tensor_plan import WrittenTensor, rank_window, whole_window
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import Adjusted, Compute, Parts, taken
from export_scripts.numeric.arrays import DTYPES, Array, store, to_float32
from export_scripts.numeric.dtypes import item_size
from foundations.errors import CheckpointMismatchError
from foundations.files.checksum import crc32
from inference.certify.experts import expert_layers, order_of_rows
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Part, Remark, Status
from inference.certify.pair import UNREAD, Pair, stored_type

# Calibration moves errors from one value to another: how far from 1 the factor of a group of values
# may be, and that of a whole block, and how large the mean of a group's errors next to their
# deviation. GPTQ of 4 bits leaves 0.05, 0.007 and 0.4; zero points off by one have a mean of 3.
_MOST_FACTOR, _MOST_SCALE, _MOST_BIAS, _GROUP = 0.2, 0.04, 0.75, 128
_ORDER = "the order of experts"
_WORKERS = 2
_MOST_MOVED_VALUES = 1 << 26  # columns are looked for in tensors up to this size
_RANGES_SHOWN = 4

Progress = Callable[[int, int], None]

# State of a tensor that is not equal -> its status, and the words of the verdict.
_STATES: Mapping[str, tuple[Status, str]] = {
    "rounded": (UP_TO, "rounding to {}"),
    "one step": (UP_TO, "one unit in the last place of {}"),
    "dequantised": (UP_TO, "the rounding of quantised weights"),
    "calibrated": (UP_TO, "what calibration moves in quantised weights"),
    "merged": (UP_TO, "the rounding of merged adapters"),
    "padded": (UP_TO, "padding rows of zeros"),
    "cut": (UP_TO, "padding rows left out"),
    "zero": (UP_TO, "biases of zeros"),
    **dict.fromkeys(("changed", "missing", "extra"), (DIFFERS, "")),
    "not comparable": (NOT_COMPUTED, ""),
}


@dataclass(frozen=True)
class TensorRecord:
    """The comparison of one stored tensor, or one rank's file of it.

    Attributes:
        state: equal, ignored (no part of the model), or one of `_STATES`.
        largest_error: from the source's value.
        checksum: CRC-32 of the bytes that it should hold.
        reason: why it has that state, where that is known.
        places: where it differs, and by how much.
    """

    key: str
    state: str
    data_type: str = ""
    shape: tuple[int, ...] = ()
    largest_error: float = 0.0
    checksum: int = 0
    reason: str = ""
    places: str = ""


@dataclass(frozen=True)
class _Rounding:
    """Errors that the stored type explains: the sum of three bounds.

    Attributes:
        method: of the quantisation or of the merge, for people; empty for plain values.
        relative: share of the value.
        least: absolute.
        of_largest: share of the largest value of its row (`by_row`) or of those near it.
        state: of a tensor with such errors; those of a calibrated one move from value to value.
    """

    method: str = ""
    relative: float = 0.0
    least: float = 0.0
    of_largest: float = 0.0
    by_row: bool = False
    state: str = "dequantised"

    def explains(self, source: Array, value: Array, error: Array, width: int) -> Array:
        """Return which of some flat values are near enough to the source's."""
        size = np.where(np.isfinite(source), np.abs(source), 0)
        largest = size.max(initial=0)
        if self.by_row and len(size) % width == 0:
            largest = np.repeat(size.reshape(-1, width).max(axis=1), width)
        near: Array = error <= size * self.relative + self.least + largest * self.of_largest
        return near & ~_off_groups(source, value) if self.state == "calibrated" else near


# One unit in the last place of each type; fp64 is compared as fp32, and fp16 has no smaller steps
# than 2^-24.
_STEPS = {
    "fp64": _Rounding(relative=2.0**-23),
    "fp32": _Rounding(relative=2.0**-23),
    "fp16": _Rounding(relative=2.0**-10, least=2.0**-24),
    "bf16": _Rounding(relative=2.0**-7),
}
# Values, their scales and the quotients may each have been rounded to bf16.
_NARROW = 3 * 2.0**-9
_SUMS = 1e-6  # sums of products may round differently on another machine
# e4m3 keeps 3 bits: half a step of a value, with the rounding of what is rounded, and below its
# normal numbers half a step of 2^-9 of 1/448 of the largest.
_FP8 = _Rounding("fp8", relative=2.0**-4 * 1.08, of_largest=2.0**-18)


def _off_groups(source: Array, value: Array) -> Array:
    """Return which values are in a group that is the source's times or plus a number.

    A method that moves errors from one value to another keeps the values together.
    """
    count = len(source) // _GROUP * _GROUP
    mine, theirs = (each[:count].reshape(-1, _GROUP) for each in (source, value))
    products, squares = (mine * theirs).sum(1), (mine * mine).sum(1)
    is_scaled = abs(products.sum() / squares.sum() - 1) > _MOST_SCALE
    factors = products / squares
    errors = theirs - mine
    is_moved = np.abs(errors.mean(1)) > _MOST_BIAS * errors.std(1)
    off = np.repeat(is_scaled | is_moved | (np.abs(factors - 1) > _MOST_FACTOR), _GROUP)
    return np.append(off, np.zeros(len(source) - count, bool))


def _sources(pair: Pair, written: WrittenTensor) -> list[Piece]:
    """Return the pieces of the source that a tensor is made of."""
    reads = (key for item in written.items for key, _ in item.reads)
    return [piece for key in reads for piece in pair.facts.pieces(key)]


@dataclass(frozen=True)
class _Unit:
    """One stored tensor of a pair's folder, or a rank's file of one, and what it should hold."""

    pair: Pair
    key: str
    written: WrittenTensor
    stored: Piece
    shape: tuple[int, ...]  # that it should have
    rank: int = 0  # of a folder of shards

    @property
    def sources(self) -> list[Piece]:
        """The pieces of the source that it is made of."""
        return _sources(self.pair, self.written)

    @property
    def source_keys(self) -> set[str | None]:
        """The names of the source's tensors that it is made of."""
        reads = (key for item in self.written.items for key, _ in item.reads)
        return {self.pair.facts.resolve(key) for key in reads}

    @property
    def width(self) -> int:
        """Values of a row."""
        return max(1, math.prod(self.stored.shape[1:]))

    @property
    def is_table(self) -> bool:
        """Whether its rows are those of tokens, so that a side may have rows of padding."""
        return self.written.key.endswith(TIED_TABLES)

    @property
    def common_rows(self) -> int | None:
        """The count of rows of both sides; None where the shapes do not belong together."""
        found, wanted = self.stored.shape, self.shape
        if found == wanted:
            return found[0] if found else 1
        if found[1:] == wanted[1:] and found and self.is_table:
            return min(found[0], wanted[0])
        return None

    def values(self) -> Array:
        """Return the stored values, flat: a view of the mapped file unless they are computed."""
        return self.stored.load(self.pair.folder.facts.maps).reshape(-1)

    def expected(self, kind: str, count: int) -> Iterator[Array]:
        """Yield the first values that it should hold, flat; each block until the next one."""
        facts, tp_size = self.pair.facts, self.pair.folder.facts.tp_size

        def pieces() -> Iterator[tuple[Parts, Any, str]]:
            last = None
            for item, view in self.written.pieces:
                if item is not last:
                    last, built = item, item.build(facts, self.pair.config)
                if view is None:
                    window = rank_window(built, item.tensor, tp_size, self.rank)
                    yield built, window, kind
                else:
                    parts = taken(built, view)
                    yield parts, whole_window(parts.shape), kind

        for chunk in file_chunks(pieces(), math.prod(self.shape) * item_size(kind)):
            values = np.frombuffer(chunk, DTYPES[kind])[:count]
            count -= len(values)
            yield values

    def matrices(self) -> tuple[Array, Array]:
        """Return what it should hold, and what it holds, by rows."""
        values, kind = self.values(), self.stored.dtype
        blocks = [each.copy() for each in self.expected(kind, len(values))]
        mine, theirs = (each.reshape(-1, self.width) for each in (np.concatenate(blocks), values))
        return mine, theirs

    def roundings(self, types: set[str]) -> Sequence[_Rounding]:
        """Return what its type may explain, the least first; none where bytes are the source's."""
        if self.pair.folder.quantised is not None and len(self.stored.stored) > 1:
            if (kind := stored_type(self.stored)) == "fp8":
                return [_FP8]
            # A folder does not say whether a calibration has chosen its integers.
            bits = int(kind.removeprefix("int"))
            level = 2 / ((1 << bits) - 1)
            own = _Rounding(f"{bits} bits", _NARROW, of_largest=0.52 * level, by_row=True)
            return [own, replace(own, of_largest=2.0 * level, state="calibrated")]
        step = _STEPS.get(self.stored.dtype)
        if step is None:  # integers, such as a buffer of positions
            return []
        if any(isinstance(getattr(each, "compute", None), Sum) for each in self.sources):
            # Some programs round the update, and then the sum.
            size = max(_SUMS, step.relative / 2)
            return [replace(step, method="a merged adapter", of_largest=size, state="merged")]
        if any(isinstance(each.source, (Adjusted, Compute)) for each in self.written.items):
            return [replace(step, of_largest=_SUMS)]
        return [] if types == {self.stored.dtype} else [step]


def _units(pair: Pair) -> Iterator[_Unit | TensorRecord]:
    """Yield what is to be compared, and what cannot be."""
    stored, are_shards = pair.folder.reader.tensors, pair.folder.is_shards
    lacking = [*pair.folder.lacking()]
    for written in pair.tensors:
        tensor = written.items[0].tensor
        if written.key not in stored and not (are_shards and tensor.optional):
            pieces = _sources(pair, written)
            is_zero = written.key not in lacking and _adds_nothing(written.key, pieces, pair.facts)
            yield TensorRecord(written.key, "zero" if is_zero else "missing")
        for rank, piece in enumerate(stored.get(written.key, ())):
            if are_shards:
                yield _Unit(pair, tensor.file_name(rank), written, piece, piece.shape, rank)
            else:
                yield _Unit(pair, written.key, written, piece, written.shape)
    expected = {written.key for written in pair.tensors}
    for key in lacking:
        if key not in expected:
            yield TensorRecord(key, "missing", reason="its own configuration asks for it")
    for key in stored:
        if key not in expected:
            yield _unexpected(pair, key)


def _adds_nothing(key: str, pieces: Sequence[Piece], facts: Facts) -> bool:
    """Return whether a tensor is a bias of zeros, which a side may leave out."""
    return key.endswith(".bias") and not any(each.load(facts.maps).any() for each in pieces)


def _unexpected(pair: Pair, key: str) -> _Unit | TensorRecord:
    """Return a stored tensor that has no counterpart: a copy, nothing of the model, or more."""
    mapping, facts = pair.folder.mapping, pair.folder.facts
    piece = facts.reader.tensors[key][0]
    if pair.folder.is_shards:
        reason = "added to the folder; this source does not hold it"
        return TensorRecord(key, "not comparable", shape=piece.shape, reason=reason)
    if mapping is not None and pair.config is not None:
        is_copy = key in map(facts.resolve, mapping.copies(facts, pair.config))
        is_ignored = mapping.is_ignored(key)
        if is_copy or (is_ignored and key.endswith(TIED_TABLES)):
            for each in pair.tensors:
                if each.key.endswith(TIED_TABLES) and each.shape[1:] == piece.shape[1:]:
                    return _Unit(pair, key, each, piece, each.shape)
        if is_ignored:
            return TensorRecord(key, "ignored", shape=piece.shape)
    if _adds_nothing(key, [piece], facts):
        return TensorRecord(key, "zero", shape=piece.shape, reason="the source has none")
    reason = "the source makes no such tensor"
    return TensorRecord(key, "extra", shape=piece.shape, reason=reason)


@dataclass
class _Differences:
    """Differences of flat values seen so far, and the rows and columns of those not explained.

    Each value is explained by one of the roundings, the least first; `level` is the coarsest that
    one has needed.
    """

    unit: _Unit
    roundings: Sequence[_Rounding]
    level: int = 0
    count: int = 0
    bad: int = 0
    error: float = 0.0
    rows: set[int] = field(default_factory=set)
    columns: tuple[int, int] = (1 << 62, 0)

    def add(self, wide: Array, expected: Array, found: Array, at: int) -> None:
        """Count those of a block that begins at an index; `wide` is `expected`, not rounded."""
        wrong, width = _bits(expected) != _bits(found), self.unit.width
        if wide is expected and not wrong.any():
            return
        with np.errstate(all="ignore"):
            source, value = to_float32(wide), to_float32(found)
            error = np.abs(value - source)
            error[np.isnan(source) & np.isnan(value) | (source == value)] = 0
            error[np.isnan(error)] = np.inf
            bad = wrong | np.isinf(error)
            for level, rounding in enumerate(self.roundings):
                if bad.any():
                    self.level = max(self.level, level)
                    bad &= ~rounding.explains(source, value, error, width)
        self.error = max(self.error, float(error.max(initial=0)))
        self.count += int(wrong.sum())
        if bad.any():
            self.bad += int(bad.sum())
            rows, columns = np.divmod(np.flatnonzero(bad) + at, width)
            self.rows.update(np.unique(rows).tolist())  # of a block of millions of values
            low, high = self.columns
            self.columns = (min(low, int(columns.min())), max(high, int(columns.max())))

    def state(self) -> tuple[str, str]:
        """Return the state of the tensor, and why."""
        rounding = self.roundings[self.level]
        method = rounding.method
        if self.bad:
            return "changed", f"more than the rounding of {method} explains" if method else ""
        if not self.count:
            return ("rounded" if self.error else "equal"), ""
        if not method:
            return "one step", ""
        return rounding.state, f"within the rounding of {method}"

    def places(self, tokens: int | None) -> Iterator[str]:
        """Yield where the tensor differs, and by how much."""
        shape = self.unit.stored.shape
        if self.rows:
            starts = sorted(row for row in self.rows if row - 1 not in self.rows)
            ends = sorted(row for row in self.rows if row + 1 not in self.rows)
            ranges = [f"{low}-{high}" for low, high in zip(starts, ends, strict=True)]
            more = len(ranges) - _RANGES_SHOWN
            where = f"rows {', '.join(ranges[:_RANGES_SHOWN])}"
            where += f" and {more} more ranges" if more > 0 else ""
            where += ", columns {}-{}".format(*self.columns) if len(shape) > 1 else ""
            if self.unit.is_table and tokens is not None and starts[0] >= tokens:
                where += f", all of them padding after the tokenizer's {tokens} tokens"
            yield f"{where} of {list(shape)}"
        if self.error:
            count = f"{self.bad or self.count:,} of {math.prod(shape):,}"
            yield f"{count} values differ, by up to {self.error:.3g}"


def _bits(values: Array) -> Array:
    return values.view(f"u{values.dtype.itemsize}")


def _record(unit: _Unit, tokens: int | None) -> TensorRecord:
    """Compare one unit; rows beyond the tokens of the tokenizer are padding."""
    kind, shape = unit.stored.dtype, unit.stored.shape
    record = TensorRecord(unit.key, "changed", kind, shape)
    rows, types = unit.common_rows, {each.dtype for each in unit.sources}
    if rows is None:
        state = "not comparable" if unit.pair.folder.is_unread else "changed"
        reason = f"its shape is {list(shape)}, not {list(unit.shape)}"
        return replace(record, state=state, reason=reason)
    if not {kind, *types} <= FLOATING_TYPES and types != {kind}:
        return replace(
            record, state="not comparable", reason=f"{kind} of {', '.join(sorted(types))}"
        )
    try:
        return _compared(unit, record, rows, unit.roundings(types), tokens)
    except CheckpointMismatchError as error:
        return replace(record, state="not comparable", reason=str(error))


def _compared(
    unit: _Unit,
    record: TensorRecord,
    rows: int,
    roundings: Sequence[_Rounding],
    tokens: int | None,
) -> TensorRecord:
    kind, values = unit.stored.dtype, unit.values()
    seen = _Differences(unit, roundings or [_Rounding()])
    count = rows * unit.width
    zeros = np.zeros(max(0, len(values) - count), DTYPES[kind])  # rows of padding
    checksum = at = 0
    for wide in itertools.chain(unit.expected("fp32" if roundings else kind, count), (zeros,)):
        expected = wide if wide.dtype == DTYPES[kind] else _stored(wide, kind)
        checksum = crc32(expected.tobytes(), checksum)
        seen.add(wide, expected, values[at : at + len(wide)], at)
        at += len(wide)
    for maps, pieces in (
        (unit.pair.folder.facts.maps, [unit.stored]),
        (unit.pair.facts.maps, unit.sources),
    ):
        for stored in itertools.chain.from_iterable(each.stored for each in pieces):
            maps.forget(stored)
    state, reason = seen.state()
    if state == "changed":
        reason = "padding rows are not zero" if min(seen.rows) >= rows else reason
    elif len(zeros):
        state, reason = "padded", f"{len(zeros) // unit.width} zero rows after the source's {rows}"
    elif unit.shape and rows < unit.shape[0]:
        state, reason = _cut(f"the source's rows from {rows} to {unit.shape[0]}", rows, tokens)
    return replace(
        record,
        state=state,
        largest_error=seen.error,
        checksum=checksum,
        reason=reason,
        places="; ".join(seen.places(tokens)),
    )


def _cut(gone: str, rows: int, tokens: int | None) -> tuple[str, str]:
    """Return what it means that the folder lacks the source's last rows."""
    if tokens is None or tokens > rows:
        return "changed", f"{gone} are left out, and the tokenizer may have tokens for them"
    return "cut", f"{gone} are left out; the tokenizer has {tokens} tokens"


def _explanation(unit: _Unit, record: TensorRecord, known: Mapping[tuple[Any, ...], str]) -> str:
    """Return what a changed tensor holds instead, as far as that can be seen."""
    values = unit.values()
    other = known.get((record.shape, record.data_type, crc32(values.tobytes(), 0)), unit.key)
    if other != unit.key:
        return f"it holds the values of {other}"
    if record.reason or len(values) > _MOST_MOVED_VALUES:
        return record.reason
    mine, theirs = unit.matrices()
    theirs = theirs[: len(mine)]  # without rows of padding
    if _row_sums(mine) == _row_sums(theirs):
        return "its rows are in another order"
    if _row_sums(mine.T) == _row_sums(theirs.T):
        return "its columns are in another order"
    if np.array_equal(_bits(mine).T, _bits(theirs)):
        return "it is transposed"
    for kind in ("fp16", "bf16"):
        rounded = (
            _stored(_stored(wide, kind), record.data_type)
            for wide in unit.expected("fp32", len(values))
        )
        if np.array_equal(np.concatenate([*map(_bits, rounded)]), _bits(values)):
            return f"it holds the source's values as {kind} rounds them"
    rows = (_bits(mine) != _bits(theirs)).any(1)
    return _arithmetic(to_float32(mine[rows]), to_float32(theirs[rows]))


def _stored(values: Array, kind: str) -> Array:
    """Return values as a type rounds them."""
    found = np.empty(values.shape, DTYPES[kind])
    store(found, values)
    return found


def _row_sums(matrix: Array) -> list[int]:
    return sorted(crc32(row.tobytes(), 0) for row in matrix)


def _arithmetic(mine: Array, theirs: Array) -> str:
    """Return by what number all values were multiplied or moved, if it is one."""
    with np.errstate(all="ignore"):
        for words, numbers, none in (("times", theirs / mine, 1), ("plus", theirs - mine, 0)):
            each = numbers[np.isfinite(numbers)]
            number = np.median(each) if len(each) > 1 else none
            if abs(number - none) > 0.01 and np.ptp(each) <= 0.01 * abs(number):
                return f"its values are the source's {words} {number:.4g}"
    return ""


def compare_tensors(
    pair: Pair,
    *,
    tokens: int | None,
    done: Mapping[str, TensorRecord],
    keep: Callable[[TensorRecord], None],
    progress: Progress = lambda *_: None,
) -> Part:
    """Compare every tensor of a folder.

    Args:
        pair: both sides.
        tokens: of the tokenizer; None where it is not known.
        done: records of an earlier run, by key.
        keep: called with each new record, one call at a time.
        progress: called with bytes done and in total.
    """
    every = {each.key: each for each in _units(pair)}
    if pair.folder.is_unread:  # names are those of its method
        for key, each in every.items():
            if isinstance(each, TensorRecord) and each.state in ("missing", "extra"):
                every[key] = replace(each, state="not comparable")
    units = {key: each for key, each in every.items() if isinstance(each, _Unit)}
    records = {key: each for key, each in every.items() if isinstance(each, TensorRecord)}
    records |= {key: done[key] for key in units if key in done}
    total = sum(each.stored.span_bytes for each in units.values())
    with concurrent.futures.ThreadPoolExecutor(_WORKERS, "certify") as pool:
        waiting = [
            pool.submit(_record, each, tokens) for key, each in units.items() if key not in records
        ]
        left = sum(each.stored.span_bytes for key, each in units.items() if key not in records)
        for future in concurrent.futures.as_completed(waiting):
            record = future.result()
            keep(record)
            records[record.key] = record
            left -= units[record.key].stored.span_bytes
            progress(total - left, total)
    orders = [*_reordered_experts(pair, units, records, tokens)]
    known = {(r.shape, r.data_type, r.checksum): r.key for r in records.values() if r.checksum}
    findings = [*pair.folder.findings, *pair.findings, *orders]
    ordered = [records[key] for key in every]
    for record in ordered:
        if record.state in _STATES:
            is_seen = record.state == "changed"
            why = _explanation(units[record.key], record, known) if is_seen else record.reason
            status, _ = _STATES[record.state]
            detail = "; ".join(filter(None, (why, record.places)))
            findings.append(Remark(status, record.state, record.key, detail))
    compared = f"{len(ordered)} tensors, {total:,} bytes"
    rows = [asdict(each) for each in ordered]
    up_to = [*_up_to(ordered), *([_ORDER] if orders else [])]
    if files := ", ".join(each.where for each in findings if each.kind == UNREAD):
        up_to.append(f"files that no part compares ({files})")
    return Part("tensors", compared, tuple(findings), tuple(up_to), rows)


def _reordered_experts(
    pair: Pair,
    units: Mapping[str, _Unit],
    records: dict[str, TensorRecord],
    tokens: int | None,
) -> Iterator[Remark]:
    """Yield the layers whose experts lie in another order together with the router's rows.

    Their records become those of a comparison in that order, if nothing in it differs.
    """
    readers: dict[str | None, list[_Unit]] = {}
    for unit in units.values():
        for name in unit.source_keys:
            readers.setdefault(name, []).append(unit)
    for layer in expert_layers(pair):
        router, *_ = readers.get(layer.router, [None])
        if router is None or records[router.key].state != "changed":
            continue
        own = [each for name in layer.keys for each in readers.get(name, ())]
        order = order_of_rows(*router.matrices())
        other = None if order is None else layer.reordered(order)
        if other is None:
            continue
        found = {each.key: _record(replace(each, pair=other), tokens) for each in own}
        statuses = {_STATES[each.state][0] for each in found.values() if each.state in _STATES}
        if statuses <= {UP_TO}:
            records |= found
            yield Remark(UP_TO, "another order", router.key, "its layer's experts are in the same")


def _up_to(records: list[TensorRecord]) -> Iterator[str]:
    for state, (status, words) in _STATES.items():
        found = [each for each in records if each.state == state]
        if found and status == UP_TO:
            kinds = ", ".join(sorted({each.data_type for each in found}))
            error = max(each.largest_error for each in found)
            yield words.format(kinds) + (f" (largest error {error:.3g})" if error else "")
