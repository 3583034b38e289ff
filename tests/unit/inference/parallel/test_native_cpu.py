"""The library of matrix products: its values on every kind of processor, and torch without it."""

import logging
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hatch_build import compile_library
from inference.parallel import native_cpu
from inference.parallel.epilogue import Epilogue, GemmOptions
from inference.parallel.gemm import make_gated_gemm, make_gemm
from inference.parallel.int8 import quantise
from inference.parallel.native_cpu import NativeGemm, attend, has_native, rms_norm
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(
        platform.machine() not in native_cpu._CHOICES, reason="no instructions of this processor"
    ),
]
LEVELS = native_cpu._CHOICES.get(platform.machine(), ())
# The largest whole number of a row's values.
STEPS = {"avx2": 63, "avx512": 127, "amx": 127, "dotprod": 127}
# Odd sizes leave groups and blocks that are not full; the last takes two digits.
SIZES = [(99, 77), (896, 64), (5, 3), (4098, 40)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the installed library, where that is of this source, or else a new one."""
    library = tmp_path_factory.mktemp("native") / "rows.so"
    if native_cpu.has_library():
        shutil.copy(native_cpu.LIBRARY, library)
    else:
        compile_library(ROOT, library)
    return library


@pytest.fixture(autouse=True)
def forgotten(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds the library anew, in the form of this source."""
    monkeypatch.setattr(native_cpu, "LIBRARY", compiled)
    monkeypatch.delenv(native_cpu.VARIABLE, raising=False)
    native_cpu._library.cache_clear()
    yield
    native_cpu._library.cache_clear()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force the instructions of a kind of processor."""
    monkeypatch.setenv(native_cpu.VARIABLE, request.param)
    try:
        native_cpu._library()
    except ValueError:
        pytest.skip(f"this processor lacks {request.param}")
    return request.param


def operands(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sizes = (rows, inputs), (inputs, outputs), (outputs,), (rows, outputs)
    x, weight, bias, residual = (torch.randn(size, generator=generator) for size in sizes)
    return x.to(dtype), weight.bfloat16(), bias, residual.to(dtype)


def assert_near(y: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Check an error relative to the size of all values, and one rounding to the type of y."""
    error = (y.double() - expected).abs()
    rounding = torch.finfo(y.dtype).eps * expected.abs() / 2 if y.dtype == torch.bfloat16 else 0
    assert (error <= rounding + tolerance * expected.norm() / expected.numel() ** 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 19, 131])
def test_rows_by_weights_of_bf16(level, rows, inputs, outputs, dtype):
    x, weight, bias, residual = operands(rows, inputs, outputs, dtype)
    y = NativeGemm(weight, Epilogue(bias), int8=False)(x, residual)
    assert y.dtype == dtype
    assert_near(y, x.double() @ weight.double() + bias.double() + residual.double(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 19, 131])
def test_sums_of_eight_bits_are_exact(level, rows, inputs, outputs, dtype):
    x, weight, bias, residual = operands(rows, inputs, outputs, dtype)
    columns, scale = quantise(weight)
    steps = STEPS[level]
    unit = x.float().abs().amax(1, keepdim=True)
    whole = x.float() * torch.div(torch.tensor(float(steps)), unit)
    digits = whole.round().double()
    if inputs >= 4096:
        digits += ((whole - whole.round()) * (2 * steps)).round().double() / (2 * steps)
    sums = digits @ columns.double().t() * scale.double() * unit.double() / steps
    y = NativeGemm(weight, Epilogue(bias), int8=True)(x, residual)
    assert y.dtype == dtype
    assert_near(y, sums + bias.double() + residual.double(), 1e-6)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("inputs", [99, 4096])
