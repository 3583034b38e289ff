"""8-bit numbers on a GPU: rounding and widening, in Triton, which must be installed."""

# Shapes: N rows, I inputs, O outputs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inference.parallel.epilogue import Epilogue, GemmActivation
from inference.parallel.launch_cuda import (
    is_native,
    launch_options,
    let_next_begin,
    wait_for_earlier,
)

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)  # E4M3's largest number, to which a row's largest value is scaled
# Up to so many rows, FP8 weights are widened within the product and rows of x stay in 16 bits. On
# an H200, a layer's products with 4096 inputs and an inner size of 14,336 take 72 us for 8 rows and
# 99 for 32, for which rounded rows take 74.
FEW_ROWS = 16
# Values of a row, or gated pairs, that a program rounds at once; it reads each only once. On an
# H200, 8000 rows of 4096 values take 24 us and of 14,336 pairs 132, the time to transfer them;
# reading and computing pairs twice took 196.
_ROUNDED = {False: {"INPUTS": 2048, "num_warps": 8}, True: {"INPUTS": 1024, "num_warps": 16}}
# Weights of one output that a program widens.
_WIDENED = {"INPUTS": 2048, "num_warps": 4}
ACTIVATIONS: dict[GemmActivation | None, int] = {
    None: 0,
    "gelu_tanh": 1,
    "gelu_erf": 2,
    "relu": 3,
    "relu2": 5,
    "silu": 4,
}


@dataclass(frozen=True)
class RoundedRows:
    """Input rows of a product, rounded to FP8."""

    digits: torch.Tensor  # (N, I)
    scale: torch.Tensor  # (N,) fp32
    dtype: torch.dtype  # before rounding

    def __len__(self) -> int:
        return len(self.digits)

    def widened(self) -> torch.Tensor:
        """Return the rows (N, I) in their original type."""
        return (self.digits.float() * self.scale.unsqueeze(1)).to(self.dtype)


@triton.jit
def _sigmoid(y, NATIVE: tl.constexpr):
    """Return 1 / (1 + exp(-y)), with an error of up to 2 ulp."""
    below = 1 + tl.exp(-y)
    if NATIVE:
        # A division takes about eight instructions, which would make gates take longer to compute
        # than to read.
        share = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [below],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        share = 1 / below
    return share


@triton.jit
def activated(y, ACTIVATION: tl.constexpr, NATIVE: tl.constexpr):
    """Return the activation of sums y; ACTIVATION is its number in `ACTIVATIONS`."""
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)  # sqrt(2 / pi)
        y = y * _sigmoid(2 * inner, NATIVE)  # (1 + tanh(inner)) / 2
    if ACTIVATION == 2:
        # erfc with an error of 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions,
        # 7.1.26. The library's takes 65 us for 12,288 rows of 3072; reading and writing takes 37.
        x = tl.abs(y) * 0.7071067811865476
        t = 1 / (1 + 0.3275911 * x)
        rest = -1.453152027 + t * 1.061405429
        rest = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * rest)))
        rest *= 0.5 * tl.exp(-x * x)
        y *= tl.where(y < 0, rest, 1 - rest)
    if ACTIVATION == 3:
        y = tl.maximum(y, 0.0)
    if ACTIVATION == 4:
        y = y * _sigmoid(y, NATIVE)
    if ACTIVATION == 5:
        y = tl.maximum(y, 0.0)
        y *= y
    return y


