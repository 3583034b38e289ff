"""Strided copies through bounded buffers, and ranges of values by their bit patterns."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from export_scripts.conversion import sharding
from export_scripts.conversion.sharding import file_chunks, is_finite
from export_scripts.conversion.tensor_plan import rank_window, whole_window
from export_scripts.families.layout.spec import FTTensor
from export_scripts.families.mapping.sources import Parts
from export_scripts.numeric.dtypes import item_size, torch_dtype
from tests.arrays import as_array

TYPES = ["fp32", "fp16", "bf16"]


def raw(values: list[float], data_type: str) -> np.ndarray:
    tensor = torch.tensor(values, dtype=torch.float64).to(torch_dtype(data_type))
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize("data_type", TYPES)
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("rest", [[1.0], [-1.0], [0.0], [-1.0, 1.0]])
def test_infinities_and_nan_are_noticed(data_type, odd, rest):
    bits = raw([*rest, odd], data_type)
    if math.isnan(odd) and math.copysign(1, odd) < 0:
        bits[-1] |= 0x80  # torch drops the sign of NaN
    assert not is_finite(bits, data_type)


@pytest.mark.parametrize("data_type", TYPES)
def test_the_largest_finite_values_are_finite(data_type):
    top = torch.finfo(torch_dtype(data_type)).max
    for values in ([top, -top], [top], [-top], [0.0], [-0.0]):
        assert is_finite(raw(values, data_type), data_type)


def written(parts: Parts, tensor: FTTensor, ranks: int, rank: int, kind: str) -> torch.Tensor:
    pieces = [(parts, rank_window(parts, tensor, ranks, rank), kind)]
    shape = tensor.local_shape(ranks)
    size = math.prod(shape) * item_size(kind)
    data = b"".join(bytes(chunk) for chunk in file_chunks(pieces, size))
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(kind)).view(shape)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("split", [-1, 1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0), (1, 0, 3, 2)])
@pytest.mark.parametrize(("stored", "kind"), [("fp32", "fp16"), ("bf16", "bf16")])
def test_any_cut_any_split_any_order_of_axes(monkeypatch, cut, split, order, stored, kind):
    """Small chunks and tiles, so that every border is crossed."""
    monkeypatch.setattr(sharding, "_TILE_COLUMNS", 8)
    monkeypatch.setattr(sharding, "_TILE_ROWS", 5)
    monkeypatch.setattr(sharding, "_SMALL", 1)
    monkeypatch.setattr(sharding, "LARGE_BYTES", 1)
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 8)
    space = sharding.Workspace(chunk_bytes=1500)
    monkeypatch.setattr(sharding, "_WORKSPACE", space)
    shape = (14, 6, 4, 10)
    base = torch.randn([shape[order.index(axis)] for axis in range(4)]).to(torch_dtype(stored))
    whole = base.permute(order)
    assert tuple(whole.shape) == shape
    halves = whole.split([shape[cut] // 2 + 1, shape[cut] // 2 - 1], cut)
    parts = Parts(cut, tuple(as_array(half) for half in halves))
    tensor, ranks = FTTensor("x", shape, split if split >= 0 else None), 2 if split >= 0 else 1
    for rank in range(ranks):
        expected = whole if split < 0 else whole.chunk(2, split)[rank]
        assert torch.equal(
            written(parts, tensor, ranks, rank, kind), expected.to(torch_dtype(kind))
        )


def test_a_row_larger_than_a_chunk_is_written_whole(monkeypatch):
    monkeypatch.setattr(sharding, "LARGE_BYTES", 1)
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 8)
    space = sharding.Workspace(chunk_bytes=100)
    monkeypatch.setattr(sharding, "_WORKSPACE", space)
    tensor = torch.randn(3, 500)
    parts = Parts(0, (tensor.numpy(),))
    assert torch.equal(written(parts, FTTensor("x", (3, 500)), 1, 0, "fp32"), tensor)


def test_a_chunk_stays_until_the_next_but_one(monkeypatch):
    monkeypatch.setattr(sharding, "LARGE_BYTES", 1)
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 8)
    space = sharding.Workspace(chunk_bytes=8)
    monkeypatch.setattr(sharding, "_WORKSPACE", space)
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    chunks = file_chunks([(Parts(0, (values,)), [(0, 3), (0, 2)], "fp32")], 24)
    first = next(chunks)
    second = next(chunks)
    assert bytes(first) == values[0].tobytes()
    assert bytes(second) == values[1].tobytes()


def test_small_files_leave_the_last_chunk_of_a_large_one_alone(monkeypatch):
    """It may still be on its way to the disk when the next files are filled."""
    space = sharding.Workspace(chunk_bytes=1 << 20)
    monkeypatch.setattr(sharding, "_WORKSPACE", space)

    def chunks(values: np.ndarray) -> list[memoryview]:
        window = whole_window(values.shape)
        return list(file_chunks([(Parts(0, (values,)), window, "fp32")], values.nbytes))

    *_, last = chunks(np.ones((1 << 19,), np.float32))
    for _ in range(3):
        chunks(np.zeros((8,), np.float32))
    assert set(last.cast("B").cast("f")) == {1.0}


def test_buffers_lie_in_private_memory_from_a_large_page_on():
    """Shared memory gets no large pages, without which direct writes take twice as long."""
    chunk = sharding.Workspace().next_chunk(1 << 20)
    address = chunk.ctypes.data
    assert address % (2 << 20) == 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            assert permissions == "rw-p"
            return
    pytest.fail("the buffer is in no mapping")
