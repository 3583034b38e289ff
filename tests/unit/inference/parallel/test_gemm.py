"""Matrix products in the forms devices like: values, fused operations, 8-bit weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from inference.parallel.gemm import GemmActivation, Int8Gemm, make_gemm

ACTIVATIONS = {
    None: lambda y: y,
    "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


def operands(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 24, generator=generator)
    weight = torch.randn(24, 56, generator=generator)
    bias = torch.randn(56, generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_with_bias_and_activation(
    dtype: torch.dtype, rows: int, activation: GemmActivation | None
) -> None:
    x, weight, bias = operands(rows, dtype)
    expected = ACTIVATIONS[activation](x.double() @ weight.double() + bias.double())
    y = make_gemm(weight, bias, activation=activation)(x)
    assert y.dtype == dtype
    # bf16 keeps 8 bits, and the sum is over 24 products.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 10)


def test_residual_is_added_once() -> None:
    x, weight, bias = operands(5, torch.float32)
    residual = torch.full((5, 56), 3.0)
    y = make_gemm(weight, bias)(x, residual)
    torch.testing.assert_close(y, x @ weight + bias + 3, rtol=1e-5, atol=1e-4)
    assert residual.eq(3).all()


def test_transposed_weight_gives_the_same_product() -> None:
    x, weight, _ = operands(3, torch.float32)
    assert make_gemm(weight.t().contiguous().t())(x).equal(make_gemm(weight)(x))


@pytest.mark.parametrize("inputs", [24, 64])
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_eight_bit_weights_lose_under_two_percent(rows: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(inputs, 56)
    bias = torch.randn(56)
    exact = make_gemm(weight, bias)(x)
    error = make_gemm(weight, bias, int8=True)(x) - exact
    assert 0 < error.norm() / exact.norm() < 0.02


def test_eight_bit_scale_is_the_largest_value_over_128() -> None:
    weight = torch.tensor([[1.0, 0.0, -2.0], [-0.5, 0.0, 0.3]])
    gemm = Int8Gemm(weight, None)
    torch.testing.assert_close(gemm.scale, torch.tensor([1 / 128, 0, 2 / 128]))
    assert gemm.weight.tolist() == [[127, -64], [0, 0], [-128, 19]]
