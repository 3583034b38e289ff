"""The choice of the next token of each row of logits, in one Triton kernel.

Without it a decode step would launch a dozen small kernels to find its best tokens, 25 us on an
H200. Drawing needs no sort: the logits that can be drawn are listed, and a search over thresholds
(cuts) finds the one at which the cumulative mass reaches the drawn share. One program works on a
row, always in the same order, so that a row's token does not depend on the other rows. Import this
module only where Triton is installed.
"""

# Shapes: n rows of logits, V ids of a rank

import torch
import triton
import triton.language as tl

from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier

_WARPS = 16
_IDS = tl.constexpr(8192)  # logits that a program reads at once
_LISTED = tl.constexpr(8192)  # most logits that it lists; of flatter rows all logits are searched
_PART = tl.constexpr(2048)  # listed logits that are compared at once
_CUTS = tl.constexpr(8)  # thresholds that they are compared with
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_DEEPEST = tl.constexpr(87.0)  # any further below the best logit, masses are subnormal in fp32
_LEAST = tl.constexpr(1e-30)  # in place of a target of 0, which only the best token should reach


@triton.jit
def _order(x):
    """Map floats to integers of the same order; -0.0 equals 0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(order):
    """Invert `_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _read_part(at, start, count, SIZE: tl.constexpr):
    """Return the indices of SIZE logits from `start` on, which exist, and them; -inf for others."""
    here = start + tl.arange(0, SIZE)
    there = here < count
    return here, there, tl.load(at + here, mask=there, other=float("-inf"))


@triton.jit
def _sums(at, count, best, cuts, COUNTS: tl.constexpr):
    """Return for each cut the mass of the logits at or above it, or with COUNTS their number.

    The order of additions is the same for every cut, so that a lower cut never has a smaller sum.
    """
    sums = tl.zeros_like(cuts).to(tl.float32)
    for start in range(0, count, _PART):
        _, there, x = _read_part(at, start, count, _PART)
        weight = there.to(tl.float32) if COUNTS else tl.exp(x - best)
        above = _order(x)[:, None] >= cuts[None, :]
        sums += tl.sum(tl.where(above, weight[:, None], 0.0), 0)
    return sums


@triton.jit
def _sum(at, count, best, cut, COUNTS: tl.constexpr):
    cuts = tl.zeros((_CUTS,), tl.int32) + cut.to(tl.int32)
    return tl.max(_sums(at, count, best, cuts, COUNTS), 0)


@triton.jit
def _reach(at, count, best, target, lowest, COUNTS: tl.constexpr):
    """Return the highest cut, at least `lowest`, at or above which the sum reaches `target`."""
    low = lowest.to(tl.int64)
    high = _order(best).to(tl.int64) + 1
    nth = tl.arange(0, _CUTS) + 1
    while high - low > 1:
        step = (high - low + _CUTS) // (_CUTS + 1)
        cuts = tl.minimum(low + step * nth, 0x7FFFFFFF).to(tl.int32)
        sums = _sums(at, count, best, cuts, COUNTS)
        low += step * tl.sum((sums >= target).to(tl.int32), 0)
        high = tl.minimum(high, low + step)
    return low.to(tl.int32)


@triton.jit
def _crossing(at, count, best, target, lowest, limit):
    """Return the order of the logit at which the cumulative mass reaches `target`.

    Also returns which of the logits equal to it that is, and the mass up to it. Only `limit` logits
    of the order `lowest` count.
    """
    target = tl.minimum(target, _sum(at, count, best, lowest, False))
    edge = _reach(at, count, best, target, lowest, False)
    above = _sum(at, count, best, edge + 1, False)
    mass = tl.exp(_number(edge) - best)
    nth = tl.maximum(tl.ceil((target - above) / mass), 1.0).to(tl.int32)
    nth = tl.where(edge == lowest, tl.minimum(nth, limit), nth)
    # Rounding may yield one more than there are.
    return edge, nth, tl.minimum(above + nth * mass, _sum(at, count, best, edge, False))


@triton.jit
def _nth_equal(at, count, edge, nth):
    """Return the index of the nth logit of order `edge`, or of the last if there are fewer."""
    found = 0
    place = 0
    for start in range(0, count, _PART):
        here, there, x = _read_part(at, start, count, _PART)
        equal = ((_order(x) == edge) & there).to(tl.int32)
        wanted = (equal > 0) & (found + tl.cumsum(equal, 0) <= nth)
        place = tl.maximum(place, tl.max(tl.where(wanted, here, 0), 0))
        found += tl.sum(equal, 0)
    return place


@triton.jit
def _list(at, count, lowest, listed_at, ids_at):
    """List the logits of at least the order `lowest`, and their ids; return their number.

    Only the first _LISTED are stored.
    """
    listed = 0
    for start in range(0, count, _IDS):
        here, there, x = _read_part(at, start, count, _IDS)
        kept = there & (_order(x) >= lowest)
        place = listed + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(listed_at + place, x, mask=kept & (place < _LISTED))
        tl.store(ids_at + place, here, mask=kept & (place < _LISTED))
        listed += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return listed


@triton.jit
def _drawn(at, count, value, best, top_k, draw_at, listed_at, ids_at):
    """Return the drawn token of a row whose best logit is `value`, by the draw at `draw_at`.

    `best` (_IDS,) are logits of the row, its best among them. `listed_at` is this row's list.
    """
    top_p, rest = tl.load(draw_at + 2), tl.load(draw_at + 3)
    whole, uniform = tl.load(draw_at + 4) > 0, tl.load(draw_at + 5)
    ids_at += tl.program_id(0).to(tl.int64) * _LISTED
    wanted = top_k.to(tl.float32)
    inside = 0.0  # mass that can be drawn
    lowest = _order(tl.full((), float("-inf"), tl.float32))
    if top_k > 0:
        # The k best logits are all at least the kth best of a subset.
        some = tl.max(tl.reshape(best, (_PART, _IDS // _PART)), 1)
        tl.store(listed_at + tl.arange(0, _PART), some)
        tl.debug_barrier()
        lowest = _reach(listed_at, _PART, value, wanted, lowest, True)
    else:
        tl.debug_barrier()
        total = _sum(at, count, value, lowest, False)
        inside = top_p * (total + rest)
        # Even `count` logits this low would have at most half of the mass that is not needed.
        slack = total - tl.where(whole, inside, inside * uniform)
        depth = -tl.log(0.5 * tl.maximum(slack, 0.0) / count)
        lowest = _order(value - tl.minimum(depth, _DEEPEST))
    tl.debug_barrier()
    number = _list(at, count, lowest, listed_at, ids_at)
    is_listed = number <= _LISTED
    searched = tl.where(is_listed, number, count)
    if is_listed:
        at = listed_at

    limit = searched
    if top_k > 0:
        lowest = _reach(at, searched, value, wanted, lowest, True)
        limit = top_k - _sum(at, searched, value, lowest + 1, True).to(tl.int32)
        above = _sum(at, searched, value, lowest + 1, False)
        inside = top_p * (above + limit * tl.exp(_number(lowest) - value) + rest)
    if whole:
        inside = _crossing(at, searched, value, inside, lowest, limit)[2]
    target = tl.maximum(uniform * inside, _LEAST)
    edge, nth, _ = _crossing(at, searched, value, target, lowest, limit)
    token = _nth_equal(at, searched, edge, nth)
    if is_listed:
        token = tl.load(ids_at + token)
    return token


# Slots and ids may start at any address of a larger tensor; one compiled kernel serves all.
@triton.jit(do_not_specialize_on_alignment=["forbidden_at", "slots_at"])
def _choose(
    logits_at,
    stride,
    count,
    first,
    forbidden_at,
    slots_at,
    newest_at,
    chosen_at,
    draws_at,
    listed_at,
    ids_at,
    penalties_at,
    seen_at,
    bias_at,
    KEEP: tl.constexpr,  # whether the choice is final
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    DRAWS: tl.constexpr = draws_at is not None
    row = tl.program_id(0)
    wait_for_earlier(EARLY)
    at = logits_at + row.to(tl.int64) * stride
    forbidden = tl.load(forbidden_at + row) - first
    slot = tl.load(slots_at + row)
    if DRAWS:
        factor = tl.load(draws_at + 6 * row)
    if penalties_at is not None:
        repetition = tl.load(penalties_at + 3 * row)
        presence = tl.load(penalties_at + 3 * row + 1)
        marked = tl.where(repetition > 0, count, 0)
        seen_at += slot.to(tl.int64) * count
        bias_at += slot.to(tl.int64) * count

    best = tl.full((_IDS,), float("-inf"), tl.float32)
    place = tl.arange(0, _IDS)
    spoilt = tl.zeros((_IDS,), tl.int32)
    for start in range(0, count, _IDS):
        here, there, x = _read_part(at, start, count, _IDS)
        if penalties_at is not None:
            x += tl.load(bias_at + here, mask=here < marked, other=0.0)
        if DRAWS:
            x *= factor
        if penalties_at is not None:
            seen = tl.load(seen_at + here, mask=here < marked, other=0)
            less = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)) - presence
            x = tl.where(seen > 0, less, x)
        x = tl.where(here == forbidden, _LOWEST, x)
        if DRAWS:
            x = tl.where(there, x, float("-inf"))
            tl.store(at + here, x, mask=there)
        # A NaN never compares as better, and is recorded.
        spoilt |= (x != x).to(tl.int32)
        better = x > best
        best, place = tl.where(better, x, best), tl.where(better, here, place)
    value = tl.max(best, 0)
    token = tl.min(tl.where(best == value, place, 2147483647), 0)  # the first among equals
    value = tl.where(tl.max(spoilt, 0) > 0, float("nan"), value)

    if DRAWS:
        top_k = tl.minimum(tl.load(draws_at + 6 * row + 1).to(tl.int32), count)
        if (top_k != 1) & (value > float("-inf")) & (value < float("inf")):
            listed_at += row.to(tl.int64) * _LISTED
            token = _drawn(at, count, value, best, top_k, draws_at + 6 * row, listed_at, ids_at)

    tl.store(chosen_at + 2 * row, value.to(tl.int32, bitcast=True))
    tl.store(chosen_at + 2 * row + 1, (token + first).to(tl.int32))
    if KEEP:
        tl.store(newest_at + slot, (token + first).to(tl.int64))
    if penalties_at is not None:
        tl.store(seen_at + token, 1)
        frequency = tl.load(penalties_at + 3 * row + 2)
        tl.store(bias_at + token, tl.load(bias_at + token) - frequency)


def chosen_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    forbidden: torch.Tensor,
    newest: torch.Tensor,
    draws: torch.Tensor | None = None,
    penalties: torch.Tensor | None = None,
    *,
    first: int,
    keep: bool,
    seen: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Choose a token of each row among this rank's ids; the result is that of `TokenFeed.choose`.

    Rows of `logits` are contiguous; with `draws` they cover the whole vocabulary, and are
    overwritten. `first` is the first id. With `keep`, if the choice is final, the tokens are stored
    in `newest` at `slots`. With penalties they are also marked in `seen` (slots, V) uint8, and the
    frequency penalty is subtracted from `bias` (slots, V) fp32.
    """
    rows, device = len(logits), logits.device
    assert penalties is None or penalties.shape == (rows, 3)  # the kernel does not check bounds
    chosen = torch.empty(rows, 2, dtype=torch.int32, device=device)
    listed = ids = None
    if draws is not None:
        listed = torch.empty(rows, _LISTED.value, dtype=torch.float32, device=device)
        ids = torch.empty_like(listed, dtype=torch.int32)
    _choose[(rows,)](
        *(logits, logits.stride(0), logits.shape[1], first),
        *(forbidden.contiguous(), slots.contiguous(), newest, chosen),
        *(draws, listed, ids, penalties, seen, bias),
        KEEP=keep,
        num_warps=_WARPS,
        **launch_options(logits),
    )
    return chosen
