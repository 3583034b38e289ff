"""Matrix products on a GPU: their results, and their independence of the number of rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inference.parallel.epilogue import PLAIN_GEMM, Epilogue, GemmActivation, GemmOptions
from inference.parallel.gemm import make_gated_gemm, make_gemm
from inference.parallel.int8 import ScaledWeight, quantise
from tests.parity.conftest import skip_without_gpu

pytestmark = pytest.mark.gpu
skip_without_gpu()

FORMS = [PLAIN_GEMM, GemmOptions(int8=True), GemmOptions(fp8=True)]
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _needs_fp8(request) -> None:
    form = request.node.callspec.params.get("form")
    if form is None:
        return
    if form.fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no FP8")


def rounded_fp8(x: torch.Tensor) -> torch.Tensor:
    """Return rows in FP8, as numbers."""
    scale = x.abs().amax(dim=1, keepdim=True) / 448
    return (x / scale).to(FP8).float() * scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "gelu_erf", "relu", "relu2", "silu"])
@pytest.mark.parametrize("inputs", [48, 2512])  # less and more than one tile
# A kernel for one, one for some, which may be rounded, and libraries.
@pytest.mark.parametrize(
    ("rows", "outputs"), [(1, 51), (5, 51), (20, 51), (60, 64), (150, 51), (150, 64)]
)
@pytest.mark.parametrize("form", FORMS)
def test_products_equal_those_of_single_precision(
    form,
    rows,
    outputs,
    inputs,
    activation,
    dtype,
):
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(rows, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
    residual = torch.randn(rows, outputs, generator=generator)
    x, weight, bias, residual = (value.to(dtype) for value in (x, weight, bias, residual))
    wide, taken = weight.float(), x.float()
    if form.int8:
        numbers, scale = quantise(weight)
        wide = (numbers.float() * scale[:, None]).t()
    elif form.fp8:
        wide = rounded_fp8(weight.cuda().float().t()).t().cpu()
    rounds = form.fp8 and rows > 16 and outputs % 16 == 0  # else rows stay in 16 bits
    if rounds:
        taken = rounded_fp8(taken)
    # 8 units of fp16's 2**-11 and 10 of bf16's 2**-8: the numbers that are added up, 1 to 4 large,
    # and those in between where a product is several kernels. A value between two of FP8's, which
    # may be rounded either way, changes its term by 6%.
    rounding = 0.1 if rounds else 4e-3 if dtype == torch.float16 else 4e-2

    expected = Epilogue(None, activation).finish(taken @ wide + bias.float())
    gemm = make_gemm(weight.cuda(), bias.cuda(), activation=activation, options=form)
    for added in (None, residual):
        y = gemm(x.cuda(), None if added is None else added.cuda()).float().cpu()
        whole = expected if added is None else expected + added.float()
        # A sum may be far smaller than the numbers that were rounded.
        largest = torch.maximum(expected.abs(), whole.abs())
        assert ((y - whole).abs() <= rounding * (1 + largest)).all()


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2", "silu"])
@pytest.mark.parametrize("rows", [1, 5, 20, 100, 150])
# The last is Qwen2.5 1.5B's, whose programs share their inputs in 8 bits.
@pytest.mark.parametrize("outputs", [35, 64, 8960])
@pytest.mark.parametrize("form", FORMS)
def test_gated_products_equal_those_of_single_precision(form, outputs, rows, activation):
    torch.manual_seed(0)
    x = torch.randn(rows, 272, dtype=torch.float16)
    gate, linear = (torch.randn(2, 272, outputs) / 16).half().unbind()
    biases = torch.randn(2, outputs, dtype=torch.float16).unbind()
    taken, (wide, other) = x.float(), (gate.float(), linear.float())
    if form.int8:
        rounded = [quantise(weight) for weight in (gate, linear)]
        wide, other = ((numbers.float() * scale[:, None]).t() for numbers, scale in rounded)
    elif form.fp8:
        wide, other = (rounded_fp8(weight.cuda().t()).t().cpu() for weight in (wide, other))
    rounds = form.fp8 and rows > 16 and 2 * outputs % 16 == 0
    if rounds:
        taken = rounded_fp8(taken)
    expected = Epilogue(None, activation).finish(taken @ wide + biases[0].float())
    expected *= taken @ other + biases[1].float()
    gemm = make_gated_gemm(
        (gate.cuda(), linear.cuda()),
        (biases[0].cuda(), biases[1].cuda()),
        activation=activation,
        options=form,
    )
    # Two factors of up to 4, each rounded as in the test above.
    rounding = 0.4 if rounds else 1.6e-2
    y = gemm(x.cuda()).float().cpu()
    torch.testing.assert_close(y, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("rows", [1, 5, 20, 60, 150])
@pytest.mark.parametrize("group", [0, 128, 256])
@pytest.mark.parametrize(("inputs", "outputs"), [(272, 96), (2432, 64), (2432, 51)])
@pytest.mark.parametrize("gated", [False, True])
def test_weights_in_fp8_are_multiplied_as_they_are(gated, inputs, outputs, group, rows, device):
    """Products are those of the widened weights, of rows that only scales of outputs round."""
    from inference.parallel.gemm_cuda import CudaGemm

    outputs *= 1 + gated
    rounds = not group and rows > 16 and outputs % 16 == inputs % 16 == 0
    if rounds and device.type == "cpu":
        pytest.skip("torch multiplies no FP8 on a CPU")
    torch.manual_seed(0)
    x, residual = torch.randn(rows, inputs).half(), torch.randn(rows, outputs).half()
    values = (torch.randn(inputs, outputs) * 100).clamp(-448, 448).to(FP8)
    groups = -(-inputs // group) if group else 1
    scale = torch.rand(groups, outputs) / (50 * inputs**0.5) + 1e-4
    wide = values.float() * scale.repeat_interleave(group or inputs, dim=0)[:inputs]
    weight = ScaledWeight(values, scale, group or inputs, torch.float16)
    weight = weight._replace(values=values.to(device), scale=scale.to(device))
    activation: GemmActivation | None = "silu" if gated else None
    gemm = CudaGemm(weight, Epilogue(None, activation, gated), PLAIN_GEMM)
    expected = (rounded_fp8(x.float()) if rounds else x.float()) @ wide
    if gated:
        gate, other = expected.unflatten(1, (-1, 2)).unbind(2)
        expected = torch.nn.functional.silu(gate) * other
        y = gemm(x.to(device))
    else:
        expected += residual.float()
        y = gemm(x.to(device), residual.to(device))
    # As above: fp16 alone, or values between two of FP8's.
    bound = 0.3 if rounds else 1.6e-2
    torch.testing.assert_close(y.float().cpu(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outputs", [64, 520, 16400])
@pytest.mark.parametrize("form", FORMS)
def test_batch_invariant_rows_have_the_same_bits_in_every_batch(form, outputs, dtype):
    torch.manual_seed(0)
    form = GemmOptions(int8=form.int8, fp8=form.fp8, batch_invariant=True)
    x = torch.randn(300, 1040, device="cuda", dtype=dtype)
    weight = torch.randn(1040, outputs, device="cuda", dtype=dtype)
    gemm = make_gemm(weight, options=form)
    whole = gemm(x)
    for rows in (1, 2, 15, 16, 17, 33, 64, 100, 128, 129, 257):
        for first in (0, 43):
            assert torch.equal(gemm(x[first : first + rows]), whole[first : first + rows])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [60, 150])  # ours, and libraries
@pytest.mark.parametrize("form", FORMS[2:])
def test_fp8_rows_are_handed_from_product_to_product(form, rows, dtype, gated, activation):
    from inference.model.gpu.norm import norm
    from inference.parallel.rounding_cuda import RoundedRows

    torch.manual_seed(0)
    x = torch.randn(rows, 272, device="cuda", dtype=dtype)
    scale = torch.rand(272, device="cuda", dtype=dtype)
    one, two = torch.randn(2, 272, 5024, device="cuda", dtype=dtype) / 16
    down = torch.randn(5024, 48, device="cuda", dtype=dtype) / 70
    rounded = norm(x, weight=scale, bias=None, eps=1e-5, centred=False, rounds=True)
    plain = norm(x, weight=scale, bias=None, eps=1e-5, centred=False)
    assert isinstance(rounded, RoundedRows)
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(rounded.widened(), plain, rtol=2**-4, atol=2e-3)
    given: dict[str, Any] = {"activation": activation, "options": form}

    def make(*, rounds: bool) -> Callable[[Any], Any]:
        if gated:
            return make_gated_gemm((one, two), (None, None), rounds=rounds, **given)
        return make_gemm(one, rounds=rounds, **given)

    inner, kept = make(rounds=True)(rounded), make(rounds=False)(rounded)
    assert isinstance(inner, RoundedRows)
    assert inner.dtype == dtype
    torch.testing.assert_close(inner.widened(), kept, rtol=2**-4, atol=float(kept.max()) / 2**9)
    out = make_gemm(down, options=form)
    expected = out(kept)
    assert (out(inner) - expected).norm() < 0.02 * expected.norm()
    assert torch.equal(out(rounded_rows_of(inner, 5)), out(inner.widened()[:5]))


def rounded_rows_of(rows: Any, count: int) -> Any:
    """Return the first of some rounded rows, so few that their product takes 16 bits."""
    return replace(rows, digits=rows.digits[:count], scale=rows.scale[:count])


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("rows", [2, 200])
def test_values_that_are_not_finite_stay_in_their_rows(rows, form):
    torch.manual_seed(0)
    x = torch.randn(rows, 64, device="cuda", dtype=torch.float16)
    x[0, 3] = float("nan")
    x[1, 5] = float("inf")
    y = make_gemm(torch.randn(64, 32, device="cuda", dtype=torch.float16), options=form)(x)
    assert not y[:2].isfinite().any()
    assert y[2:].isfinite().all()
