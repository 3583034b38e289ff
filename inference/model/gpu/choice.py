"""The best token of each row of logits in one GPU kernel, in Triton's language; needs Triton.

A step of one token launches a dozen small kernels for this otherwise, 25 us on an H200.
"""

# Shapes: n rows of logits, V ids of a rank

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier

_READ = {"IDS": 8192, "num_warps": 16}  # logits that a program reads at once


# Slots and ids may begin anywhere in a larger tensor; one kernel serves them all.
@triton.jit(do_not_specialize_on_alignment=["forbidden_at", "slots_at"])  # type: ignore[untyped-decorator]
def _best_token(  # type: ignore[no-untyped-def]
    logits_at,
    stride,
    count,
    first,
    forbidden_at,
    slots_at,
    newest_at,
    chosen_at,
    LOWEST: tl.constexpr,  # noqa: N803 - constants of the kernel
    IDS: tl.constexpr,  # noqa: N803
    KEEP: tl.constexpr,  # noqa: N803 - whether the choice is final
    EARLY: tl.constexpr,  # noqa: N803
):
    let_next_begin(EARLY)
    row = tl.program_id(0)
    within = tl.arange(0, IDS)
    wait_for_earlier(EARLY)
    logits_at += row.to(tl.int64) * stride
    forbidden = tl.load(forbidden_at + row) - first
    best = tl.full((IDS,), float("-inf"), tl.float32)
    place = within
    spoilt = tl.zeros((IDS,), tl.int32)
    for start in range(0, count, IDS):
        here = start + within
        logit = tl.load(logits_at + here, mask=here < count, other=float("-inf"))
        logit = tl.where(here == forbidden, LOWEST, logit)
        spoilt |= (logit != logit).to(tl.int32)
        better = logit > best
        best = tl.where(better, logit, best)
        place = tl.where(better, here, place)
    value = tl.max(best, 0)
    token = tl.min(tl.where(best == value, place, 2147483647), 0) + first
    value = tl.where(tl.max(spoilt, 0) > 0, float("nan"), value)
    tl.store(chosen_at + 2 * row, value.to(tl.int32, bitcast=True))
    tl.store(chosen_at + 2 * row + 1, token.to(tl.int32))
    if KEEP:
        tl.store(newest_at + tl.load(slots_at + row), token.to(tl.int64))


def best_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    forbidden: torch.Tensor,
    newest: torch.Tensor,
    *,
    first: int,
    keep: bool,
) -> torch.Tensor:
    """Return the best token of each row as `TokenFeed.choose` does, of this rank's ids.

    Args:
        logits: (n, V) fp32, contiguous rows.
        slots: (n,) integers.
        forbidden: (n,) integers.
        newest: Receives the tokens at `slots` if `keep` is true.
        first: The first of this rank's ids.
        keep: Whether no other rank has a say.
    """
    chosen = torch.empty(len(logits), 2, dtype=torch.int32, device=logits.device)
    _best_token[(len(logits),)](
        *(logits, logits.stride(0), logits.shape[1], first),
        *(forbidden.contiguous(), slots.contiguous(), newest, chosen),
        LOWEST=torch.finfo(torch.float32).min,
        KEEP=keep,
        **_READ,
        **launch_options(logits),
    )
    return chosen
