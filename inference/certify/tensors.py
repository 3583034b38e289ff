"""Compare every stored tensor of a folder with the values that its source implies, in blocks.

Shapes: flat values in C order; a row is a slice along the first axis.
"""

import concurrent.futures
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from export_scripts.checkpoints.base import FLOATING_TYPES, Piece
from export_scripts.checkpoints.huggingface import TIED_TABLES
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.numeric.arrays import DTYPES, Array, store, to_float32
from foundations.errors import CheckpointMismatchError
from foundations.files.checksum import crc32
from inference.certify.differences import Differences, raw_bits
from inference.certify.experts import reordered_experts
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Part, Remark, Status
from inference.certify.pair import OTHER_FILE, Pair
from inference.certify.units import Unit, source_pieces

_ORDER = "the order of experts"
_WORKERS = 2
_MAX_EXPLAINED_VALUES = 1 << 26  # larger tensors are not searched for permutations

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


def _units(pair: Pair) -> Iterator[Unit | TensorRecord]:
    """Yield the tensors to compare, and records of those that have no counterpart."""
    stored, are_shards = pair.folder.reader.tensors, pair.folder.is_shards
    missing = [*pair.folder.missing_tensors()]
    for written in pair.tensors:
        tensor = written.items[0].tensor
        if written.key not in stored and not (are_shards and tensor.optional):
            pieces = source_pieces(pair, written)
            is_zero = written.key not in missing and _is_zero_bias(written.key, pieces, pair.facts)
            yield TensorRecord(written.key, "zero" if is_zero else "missing")
        for rank, piece in enumerate(stored.get(written.key, ())):
            if are_shards:
                yield Unit(pair, tensor.file_name(rank), written, piece, piece.shape, rank)
            else:
                yield Unit(pair, written.key, written, piece, written.shape)
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


def _unexpected(pair: Pair, key: str) -> Unit | TensorRecord:
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
                    return Unit(pair, key, table, piece, table.shape)
        if is_ignored:
            return TensorRecord(key, "ignored", shape=piece.shape)
    if _is_zero_bias(key, [piece], facts):
        return TensorRecord(key, "zero", shape=piece.shape, reason="the source has none")
    reason = "the source makes no such tensor"
    return TensorRecord(key, "extra", shape=piece.shape, reason=reason)


def _record(unit: Unit, tokens: int | None) -> TensorRecord:
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
        return _compared(unit, record, rows, unit.differences(types), tokens)
    except CheckpointMismatchError as error:
        return replace(record, state="not comparable", reason=str(error))


def _compared(
    unit: Unit,
    record: TensorRecord,
    rows: int,
    seen: Differences,
    tokens: int | None,
) -> TensorRecord:
    kind, values = unit.stored.dtype, unit.values()
    count = rows * unit.width
    zeros = np.zeros(max(0, len(values) - count), DTYPES[kind])  # padding rows
    blocks = unit.expected(kind if seen.rounding is None else "fp32", count)
    checksum = at = 0
    for wide in itertools.chain(seen.blocks(blocks), (zeros,)):
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
        places="; ".join(seen.places(tokens if unit.is_table else None)),
    )


def _cut(rows: int, source_rows: int, tokens: int | None) -> tuple[str, str]:
    """Return the state and reason of a table that lacks the source's last rows."""
    left_out = f"the source's rows from {rows} to {source_rows} are left out"
    if tokens is None or tokens > rows:
        return "changed", f"{left_out}, and the tokenizer may have tokens for them"
    return "cut", f"{left_out}; the tokenizer has {tokens} tokens"


def _explanation(unit: Unit, record: TensorRecord, known: Mapping[tuple[Any, ...], str]) -> str:
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
    if np.array_equal(raw_bits(expected).T, raw_bits(found)):
        return "it is transposed"
    for kind in ("fp16", "bf16"):
        rounded = (
            _stored(_stored(wide, kind), record.data_type)
            for wide in unit.expected("fp32", len(values))
        )
        if np.array_equal(np.concatenate([*map(raw_bits, rounded)]), raw_bits(values)):
            return f"it holds the source's values as {kind} rounds them"
    rows = (raw_bits(expected) != raw_bits(found)).any(1)
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
    units = {key: entry for key, entry in entries.items() if isinstance(entry, Unit)}
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
    units: Mapping[str, Unit],
    records: dict[str, TensorRecord],
    tokens: int | None,
) -> Iterator[Remark]:
    """Yield layers whose experts and router rows are permuted together: the same function.

    Their records are replaced by those of a comparison in that order, if it finds no difference.
    """
    changed = {key for key, record in records.items() if record.state == "changed"}
    for router, layer in reordered_experts(pair, units, changed):
        found = {unit.key: _record(unit, tokens) for unit in layer}
        statuses = {_STATES[each.state][0] for each in found.values() if each.state in _STATES}
        if statuses <= {UP_TO}:
            records |= found
            yield Remark(UP_TO, "another order", router, "the experts are permuted alike")


def _up_to(records: list[TensorRecord]) -> Iterator[str]:
    """Yield the bound of each state that some tensor has."""
    for state, (status, bound) in _STATES.items():
        found = [record for record in records if record.state == state]
        if found and status == UP_TO:
            kinds = ", ".join(sorted({record.data_type for record in found}))
            error = max(record.largest_error for record in found)
            yield bound.format(kinds) + (f" (largest error {error:.3g})" if error else "")
