"""The loop over a plan's tensors: read, rearrange, cast, split, write.

Workers are threads: copies, casts, checksums and writes release the interpreter lock, and all
workers share one mapping of the source.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from export_scripts.checkpoints.base import StoredTensor
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.sharding import Bytes, file_chunks, is_finite
from export_scripts.conversion.tensor_plan import (
    TensorPlan,
    Window,
    WrittenFile,
    WrittenTensor,
    rank_window,
    whole_window,
)
from export_scripts.families.mapping.sources import Parts, rearranged
from export_scripts.ft.writer import FTWriter
from export_scripts.numeric import widening
from export_scripts.numeric.arrays import to_float32
from export_scripts.numeric.dtypes import LARGEST_FINITE
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.checksum import crc32

_SCAN_VALUES = 1 << 20


@dataclass
class Counter:
    """Progress in bytes, reported to the caller."""

    # Called with (done, total) after every change, one call at a time.
    progress: Callable[[int, int], None] | None
    total: int  # bytes of all weight files
    done: int  # bytes written, by this run and an earlier one
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Add written bytes."""
        with self._lock:
            self.done += count
            if self.progress is not None:
                self.progress(self.done, self.total)


def write_files(plan: ConversionPlan, writer: FTWriter, counter: Counter) -> list[str]:
    """Write every missing file of weights; return problems of the values.

    Any other error stops all workers, and is raised.
    """
    stopping = threading.Event()
    groups = [_Group(plan, files, writer, counter, stopping) for files in plan.files]
    pool = concurrent.futures.ThreadPoolExecutor(plan.request.processes, "convert")
    try:
        # In the order of the source, reads are sequential, and a layer's small tensors come between
        # its large ones, which keeps the disk busy.
        futures = [pool.submit(group.write) for group in sorted(groups, key=_Group.place)]
        done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)
    writer.flush()
    return [problem for group in groups for problem in group.problems]


def build_parts(plan: ConversionPlan, item: TensorPlan) -> Parts:
    """Return a tensor's parts: views of the source's files, unless values are computed.

    Raises:
        CheckpointMismatchError: Stored values contradict each other.
    """
    try:
        return item.build(plan.facts, plan.config)
    except CheckpointMismatchError as error:
        keys = ", ".join(key for key, _ in item.reads)
        where = f"{item.tensor.name}: {keys} in {plan.facts.reader.path}"
        raise CheckpointMismatchError(
            f"{where}: {problem}" for problem in error.problems
        ) from error


