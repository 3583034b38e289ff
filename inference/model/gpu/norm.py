"""Norms in one GPU kernel each, in Triton's language; needs Triton."""

# Shapes: N tokens, E hidden, H query heads, K key heads, D head size

from typing import Any

import torch
import triton
import triton.language as tl

from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier
from inference.parallel.rounding_cuda import (
    FEW_ROWS,
    empty_rounded,
    store_rounded,
    store_scale,
)

_NORMED_VALUES = 1024  # of heads that a program normalises


@triton.jit
def _norm(
    x_at,
    residual_at,
    weight_at,
    bias_at,
    y_at,
    scale_at,  # of rows that are rounded to 8 bits
    size,
    eps,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < size
    weight = tl.load(weight_at + place, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(EARLY)
    x = tl.load(x_at + row * size + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_at + row * size + place, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    y *= weight
    if HAS_BIAS:
        y += tl.load(bias_at + place, mask=inside, other=0.0).to(tl.float32)
    y_at += row * size + place
    if ROUNDS:
        y = tl.where(inside, y, 0.0)
        largest = tl.max(tl.abs(y), 0)
        store_scale(largest, tl.sum(y * 0.0, 0), scale_at + row)
        store_rounded(y, largest, inside, y_at)
    else:
        tl.store(y_at, y.to(y_at.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
    rounds: bool = False,
) -> Any:
    """Return LayerNorm (`centred`) or RMSNorm of the sums of rows x and residual (N, E).

    torch's take 6 us for 64 rows of 4096 on an H200, this one 2; for 8192 rows 54 and 35. Nothing
    depends on the number of rows: a row's result is the same to the bit among any others.

    `weight` and `bias` are (E,). With `rounds`, many rows come as
    `RoundedRows`.
    """
    x = x.contiguous()
    rounds = rounds and len(x) > FEW_ROWS
    rounded = empty_rounded(len(x), x.shape[1], x) if rounds else None
    y = torch.empty_like(x) if rounded is None else rounded.digits
    _norm[(len(x),)](
        *(x, x if residual is None else residual.contiguous()),
        *(weight, weight if bias is None else bias, y),
        *(x if rounded is None else rounded.scale, x.shape[1], eps),
        ROUNDS=rounds,
        WIDTH=triton.next_power_of_2(x.shape[1]),
        CENTRED=centred,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        num_warps=4 if x.shape[1] <= 4096 else 8,
        **launch_options(x),
    )
    return y if rounded is None else rounded


@triton.jit
def _norm_heads(
    heads_at,
    stride,
    weight_at,
    number,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    inside = (head < number) & (d < D)
    weight = tl.load(weight_at + head * D + d, mask=inside, other=0.0)
    wait_for_earlier(EARLY)
    at = heads_at + row.to(tl.int64) * stride + head * D + d
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 1)[:, None] / D + eps) * weight
    tl.store(at, y.to(heads_at.dtype.element_ty), mask=inside)


def norm_heads(heads: torch.Tensor, *, weight: torch.Tensor, eps: float) -> None:
    """Normalise each of heads (N, H+K, D) in place by RMSNorm with `weight` (H+K, D) fp32."""
    count, number, size = heads.shape
    assert heads.stride()[1:] == (size, 1)
    width = triton.next_power_of_2(size)
    at_once = max(_NORMED_VALUES // width, 1)
    _norm_heads[(count, triton.cdiv(number, at_once))](
        *(heads, heads.stride(0), weight, number, eps),
        D=size,
        WIDTH=width,
        HEADS=at_once,
        num_warps=4,
        **launch_options(heads),
    )
