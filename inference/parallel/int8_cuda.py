"""The product of a few rows with 8-bit weights on a GPU, written in Triton's language.

Decoding reads every weight once per token, so half the bytes of fp16 are near half the time.
Import this only where CUDA is: Triton comes with torch's CUDA builds.
"""

# Shapes: M rows, I inputs, O outputs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MOST_ROWS = 64
_LEAST_ROWS = 16  # that a tensor core multiplies
# Tiles of the weight: best or near it for GPT-J's four matrices on an H200 (1.5 to 2.5 TB/s, where
# fp16 products of the same matrices take 1.2 to 1.4 times as long).
_OUTPUTS = 32
_INPUTS_TIMES_ROWS = 8192
_STAGES = 3
_SHARED_BYTES = 160 * 1024  # about what such tiles take of a multiprocessor


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x_at,
    weight_at,
    scale_at,
    y_at,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,  # noqa: N803 - constants of the kernel
    OUTPUTS: tl.constexpr,  # noqa: N803
    INPUTS: tl.constexpr,  # noqa: N803
):
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        place = first + tl.arange(0, INPUTS)
        x = tl.load(
            x_at + row[:, None] * inputs + place[None, :],
            mask=(row[:, None] < rows) & (place[None, :] < inputs),
            other=0.0,
        )
        weight = tl.load(
            weight_at + output[:, None].to(tl.int64) * inputs + place[None, :],
            mask=(output[:, None] < outputs) & (place[None, :] < inputs),
            other=0,
        )
        total = tl.dot(x, tl.trans(weight.to(x.dtype)), total)
    scale = tl.load(scale_at + output, mask=output < outputs, other=0.0)
    tl.store(
        y_at + row[:, None] * outputs + output[None, :],
        (total * scale[None, :]).to(y_at.dtype.element_ty),
        mask=(row[:, None] < rows) & (output[None, :] < outputs),
    )


def int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x W scaled per output, (M, O) in the type of x.

    Args:
        x: (M, I) of 16 bits, contiguous, at most MOST_ROWS rows.
        weight: (O, I) int8, contiguous.
        scale: (O,) fp32.
    """
    rows, inputs = x.shape
    outputs = len(weight)
    assert rows <= MOST_ROWS
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    padded = max(_LEAST_ROWS, triton.next_power_of_2(rows))
    tile = _INPUTS_TIMES_ROWS // padded
    device: Any = torch.cuda.get_device_properties(x.device)
    if device.shared_memory_per_block_optin < _SHARED_BYTES:
        tile //= 2
    grid: Any = (triton.cdiv(outputs, _OUTPUTS),)
    constants = {"ROWS": padded, "OUTPUTS": _OUTPUTS, "INPUTS": tile, "num_stages": _STAGES}
    _kernel[grid](x, weight, scale, y, rows, outputs, inputs, **constants)
    return y
