"""The next token of each row of logits in one GPU kernel, in Triton's language; needs Triton.

A step of one token launches a dozen small kernels for its best tokens otherwise, 25 us on an H200.
A token is drawn without a sort: the logits that can be drawn are listed, and cuts through their
order find the one at which the sum of masses reaches the drawn part. One program works on a row,
always in the same order, so that a row's token does not depend on the other rows.
"""

# Shapes: n rows of logits, V ids of a rank

import torch
import triton
import triton.language as tl

from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier

_READ = {"IDS": 8192, "num_warps": 16}  # logits that a program reads at once
_LISTED = 8192  # most logits that a program lists; a flatter row is searched whole
_PART, _CUTS = 2048, 8  # listed logits that are compared at once, and the cuts they are compared to
_DEEPEST = 87.0  # below the best logit: no mass further down is a normal fp32 number
_LEAST = 1e-30  # mass that stands for a threshold of 0, which only the best token reaches


@triton.jit
def _better(logit, here, best, place, spoilt):
    """Return the best logits so far and their places, and whether there was a NaN."""
    spoilt |= (logit != logit).to(tl.int32)
    better = logit > best
    return tl.where(better, logit, best), tl.where(better, here, place), spoilt


@triton.jit
def _best(best, place, spoilt):
    """Return the best logit of all, NaN if there was one, and its place, the first of equals."""
    value = tl.max(best, 0)
    token = tl.min(tl.where(best == value, place, 2147483647), 0)
    return tl.where(tl.max(spoilt, 0) > 0, float("nan"), value), token