def test_a_row_does_not_depend_on_the_others(level, inputs, int8):
    x, weight, bias, _ = operands(35, inputs, 77, torch.bfloat16)
    gemm = NativeGemm(weight, Epilogue(bias), int8=int8)
    whole = gemm(x)
    for rows in (1, 2, 3, 5, 8, 11, 17, 33):
        others = x.clone()
        others[rows:] *= 1000
        assert gemm(x[:rows]).equal(whole[:rows])
        assert gemm(others)[:rows].equal(whole[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
def test_nothing_gives_the_bias_and_nan_is_not_lost(level, int8, dtype):
    x, weight, bias, _ = operands(3, 24, 56, dtype)
    x[0] = 0
    x[1, 5] = torch.nan
    weight[:, 7] = 0  # an output without a scale
    y = NativeGemm(weight, Epilogue(bias), int8=int8)(x)
    assert y[0].equal(bias.to(dtype))
    assert y[2, 7] == bias[7].to(dtype)
    assert y[1].isnan().all()
    assert y[2].isfinite().all()
    assert NativeGemm(weight, Epilogue(bias), int8=int8)(x[:0]).shape == (0, 56)


@pytest.mark.parametrize("int8", [False, True])
def test_activation_residual_and_gate(level, int8, monkeypatch):
    monkeypatch.setattr(native_cpu, "multiplies_bf16", lambda: False)
    x, weight, bias, residual = operands(3, 24, 56, torch.float32)
    options = GemmOptions(int8=int8)
    plain = make_gemm(weight, bias, options=options)
    assert isinstance(plain, NativeGemm)
    curved = make_gemm(weight, bias, activation="silu", options=options)
    silu = torch.nn.functional.silu(plain(x))
    torch.testing.assert_close(curved(x, residual), silu + residual)
    other = make_gemm(weight * 2, options=options)
    gated = make_gated_gemm((weight, weight * 2), (bias, None), activation="silu", options=options)
    torch.testing.assert_close(gated(x), silu * other(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 24, 3])
def test_attention_of_single_tokens(level, size, dtype):
    generator = torch.Generator().manual_seed(size)
    heads, key_heads, tokens = 6, 2, 37
    qkv = torch.randn(3, heads + 2 * key_heads, size, generator=generator).to(dtype)
    cache = torch.randn(5, 2, key_heads, tokens, size, generator=generator).to(dtype)
    query, (keys, values) = qkv[:, :heads], cache[1:4, :, :, :35].unbind(1)
    spans = torch.tensor([[0, 5, 34], [35, 20, 35]])
    found = attend(query, keys, values, spans, scale=0.3)
    assert found.dtype == dtype
    for row, (first, stop) in enumerate(spans.t().tolist()):
        seen = [each[row, :, first:stop].double() for each in (keys, values)]
        k, v = (each.repeat_interleave(heads // key_heads, 0) for each in seen)
        scores = torch.einsum("hd,hsd->hs", query[row].double(), k) * 0.3
        expected = torch.einsum("hs,hsd->hd", scores.softmax(-1), v)
        assert_near(found[row].view(heads, size), expected, 1e-5)


def test_attention_to_a_far_greater_score_and_to_nan(level):
    query, keys = torch.ones(1, 1, 8), torch.full((1, 1, 3, 8), -1000.0)
    keys[:, :, 1] = 1000
    values = torch.arange(24.0).view(1, 1, 3, 8)
    spans = torch.tensor([[0], [3]])
    assert attend(query, keys, values, spans, scale=1.0).equal(values[:, 0, 1])
    keys[0, 0, 2, 3] = torch.nan
    assert attend(query, keys, values, spans, scale=1.0).isnan().all()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_rows(dtype, kept, rows):
    x, _, weight, _ = operands(rows, 77, 77, dtype)
    x[0] = 0
    weight, wide = weight.to(kept), x.double()
    expected = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype
    assert_near(found, expected, 1e-6)


def test_where_the_library_is_missing_torch_multiplies(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(native_cpu, "LIBRARY", tmp_path / "rows.so")
    with caplog.at_level(logging.WARNING):
        assert not has_native(torch.int8, 8)
        assert not has_native(torch.bfloat16, 8)
    assert len(caplog.records) == 1  # once for all products
    x, weight, bias, _ = operands(3, 24, 56, torch.float32)
    gemm = make_gemm(weight.float(), bias, options=GemmOptions(int8=True))
    assert not isinstance(gemm, NativeGemm)
    assert_near(gemm(x), x.double() @ weight.double() + bias.double(), 0.1)


def test_a_library_of_another_source_is_not_taken(monkeypatch, tmp_path, caplog):
    for name in ("rows.c", "kernel.h"):
        shutil.copy(native_cpu._FOLDER / name, tmp_path)
    with (tmp_path / "kernel.h").open("a", encoding="utf-8") as file:
        file.write("\n")
    monkeypatch.setattr(native_cpu, "_FOLDER", tmp_path)
    assert not has_native(torch.int8, 8)
    assert "another version" in caplog.text


@pytest.mark.parametrize("wanted", ["AVX512", "sse", ""])
def test_unknown_instructions_are_refused(wanted, monkeypatch):
    monkeypatch.setenv(native_cpu.VARIABLE, wanted)
    with pytest.raises(
        ValueError, match=f"{native_cpu.VARIABLE}={wanted}: expected one of auto, none"
    ):
        has_native(torch.int8, 8)


def test_instructions_that_are_asked_for_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(native_cpu, "LIBRARY", tmp_path / "rows.so")
    monkeypatch.setenv(native_cpu.VARIABLE, LEVELS[0])
    with pytest.raises(ValueError, match=f"{native_cpu.VARIABLE}={LEVELS[0]}: "):
        has_native(torch.int8, 8)


def test_none_asks_for_torch(monkeypatch):
    assert has_native(torch.int8, 8)
    assert not has_native(torch.int8, 1 << 17)  # its sums may exceed 32 bits
    native_cpu._library.cache_clear()
    monkeypatch.setenv(native_cpu.VARIABLE, "none")
    assert not has_native(torch.int8, 8)
