"""8-bit numbers on a GPU: rounding and widening, in Triton's language; needs Triton."""

# Shapes: N rows, I inputs, O outputs

import torch
import triton
import triton.language as tl

from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what a row's largest value becomes
# Weights of one output that a program widens.
_WIDENED = {"INPUTS": 2048, "num_warps": 4}


@triton.jit
def widened(weight, NATIVE: tl.constexpr):
    """Return fp16 of whole numbers of 8 bits.

    Four at a time become the low bytes of 1024 + 128 + weight. A step of GPT-J-6B takes 1.9 ms this
    way, 2.4 ms with the compiler's own conversion.
    """
    if NATIVE:
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
        return wide
    return weight.to(tl.float16)


@triton.jit(do_not_specialize=["rows"])
def _round_rows(
    x_at,
    digits_at,
    scale_at,
    rows,
    x_stride,
    inputs,
    WIDTH: tl.constexpr,  # a power of two, at least the inputs
    LARGEST: tl.constexpr,
    DIGITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < inputs
    wait_for_earlier(EARLY)
    x = tl.load(x_at + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    x *= LARGEST / tl.maximum(largest, 1e-30)
    # A row with a value that is not finite has such sums, too: 0 times the value is NaN.
    tl.store(scale_at + row, largest / LARGEST + tl.sum(x * 0.0, 0))
    digits_at += row * inputs + place
    if DIGITS == 1:
        tl.store(digits_at, x.to(digits_at.dtype.element_ty), mask=inside)
    else:
        # Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
        whole = (x + 12582912.0) - 12582912.0
        rest = (x - whole) * 254.0
        rest = (rest + 12582912.0) - 12582912.0
        tl.store(digits_at, whole.to(tl.int8), mask=inside)
        tl.store(digits_at + rows.to(tl.int64) * inputs, rest.to(tl.int8), mask=inside)


def round_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in 8 bits (digits, N, I), and the scale of each row (N,) fp32.

    A row's largest value becomes 127, or 448 in FP8. Whole numbers have a second digit, the rest
    in 254ths: activations of large models have outliers, next to which 8 bits would be too few.

    Args:
        x: (N, I), inputs side by side.
        dtype: int8 or float8_e4m3fn.
    """
    count, inputs = x.shape
    digits = 2 if dtype == torch.int8 else 1
    rounded = torch.empty(digits, count, inputs, dtype=dtype, device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    _round_rows[(count,)](
        *(x, rounded, scale, count, x.stride(0), inputs),
        WIDTH=triton.next_power_of_2(inputs),
        LARGEST=_LARGEST[dtype],
        DIGITS=digits,
        num_warps=16,
        **launch_options(x),
    )
    return rounded, scale


@triton.jit
def _widen(weight_at, scale_at, wide_at, inputs, INPUTS: tl.constexpr, NATIVE: tl.constexpr):
    output = tl.program_id(0)
    scale = tl.load(scale_at + output)
    place = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    inside = place < inputs
    at = output.to(tl.int64) * inputs + place
    weight = widened(tl.load(weight_at + at, mask=inside, other=0), NATIVE).to(tl.float32)
    tl.store(wide_at + at, (weight * scale).to(wide_at.dtype.element_ty), mask=inside)


def widen(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights (O, I) that 8-bit ones and their scales (O,) stand for."""
    outputs, inputs = weight.shape
    wide = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    native = weight.is_cuda and torch.version.cuda is not None
    grid = (outputs, triton.cdiv(inputs, _WIDENED["INPUTS"]))
    _widen[grid](weight, scale, wide, inputs, NATIVE=native, **_WIDENED)
    return wide


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (O, I) float8_e4m3fn and the scale of each output (O,) fp32 for a weight (I, O)."""
    columns = weight.t().float()  # (O, I)
    scale = columns.abs().amax(dim=1) / _LARGEST[torch.float8_e4m3fn]
    divisor = torch.where(scale > 0, scale, 1).unsqueeze(1)
    return (columns / divisor).to(torch.float8_e4m3fn).contiguous(), scale
