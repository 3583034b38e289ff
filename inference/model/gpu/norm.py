"""Norms in one GPU kernel each, in Triton's language; needs Triton."""

# Shapes: N tokens, E hidden, H heads, D head size

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x_at,
    residual_at,
    weight_at,
    bias_at,
    y_at,
    size,
    stride,
    eps,
    WIDTH: tl.constexpr,  # noqa: N803
    CENTRED: tl.constexpr,  # noqa: N803
    HAS_RESIDUAL: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
):
    let_next_begin(EARLY)
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * stride + head * size
    place = tl.arange(0, WIDTH)
    inside = place < size
    weight = tl.load(weight_at + head * size + place, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(EARLY)
    x = tl.load(x_at + row + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_at + row + place, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    y *= weight
    if HAS_BIAS:
        y += tl.load(bias_at + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at + row + place, y.to(y_at.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
) -> torch.Tensor:
    """Return LayerNorm (`centred`) or RMSNorm of the sums of rows x and residual (N, E).

    torch's take 6 us for 64 rows of 4096 on an H200, this one 2; for 8192 rows 54 and 35. Nothing
    depends on the number of rows: a row's result is the same to the bit among any others.

    `weight` and `bias` are (E,).
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    _norm[(len(x), 1)](
        *(x, x if residual is None else residual.contiguous()),
        *(weight, weight if bias is None else bias, y, x.shape[1], x.shape[1], eps),
        WIDTH=triton.next_power_of_2(x.shape[1]),
        CENTRED=centred,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        num_warps=4 if x.shape[1] <= 4096 else 8,
        **launch_options(x),
    )
    return y


def norm_heads(heads: torch.Tensor, *, weight: torch.Tensor, eps: float) -> None:
    """Normalise heads (N, H, D) in place by RMSNorm with `weight` (H, D)."""
    count, H, D = heads.shape  # noqa: N806 - the shape legend
    assert heads.stride()[1:] == (D, 1)
    _norm[(count, H)](
        *(heads, heads, weight, weight, heads, D, heads.stride(0), eps),
        WIDTH=triton.next_power_of_2(D),
        CENTRED=False,
        HAS_RESIDUAL=False,
        HAS_BIAS=False,
        num_warps=1,
        **launch_options(heads),
    )
