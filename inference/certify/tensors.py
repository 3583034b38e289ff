"""Compare every stored tensor of a folder with the values that its source implies, in blocks.

Shapes: flat values in C order; a row is a slice along the first axis.
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
from export_scripts.families.mapping.sources import Adjusted, Compute, Parts, rearranged
from export_scripts.numeric.arrays import DTYPES, Array, store, to_float32
from export_scripts.numeric.dtypes import item_size
from foundations.errors import CheckpointMismatchError
from foundations.files.checksum import crc32
from inference.certify.experts import expert_layers, order_of_rows
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Part, Remark, Status
from inference.certify.pair import OTHER_FILE, Pair, keys_read, stored_type

# Calibration moves errors from one value to another. Bounds of such errors: distance from 1 of the
# factor of a group of values, the same for a whole block, and the mean error of a group in standard
# deviations. 4-bit GPTQ reaches 0.05, 0.007 and 0.4; zero points off by one have a mean of 3.
_MAX_GROUP_FACTOR, _MAX_BLOCK_FACTOR, _MAX_BIAS, _GROUP = 0.2, 0.04, 0.75, 128
_ORDER = "the order of experts"
_WORKERS = 2
_MAX_EXPLAINED_VALUES = 1 << 26  # larger tensors are not searched for permutations
_RANGES_SHOWN = 4

Progress = Callable[[int, int], None]  # bytes compared, bytes in total

# State of a tensor that is not equal -> its status and its bound in the verdict.
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
    """The comparison of one stored tensor, or of one rank's file of it.

    Attributes:
        state: equal, ignored (not part of the model), or a key of `_STATES`.
        largest_error: largest absolute difference from the source.
        checksum: CRC-32 of the expected bytes.
        reason: why it has that state, if known.
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
    """The largest error that a stored type explains: the sum of three bounds.

    Attributes:
        method: name of the quantisation or merge for messages; empty for plain values.
        relative: share of the value.
        least: absolute bound.
        of_largest: share of the largest value of its row (`by_row`) or of its block.
        state: state of a tensor with such errors; "calibrated" adds the bounds of `_off_groups`.
    """

    method: str = ""
    relative: float = 0.0
    least: float = 0.0
    of_largest: float = 0.0
    by_row: bool = False
    state: str = "dequantised"

    def explains(self, source: Array, value: Array, error: Array, width: int) -> Array:
        """Return which flat values are within the bound of the source's, as booleans."""
        size = np.where(np.isfinite(source), np.abs(source), 0)
        largest = size.max(initial=0)
        if self.by_row and len(size) % width == 0:
            largest = np.repeat(size.reshape(-1, width).max(axis=1), width)
        near: Array = error <= size * self.relative + self.least + largest * self.of_largest
        return near & ~_off_groups(source, value) if self.state == "calibrated" else near


# One unit in the last place of each type. fp64 is compared as fp32; fp16's smallest step is 2^-24.
_STEPS = {
    "fp64": _Rounding(relative=2.0**-23),
    "fp32": _Rounding(relative=2.0**-23),
    "fp16": _Rounding(relative=2.0**-10, least=2.0**-24),
    "bf16": _Rounding(relative=2.0**-7),
}
# Values, their scales and the quotients may each have been rounded to bf16.
_BF16_OPERANDS = 3 * 2.0**-9
_SUMS = 1e-6  # sums of products may round differently on another machine
# e4m3 keeps 3 bits: half a step of a value, plus 8 % for rounded operands. Subnormal numbers: half
# a step of 2^-9, of 1/448 of the largest value.
_FP8 = _Rounding("fp8", relative=2.0**-4 * 1.08, of_largest=2.0**-18)


def _off_groups(source: Array, value: Array) -> Array:
    """Return which values belong to a group that was scaled or shifted as a whole.

    Errors that calibration moves within a group cancel; those of a wrong scale do not.
    """
    count = len(source) // _GROUP * _GROUP
    expected, found = (side[:count].reshape(-1, _GROUP) for side in (source, value))
    products, squares = (expected * found).sum(1), (expected * expected).sum(1)
    is_block_scaled = abs(products.sum() / squares.sum() - 1) > _MAX_BLOCK_FACTOR
    is_scaled = np.abs(products / squares - 1) > _MAX_GROUP_FACTOR
    errors = found - expected
    is_shifted = np.abs(errors.mean(1)) > _MAX_BIAS * errors.std(1)
    off = np.repeat(is_block_scaled | is_shifted | is_scaled, _GROUP)
    return np.append(off, np.zeros(len(source) - count, bool))


def _source_pieces(pair: Pair, written: WrittenTensor) -> list[Piece]:
    """Return the pieces of the source from which a tensor is made."""
    return [piece for key in keys_read(written.items) for piece in pair.facts.pieces(key)]


