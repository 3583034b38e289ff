"""Matrix products in the forms devices like: values, fused operations, 8-bit weights."""

import pytest
import torch
from torch.nn import functional

from inference.parallel import gemm_cpu
from inference.parallel.epilogue import Epilogue
from inference.parallel.gemm import make_gemm
from inference.parallel.int8 import Int8Gemm, quantise

ACTIVATIONS = {
    None: lambda y: y,
    "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda y: functional.relu(y).square(),
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
def test_product_with_bias_and_activation(dtype, rows, activation):
    x, weight, bias = operands(rows, dtype)
    expected = ACTIVATIONS[activation](x.double() @ weight.double() + bias.double())
    y = make_gemm(weight, bias, activation=activation)(x)
    assert y.dtype == dtype
    # bf16 keeps 8 bits, and the sum is over 24 products.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 10)


def test_residual_is_added_once():
    x, weight, bias = operands(5, torch.float32)
    residual = torch.full((5, 56), 3.0)
    y = make_gemm(weight, bias)(x, residual)
    torch.testing.assert_close(y, x @ weight + bias + 3, rtol=1e-5, atol=1e-4)
    assert residual.eq(3).all()


def test_transposed_weight_gives_the_same_product():
    x, weight, _ = operands(3, torch.float32)
    assert make_gemm(weight.t().contiguous().t())(x).equal(make_gemm(weight)(x))


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_weights_of_half_precision_multiply_rows_of_single(rows):
    x, weight, bias = operands(rows, torch.float32)
    half, residual = weight.half(), torch.full((rows, 56), 3.0)
    y = make_gemm(half, bias)(x, residual)
    assert y.dtype == torch.float32
    # Only the order of the sums differs: the weights keep their values.
    torch.testing.assert_close(y, x @ half.float() + bias + 3, rtol=1e-5, atol=1e-4)


INT8_GEMMS = [
    *([gemm_cpu.FbgemmInt8Gemm] if gemm_cpu.has_fbgemm_int8() else []),
    Int8Gemm,
]


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 14, 31, 50, 121])
@pytest.mark.parametrize("half", [False, True])
def test_row_does_not_depend_on_how_many_there_are(rows, half):
    x, weight, bias = operands(150, torch.float32)
    gemm = make_gemm(weight.half() if half else weight, bias)
    assert gemm(x[:rows]).equal(gemm(x)[:rows])


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 8])
@pytest.mark.parametrize("kind", INT8_GEMMS[:-1])
def test_row_of_eight_bits_does_not_depend_on_the_others(kind, rows):
    x, weight, bias = operands(8, torch.float32)
    others = x.clone()
    others[rows:] *= 1000
    gemm = kind(weight, Epilogue(bias))
    assert gemm(x[:rows]).equal(gemm(others)[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 17, 100])
@pytest.mark.parametrize("kind", INT8_GEMMS)
def test_eight_bit_product_is_that_of_the_rounded_weights(kind, rows, dtype):
    x, weight, bias = operands(rows, dtype)
    x[0] *= 100  # rows of other sizes do not matter
    numbers, scale = quantise(weight)
    matrix = numbers * scale[:, None]
    expected = x.float() @ matrix.t() + bias.float()
    y = kind(weight, Epilogue(bias))(x)
    assert y.dtype == dtype
    # Each activation is off by half a step at most; steps are 1/127 of a row's largest value, with
    # 7 bits 1/63. On top come a few roundings of the type.
    steps = 127 if gemm_cpu.has_vnni() else 63
    most = x.float().abs().amax(1, keepdim=True) * matrix.abs().sum(1) / (2 * steps)
    rounded = 4 * torch.finfo(dtype).eps * (expected.abs() + x.float().abs() @ matrix.abs().t())
    assert ((y.float() - expected).abs() <= most + rounded).all()


@pytest.mark.parametrize("kind", INT8_GEMMS)
def test_eight_bit_product_of_nothing_is_the_bias_and_of_nan_not_finite(
    kind,
):
    x, weight, bias = operands(3, torch.float32)
    x[0] = 0
    x[1, 5] = torch.nan
    weight[:, 7] = 0  # an output without a scale
    y = kind(weight, Epilogue(bias))(x)
    assert y[0].equal(bias)
    assert y[2, 7] == bias[7]
    assert y[1].isnan().all()
    assert y[2].isfinite().all()


@pytest.mark.parametrize("inputs", [24, 64])
@pytest.mark.parametrize("kind", INT8_GEMMS)
def test_eight_bit_weights_lose_under_three_percent(kind, inputs):
    # For normal values: 0.8% by the weights, as much by activations of 8 bits, twice that by 7.
    generator = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((7, inputs), (inputs, 56)))
    exact = x @ weight
    error = kind(weight, Epilogue())(x) - exact
    assert 0 < error.norm() / exact.norm() < 0.03


@pytest.mark.parametrize("kind", INT8_GEMMS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_wide_row_with_one_large_value_keeps_its_small_ones(rows, kind):
    """A single digit of 8 bits would make all values but the largest one or two steps."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4096, 32, generator=generator)
    weight[7] = 0.0  # what is left is the work of the small values
    x = torch.randn(rows, 4096, generator=generator)
    x[:, 7] = 100.0
    numbers, scale = quantise(weight)
    expected = x @ (numbers * scale[:, None]).t()
    found = kind(weight, Epilogue())(x)
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_eight_bit_scale_is_the_largest_value_over_128():
    weight = torch.tensor([[1.0, 0.0, -2.0], [-0.5, 0.0, 0.3]])
    numbers, scale = quantise(weight)
    torch.testing.assert_close(scale, torch.tensor([1 / 128, 0, 2 / 128]))
    assert numbers.tolist() == [[127, -64], [0, 0], [-128, 19]]
