"""The loop over a plan's tensors: read, rearrange, cast, split, write.

Threads suffice as workers: copies, casts, checksums and writes all run outside the interpreter
lock, and all workers share one mapping of the source.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from export_scripts.checkpoints.base import StoredTensor
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.sharding import ValueRange, file_chunks
from export_scripts.conversion.tensor_plan import TensorPlan, local_fine_shape, values_of
from export_scripts.errors import CheckpointMismatchError
from export_scripts.families.mapping.sources import Parts
from export_scripts.families.mapping.tensors import ShapeTensor
from export_scripts.ft.writer import FTWriter
from export_scripts.numeric.arrays import to_float32
from export_scripts.numeric.dtypes import LARGEST_FINITE

Progress = Callable[[int, int], None]
_Item = TypeVar("_Item")

_SCAN_VALUES = 1 << 20


@dataclass
class Counter:
    """Progress in bytes, reported to the caller."""

    progress: Progress | None  # called with (done, total) after every change, one call at a time
    total: int = 0  # bytes of all weight files
    done: int = 0  # bytes complete, those of an earlier run included
    written: int = 0  # bytes written by this run
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int, *, written: bool = True) -> None:
        """Count bytes."""
        with self._lock:
            self.done += count
            self.written += count if written else 0
            if self.progress is not None:
                self.progress(self.done, self.total)


def write_tensors(
    plan: ConversionPlan, writer: FTWriter, counter: Counter, *, processes: int
) -> list[str]:
    """Write every missing file; return the problems of the values."""
    worker = _TensorWorker(plan, writer, counter)
    # Source order: reads go forward, and a layer's small tensors come between its large ones,
    # which keeps the disk busy.
    ordered = sorted(plan.tensors, key=worker.values.place)
    problems = write_all(worker.write, ordered, worker.stopping, processes=processes)
    writer.flush()
    found = {item.tensor.name: each for item, each in zip(ordered, problems, strict=True)}
    return [problem for item in plan.tensors for problem in found[item.tensor.name]]


def write_all(
    write: Callable[[_Item], list[str]],
    items: Sequence[_Item],
    stopping: threading.Event,
    *,
    processes: int,
) -> list[list[str]]:
    """Return the problems that `write` returns, or raises as a mismatch, for each item in order.

    Items are worked on in parallel. The first other exception sets `stopping` and is raised, once
    all workers have ended.
    """

    def attempt(item: _Item) -> list[str]:
        try:
            return write(item)
        except CheckpointMismatchError as error:
            return error.problems

    pool = concurrent.futures.ThreadPoolExecutor(processes, "convert")
    try:
        futures = [pool.submit(attempt, item) for item in items]
        done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    finally:
        stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)


def build_parts(plan: ConversionPlan, item: TensorPlan) -> Parts:
    """Return a tensor's parts: views of the source's files unless a value is computed.

    Raises:
        CheckpointMismatchError: Stored values contradict each other.
    """
    try:
        return item.source.build(values_of(plan.facts, item.index), plan.config)
    except CheckpointMismatchError as error:
        keys = ", ".join(key.format(**item.index) for key, _ in item.source.reads)
        where = f"{item.tensor.name}: {keys} in {plan.facts.reader.path}"
        raise CheckpointMismatchError(f"{where}: {each}" for each in error.problems) from error


@dataclass(frozen=True)
class SourceValues:
    """The stored values that the tensors of a plan are made of."""

    plan: ConversionPlan

    def place(self, item: TensorPlan) -> tuple[str, int]:
        """Return the file and offset at which a tensor begins in the source."""
        return next(((str(stored.path), stored.offset) for _, stored in self._read(item)), ("", 0))

    def _read(self, item: TensorPlan) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (key, stored part) of everything read for a tensor; of replicas the first."""
        for pattern, cut in item.source.reads:
            key = pattern.format(**item.index)
            pieces = self.plan.facts.pieces(key)
            for piece in pieces[:1] if cut is None else pieces:
                yield from ((key, stored) for stored in piece.stored)

    def damage(self, item: TensorPlan) -> list[str]:
        """Return a problem for everything read for a tensor that differs from its checksum."""
        name = item.tensor.name
        maps = self.plan.facts.maps
        for _, piece in self._read(item):
            maps.prefetch(piece)
        return [
            f"{name}: {key} in {piece.path} does not match its checksum in the archive, so it is "
            f"damaged; copy the file again (--allow '{name}' converts it as it is)"
            for key, piece in self._read(item)
            if not self.plan.request.allows(name) and not maps.is_intact(piece)
        ]

    def forget(self, item: TensorPlan) -> None:
        """Drop the source's pages, which keeps memory independent of the model's size."""
        for _, piece in self._read(item):
            self.plan.facts.maps.forget(piece)

    def problem(self, name: str, items: Sequence[TensorPlan], kind: str) -> str:
        """Return the problem of a tensor, made of some of the plan's, with infinities or NaN."""
        extents = []
        for item in items:
            extents.append(_source_extent(build_parts(self.plan, item)))
            self.forget(item)
        largest, bad = max(each for each, _ in extents), sum(count for _, count in extents)
        if bad:
            return (
                f"{name}: the checkpoint holds {bad} values that are infinite or not a number; "
                f"training diverged or the file is damaged (--allow '{name}' converts it as it is)"
            )
        return (
            f"{name}: values up to {largest:.6g} in magnitude become infinite in {kind}, whose "
            f"largest is {LARGEST_FINITE[kind]:.6g}; convert to bf16 or fp32"
        )