@dataclass(frozen=True)
class _Unit:
    """One stored tensor of a pair's folder, or one rank's file of it, and its expected value."""

    pair: Pair
    key: str
    written: WrittenTensor  # its sources
    stored: Piece
    shape: tuple[int, ...]  # expected
    rank: int = 0  # in a folder of shards

    @property
    def sources(self) -> list[Piece]:
        """The pieces of the source from which it is made."""
        return _source_pieces(self.pair, self.written)

    @property
    def source_keys(self) -> set[str | None]:
        """The names of the source's tensors from which it is made."""
        return {*map(self.pair.facts.resolve, keys_read(self.written.items))}

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return max(1, math.prod(self.stored.shape[1:]))

    @property
    def is_table(self) -> bool:
        """Whether it has a row for each token, so that a side may have padding rows."""
        return self.written.key.endswith(TIED_TABLES)

    @property
    def common_rows(self) -> int | None:
        """The number of rows that both sides have; None if the shapes are incompatible."""
        found, wanted = self.stored.shape, self.shape
        if found == wanted:
            return found[0] if found else 1
        if found[1:] == wanted[1:] and found and self.is_table:
            return min(found[0], wanted[0])
        return None

    def values(self) -> Array:
        """Return the stored values, flat: a view of the mapped file, unless they are computed."""
        return self.stored.load(self.pair.folder.facts.maps).reshape(-1)

    def expected(self, kind: str, count: int) -> Iterator[Array]:
        """Yield the first `count` expected values, flat; a block is valid until the next one."""
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
                    parts = rearranged(built, view)
                    yield parts, whole_window(parts.shape), kind

        for chunk in file_chunks(pieces(), math.prod(self.shape) * item_size(kind)):
            values = np.frombuffer(chunk, DTYPES[kind])[:count]
            count -= len(values)
            yield values

    def matrices(self) -> tuple[Array, Array]:
        """Return the expected and the stored values as matrices of rows."""
        values, kind = self.values(), self.stored.dtype
        expected = np.concatenate([block.copy() for block in self.expected(kind, len(values))])
        return expected.reshape(-1, self.width), values.reshape(-1, self.width)

    def roundings(self, types: set[str]) -> Sequence[_Rounding]:
        """Return roundings that may explain errors, smallest first; `types` are the source's."""
        if self.pair.folder.quantised is not None and len(self.stored.stored) > 1:
            if (kind := stored_type(self.stored)) == "fp8":
                return [_FP8]
            # The folder does not say whether a calibration chose its integers.
            bits = int(kind.removeprefix("int"))
            level = 2 / ((1 << bits) - 1)
            plain = _Rounding(f"{bits} bits", _BF16_OPERANDS, of_largest=0.52 * level, by_row=True)
            return [plain, replace(plain, of_largest=2.0 * level, state="calibrated")]
        step = _STEPS.get(self.stored.dtype)
        if step is None:  # integers, such as a buffer of positions
            return []
        if any(isinstance(getattr(piece, "compute", None), Sum) for piece in self.sources):
            # Some programs round the update before they add it, and then the sum.
            size = max(_SUMS, step.relative / 2)
            return [replace(step, method="a merged adapter", of_largest=size, state="merged")]
        if any(isinstance(item.source, (Adjusted, Compute)) for item in self.written.items):
            return [replace(step, of_largest=_SUMS)]
        return [] if types == {self.stored.dtype} else [step]


def _units(pair: Pair) -> Iterator[_Unit | TensorRecord]:
    """Yield the tensors to compare, and records of those that have no counterpart."""
    stored, are_shards = pair.folder.reader.tensors, pair.folder.is_shards
    missing = [*pair.folder.missing_tensors()]
    for written in pair.tensors:
        tensor = written.items[0].tensor
        if written.key not in stored and not (are_shards and tensor.optional):
            pieces = _source_pieces(pair, written)
            is_zero = written.key not in missing and _is_zero_bias(written.key, pieces, pair.facts)
            yield TensorRecord(written.key, "zero" if is_zero else "missing")
        for rank, piece in enumerate(stored.get(written.key, ())):
            if are_shards:
                yield _Unit(pair, tensor.file_name(rank), written, piece, piece.shape, rank)
            else:
                yield _Unit(pair, written.key, written, piece, written.shape)
    expected = {written.key for written in pair.tensors}
    for key in missing:
        if key not in expected:
            yield TensorRecord(key, "missing", reason="its own configuration requires it")
    for key in stored:
        if key not in expected:
            yield _unexpected(pair, key)


def _is_zero_bias(key: str, pieces: Sequence[Piece], facts: Facts) -> bool:
    """Return whether a tensor is a bias of zeros, which a side may leave out."""
    return key.endswith(".bias") and not any(piece.load(facts.maps).any() for piece in pieces)


