"""Compare every stored tensor of a folder with what its source says it should hold, block by block.

Shapes: flat values in C order; a row is what follows one index of the first axis.
"""

import concurrent.futures
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from export_scripts.checkpoints.base import FLOATING_TYPES, Piece
from export_scripts.checkpoints.huggingface import TIED_TABLES
from export_scripts.conversion.sharding import ValueRange, file_chunks
from export_scripts.conversion.tensor_plan import WrittenTensor, rank_window, whole_window
from export_scripts.errors import CheckpointMismatchError
from export_scripts.families.mapping.sources import Adjusted, Compute, Parts, taken
from export_scripts.files.checksum import crc32
from export_scripts.numeric.arrays import DTYPES, Array, store, to_float32
from export_scripts.numeric.dtypes import item_size
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Part, Remark, Status
from inference.certify.pair import Pair

# One unit in the last place, of a value; fp16 has no smaller steps than the second.
_STEPS = {"fp32": (2.0**-23, 0.0), "fp16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 0.0)}
_SUMS = 1e-6  # sums of products may round differently on another machine: of the largest value
# e4m3 keeps 3 bits: half a step of a value, with the rounding of what is rounded, and below its
# normal numbers half a step of 2^-9 of 1/448 of the largest.
_FP8 = (2.0**-4 * 1.08, 2.0**-18)
# Methods that move errors from one value to another (awq, gptq): steps of a value, and how far from
# 1 the factor of a group of values is. Rounding to 4 bits alone leaves a factor within 0.03.
_CALIBRATED_STEPS, _MOST_FACTOR, _GROUP = 2.0, 0.2, 128
_CALIBRATED = ("awq", "gptq")
_FLOAT_METHODS = ("fp8", "float-quantized", "naive-quantized")
_WORKERS = 2
_MOST_MOVED_VALUES = 1 << 26  # columns are looked for in tensors up to this size
_RANGES_SHOWN = 4

Progress = Callable[[int, int], None]

# State of a tensor that is not equal -> its status, and the words of the verdict.
_STATES: Mapping[str, tuple[Status, str]] = {
    "rounded": (UP_TO, "rounding to {}"),
    "one step": (UP_TO, "one unit in the last place of {}"),
    "dequantised": (UP_TO, "the rounding of quantised weights"),
    "padded": (UP_TO, "padding rows of zeros"),
    "cut": (UP_TO, "padding rows left out"),
    **dict.fromkeys(("changed", "missing", "extra"), (DIFFERS, "")),
    "not comparable": (NOT_COMPUTED, ""),
}


@dataclass(frozen=True)
class TensorRecord:
    """The comparison of one stored tensor, or one rank's file of it.

    Attributes:
        state: equal, ignored (no part of the model), or one of `_STATES`.
        tensor: its name in the family's layout.
        largest_error: from the source's value.
        checksum: CRC-32 of the bytes that it should hold.
        rows, columns: where it differs: first and end of each range.
    """

    key: str
    state: str
    tensor: str = ""
    data_type: str = ""
    shape: tuple[int, ...] = ()
    values: int = 0
    differing: int = 0
    largest_error: float = 0.0
    checksum: int = 0
    rows: tuple[tuple[int, int], ...] = ()
    columns: tuple[int, int] = (0, 0)
    detail: str = ""


@dataclass(frozen=True)
class _Unit:
    """One stored tensor, or a rank's file of one."""

    key: str
    written: WrittenTensor
    stored: Piece
    shape: tuple[int, ...]  # that it should have
    rank: int = 0  # of a folder of shards

    @property
    def tensor(self) -> str:
        """Its name in the family's layout."""
        return self.written.items[0].tensor.name


@dataclass
class _Tally:
    """Differences seen so far.

    Attributes:
        bound: returns the error of each of some of the source's values that rounding explains.
        factors: whether groups of values have to be the source's times 1, too.
    """

    width: int
    bound: Callable[[Array], Any]
    factors: bool
    differing: int = 0
    bad: int = 0
    error: float = 0.0
    overflows: int = 0
    rows: set[int] = field(default_factory=set)
    columns: tuple[int, int] = (1 << 62, 0)

    def add(self, wide: Array, expected: Array, found: Array, at: int) -> None:
        """Count the differences of flat values that begin at an index.

        `wide` are the values before they were rounded to those `expected`.
        """
        wrong = _bits(expected) != _bits(found)
        if wide is expected and not wrong.any():
            return
        with np.errstate(all="ignore"):
            source, value = to_float32(wide), to_float32(found)
            error = np.abs(value - source)
            error[np.isnan(source) & np.isnan(value) | (source == value)] = 0
            error[np.isnan(error)] = np.inf
            self.overflows += int((np.isfinite(source) & ~np.isfinite(to_float32(expected))).sum())
            bad = wrong & (error > self.bound(source))
            if self.factors:
                bad |= _off_factors(source, value)
        self.error = max(self.error, float(error.max(initial=0)))
        self.differing += int(wrong.sum())
        if bad.any():
            self.bad += int(bad.sum())
            rows, columns = np.divmod(np.flatnonzero(bad) + at, self.width)
            self.rows.update(np.unique(rows).tolist())
            low, high = self.columns
            self.columns = (min(low, int(columns.min())), max(high, int(columns.max()) + 1))


def _off_factors(source: Array, value: Array) -> Array:
    """Return which values are in a group that is the source's times another number than 1.

    A method that moves errors from one value to another keeps the size of the values together.
    """
    count = len(source) // _GROUP * _GROUP
    mine, theirs = (each[:count].reshape(-1, _GROUP) for each in (source, value))
    factors = (mine * theirs).sum(1) / (mine * mine).sum(1)
    off = np.repeat(np.abs(factors - 1) > _MOST_FACTOR, _GROUP)
    return np.append(off, np.zeros(len(source) - count, bool))


def _bits(values: Array) -> Array:
    return values.view(f"u{values.dtype.itemsize}")


def _ranges(rows: set[int]) -> tuple[tuple[int, int], ...]:
    ordered = sorted(rows)
    starts = [row for row in ordered if row - 1 not in rows]
    ends = [row + 1 for row in ordered if row + 1 not in rows]
    return tuple(zip(starts, ends, strict=True))


@dataclass(frozen=True)
class _Comparison:
    """The comparison of one pair."""

    pair: Pair
    tokens: int | None  # of the tokenizer; rows beyond them are padding

    def units(self) -> Iterator[_Unit | TensorRecord]:
        """Yield what is to be compared, and what cannot be."""
        folder, stored = self.pair.folder, self.pair.folder.reader.tensors
        seen: set[str | None] = set()
        for written in self.pair.tensors:
            tensor = written.items[0].tensor
            key = written.key if folder.is_shards else folder.facts.resolve(written.key)
            seen.add(key)
            if key not in stored and not (folder.is_shards and tensor.optional):
                yield TensorRecord(written.key, "missing", tensor.name)
            for rank, piece in enumerate(stored.get(key or "", ())):
                if folder.is_shards:
                    yield _Unit(tensor.file_name(rank), written, piece, piece.shape, rank)
                else:
                    yield _Unit(written.key, written, piece, written.shape)
        for key in stored:
            if key not in seen:
                yield self._unexpected(key)

    def _unexpected(self, key: str) -> _Unit | TensorRecord:
        """Return a stored tensor that has no counterpart: a copy, nothing of the model, or more."""
        folder, config = self.pair.folder, self.pair.config
        mapping, piece = folder.mapping, folder.reader.tensors[key][0]
        if folder.is_shards:
            detail = "added to the folder; this source does not hold it"
            return TensorRecord(key, "not comparable", key, shape=piece.shape, detail=detail)
        if mapping is not None and config is not None:
            copies = {folder.facts.resolve(name) for name in mapping.copies(folder.facts, config)}
            for each in self.pair.tensors if key in copies else ():
                if each.key.endswith(TIED_TABLES) and each.shape[1:] == piece.shape[1:]:
                    return _Unit(key, each, piece, each.shape)
            if mapping.is_ignored(key):
                return TensorRecord(key, "ignored", shape=piece.shape)
        detail = "the source makes no such tensor"
        return TensorRecord(key, "extra", shape=piece.shape, detail=detail)

    def record(self, unit: _Unit) -> TensorRecord:
        """Compare one unit."""
        kind, shape = unit.stored.dtype, unit.stored.shape
        rows, types = _common_rows(unit), {each.dtype for each in self._sources(unit)}
        state, problem = "changed", ""
        if rows is None:
            problem = f"its shape is {list(shape)}, not {list(unit.shape)}"
        elif not {kind, *types} <= FLOATING_TYPES and types != {kind}:
            state, problem = "not comparable", f"{kind} of {', '.join(sorted(types))}"
        else:
            try:
                return self._compared(unit, rows, types)
            except CheckpointMismatchError as error:
                state, problem = "not comparable", str(error)
        return TensorRecord(unit.key, state, unit.tensor, kind, shape, detail=problem)

    def _sources(self, unit: _Unit) -> Iterator[Piece]:
        """Yield the pieces of the source that a unit is made of."""
        for item in unit.written.items:
            for key, _ in item.reads:
                yield from self.pair.facts.pieces(key)

    def _compared(self, unit: _Unit, rows: int, types: set[str]) -> TensorRecord:
        kind, shape = unit.stored.dtype, unit.stored.shape
        computed = any(isinstance(each.source, (Adjusted, Compute)) for each in unit.written.items)
        quantised = self._quantised(unit)
        is_exact = types == {kind} and not (computed or quantised)
        width = max(1, math.prod(shape[1:]))
        bound = _bound(kind, is_exact, computed, quantised, width)
        tally = _Tally(width, bound, quantised is not None and quantised[0] in _CALIBRATED)
        checksum, at, values = 0, 0, self._values(unit.stored)
        zeros = np.zeros(max(0, len(values) - rows * width), DTYPES[kind])  # rows of padding
        own = self._chunks(unit, kind if is_exact else "fp32", rows * width)
        for wide in itertools.chain(own, (zeros,)):
            expected = wide
            if wide.dtype != DTYPES[kind]:
                expected = np.empty(wide.shape, DTYPES[kind])
                store(expected, wide)
            checksum = crc32(expected.tobytes(), checksum)
            tally.add(wide, expected, values[at : at + len(wide)], at)
            at += len(wide)
        for piece in (unit.stored, *self._sources(unit)):
            for stored in piece.stored:
                maps = (self.pair.folder if piece is unit.stored else self.pair).facts.maps
                maps.forget(stored)
        state, detail = _judged(tally, quantised, kind)
        if state == "changed":
            if tally.rows and min(tally.rows) >= rows:
                detail = "padding rows are not zero"
        elif len(zeros):
            state, detail = "padded", f"{len(zeros) // width} zero rows after the source's {rows}"
        elif unit.shape and rows < unit.shape[0]:
            state, detail = self._cut(unit, rows)
        return TensorRecord(
            key=unit.key,
            state=state,
            tensor=unit.tensor,
            data_type=kind,
            shape=shape,
            values=at,
            differing=tally.bad or tally.differing,
            largest_error=tally.error,
            checksum=checksum,
            rows=_ranges(tally.rows),
            columns=tally.columns if tally.rows else (0, 0),
            detail=detail,
        )

    def _cut(self, unit: _Unit, rows: int) -> tuple[str, str]:
        """Return what it means that the folder lacks the source's last rows."""
        gone = f"the source's rows from {rows} to {unit.shape[0]} are left out"
        if self.tokens is None or self.tokens > rows:
            return "changed", f"{gone}, and the tokenizer is not known to do without them"
        return "cut", f"{gone}; the tokenizer has {self.tokens} tokens"

    def _quantised(self, unit: _Unit) -> tuple[str, int] | None:
        """Return by what method a tensor is quantised, and to how many bits."""
        settings = self.pair.folder.quantised
        if settings is None or len(unit.stored.stored) < 2:
            return None
        method = str(settings.get("format") or settings.get("quant_method"))
        if method in _FLOAT_METHODS or "FP8" in str(settings.get("quant_algo")):
            return "fp8", 8
        groups = list((settings.get("config_groups") or {}).values())
        own = groups[0]["weights"] if groups else settings
        return method, int(own.get("num_bits") or own.get("bits") or own.get("w_bit") or 8)

    def _chunks(self, unit: _Unit, kind: str, count: int) -> Iterator[Array]:
        """Yield the first values that a unit should hold, flat, in C order."""
        size = math.prod(unit.shape) * item_size(kind)
        for chunk in file_chunks(self._pieces(unit), kind, size):
            values = np.frombuffer(chunk, DTYPES[kind])[:count]
            count -= len(values)
            yield values

    def _pieces(self, unit: _Unit) -> Iterator[tuple[Parts, Any, ValueRange]]:
        facts, config = self.pair.facts, self.pair.config
        built: dict[Any, Parts] = {}
        for item, view in unit.written.pieces:
            if item not in built:
                built = {item: item.build(facts, config)}
            parts = built[item]
            if view is not None:
                parts = taken(parts, view)
                yield parts, whole_window(parts.shape), ValueRange()
            else:
                tp_size = self.pair.folder.facts.tp_size
                yield parts, rank_window(parts, item.tensor, tp_size, unit.rank), ValueRange()

    def _values(self, piece: Piece) -> Array:
        """Return stored values, flat: a view of the mapped file unless they are computed."""
        return piece.load(self.pair.folder.facts.maps).reshape(-1)

    def explained(
        self, unit: _Unit, record: TensorRecord, known: Mapping[tuple[Any, ...], str]
    ) -> str:
        """Return what a changed tensor holds instead, as far as that can be seen."""
        values = self._values(unit.stored)
        other = known.get((record.shape, record.data_type, crc32(values.tobytes(), 0)))
        if other is not None and other != unit.key:
            return f"it holds the values of {other}"
        if record.detail or record.data_type not in DTYPES or len(values) > _MOST_MOVED_VALUES:
            return record.detail
        expected = np.empty(len(values), DTYPES[record.data_type])
        at = 0
        for wide in self._chunks(unit, record.data_type, len(values)):
            store(expected[at : at + len(wide)], wide)
            at += len(wide)
        mine, theirs = (each.reshape(len(values) // max(1, math.prod(record.shape[1:])), -1)
                        for each in (expected, values))  # fmt: skip
        if _is_permuted(mine, theirs):
            return "its rows are in another order"
        if _is_permuted(mine.T, theirs.T):
            return "its columns are in another order"
        if np.array_equal(_bits(mine).T, _bits(theirs)):
            return "it is transposed"
        rows = [row for low, high in record.rows for row in range(low, high)]
        return _arithmetic(to_float32(mine[rows]), to_float32(theirs[rows]))


def _common_rows(unit: _Unit) -> int | None:
    """Return how many rows both sides have; None where the shapes do not belong together."""
    found, wanted = unit.stored.shape, unit.shape
    if found == wanted:
        return found[0] if found else 1
    if found[1:] == wanted[1:] and found and unit.written.key.endswith(TIED_TABLES):
        return min(found[0], wanted[0])
    return None


def _bound(
    kind: str, is_exact: bool, computed: bool, quantised: tuple[str, int] | None, width: int
) -> Callable[[Array], Any]:
    """Return the error of each value that its rounding explains."""

    def bound(source: Array) -> Any:
        size = np.abs(source)
        largest: Any = size.max(initial=0)
        if is_exact:
            return 0.0
        if quantised is None:
            relative, least = _STEPS[kind]
            return size * relative + least + (_SUMS * largest if computed else 0.0)
        method, bits = quantised
        if method == "fp8":
            return size * _FP8[0] + largest * _FP8[1]
        if len(source) % width == 0:
            largest = np.repeat(size.reshape(-1, width).max(axis=1), width)
        step = 2 * largest / ((1 << bits) - 1)
        return step * (_CALIBRATED_STEPS if method in _CALIBRATED else 0.52)

    return bound


def _judged(tally: _Tally, quantised: tuple[str, int] | None, kind: str) -> tuple[str, str]:
    """Return the state of a tensor, and why."""
    method = quantised and f"{quantised[0]}, {quantised[1]} bits"
    if tally.overflows:
        return "changed", f"{tally.overflows} values are beyond the range of {kind}"
    if tally.bad:
        return "changed", f"more than the rounding of {method} explains" if method else ""
    if tally.differing:
        return ("dequantised", f"within the rounding of {method}") if method else ("one step", "")
    return ("rounded" if tally.error else "equal"), ""


def _is_permuted(mine: Array, theirs: Array) -> bool:
    """Return whether two matrices have the same rows in different orders."""
    sums = [sorted(crc32(row.tobytes(), 0) for row in matrix) for matrix in (mine, theirs)]
    return sums[0] == sums[1]


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
    comparison = _Comparison(pair, tokens)
    units = list(comparison.units())
    todo = [each for each in units if isinstance(each, _Unit)]
    records = {each.key: each for each in units if isinstance(each, TensorRecord)}
    records |= {each.key: done[each.key] for each in todo if each.key in done}
    total = sum(each.stored.span_bytes for each in todo)
    size = sum(each.stored.span_bytes for each in todo if each.key in records)
    with concurrent.futures.ThreadPoolExecutor(_WORKERS, "certify") as pool:
        waiting = {
            pool.submit(comparison.record, each): each for each in todo if each.key not in records
        }
        for future in concurrent.futures.as_completed(waiting):
            record = future.result()
            keep(record)
            records[record.key] = record
            size += waiting[future].stored.span_bytes
            progress(size, total)
    known = {(r.shape, r.data_type, r.checksum): r.key for r in records.values() if r.checksum}
    findings = [*pair.folder.findings, *pair.findings]
    by_key = {each.key: each for each in todo}
    ordered = [records[each.key] for each in units]
    for record in ordered:
        if record.state in _STATES:
            is_changed = record.state == "changed"
            why = comparison.explained(by_key[record.key], record, known) if is_changed else ""
            status, _ = _STATES[record.state]
            findings.append(Remark(status, record.state, record.key, _detail(record, why, tokens)))
    compared = f"{len(ordered)} tensors, {total:,} bytes"
    rows = [asdict(each) for each in ordered]
    return Part("tensors", compared, tuple(findings), tuple(_up_to(ordered)), rows)


def _up_to(records: list[TensorRecord]) -> Iterator[str]:
    for state, (status, words) in _STATES.items():
        found = [each for each in records if each.state == state]
        if found and status == UP_TO:
            kinds = ", ".join(sorted({each.data_type for each in found}))
            error = max(each.largest_error for each in found)
            yield words.format(kinds) + (f" (largest error {error:.3g})" if error else "")


def _detail(record: TensorRecord, why: str, tokens: int | None) -> str:
    words = [why or record.detail]
    if record.rows:
        shown = ", ".join(f"{low}-{high - 1}" for low, high in record.rows[:_RANGES_SHOWN])
        more = len(record.rows) - _RANGES_SHOWN
        where = f"rows {shown}" + (f" and {more} more ranges" if more > 0 else "")
        low, high = record.columns
        where += f", columns {low}-{high - 1}" if len(record.shape) > 1 else ""
        if tokens is not None and record.key.endswith(TIED_TABLES) and record.rows[0][0] >= tokens:
            where += f", all of them padding after the tokenizer's {tokens} tokens"
        words.append(f"{where} of {list(record.shape)}")
    if record.largest_error:
        words.append(
            f"{record.differing:,} of {record.values:,} values differ, by up to "
            f"{record.largest_error:.3g}"
        )
    return "; ".join(filter(None, words))