@triton.jit
def widened(weight, NATIVE: tl.constexpr):
    """Return int8 or FP8 weights as fp16, and 16-bit weights unchanged.

    Four int8 values at a time become the low bytes of 1024 + 128 + weight. A step of GPT-J-6B takes
    1.9 ms this way, 2.4 ms with the compiler's conversion.
    """
    wide = weight
    if NATIVE and weight.dtype == tl.int8:
        (wide,) = tl.inline_asm_elementwise(
            """{
            .reg .b32 unsigned, offset;
            mov.b32 offset, 0x64806480;
            xor.b32 unsigned, $2, 0x80808080;
            prmt.b32 $0, unsigned, 0x64646464, 0x4140;
            prmt.b32 $1, unsigned, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=r,=r,r",
            [weight],
            dtype=(tl.float16,),
            is_pure=True,
            pack=4,
        )
    elif weight.dtype.primitive_bitwidth == 8:
        wide = weight.to(tl.float16)
    return wide


@triton.jit
def store_rounded(x, largest, inside, digits_at):
    """Store values x fp32 of a row in FP8, given the row's largest magnitude."""
    x *= LARGEST / tl.maximum(largest, 1e-30)
    tl.store(digits_at, x.to(digits_at.dtype.element_ty), mask=inside)


@triton.jit
def store_scale(largest, spoilt, scale_at):
    """Store the scale of a row; `spoilt` is NaN if a value is not finite, else 0."""
    tl.store(scale_at, largest / LARGEST + spoilt)


@triton.jit
def finished_values(
    x_at,
    first,
    inputs,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return (INPUTS,) fp32: the activation of values, or the gated product of pairs."""
    if GATED:
        place = 2 * first + tl.arange(0, 2 * INPUTS)
        pairs = tl.load(x_at + place, mask=place < 2 * inputs, other=0.0).to(tl.float32)
        gate, linear = tl.split(tl.reshape(pairs, (INPUTS, 2)))
        x = activated(gate, ACTIVATION, NATIVE) * linear
    else:
        place = first + tl.arange(0, INPUTS)
        x = tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32)
        x = activated(x, ACTIVATION, NATIVE)
    return x


@triton.jit
def _round_rows(
    x_at,
    digits_at,
    scale_at,
    x_stride,
    inputs,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks of INPUTS values in a row
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Round a row, which is read once and kept in registers."""
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x_at += row * x_stride
    digits_at += row * inputs
    wait_for_earlier(EARLY)
    held = ()
    most = tl.zeros((INPUTS,), tl.float32)
    spoilt = tl.zeros((INPUTS,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        x = finished_values(x_at, chunk * INPUTS, inputs, INPUTS, ACTIVATION, GATED, NATIVE)
        most = tl.maximum(most, tl.abs(x))
        spoilt += x * 0.0
        held += (x,)  # type: ignore[assignment]
    largest = tl.max(most, 0)
    store_scale(largest, tl.sum(spoilt, 0), scale_at + row)
    for chunk in tl.static_range(CHUNKS):
        place = chunk * INPUTS + tl.arange(0, INPUTS)
        store_rounded(held[chunk], largest, place < inputs, digits_at + place)


def empty_rounded(count: int, inputs: int, x: torch.Tensor) -> RoundedRows:
    """Return uninitialised rows (count, inputs), on the device of `x` and for its type."""
    digits = torch.empty(count, inputs, dtype=FP8, device=x.device)
    return RoundedRows(digits, x.new_empty(count, dtype=torch.float32), x.dtype)


def round_rows(x: torch.Tensor, epilogue: Epilogue = Epilogue()) -> RoundedRows:  # noqa: B008
    """Return the activation of rows in FP8, scaled so that each row's largest value becomes 448.

    Args:
        x: (N, I) with contiguous inputs, or (N, 2 I) if the epilogue is gated, see `Epilogue`.
        epilogue: Its activation is applied first; x includes the bias already.
    """
    count, width = x.shape
    rounded = empty_rounded(count, width // 2 if epilogue.gated else width, x)
    inputs, options = rounded.digits.shape[1], _ROUNDED[epilogue.gated]
    _round_rows[(count,)](
        *(x, rounded.digits, rounded.scale, x.stride(0), inputs),
        ACTIVATION=ACTIVATIONS[epilogue.activation],
        GATED=epilogue.gated,
        NATIVE=is_native(x),
        CHUNKS=triton.cdiv(inputs, options["INPUTS"]),
        **options,
        **launch_options(x),
    )
    return rounded


@triton.jit
def _widen(
    weight_at,
    scale_at,
    wide_at,
    inputs,
    group,  # inputs per scale
    INPUTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    output = tl.program_id(0)
    place = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    inside = place < inputs
    scale = tl.load(scale_at + output * tl.cdiv(inputs, group) + place // group, mask=inside)
    at = output.to(tl.int64) * inputs + place
    weight = widened(tl.load(weight_at + at, mask=inside, other=0.0), NATIVE).to(tl.float32)
    tl.store(wide_at + at, (weight * scale).to(wide_at.dtype.element_ty), mask=inside)


def widen(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, group: int = 0
) -> torch.Tensor:
    """Return 8-bit weights (O, I) times their scales (O,), in `dtype`.

    With `group`, scales are (O, G), one for every `group` inputs.
    """
    outputs, inputs = weight.shape
    wide = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    grid = (outputs, triton.cdiv(inputs, _WIDENED["INPUTS"]))
    group = group or inputs
    _widen[grid](weight, scale, wide, inputs, group, NATIVE=is_native(weight), **_WIDENED)
    return wide