def _unexpected(pair: Pair, key: str) -> _Unit | TensorRecord:
    """Classify a stored tensor that the source does not imply: a copy, ignored, zero or extra."""
    mapping, facts = pair.folder.mapping, pair.folder.facts
    piece = facts.reader.tensors[key][0]
    if pair.folder.is_shards:
        reason = "added to the folder; this source does not hold it"
        return TensorRecord(key, "not comparable", shape=piece.shape, reason=reason)
    if mapping is not None and pair.config is not None:
        is_copy = key in map(facts.resolve, mapping.copies(facts, pair.config))
        is_ignored = mapping.is_ignored(key)
        if is_copy or (is_ignored and key.endswith(TIED_TABLES)):
            for table in pair.tensors:
                if table.key.endswith(TIED_TABLES) and table.shape[1:] == piece.shape[1:]:
                    return _Unit(pair, key, table, piece, table.shape)
        if is_ignored:
            return TensorRecord(key, "ignored", shape=piece.shape)
    if _is_zero_bias(key, [piece], facts):
        return TensorRecord(key, "zero", shape=piece.shape, reason="the source has none")
    reason = "the source makes no such tensor"
    return TensorRecord(key, "extra", shape=piece.shape, reason=reason)


@dataclass
class _Differences:
    """Differences of the values compared so far.

    Each value is explained by the first of the roundings that covers its error; `level` is the
    largest index needed so far. `rows` and `columns` (first, last) are those of the `bad` values,
    which none explains; `count` values have other bytes, and the largest difference is `error`.
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
        """Count the differences of a block at flat index `at`; `wide` is `expected` unrounded."""
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
            self.rows.update(np.unique(rows).tolist())  # a block has millions of values, few rows
            low, high = self.columns
            self.columns = (min(low, int(columns.min())), max(high, int(columns.max())))

    def state(self) -> tuple[str, str]:
        """Return the state of the tensor and its reason, or an empty one."""
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
    """Compare one unit; rows from index `tokens` on, the tokenizer's count, are padding."""
    kind, shape = unit.stored.dtype, unit.stored.shape
    record = TensorRecord(unit.key, "changed", kind, shape)
    rows, types = unit.common_rows, {piece.dtype for piece in unit.sources}
    if rows is None:
        state = "not comparable" if unit.pair.folder.is_undecoded else "changed"
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
    zeros = np.zeros(max(0, len(values) - count), DTYPES[kind])  # padding rows
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
        for stored in itertools.chain.from_iterable(piece.stored for piece in pieces):
            maps.forget(stored)
    state, reason = seen.state()
    if state == "changed":
        reason = "padding rows are not zero" if min(seen.rows) >= rows else reason
    elif len(zeros):
        state, reason = "padded", f"{len(zeros) // unit.width} zero rows after the source's {rows}"
    elif unit.shape and rows < unit.shape[0]:
        state, reason = _cut(rows, unit.shape[0], tokens)
    return replace(
        record,
        state=state,
        largest_error=seen.error,
        checksum=checksum,
        reason=reason,
        places="; ".join(seen.places(tokens)),
    )


def _cut(rows: int, source_rows: int, tokens: int | None) -> tuple[str, str]:
    """Return the state and reason of a table that lacks the source's last rows."""
    left_out = f"the source's rows from {rows} to {source_rows} are left out"
    if tokens is None or tokens > rows:
        return "changed", f"{left_out}, and the tokenizer may have tokens for them"
    return "cut", f"{left_out}; the tokenizer has {tokens} tokens"


def _explanation(unit: _Unit, record: TensorRecord, known: Mapping[tuple[Any, ...], str]) -> str:
    """Say how a changed tensor's values are related to those of `known` tensors, if visible."""
    values = unit.values()
    other = known.get((record.shape, record.data_type, crc32(values.tobytes(), 0)), unit.key)
    if other != unit.key:
        return f"it holds the values of {other}"
    if record.reason or len(values) > _MAX_EXPLAINED_VALUES:
        return record.reason
    expected, found = unit.matrices()
    found = found[: len(expected)]  # without padding rows
    if _row_checksums(expected) == _row_checksums(found):
        return "its rows are in another order"
    if _row_checksums(expected.T) == _row_checksums(found.T):
        return "its columns are in another order"
    if np.array_equal(_bits(expected).T, _bits(found)):
        return "it is transposed"
    for kind in ("fp16", "bf16"):
        rounded = (
            _stored(_stored(wide, kind), record.data_type)
            for wide in unit.expected("fp32", len(values))
        )
        if np.array_equal(np.concatenate([*map(_bits, rounded)]), _bits(values)):
            return f"it holds the source's values as {kind} rounds them"
    rows = (_bits(expected) != _bits(found)).any(1)
    return _arithmetic(to_float32(expected[rows]), to_float32(found[rows]))


