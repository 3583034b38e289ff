"""Compare every stored tensor of a folder with what its source says it should hold, block by block.

Shapes: flat values in C order; a row is what follows one index of the first axis.
"""

import concurrent.futures
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
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
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Part, Remark
from inference.certify.pair import Pair, piece_of

# One unit in the last place, of a value; fp16 has no smaller steps than the second.
_STEPS = {"fp32": (2.0**-23, 0.0), "fp16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 0.0)}
_SUMS = 1e-6  # sums of products may round differently on another machine: of the largest value
# e4m3 keeps 3 bits: half a step of a value, with the rounding of what is rounded, and below its
# normal numbers half a step of 2^-9 of 1/448 of the largest.
_FP8 = (2.0**-4 * 1.08, 2.0**-18)
_CALIBRATED_STEPS = 2.0  # methods that move errors from one value to another: awq, gptq
_FLOAT_METHODS = ("fp8", "float-quantized", "naive-quantized")
_WORKERS = 2
_MOST_MOVED_VALUES = 1 << 26  # columns are looked for in tensors up to this size
_RANGES_SHOWN = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TensorRecord:
    """The comparison of one stored tensor, or one rank's file of it.

    Attributes:
        state: equal, rounded, one step (of the last place), dequantised, padded, cut, ignored,
            changed, missing, extra.
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


_STATUS: Mapping[str, Any] = {
    **dict.fromkeys(("rounded", "one step", "dequantised", "padded", "cut"), UP_TO),
    **dict.fromkeys(("changed", "missing", "extra"), DIFFERS),
    "not comparable": NOT_COMPUTED,
}


@dataclass(frozen=True)
class _Unit:
    """One stored tensor, or a rank's file of one."""

    key: str
    written: WrittenTensor
    stored: Piece
    shape: tuple[int, ...]  # that it should have
    rank: int | None  # of a folder of shards


@dataclass
class _Tally:
    """Differences seen so far."""

    width: int
    differing: int = 0
    bad: int = 0
    largest_error: float = 0.0
    largest_bad: float = 0.0
    overflows: int = 0
    rows: set[int] = field(default_factory=set)
    columns: tuple[int, int] = (1 << 62, 0)

    def add(
        self, wide: Array, expected: Array, found: Array, bound: Callable[[Array], Any], at: int
    ) -> None:
        """Count the differences of flat values that begin at an index.

        `wide` are the values before they were rounded to those `expected`.
        """
        wrong = _bits(expected) != _bits(found)
        if wide is expected and not wrong.any():
            return
        with np.errstate(invalid="ignore", over="ignore"):
            source, value = to_float32(wide), to_float32(found)
            error = np.abs(value - source)
            error[np.isnan(source) & np.isnan(value) | (source == value)] = 0
            error = np.nan_to_num(error, nan=np.inf, posinf=np.inf)
            self.overflows += int((np.isfinite(source) & ~np.isfinite(to_float32(expected))).sum())
            self.largest_error = max(self.largest_error, float(error.max(initial=0)))
            bad = wrong & (error > bound(source))
        self.differing += int(wrong.sum())
        if bad.any():
            self.bad += int(bad.sum())
            self.largest_bad = max(self.largest_bad, float(error[bad].max()))
            places = np.flatnonzero(bad) + at
            self.rows.update((places // self.width).tolist())
            columns = places % self.width
            low, high = self.columns
            self.columns = (min(low, int(columns.min())), max(high, int(columns.max()) + 1))


def _bits(values: Array) -> Array:
    return values.view(f"u{values.dtype.itemsize}")


def _ranges(rows: set[int]) -> tuple[tuple[int, int], ...]:
    out: list[list[int]] = []
    for row in sorted(rows):
        if out and out[-1][1] == row:
            out[-1][1] += 1
        else:
            out.append([row, row + 1])
    return tuple((low, high) for low, high in out)


@dataclass(frozen=True)
class _Comparison:
    """The comparison of one pair."""

    pair: Pair
    tokens: int | None  # of the tokenizer; rows beyond them are padding

    def units(self) -> Iterator[_Unit | TensorRecord]:
        """Yield what is to be compared, and what cannot be."""
        folder, reader = self.pair.folder, self.pair.folder.reader
        seen: set[str | None] = set()
        for written in self.pair.tensors:
            name = written.items[0].tensor.name
            if folder.is_shards:
                tensor = written.items[0].tensor
                seen.add(name)
                if name not in reader.tensors and not tensor.optional:
                    yield TensorRecord(name, "missing", name)
                for rank, piece in enumerate(reader.tensors.get(name, ())):
                    file = tensor.file_name(rank)
                    yield _Unit(file, written, piece, piece.shape, rank)
                continue
            seen.add(folder.facts.resolve(written.key))
            if (found := piece_of(reader, folder.facts, written.key)) is None:
                yield TensorRecord(written.key, "missing", name, shape=written.shape)
            else:
                yield _Unit(written.key, written, found, written.shape, None)
        for key in reader.tensors:
            if key not in seen:
                yield from self._unexpected(key)

    def _unexpected(self, key: str) -> Iterator[_Unit | TensorRecord]:
        """Yield a stored tensor that has no counterpart: a copy, nothing of the model, or more."""
        folder, config = self.pair.folder, self.pair.config
        mapping = folder.mapping
        shape = folder.reader.tensors[key][0].shape
        if mapping is not None and config is not None:
            copies = {folder.facts.resolve(name) for name in mapping.copies(folder.facts, config)}
            tables = [
                each
                for each in self.pair.tensors
                if each.key.endswith(TIED_TABLES) and each.shape[1:] == shape[1:]
            ]
            if key in copies and tables and not folder.is_shards:
                piece = folder.reader.tensors[key][0]
                yield _Unit(key, tables[0], piece, tables[0].shape, None)
                return
            if mapping.is_ignored(key):
                yield TensorRecord(key, "ignored", shape=shape, detail="no part of the model")
                return
        if folder.is_shards:
            detail = "added to the folder; this source does not hold it"
            yield TensorRecord(key, "not comparable", key, shape=shape, detail=detail)
        else:
            yield TensorRecord(key, "extra", shape=shape, detail="the source makes no such tensor")

    def record(self, unit: _Unit) -> TensorRecord:
        """Compare one unit."""
        kind, name = unit.stored.dtype, unit.written.items[0].tensor.name
        record = partial(
            TensorRecord, unit.key, tensor=name, data_type=kind, shape=unit.stored.shape
        )
        rows = _common_rows(unit)
        if rows is None:
            return record(
                "changed", detail=f"its shape is {list(unit.stored.shape)}, not {list(unit.shape)}"
            )
        types = self._types(unit)
        if not {kind, *types} <= FLOATING_TYPES and types != {kind}:
            return record("not comparable", detail=f"{kind} of {', '.join(sorted(types))}")
        try:
            return self._compared(unit, record, rows, types)
        except CheckpointMismatchError as error:
            return record("not comparable", detail=str(error))

    def _types(self, unit: _Unit) -> set[str]:
        facts = self.pair.facts
        return {
            piece.dtype
            for item in unit.written.items
            for key, _ in item.reads
            for piece in facts.pieces(key)
        }

    def _compared(
        self, unit: _Unit, record: Callable[..., TensorRecord], rows: int, types: set[str]
    ) -> TensorRecord:
        kind = unit.stored.dtype
        computed = any(isinstance(each.source, (Adjusted, Compute)) for each in unit.written.items)
        quantised = self._quantised(unit)
        is_exact = types == {kind} and not (computed or quantised)
        width = max(1, math.prod(unit.stored.shape[1:]))
        tally, checksum, at = _Tally(width), 0, 0
        bound = _bound(kind, is_exact, computed, quantised, width)
        values = self._values(unit.stored)[: rows * width]
        for wide in self._chunks(unit, kind if is_exact else "fp32"):
            wide = wide[: len(values) - at]
            expected = wide
            if kind != "fp32" and not is_exact:
                expected = np.empty(wide.shape, DTYPES[kind])
                store(expected, wide)
            checksum = crc32(expected.tobytes(), checksum)
            tally.add(wide, expected, values[at : at + len(wide)], bound, at)
            at += len(wide)
        rest = self._values(unit.stored)[len(values) :]
        padding = float(np.abs(to_float32(rest)).max(initial=0)) if len(rest) else None
        self._forget(unit)
        state, detail = _judged(tally, quantised, kind)
        rows_found = tally.rows
        if padding is not None and state != "changed":
            state, detail = "padded", f"{len(rest) // width} zero rows after the source's {rows}"
            if padding != 0:
                state, detail = "changed", f"padding rows are not zero, but up to {padding:.3g}"
                places = np.flatnonzero(to_float32(rest))
                rows_found = {rows + row for row in np.unique(places // width).tolist()}
        elif unit.shape and rows < unit.shape[0] and state != "changed":
            state, detail = self._cut(unit, rows)
        return record(
            state,
            values=at,
            differing=tally.bad if state == "changed" else tally.differing,
            largest_error=tally.largest_bad if tally.bad else tally.largest_error,
            checksum=checksum,
            rows=_ranges(rows_found),
            columns=tally.columns if tally.rows else (0, 0),
            detail=detail,
        )

    def _cut(self, unit: _Unit, rows: int) -> tuple[str, str]:
        """Return what it means that the folder lacks the source's last rows."""
        gone = f"the source's rows from {rows} to {unit.shape[0]} are left out"
        if self.tokens is None or self.tokens > rows:
            return "changed", f"{gone}, and the tokenizer is not known to do without them"
        return "cut", f"{gone}; the tokenizer has {self.tokens} tokens"

    def _quantised(self, unit: _Unit) -> str | None:
        """Return by what method a tensor is quantised, with the bits of integers."""
        settings = self.pair.folder.quantised
        if settings is None or len(unit.stored.stored) < 2:
            return None
        method = str(settings.get("format") or settings.get("quant_method"))
        if method in _FLOAT_METHODS or "FP8" in str(settings.get("quant_algo")):
            return "fp8"
        groups = list((settings.get("config_groups") or {}).values())
        own = groups[0]["weights"] if groups else settings
        bits = own.get("num_bits") or own.get("bits") or own.get("w_bit") or 8
        return f"{method} {bits}"

    def _chunks(self, unit: _Unit, kind: str) -> Iterator[Array]:
        """Yield the values that a unit should hold, flat, in C order."""
        size = math.prod(unit.shape) * item_size(kind)
        for chunk in file_chunks(self._pieces(unit), kind, size):
            yield np.frombuffer(chunk, DTYPES[kind])

    def _pieces(self, unit: _Unit) -> Iterator[tuple[Parts, Any, ValueRange]]:
        facts, config = self.pair.facts, self.pair.config
        built: dict[Any, Parts] = {}
        for item, view in unit.written.pieces:
            if item not in built:
                built = {item: item.build(facts, config)}
            parts = built[item]
            if view is not None:
                parts = taken(parts, view)
                window = whole_window(parts.shape)
            else:
                tp_size = self.pair.folder.facts.tp_size
                window = rank_window(parts, item.tensor, tp_size, unit.rank or 0)
            yield parts, window, ValueRange()

    def _values(self, piece: Piece) -> Array:
        """Return stored values, flat: a view of the mapped file unless they are computed."""
        return piece.load(self.pair.folder.facts.maps).reshape(-1)

    def _forget(self, unit: _Unit) -> None:
        for stored in unit.stored.stored:
            self.pair.folder.facts.maps.forget(stored)
        for item in unit.written.items:
            for key, _ in item.reads:
                for piece in self.pair.facts.pieces(key):
                    for stored in piece.stored:
                        self.pair.facts.maps.forget(stored)

    def explained(
        self, unit: _Unit, record: TensorRecord, known: Mapping[tuple[Any, ...], str]
    ) -> str:
        """Return what a changed tensor holds instead, as far as that can be seen."""
        values = self._values(unit.stored)
        other = known.get((record.shape, record.data_type, crc32(values.tobytes(), 0)))
        if other is not None and other != unit.key:
            return f"it holds the values of {other}"
        kind = unit.stored.dtype if unit.stored.dtype in DTYPES else "fp32"
        rows = [row for low, high in record.rows for row in range(low, high)]
        if record.detail or not rows or math.prod(unit.shape) != len(values):
            return record.detail
        expected = np.empty(len(values), DTYPES[kind])
        at = 0
        for wide in self._chunks(unit, kind):
            store(expected[at : at + len(wide)], wide)
            at += len(wide)
        shape = (-1, max(1, math.prod(unit.shape[1:])))
        mine, theirs = expected.reshape(shape), values.reshape(shape)
        if _is_permuted(mine[rows], theirs[rows]):
            return "its rows are in another order"
        low, high = record.columns
        if high - low > 1 and mine.size <= _MOST_MOVED_VALUES:
            columns = (np.ascontiguousarray(each[:, low:high].T) for each in (mine, theirs))
            if _is_permuted(*columns):
                return "its columns are in another order"
        square = mine.shape[0] == mine.shape[1] and mine.size <= _MOST_MOVED_VALUES
        if square and np.array_equal(_bits(mine).T, _bits(theirs)):
            return "it is transposed"
        return _arithmetic(to_float32(mine[rows]), to_float32(theirs[rows]))


def _common_rows(unit: _Unit) -> int | None:
    """Return how many rows both sides have; None where the shapes do not belong together."""
    found, wanted = unit.stored.shape, unit.shape
    if unit.rank is not None or found == wanted:
        return found[0] if found else 1
    if found[1:] == wanted[1:] and found and unit.written.key.endswith(TIED_TABLES):
        return min(found[0], wanted[0])
    return None


def _bound(
    kind: str, is_exact: bool, computed: bool, quantised: str | None, width: int
) -> Callable[[Array], Any]:
    """Return the error of each value that its rounding explains."""

    def bound(source: Array) -> Any:
        size = np.abs(source)
        if is_exact:
            return 0.0
        if quantised == "fp8":
            return size * _FP8[0] + float(size.max(initial=0)) * _FP8[1]
        if quantised is not None:
            method, _, bits = quantised.rpartition(" ")
            if len(source) % width:
                largest: Any = size.max(initial=0)
            else:
                rows = size.reshape(-1, width)
                largest = np.repeat(rows.max(axis=1), width)
            step = 2 * largest / ((1 << int(bits)) - 1)
            return step * (_CALIBRATED_STEPS if method in ("awq", "gptq") else 0.52)
        relative, least = _STEPS[kind]
        sums = _SUMS * float(size.max(initial=0)) if computed else 0.0
        return size * relative + least + sums

    return bound


def _judged(tally: _Tally, quantised: str | None, kind: str) -> tuple[str, str]:
    if tally.overflows:
        return "changed", f"{tally.overflows} values are beyond the range of {kind}"
    if tally.bad:
        if quantised:
            return "changed", f"more than the rounding of {quantised} explains"
        return "changed", ""
    if quantised and tally.differing:
        return "dequantised", f"within the rounding of {quantised}"
    if tally.differing:
        return "one step", f"within one unit in the last place of {kind}"
    return ("rounded", f"rounded to {kind}") if tally.largest_error else ("equal", "")


def _is_permuted(mine: Array, theirs: Array) -> bool:
    """Return whether two matrices have the same rows in different orders."""
    sums = [sorted(crc32(row.tobytes(), 0) for row in matrix) for matrix in (mine, theirs)]
    return sums[0] == sums[1]


def _arithmetic(mine: Array, theirs: Array) -> str:
    """Return by what number all values were multiplied or moved, if it is one."""
    with np.errstate(all="ignore"):
        for words, numbers in (("times", theirs / mine), ("plus", theirs - mine)):
            each = numbers[np.isfinite(numbers)]
            if len(each) > 1 and np.ptp(each) <= 0.01 * abs(np.median(each)):
                return f"its values are the source's {words} {np.median(each):.4g}"
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
        if (status := _STATUS.get(record.state)) is not None:
            why = ""
            if record.state == "changed":
                why = comparison.explained(by_key[record.key], record, known)
            findings.append(Remark(status, record.state, record.key, _detail(record, why, tokens)))
    return Part(
        "tensors",
        f"{len(ordered)} tensors, {total:,} bytes",
        tuple(findings),
        tuple(_up_to(ordered)),
        [asdict(each) for each in ordered],
    )


def _up_to(records: list[TensorRecord]) -> Iterator[str]:
    for state, words in (
        ("rounded", "rounding to {}"),
        ("one step", "one unit in the last place of {}"),
        ("dequantised", "the rounding of quantised weights"),
        ("padded", "padding rows of zeros"),
        ("cut", "padding rows left out"),
    ):
        found = [each for each in records if each.state == state]
        if found:
            kinds = ", ".join(sorted({each.data_type for each in found}))
            error = max(each.largest_error for each in found)
            yield words.format(kinds) + (f" (largest error {error:.3g})" if error else "")


def _detail(record: TensorRecord, why: str, tokens: int | None) -> str:
    words = [why or record.detail]
    if record.state == "changed" and record.rows:
        shown = ", ".join(f"{low}-{high - 1}" for low, high in record.rows[:_RANGES_SHOWN])
        more = len(record.rows) - _RANGES_SHOWN
        where = f"rows {shown}" + (f" and {more} more ranges" if more > 0 else "")
        low, high = record.columns
        if high and len(record.shape) > 1:
            where += f", columns {low}-{high - 1}"
        if tokens is not None and record.key.endswith(TIED_TABLES) and record.rows[0][0] >= tokens:
            where += f", all of them padding after the tokenizer's {tokens} tokens"
        words.append(where + f" of {list(record.shape)}")
    if record.state == "changed" and record.differing:
        words.append(
            f"{record.differing:,} of {record.values:,} values differ, by up to "
            f"{record.largest_error:.3g}"
        )
    elif record.largest_error:
        words.append(f"largest error {record.largest_error:.3g}")
    return "; ".join(filter(None, words))