@dataclass
class _Group:
    """Files that hold the same tensors, written by one worker."""

    plan: ConversionPlan
    files: Sequence[WrittenFile]
    writer: FTWriter
    counter: Counter
    stopping: threading.Event  # set after another worker has failed
    problems: list[str] = field(default_factory=list)  # complete after `write`
    # Tensors of the family -> parts built from their sources.
    _built: dict[TensorPlan, Parts] = field(default_factory=dict)
    _is_finite: bool = True  # whether the current tensor's values are finite so far
    _checksum: int = 0  # checksum of these values

    def place(self) -> tuple[str, int]:
        """Return (file, offset) of the first tensor in the source."""
        read = self._read(self.files[0].tensors[0].items[0])
        return next(((str(stored.path), stored.offset) for _, stored in read), ("", 0))

    def _read(self, item: TensorPlan) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (key, stored tensor) of everything read for a tensor, but only one replica."""
        for key, cut in item.reads:
            pieces = item.pieces(self.plan.facts, key)
            for piece in pieces[:1] if cut is None else pieces:
                yield from ((key, stored) for stored in piece.stored)

    def _checksum_problems(self, item: TensorPlan) -> list[str]:
        """Return a problem for each source of a tensor that does not match its checksum."""
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

    def _forget(self, item: TensorPlan) -> None:
        """Drop the source's pages, so that memory does not grow with the model."""
        for _, piece in self._read(item):
            self.plan.facts.maps.forget(piece)

    def _value_problems(self, tensor: WrittenTensor, kind: str) -> list[str]:
        """Return a problem if a tensor was written with infinities or NaN."""
        name = tensor.key
        names = (name, *(item.tensor.name for item in tensor.items))
        if self._is_finite or any(map(self.plan.request.allows, names)):
            return []
        parts = (self._built.get(item) or build_parts(self.plan, item) for item in tensor.items)
        extents = [_source_extent(part) for part in parts]
        largest, bad = max(value for value, _ in extents), sum(count for _, count in extents)
        if bad:
            return [
                f"{name}: the checkpoint holds {bad} values that are infinite or not a number; "
                f"training diverged or the file is damaged (--allow '{name}' converts it as it is)"
            ]
        return [
            f"{name}: values up to {largest:.6g} in magnitude become infinite in {kind}, whose "
            f"largest is {LARGEST_FINITE[kind]:.6g}; convert to bf16 or fp32"
        ]

    def _counted(self, chunk: memoryview) -> memoryview:
        """Count a chunk that is about to be written, and return it.

        Raises:
            CancelledError: Another worker has failed.
        """
        if self.stopping.is_set():
            raise concurrent.futures.CancelledError
        self.counter.add(len(chunk))
        return chunk

    def write(self) -> None:
        """Write the missing files, up to the first with bad values; its problems are recorded."""
        try:
            for file in self.files:
                if file.name not in self.writer.records:
                    self._write(file)
        except CheckpointMismatchError as error:
            self.problems = error.problems
        self._release_except(())

    def _write(self, file: WrittenFile) -> None:
        has_archives = file.tensors[0].archive is not None

        def inspect(raw: Bytes, kind: str) -> None:
            self._is_finite = self._is_finite and is_finite(raw, kind)
            if has_archives:
                self._checksum = crc32(raw, self._checksum)

        facts = {} if file.header else {"tensor": file.tensors[0].key}
        chunks = file_chunks(self._pieces(file), file.size_bytes, inspect)
        self.writer.write(file.name, file.size_bytes, map(self._counted, chunks), facts=facts)

    def _pieces(self, file: WrittenFile) -> Iterator[bytes | tuple[Parts, Window, str]]:
        """Yield the pieces of a file, for `file_chunks`.

        The parts of a tensor stay built for the next tensor or file if that needs them, too.

        Raises:
            CheckpointMismatchError: After the last piece, if a source is damaged or values are not
                finite, so that no later run takes the file for a complete one.
        """
        problems = []
        if file.header:
            yield file.header
        for tensor in file.tensors:
            self._release_except(tensor.items)
            self._is_finite, self._checksum = True, 0
            if tensor.archive:
                yield tensor.archive.parts()[0]
            for number, (item, view) in enumerate(tensor.pieces):
                if number:  # all experts of a layer would not fit into memory
                    self._release_except([each for each, _ in tensor.pieces[number:]])
                if item not in self._built:
                    problems += self._checksum_problems(item)
                    self._built[item] = build_parts(self.plan, item)
                parts = self._built[item]
                if view is not None:
                    parts = rearranged(parts, view)
                    window = whole_window(parts.shape)
                else:
                    tp_size = self.plan.config.tensor_para_size
                    window = rank_window(parts, item.tensor, tp_size, file.tp_rank)
                yield parts, window, file.type_of(tensor)
                del parts
            if tensor.archive:
                yield tensor.archive.parts(self._checksum)[1]
            problems += self._value_problems(tensor, file.type_of(tensor))
        refuse(problems)

    def _release_except(self, items: Sequence[TensorPlan]) -> None:
        """Release the parts and pages of all tensors but `items`."""
        for item in self._built.keys() - items:
            del self._built[item]
            self._forget(item)


def _source_extent(parts: Parts) -> tuple[float, int]:
    """Return the source's largest finite magnitude, and its number of non-finite values."""
    largest, bad = 0.0, 0
    for part in parts.tensors:
        flat = part.ravel(order="K")
        for start in range(0, flat.size, _SCAN_VALUES):
            values = flat[start : start + _SCAN_VALUES]
            if values.dtype == np.uint8:  # the bytes of FP8
                values = widening.wide(values)
            values = values if values.dtype == np.float64 else to_float32(values)
            finite = np.isfinite(values)
            bad += int((~finite).sum())
            if finite.any():
                largest = max(largest, float(abs(values[finite]).max()))
    return largest, bad