@dataclass(frozen=True)
class Worker:
    """State that all workers of a conversion share."""

    plan: ConversionPlan
    writer: FTWriter
    counter: Counter
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def values(self) -> SourceValues:
        """The stored values of the source."""
        return SourceValues(self.plan)

    def counted(self, chunk: memoryview) -> memoryview:
        """Return a chunk that is about to be written.

        Raises:
            CancelledError: Another worker has failed.
        """
        if self.stopping.is_set():
            raise concurrent.futures.CancelledError
        self.counter.add(len(chunk))
        return chunk


class _TensorWorker(Worker):
    """A worker that writes the files of one tensor after the other."""

    def write(self, item: TensorPlan) -> list[str]:
        """Write the missing files of one tensor; return the problems of its values."""
        tp_size = self.plan.config.tensor_para_size
        kind = item.tensor.dtype or self.plan.config.weight_data_type
        size = item.tensor.file_bytes(tp_size, kind)
        whole = ValueRange()
        missing: list[tuple[int, str]] = []
        for tp_rank, name in enumerate(item.tensor.file_names(tp_size)):
            if self.writer.is_done(name):
                self.counter.add(size, written=False)
                whole.include(recorded_range(self.writer.records[name]))
            else:
                missing.append((tp_rank, name))
        if missing:
            if damaged := self.values.damage(item):
                return damaged
            parts = build_parts(self.plan, item)
            shape, axis = local_fine_shape(parts, item.tensor, tp_size)
            for tp_rank, name in missing:
                found = ValueRange()
                chunks = self._chunks(file_chunks(parts, shape, axis, tp_rank, kind), found)
                facts = _range_recorder(item.tensor.name, found)
                self.writer.write(name, size, chunks, facts=facts)
                whole.include(found)
            del parts
            self.values.forget(item)
        if whole.finite or self.plan.request.allows(item.tensor.name):
            return []
        return [self.values.problem(item.tensor.name, (item,), kind)]

    def _chunks(
        self, chunks: Iterator[tuple[memoryview, ValueRange]], found: ValueRange
    ) -> Iterator[memoryview]:
        for chunk, values in chunks:
            found.include(values)
            yield self.counted(chunk)


def _range_recorder(tensor: str, found: ValueRange) -> Callable[[], Mapping[str, Any]]:
    def record() -> Mapping[str, Any]:
        return {"tensor": tensor, **range_record(found)}

    return record


def range_record(found: ValueRange) -> Mapping[str, str]:
    """Return the record of a range of values; JSON has no infinities."""
    return {"min": repr(found.smallest), "max": repr(found.largest)}


def recorded_range(record: Mapping[str, Any]) -> ValueRange:
    """Return the range of values that a file's record holds."""
    low, high = float(record["min"]), float(record["max"])
    return ValueRange(low, high, math.isfinite(low) and math.isfinite(high))


def _source_extent(parts: Parts) -> tuple[float, int]:
    """Return the largest finite magnitude of the source and its number of non-finite values."""
    largest, bad = 0.0, 0
    for part in parts.tensors:
        if isinstance(part, ShapeTensor):
            continue
        flat = part.ravel(order="K")
        for start in range(0, flat.size, _SCAN_VALUES):
            values = flat[start : start + _SCAN_VALUES]
            values = values if values.dtype == np.float64 else to_float32(values)
            finite = np.isfinite(values)
            bad += int((~finite).sum())
            if finite.any():
                largest = max(largest, float(abs(values[finite]).max()))
    return largest, bad


def tensor_records(plan: ConversionPlan, writer: FTWriter) -> dict[str, Any]:
    """Return the manifest's record of each tensor: shape, type, sources, range of values."""
    out: dict[str, Any] = {}
    for item in plan.tensors:
        whole = ValueRange()
        for name in item.tensor.file_names(plan.config.tensor_para_size):
            whole.include(recorded_range(writer.records[name]))
        kind = item.tensor.dtype or plan.config.weight_data_type
        out[item.tensor.name] = {
            "split": item.tensor.split,
            **tensor_record((item,), item.tensor.shape, kind, whole),
        }
    return out


def tensor_record(
    items: Sequence[TensorPlan], shape: Sequence[int], kind: str, found: ValueRange
) -> dict[str, Any]:
    """Return the record of a tensor, made of some of a plan's, in a shape and a type."""
    return {
        "shape": list(shape),
        "dtype": kind,
        "source": [
            *dict.fromkeys(
                key.format(**item.index) for item in items for key, _ in item.source.reads
            )
        ],
        "min": _json_number(found.smallest),
        "max": _json_number(found.largest),
        "abs_max": _json_number(found.largest_magnitude),
    }


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)