def _stored(values: Array, kind: str) -> Array:
    """Return values rounded to a type."""
    rounded = np.empty(values.shape, DTYPES[kind])
    store(rounded, values)
    return rounded


def _row_checksums(matrix: Array) -> list[int]:
    return sorted(crc32(row.tobytes(), 0) for row in matrix)


def _arithmetic(source: Array, folder: Array) -> str:
    """Return the common factor or offset of all values, in words; empty without one."""
    with np.errstate(all="ignore"):
        for operator, results, neutral in (
            ("times", folder / source, 1),
            ("plus", folder - source, 0),
        ):
            finite = results[np.isfinite(results)]
            number = np.median(finite) if len(finite) > 1 else neutral
            if abs(number - neutral) > 0.01 and np.ptp(finite) <= 0.01 * abs(number):
                return f"its values are the source's {operator} {number:.4g}"
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
        tokens: number of tokens of the tokenizer; None if unknown.
        done: records of an earlier run, by key.
        keep: called with each new record, one call at a time.
        progress: called with the bytes compared and the bytes in total.
    """
    entries = {entry.key: entry for entry in _units(pair)}
    if pair.folder.is_undecoded:  # the quantisation method has other tensor names
        for key, entry in entries.items():
            if isinstance(entry, TensorRecord) and entry.state in ("missing", "extra"):
                entries[key] = replace(entry, state="not comparable")
    units = {key: entry for key, entry in entries.items() if isinstance(entry, _Unit)}
    records = {key: entry for key, entry in entries.items() if isinstance(entry, TensorRecord)}
    records |= {key: done[key] for key in units if key in done}
    pending = [unit for key, unit in units.items() if key not in records]
    total = sum(unit.stored.span_bytes for unit in units.values())
    with concurrent.futures.ThreadPoolExecutor(_WORKERS, "certify") as pool:
        futures = [pool.submit(_record, unit, tokens) for unit in pending]
        left = sum(unit.stored.span_bytes for unit in pending)
        for future in concurrent.futures.as_completed(futures):
            record = future.result()
            keep(record)
            records[record.key] = record
            left -= units[record.key].stored.span_bytes
            progress(total - left, total)
    orders = [*_reordered_experts(pair, units, records, tokens)]
    known = {(r.shape, r.data_type, r.checksum): r.key for r in records.values() if r.checksum}
    findings = [*pair.folder.findings, *pair.findings, *orders]
    ordered = [records[key] for key in entries]
    for record in ordered:
        if record.state in _STATES:
            is_changed = record.state == "changed"
            reason = _explanation(units[record.key], record, known) if is_changed else record.reason
            status, _ = _STATES[record.state]
            detail = "; ".join(filter(None, (reason, record.places)))
            findings.append(Remark(status, record.state, record.key, detail))
    compared = f"{len(ordered)} tensors, {total:,} bytes"
    rows = [asdict(record) for record in ordered]
    up_to = [*_up_to(ordered), *([_ORDER] if orders else [])]
    if files := ", ".join(remark.where for remark in findings if remark.kind == OTHER_FILE):
        up_to.append(f"files that no part compares ({files})")
    return Part("tensors", compared, tuple(findings), tuple(up_to), rows)


def _reordered_experts(
    pair: Pair,
    units: Mapping[str, _Unit],
    records: dict[str, TensorRecord],
    tokens: int | None,
) -> Iterator[Remark]:
    """Yield layers whose experts and router rows are permuted together: the same function.

    Their records are replaced by those of a comparison in that order, if it finds no difference.
    """
    readers: dict[str | None, list[_Unit]] = {}
    for unit in units.values():
        for name in unit.source_keys:
            readers.setdefault(name, []).append(unit)
    for layer in expert_layers(pair):
        router, *_ = readers.get(layer.router, [None])
        if router is None or records[router.key].state != "changed":
            continue
        order = order_of_rows(*router.matrices())
        reordered = None if order is None else layer.reordered(order)
        if reordered is None:
            continue
        members = [unit for name in layer.keys for unit in readers.get(name, ())]
        found = {unit.key: _record(replace(unit, pair=reordered), tokens) for unit in members}
        statuses = {_STATES[each.state][0] for each in found.values() if each.state in _STATES}
        if statuses <= {UP_TO}:
            records |= found
            yield Remark(UP_TO, "another order", router.key, "the experts are permuted alike")


def _up_to(records: list[TensorRecord]) -> Iterator[str]:
    """Yield the bound of each state that some tensor has."""
    for state, (status, bound) in _STATES.items():
        found = [record for record in records if record.state == state]
        if found and status == UP_TO:
            kinds = ", ".join(sorted({record.data_type for record in found}))
            error = max(record.largest_error for record in found)
            yield bound.format(kinds) + (f" (largest error {error:.3g})" if error else "")
