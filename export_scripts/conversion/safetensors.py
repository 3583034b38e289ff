"""The writing of safetensors shards: the tensors of a file one after the other, in whole blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from export_scripts.conversion.huggingface import HuggingFacePlan, Shard, WrittenTensor
from export_scripts.conversion.sharding import (
    CHUNK_BYTES,
    ValueRange,
    gather,
    value_range,
    workspace,
)
from export_scripts.conversion.tensor_plan import shapes_of
from export_scripts.conversion.write import (
    Counter,
    Worker,
    build_parts,
    range_record,
    recorded_range,
    tensor_record,
    write_all,
)
from export_scripts.families.mapping.sources import Parts
from export_scripts.families.mapping.views import taken
from export_scripts.files.disk import BLOCK_BYTES
from export_scripts.ft.writer import FTWriter
from export_scripts.numeric.arrays import DTYPES


def write_shards(
    plan: HuggingFacePlan, writer: FTWriter, counter: Counter, *, processes: int
) -> list[str]:
    """Write every missing shard; return the problems of the values.

    Files are written in parallel, the tensors of one in order.
    """
    worker = _ShardWorker(plan.source, writer, counter)
    problems = write_all(worker.write, plan.shards, worker.stopping, processes=processes)
    writer.flush()
    return [problem for each in problems for problem in each]


def shard_records(plan: HuggingFacePlan, writer: FTWriter) -> dict[str, Any]:
    """Return the manifest's record of each tensor."""
    kind = plan.source.config.weight_data_type
    return {
        tensor.key: tensor_record(
            tensor.items,
            tensor.shape,
            kind,
            recorded_range(writer.records[shard.name]["tensors"][tensor.key]),
        )
        for shard in plan.shards
        for tensor in shard.tensors
    }


class _ShardWorker(Worker):
    """A worker that writes one file of several tensors after the other."""

    def write(self, shard: Shard) -> list[str]:
        """Write one file; return the problems of its values."""
        ranges: dict[str, ValueRange] = {}
        damaged: list[str] = []
        if self.writer.is_done(shard.name):
            self.counter.add(shard.size_bytes, written=False)
            records = self.writer.records[shard.name]["tensors"]
            ranges = {key: recorded_range(record) for key, record in records.items()}
        else:
            chunks = self._chunks(shard, ranges, damaged)

            def facts() -> Mapping[str, Any]:
                return {"tensors": {key: range_record(each) for key, each in ranges.items()}}

            self.writer.write(shard.name, shard.size_bytes, chunks, facts=facts)
        kind = self.plan.config.weight_data_type
        return damaged + [
            self.values.problem(tensor.key, tensor.items, kind)
            for tensor in shard.tensors
            if not ranges[tensor.key].finite and not self._is_allowed(tensor)
        ]

    def _is_allowed(self, tensor: WrittenTensor) -> bool:
        request = self.plan.request
        return request.allows(tensor.key) or any(
            request.allows(item.tensor.name) for item in tensor.items
        )

    def _chunks(
        self, shard: Shard, ranges: dict[str, ValueRange], damaged: list[str]
    ) -> Iterator[memoryview]:
        """Yield the file in chunks of whole blocks, and note each tensor's range and damage."""
        kind = self.plan.config.weight_data_type
        space, dtype = workspace(), DTYPES[kind]
        # A row that begins in a chunk ends in it.
        largest = max((self._row_bytes(tensor) for tensor in shard.tensors), default=0)
        capacity = CHUNK_BYTES + max(largest, len(shard.header))
        buffer = space.next_chunk(capacity)
        filled = len(shard.header)
        buffer[:filled] = memoryview(shard.header)
        for key, parts in self._pieces(shard, damaged):
            shape, found = parts.shape, ranges.setdefault(key, ValueRange())
            row = math.prod(shape[1:]) * dtype.itemsize
            first = 0
            while first < shape[0]:
                rows = min(shape[0] - first, max(1, (CHUNK_BYTES - filled) // row))
                raw = buffer[filled : filled + rows * row]
                window = [(first, first + rows), *((0, size) for size in shape[1:])]
                gather(raw.view(dtype).reshape(rows, *shape[1:]), parts, window, space)
                found.include(value_range(raw, kind))
                first += rows
                filled += rows * row
                if filled >= CHUNK_BYTES:
                    whole = filled // BLOCK_BYTES * BLOCK_BYTES
                    yield self.counted(buffer[:whole].data)
                    rest = buffer[whole:filled]
                    buffer, filled = space.next_chunk(capacity), len(rest)
                    buffer[:filled] = rest
            del parts
        if filled:
            yield self.counted(buffer[:filled].data)

    def _pieces(self, shard: Shard, damaged: list[str]) -> Iterator[tuple[str, Parts]]:
        """Yield each tensor's key with what follows each other in it."""
        for tensor in shard.tensors:
            for item in tensor.items:
                damaged += self.values.damage(item)
            for item, view in tensor.pieces:
                yield tensor.key, taken(build_parts(self.plan, item), view)
            for item in tensor.items:
                self.values.forget(item)

    def _row_bytes(self, tensor: WrittenTensor) -> int:
        """Return the most bytes of an entry of the first axis of a tensor's parts."""
        source = self.plan
        shapes = (
            taken(item.source.build(shapes_of(item, source.facts), source.config), view).shape
            for item, view in tensor.pieces
        )
        values = max(math.prod(shape[1:]) for shape in shapes)
        return values * DTYPES[source.config.weight_data_type].itemsize