# Slots and ids may begin anywhere in a larger tensor; one kernel serves them all.
@triton.jit(do_not_specialize_on_alignment=["forbidden_at", "slots_at"])
def _best_token(
    logits_at,
    stride,
    count,
    first,
    forbidden_at,
    slots_at,
    newest_at,
    chosen_at,
    LOWEST: tl.constexpr,
    IDS: tl.constexpr,
    KEEP: tl.constexpr,  # whether the choice is final
    EARLY: tl.constexpr,
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
        best, place, spoilt = _better(logit, here, best, place, spoilt)
    value, token = _best(best, place, spoilt)
    token += first
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

    Rows of `logits` are contiguous. `first` is the first of the ids; with `keep`, if no other rank
    has a say, `newest` receives the tokens at `slots`.
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


@triton.jit
def _order(x):
    """Return integers in the order of the numbers; -0.0 equals 0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(order):
    """Undo `_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sums(at, count, best, cuts, COUNTS: tl.constexpr, PART: tl.constexpr):
    """Return for each cut the mass of the logits at or above it, or with COUNTS their number.

    The additions have the same order for every cut: a lower cut never gives a smaller sum.
    """
    within = tl.arange(0, PART)
    sums = tl.zeros_like(cuts).to(tl.float32)
    for start in range(0, count, PART):
        here = start + within
        x = tl.load(at + here, mask=here < count, other=float("-inf"))
        weight = (here < count).to(tl.float32) if COUNTS else tl.exp(x - best)
        above = _order(x)[:, None] >= cuts[None, :]
        sums += tl.sum(tl.where(above, weight[:, None], 0.0), 0)
    return sums


@triton.jit
def _sum(at, count, best, cut, COUNTS: tl.constexpr, PART: tl.constexpr, CUTS: tl.constexpr):
    cuts = tl.zeros((CUTS,), tl.int32) + cut.to(tl.int32)
    return tl.max(_sums(at, count, best, cuts, COUNTS, PART), 0)


@triton.jit
def _reach(
    at, count, best, target, lowest, COUNTS: tl.constexpr, PART: tl.constexpr, CUTS: tl.constexpr
):
    """Return the highest cut from which on the logits' sum reaches `target`, at least `lowest`."""
    low = lowest.to(tl.int64)
    high = _order(best).to(tl.int64) + 1
    nth = tl.arange(0, CUTS) + 1
    while high - low > 1:
        step = (high - low + CUTS) // (CUTS + 1)
        cuts = tl.minimum(low + step * nth, 0x7FFFFFFF).to(tl.int32)
        sums = _sums(at, count, best, cuts, COUNTS, PART)
        low += step * tl.sum((sums >= target).to(tl.int32), 0)
        high = tl.minimum(high, low + step)
    return low.to(tl.int32)


@triton.jit
def _crossing(at, count, best, target, lowest, limit, PART: tl.constexpr, CUTS: tl.constexpr):
    """Return the order of the logit with which the masses' sum reaches `target`.

    Also which of the logits that are equal to it, and the sum up to that one. Only `limit` logits
    of the order `lowest` count.
    """
    target = tl.minimum(target, _sum(at, count, best, lowest, False, PART, CUTS))
    edge = _reach(at, count, best, target, lowest, False, PART, CUTS)
    above = _sum(at, count, best, edge + 1, False, PART, CUTS)
    mass = tl.exp(_number(edge) - best)
    nth = tl.maximum(tl.ceil((target - above) / mass), 1.0).to(tl.int32)
    nth = tl.where(edge == lowest, tl.minimum(nth, limit), nth)
    # Rounding may ask for one more than there are.
    return edge, nth, tl.minimum(above + nth * mass, _sum(at, count, best, edge, False, PART, CUTS))


@triton.jit
def _nth_equal(at, count, edge, nth, PART: tl.constexpr):
    """Return the place of the nth logit of an order, of the last one where there are fewer."""
    within = tl.arange(0, PART)
    found = 0
    place = 0
    for start in range(0, count, PART):
        here = start + within
        x = tl.load(at + here, mask=here < count, other=float("-inf"))
        equal = ((_order(x) == edge) & (here < count)).to(tl.int32)
        wanted = (equal > 0) & (found + tl.cumsum(equal, 0) <= nth)
        place = tl.maximum(place, tl.max(tl.where(wanted, here, 0), 0))
        found += tl.sum(equal, 0)
    return place


@triton.jit
def _total(at, count, best, IDS: tl.constexpr):
    """Return the mass of all logits."""
    within = tl.arange(0, IDS)
    sums = tl.zeros((IDS,), tl.float32)
    for start in range(0, count, IDS):
        here = start + within
        sums += tl.exp(tl.load(at + here, mask=here < count, other=float("-inf")) - best)
    return tl.sum(sums, 0)


@triton.jit
def _list(at, count, lowest, listed_at, ids_at, IDS: tl.constexpr, LISTED: tl.constexpr):
    """List the logits from the order `lowest` on, and their ids; return their number.

    Those beyond the first LISTED are left out.
    """
    within = tl.arange(0, IDS)
    listed = 0
    for start in range(0, count, IDS):
        here = start + within
        x = tl.load(at + here, mask=here < count, other=float("-inf"))
        kept = (here < count) & (_order(x) >= lowest)
        place = listed + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(listed_at + place, x, mask=kept & (place < LISTED))
        tl.store(ids_at + place, here, mask=kept & (place < LISTED))
        listed += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return listed


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["forbidden_at", "slots_at"]
)
def _drawn_token(
    logits_at,
    stride,
    count,
    forbidden_at,
    slots_at,
    draws_at,
    newest_at,
    chosen_at,
    listed_at,
    ids_at,
    penalties_at,
    seen_at,
    bias_at,
    LOWEST: tl.constexpr,
    DEEPEST: tl.constexpr,
    LEAST: tl.constexpr,
    IDS: tl.constexpr,
    LISTED: tl.constexpr,
    PART: tl.constexpr,
    CUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    row = tl.program_id(0)
    within = tl.arange(0, IDS)
    wait_for_earlier(EARLY)
    at = logits_at + row.to(tl.int64) * stride
    forbidden = tl.load(forbidden_at + row)
    factor = tl.load(draws_at + 6 * row)
    top_k = tl.minimum(tl.load(draws_at + 6 * row + 1).to(tl.int32), count)
    top_p = tl.load(draws_at + 6 * row + 2)
    rest = tl.load(draws_at + 6 * row + 3)
    whole = tl.load(draws_at + 6 * row + 4) > 0
    uniform = tl.load(draws_at + 6 * row + 5)
    slot = tl.load(slots_at + row)
    if penalties_at is not None:
        repetition = tl.load(penalties_at + 3 * row)
        presence = tl.load(penalties_at + 3 * row + 1)
        marked = tl.where(repetition > 0, count, 0)
        seen_at += slot.to(tl.int64) * count
        bias_at += slot.to(tl.int64) * count

    best = tl.full((IDS,), float("-inf"), tl.float32)
    place = within
    spoilt = tl.zeros((IDS,), tl.int32)
    for start in range(0, count, IDS):
        here = start + within
        x = tl.load(at + here, mask=here < count, other=float("-inf"))
        if penalties_at is not None:
            x += tl.load(bias_at + here, mask=here < marked, other=0.0)
        x *= factor
        if penalties_at is not None:
            seen = tl.load(seen_at + here, mask=here < marked, other=0)
            less = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)) - presence
            x = tl.where(seen > 0, less, x)
        x = tl.where(here == forbidden, LOWEST, x)
        x = tl.where(here < count, x, float("-inf"))
        tl.store(at + here, x, mask=here < count)
        best, place, spoilt = _better(x, here, best, place, spoilt)
    value, token = _best(best, place, spoilt)

    if (top_k != 1) & (value > float("-inf")) & (value < float("inf")):
        listed_at += row.to(tl.int64) * LISTED
        ids_at += row.to(tl.int64) * LISTED
        wanted = top_k.to(tl.float32)
        inside = 0.0  # mass that can be drawn
        if top_k > 0:
            # The k best of all logits lie at or above the kth best of some of them.
            some = tl.max(tl.reshape(best, (PART, IDS // PART)), 1)
            tl.store(listed_at + tl.arange(0, PART), some)
            tl.debug_barrier()
            lowest = _order(tl.full((), float("-inf"), tl.float32))
            lowest = _reach(listed_at, PART, value, wanted, lowest, True, PART, CUTS)
        else:
            tl.debug_barrier()
            total = _total(at, count, value, IDS)
            inside = top_p * (total + rest)
            # Even `count` logits this low would have half of the mass that is not searched.
            slack = total - tl.where(whole, inside, inside * uniform)
            depth = -tl.log(0.5 * tl.maximum(slack, 0.0) / count)
            lowest = _order(value - tl.minimum(depth, DEEPEST))
        tl.debug_barrier()
        listed = _list(at, count, lowest, listed_at, ids_at, IDS, LISTED)
        if listed <= LISTED:
            at = listed_at
            count = listed

        limit = count
        if top_k > 0:
            lowest = _reach(at, count, value, wanted, lowest, True, PART, CUTS)
            limit = top_k - _sum(at, count, value, lowest + 1, True, PART, CUTS).to(tl.int32)
            above = _sum(at, count, value, lowest + 1, False, PART, CUTS)
            inside = top_p * (above + limit * tl.exp(_number(lowest) - value) + rest)
        if whole:
            inside = _crossing(at, count, value, inside, lowest, limit, PART, CUTS)[2]
        target = tl.maximum(uniform * inside, LEAST)
        edge, nth, _ = _crossing(at, count, value, target, lowest, limit, PART, CUTS)
        token = _nth_equal(at, count, edge, nth, PART)
        if listed <= LISTED:
            token = tl.load(ids_at + token)

    tl.store(chosen_at + 2 * row, value.to(tl.int32, bitcast=True))
    tl.store(chosen_at + 2 * row + 1, token)
    tl.store(newest_at + slot, token.to(tl.int64))
    if penalties_at is not None:
        tl.store(seen_at + token, 1)
        frequency = tl.load(penalties_at + 3 * row + 2)
        tl.store(bias_at + token, tl.load(bias_at + token) - frequency)


def drawn_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    forbidden: torch.Tensor,
    draws: torch.Tensor,
    newest: torch.Tensor,
    *,
    penalties: torch.Tensor | None,
    seen: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Return the drawn token of each row as `TokenFeed.choose` does; drawn rows are overwritten.

    Rows of `logits` are contiguous and of the whole vocabulary. `newest` receives the tokens at
    `slots`; where there are penalties so does `seen` (slots, V) uint8, and the frequency penalty is
    subtracted from `bias` (slots, V) fp32.
    """
    rows, device = len(logits), logits.device
    assert penalties is None or penalties.shape == (rows, 3)  # the kernel would read beyond
    chosen = torch.empty(rows, 2, dtype=torch.int32, device=device)
    listed = torch.empty(rows, _LISTED, dtype=torch.float32, device=device)
    _drawn_token[(rows,)](
        *(logits, logits.stride(0), logits.shape[1], forbidden.contiguous(), slots.contiguous()),
        *(draws, newest, chosen, listed, torch.empty_like(listed, dtype=torch.int32)),
        *(penalties, seen, bias),
        LOWEST=torch.finfo(torch.float32).min,
        DEEPEST=_DEEPEST,
        LEAST=_LEAST,
        LISTED=_LISTED,
        PART=_PART,
        CUTS=_CUTS,
        **_READ,
        **launch_options(logits),
    )
    return chosen
