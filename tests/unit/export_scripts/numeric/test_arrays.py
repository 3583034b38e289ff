"""Conversions between types give torch's bits: every half, every bfloat16, every kind of float."""

import numpy as np
import pytest
import torch

from export_scripts.numeric import arrays
from export_scripts.numeric.arrays import BF16, DTYPES, round_to, store, to_float32
from export_scripts.numeric.dtypes import torch_dtype
from tests.arrays import as_array, as_torch

EVERY_16_BITS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def floats() -> torch.Tensor:
    """Return values on, next to and between those of the narrow types, and around their limits."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=generator, dtype=torch.int64)
    ties = torch.arange(0x3F7F0000, 0x3F820000, 0x800, dtype=torch.int64)
    ends = torch.tensor([65504.0, 65519.9, 65520.0, 3.3895e38, 3.4e38, 6e-8, 2.9e-8, 1e-45, 0.0])
    bits = torch.cat([bits, ties - 1, ties, ties + 1]).to(torch.int32)
    return torch.cat([bits.view(torch.float32), ends, -ends, ends / 0.0, -ends / 0.0])


def converted(values: torch.Tensor, kind: str) -> torch.Tensor:
    target = np.empty(tuple(values.shape), DTYPES[kind])
    store(target, as_array(values))
    return as_torch(target)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bit by bit, except that any NaN is as good as another."""
    assert found.dtype == expected.dtype
    odd = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), odd)
    width = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    assert torch.equal(found.view(width)[~odd], expected.view(width)[~odd])


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("stored", ["fp64", "fp32", "fp16", "bf16"])
def test_every_conversion_is_torchs(stored, kind):
    dtype = torch.float64 if stored == "fp64" else torch_dtype(stored)
    values = EVERY_16_BITS.view(dtype) if stored in ("fp16", "bf16") else floats().to(dtype)
    assert_same(converted(values, kind), values.to(torch_dtype(kind)))


def test_fp64_is_rounded_to_fp32_on_its_way():
    values = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert converted(values, "fp16").item() == 1.0


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 70_000), (3, 5, 30_000), (70_000, 2)])
def test_blocks_cover_every_shape(shape):
    values = torch.randn(shape).bfloat16()
    assert torch.equal(converted(values, "fp16"), values.half())


def test_turned_arrays_convert_as_straight_ones(monkeypatch):
    monkeypatch.setattr(arrays, "_BLOCK_VALUES", 10)
    values = torch.randn(4, 6, 5)
    for kind in ("bf16", "fp16"):
        expected = values.permute(2, 0, 1).to(torch_dtype(kind))
        assert torch.equal(converted(values.permute(2, 0, 1), kind), expected)


def test_bf16_cannot_be_computed_with_by_mistake():
    values = as_array(torch.ones(3, dtype=torch.bfloat16))
    assert values.dtype == BF16
    with pytest.raises(TypeError):
        values + values
    assert (to_float32(values) + 1).tolist() == [2.0] * 3


def test_rounded_values_keep_only_what_the_type_holds():
    values = np.array([1 + 2**-9, 1e6], np.float32)
    assert round_to(values, "bf16").tolist() == [1.0, 999424.0]
    assert round_to(values, "fp16").tolist() == [1 + 2**-9, np.inf]
