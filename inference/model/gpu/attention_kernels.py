"""Triton kernels of attention over the cached blocks of sequences.

`attention` launches them. Shared arguments are records of pointers, strides, numbers, and (in
capitals) compile-time constants. Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, H local query heads, K local key/value heads, G query heads of
#         a key/value head, D head size, R rotated dimensions, T entries of a bias table

from typing import Any, NamedTuple

import triton
import triton.language as tl

from inference.parallel.launch_cuda import let_next_begin, wait_for_earlier
from inference.parallel.rounding_cuda import LARGEST, store_rounded

_LOG2_E = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """New tokens: heads of queries, of keys and values if these are new, and rotation angles."""

    query_at: Any
    token_stride: Any
    key_at: Any = None
    value_at: Any = None
    cos_at: Any = None
    sin_at: Any = None
    R: Any = 0
    INTERLEAVED: Any = False


class Cached(NamedTuple):
    """A layer's keys and values in blocks of BLOCK tokens, and the block table of the slots.

    In an FP8 cache, `largest_at` has the largest magnitude of the key or value of each token's
    head, in the same order. The TMA descriptor for tiles of TOKENS keys or values is a separate
    argument, None without TMA, since Triton does not support descriptors in records.
    """

    keys_at: Any
    values_at: Any
    block_stride: Any
    head_stride: Any
    tables_at: Any
    table_width: Any
    BLOCK: Any
    largest_at: Any = None


class Tiles(NamedTuple):
    """Runs of new tokens of one launch, each within one sequence; fields are (n,) integers."""

    slots: Any
    places: Any  # index of the first token in its slot
    rows: Any  # index of the first token in the step
    counts: Any
    stops: Any = None  # tokens of the sequence, for attention that is not causal


class Heads(NamedTuple):
    """Sizes of heads and tiles."""

    G: Any
    K: Any
    D: Any
    WIDTH: Any  # a power of two, at least D
    ROWS: Any  # query rows of a tile, a power of two


class Scores(NamedTuple):
    """Scale, cap, bias and visibility of scores, see `AttentionRules`.

    `bias_at` points to ALiBi slopes, or with TABLE > 0 to the biases of distances from FIRST on.
    """

    scale: Any
    bias_at: Any = None
    WINDOW: Any = 0  # 0 for none
    SOFTCAP: Any = 0.0  # 0 for none
    TABLE: Any = 0
    FIRST: Any = 0
    CAUSAL: Any = True
    NATIVE: Any = False  # whether the soft cap uses the hardware's tanh


@triton.jit
def _turned(at, inside, inputs, angle, d):
    """Return the values of heads at `at` + `d`, with the first R dimensions of each rotated.

    `at` and `angle` are the start of each head and of its token's angles; they broadcast with the
    dimensions `d`.
    """
    R: tl.constexpr = inputs.R
    x = tl.load(at + d, mask=inside, other=0.0)
    if R > 0:
        if inputs.INTERLEAVED:
            partner = d ^ 1
            sign = tl.where((d & 1) == 0, -1.0, 1.0)
        else:
            partner = tl.where(d < R // 2, d + R // 2, d - R // 2)
            sign = tl.where(d < R // 2, -1.0, 1.0)
        turns = d < R
        other = tl.load(at + tl.where(turns, partner, d), mask=inside, other=0.0)
        cos = tl.load(inputs.cos_at + angle + d, mask=inside & turns, other=1.0).to(tl.float32)
        sin = tl.load(inputs.sin_at + angle + d, mask=inside & turns, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + sign * other.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit
def _in_units_of_log_2(product, scores):
    """Return scores from products of queries and keys: scaled, capped, as exponents of 2."""
    if scores.SOFTCAP > 0:
        cap: tl.constexpr = scores.SOFTCAP * 1.4426950408889634
        if scores.NATIVE:  # with a relative error of 2**-11
            part = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;",
                "=f,f",
                [product * (scores.scale / scores.SOFTCAP)],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
            return cap * part
        # cap * tanh(z) = cap - 2 * cap / (exp(2 * z) + 1)
        power = tl.exp2(product * (scores.scale * (2 * 1.4426950408889634 / scores.SOFTCAP)))
        return cap - 2 * cap / (power + 1)
    return product * (scores.scale * _LOG2_E)


@triton.jit
def _biased(score, start, position, scores, head, TOKENS: tl.constexpr):
    """Return scores of queries and tokens from `start` on, with the bias of their distance."""
    if scores.bias_at is not None:
        distance = position[:, None] - (start + tl.arange(0, TOKENS))[None, :]
        if scores.TABLE > 0:
            entry = tl.minimum(tl.maximum(distance - scores.FIRST, 0), scores.TABLE - 1)
            entry += head[:, None] * scores.TABLE
            score += tl.load(scores.bias_at + entry).to(tl.float32) * _LOG2_E
        else:
            slope = tl.load(scores.bias_at + head)
            score -= (slope * _LOG2_E)[:, None] * distance.to(tl.float32)
    return score


@triton.jit
def _store_token(cached, heads, kv_head, table_at, place, d, key, value):
    """Store keys and values (heads, WIDTH) of the token at index `place`.

    Entries of `kv_head` (heads, 1) beyond K are skipped.
    """
    within = place % cached.BLOCK
    block = tl.load(table_at + place // cached.BLOCK).to(tl.int64)
    cell = block * cached.block_stride + kv_head * cached.head_stride + within * heads.D + d
    there = kv_head < heads.K
    inside = there & (d < heads.D)
    if cached.largest_at is not None:
        row_at = cached.largest_at + (block * (2 * heads.K) + kv_head) * cached.BLOCK + within
        key, value = key.to(tl.float32), value.to(tl.float32)
        largest = tl.max(tl.abs(key), 1, keep_dims=True)
        store_rounded(key, largest, inside, cached.keys_at + cell)
        tl.store(row_at, largest, mask=there)
        largest = tl.max(tl.abs(value), 1, keep_dims=True)
        store_rounded(value, largest, inside, cached.values_at + cell)
        tl.store(row_at + heads.K * cached.BLOCK, largest, mask=there)
    else:
        tl.store(cached.keys_at + cell, key, mask=inside)
        tl.store(cached.values_at + cell, value, mask=inside)


@triton.jit
def store_new_tokens(
    inputs,
    cached,
    slots_at,
    places_at,
    heads,
    QUERIES: tl.constexpr,  # a power of two, at least H
    HEADS: tl.constexpr,  # a power of two, at least K
    EARLY: tl.constexpr,
):
    """Store the rotated keys and the values of one token, and rotate its queries in place."""
    let_next_begin(EARLY)
    token = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, heads.WIDTH)[None, :]
    inside = (head < heads.K) & (d < heads.D)
    wait_for_earlier(EARLY)
    slot, place = tl.load(slots_at + token), tl.load(places_at + token)
    table_at = cached.tables_at + slot * cached.table_width
    source = token.to(tl.int64) * inputs.token_stride + head * heads.D
    angle = token * inputs.R
    key = _turned(inputs.key_at + source, inside, inputs, angle, d)
    value = tl.load(inputs.value_at + source + d, mask=inside, other=0.0)
    _store_token(cached, heads, head, table_at, place, d, key, value)
    if inputs.R > 0:
        query = tl.arange(0, QUERIES)[:, None]
        inside = (query < heads.G * heads.K) & (d < inputs.R)
        at = inputs.query_at + token.to(tl.int64) * inputs.token_stride + query * heads.D
        turned = _turned(at, inside, inputs, angle, d)
        tl.debug_barrier()  # both elements of a pair are read before either is written
        tl.store(at + d, turned, mask=inside)


@triton.jit
def _nothing_seen(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the initial state of the online softmax, see `_attend_keys`."""
    largest = tl.full((ROWS,), -1e30, tl.float32)
    return largest, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def _loaded(at, inside, WHOLE: tl.constexpr):
    """Load values at pointers, zeros for those not `inside`; WHOLE means that all are inside."""
    if WHOLE:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values


@triton.jit
def _attend_keys(  # noqa: C901 - constants choose
    state,
    query,
    position,
    span,
    cached,
    described,
    kv_head,
    table_at,
    scores,
    head,
    heads,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,  # whether some tokens are hidden from some queries
):
    """Add cached tokens of a span to the online softmax of queries (ROWS, WIDTH).

    The state is each row's largest score so far in units of log 2, and, relative to it, the sum of
    the weights and the weighted sum of values. The span is the first token to read, the end of
    these, and the end of valid tokens.
    """
    largest, total, mixed = state
    begin, end, stop = span
    D: tl.constexpr = heads.D
    BLOCK: tl.constexpr = cached.BLOCK
    d = tl.arange(0, heads.WIDTH)[None, :]
    ONE_BLOCK: tl.constexpr = BLOCK % TOKENS == 0  # TOKENS never span two blocks
    # Without cap and bias, scaling and subtracting the largest score is one instruction.
    PLAIN: tl.constexpr = scores.bias_at is None and scores.SOFTCAP == 0
    FP8: tl.constexpr = cached.largest_at is not None
    if FP8:  # values are summed in units of their digits, weighted by their largest magnitude
        mixed *= LARGEST
    unit = scores.scale * _LOG2_E if PLAIN else 1.0
    zero = tl.full((), 0, tl.int32)  # Triton's interpreter cannot divide Python integers
    block = zero
    if ONE_BLOCK:
        # Loaded one step ahead, so that the compiler can prefetch keys, too.
        block = tl.load(table_at + (begin + zero) // BLOCK, mask=begin < end, other=0)
    for start in range(begin, end, TOKENS):
        within = (start + zero) % BLOCK
        token = start + tl.arange(0, TOKENS)
        there = (token < stop)[:, None]
        if ONE_BLOCK:
            each, inner = block, within + tl.arange(0, TOKENS)
        else:
            each = tl.load(table_at + token // BLOCK, mask=token < stop, other=0)
            inner = token % BLOCK
        if described is not None:
            row = (block * (2 * heads.K) + kv_head) * BLOCK + within
            keys = described.load([row, 0])
        else:
            offset = each.to(tl.int64) * cached.block_stride + inner * D
            at = offset[:, None] + kv_head * cached.head_stride + d
            inside = there & (d < D) if MASKED else d < D
            keys = _loaded(cached.keys_at + at, inside, not MASKED and heads.WIDTH == D)
        score = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        if FP8:
            row_at = (each.to(tl.int64) * (2 * heads.K) + kv_head) * BLOCK + inner
            row_at += cached.largest_at
            largest_key = tl.load(row_at, mask=token < stop, other=0.0)
            largest_value = tl.load(row_at + heads.K * BLOCK, mask=token < stop, other=0.0)
            score *= (largest_key * (1 / LARGEST))[None, :]
        if not PLAIN:
            score = _in_units_of_log_2(score, scores)
            score = _biased(score, start, position, scores, head, TOKENS)
        distance = position[:, None] - token[None, :]
        if MASKED:
            seen = (token < stop)[None, :]
            if scores.CAUSAL:
                seen &= distance >= 0
            if scores.WINDOW > 0:
                seen &= distance < scores.WINDOW
            score = tl.where(seen, score, -1e30)
        new_largest = tl.maximum(largest, tl.max(score, 1) * unit)
        weight = tl.exp2(score * unit - new_largest[:, None])
        if MASKED and scores.WINDOW > 0:  # a row may see none of these tokens
            weight = tl.where(seen, weight, 0.0)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, 1)
        if described is not None:
            values = described.load([row + heads.K * BLOCK, 0])
            if MASKED:  # values beyond the end may not be finite
                values = tl.where(there, values, 0.0)
        else:
            values = _loaded(cached.values_at + at, inside, not MASKED and heads.WIDTH == D)
        mixed = mixed * shrink[:, None]
        if FP8:
            weight *= largest_value[None, :]
        values = values.to(query.dtype)
        mixed = tl.dot(weight.to(query.dtype), values, mixed, input_precision="ieee")
        largest = new_largest
        if ONE_BLOCK:
            following = start + zero + TOKENS
            block = tl.load(table_at + following // BLOCK, mask=following < end, other=0)
    if FP8:
        mixed *= 1 / LARGEST
    return largest, total, mixed


@triton.jit
def flash_attend_prompts(
    inputs,
    cached,
    described,
    tiles,
    scores,
    y_at,
    y_stride,
    heads,
    TOKENS: tl.constexpr,  # cached tokens that are read at once
    EARLY: tl.constexpr,
):
    """Flash attention of a tile: new tokens of one sequence, query heads of one key/value head.

    Keys that all queries of the tile see are added without masks.
    """
    let_next_begin(EARLY)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, heads.ROWS)
    token, head = row // heads.G, kv_head * heads.G + row % heads.G
    d = tl.arange(0, heads.WIDTH)
    wait_for_earlier(EARLY)
    count = tl.load(tiles.counts + tile)
    if count == 0:  # an unused tile of a graph
        return
    slot, place = tl.load(tiles.slots + tile), tl.load(tiles.places + tile).to(tl.int32)
    first_row = tl.load(tiles.rows + tile).to(tl.int64)
    inside = (token < count)[:, None] & (d < heads.D)[None, :]
    across = head[:, None] * heads.D + d[None, :]
    at = inputs.query_at + (first_row + token)[:, None] * inputs.token_stride + across
    query = tl.load(at, mask=inside, other=0.0)
    # Cached tokens are read in the same tiles wherever the query's tile begins.
    begin, all_seen = 0, 0
    if scores.CAUSAL:
        stop = place + count.to(tl.int32)
        end = (place + 1) // TOKENS * TOKENS
    else:
        stop = tl.load(tiles.stops + tile).to(tl.int32)
        end = stop // TOKENS * TOKENS
    if scores.WINDOW > 0:
        begin = tl.maximum(0, place + 1 - scores.WINDOW) // TOKENS * TOKENS
        all_seen = tl.maximum(0, stop - scores.WINDOW + TOKENS - 1) // TOKENS * TOKENS
    largest, total, mixed = _nothing_seen(heads.ROWS, heads.WIDTH)
    table_at = cached.tables_at + slot * cached.table_width
    for phase in tl.static_range(3):
        first, last = begin, tl.minimum(all_seen, stop)
        if phase == 1:
            first, last = all_seen, end
        if phase == 2:
            first, last = tl.maximum(end, all_seen), stop
        if phase > 0 or scores.WINDOW > 0:
            largest, total, mixed = _attend_keys(
                *((largest, total, mixed), query, place + token, (first, last, stop)),
                *(cached, described, kv_head, table_at, scores, head, heads, TOKENS, phase != 1),
            )
    at = y_at + (first_row + token)[:, None] * y_stride + across
    tl.store(at, (mixed / total[:, None]).to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def _even_shares(
    tiles,
    count,
    heads,
    TOKENS: tl.constexpr,
    COUNTED: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    NEW: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the end of each single token's tiles of cached tokens, and the tiles per program.

    The tiles of all tokens and heads are numbered consecutively; ends are (COUNTED,). Each program
    takes an equal share of consecutive tiles; about MOST_PARTS programs at most share a head.
    """
    rows = tl.arange(0, COUNTED)
    there = rows < count
    there &= tl.load(tiles.counts + rows, mask=there, other=0) > 0
    places = tl.load(tiles.places + rows, mask=there, other=0).to(tl.int32)
    read = places if NEW else places + 1
    if WINDOW > 0:
        read -= tl.maximum(0, places + 1 - WINDOW) // TOKENS * TOKENS
    number = tl.where(there, tl.maximum(tl.cdiv(read, TOKENS), 1), 0)
    ends = tl.cumsum(number, 0) * heads.K
    share = tl.cdiv(tl.max(ends, 0), tl.num_programs(0))
    return ends, tl.maximum(share, tl.cdiv(tl.max(number, 0), MOST_PARTS))


@triton.jit
def _head_of(tile, ends, heads):
    """Return the token and the head of a tile, and the head's first and end tile."""
    nth_row = tl.sum((ends <= tile).to(tl.int32), 0)
    row_begin = tl.max(tl.where(ends <= tile, ends, 0), 0)
    row_end = tl.min(tl.where(ends > tile, ends, tl.max(ends, 0)), 0)
    head_tiles = (row_end - row_begin) // heads.K
    head = (tile - row_begin) // head_tiles
    head_begin = row_begin + head * head_tiles
    return nth_row, head, head_begin, head_begin + head_tiles


@triton.jit
def _leave_head(
    state,
    tile,
    head_begin,
    head_end,
    share,
    parts_at,
    sums_at,
    ticket_at,
    target_at,
    heads,
    HEADS: tl.constexpr,  # a power of two, at least G
    JOINED: tl.constexpr,  # parts that are read at once
):
    """Store the results of G query heads, or a part of them if several programs share the heads.

    The program that stores the last part joins all parts, by the logarithms of their sums of
    weights. `state` is that of `_attend_keys`.
    """
    largest, total, mixed = state
    WIDTH: tl.constexpr = heads.WIDTH
    program = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    g = tl.arange(0, heads.ROWS)
    inside = (g < heads.G)[:, None] & (d < heads.D)[None, :]
    first_program = head_begin // share
    parts = (head_end - 1) // share - first_program + 1
    mixed = mixed / total[:, None]
    if parts == 1:
        y = mixed.to(target_at.dtype.element_ty)
        tl.store(target_at + g[:, None] * heads.D + d[None, :], y, mask=inside)
    else:
        # A program shares at most two heads with others: its first and its last.
        mine = 2 * program + (tile == head_begin).to(tl.int32)
        cell = mine * (HEADS * WIDTH) + g[:, None] * WIDTH + d[None, :]
        tl.store(parts_at + cell, mixed, mask=inside)
        tl.store(sums_at + mine * HEADS + g, largest + tl.log2(total), mask=g < heads.G)
        tl.debug_barrier()  # this program's values are all stored before it draws its ticket
        if tl.atomic_add(ticket_at, 1) == parts - 1:
            tl.debug_barrier()
            h = tl.arange(0, HEADS)
            best, all_total, all_mixed = _nothing_seen(HEADS, WIDTH)
            for first_part in range(0, parts, JOINED):
                nth = first_part + tl.arange(0, JOINED)
                other = 2 * (first_program + nth) + (nth == 0).to(tl.int32)
                known = (nth < parts)[:, None] & (h < heads.G)[None, :]
                sum_at = sums_at + other[:, None] * HEADS + h[None, :]
                place_at = other[:, None, None] * (HEADS * WIDTH) + h[None, :, None] * WIDTH
                each = tl.load(
                    parts_at + place_at + d[None, None, :],
                    mask=known[:, :, None] & (d < heads.D)[None, None, :],
                    other=0.0,
                )
                sums = tl.load(sum_at, mask=known, other=float("-inf"))
                new_best = tl.maximum(best, tl.max(sums, 0))
                shrink = tl.exp2(best - new_best)
                weight = tl.exp2(sums - new_best[None, :])
                all_total = all_total * shrink + tl.sum(weight, 0)
                all_mixed = all_mixed * shrink[:, None] + tl.sum(each * weight[:, :, None], 0)
                best = new_best
            y = (all_mixed / all_total[:, None]).to(target_at.dtype.element_ty)
            within = (h < heads.G)[:, None] & (d < heads.D)[None, :]
            tl.store(target_at + h[:, None] * heads.D + d[None, :], y, mask=within)
            tl.store(ticket_at, 0)


@triton.jit(do_not_specialize=["count"])
def flash_decode(
    inputs,
    cached,
    described,
    tiles,
    count,
    scores,
    parts_at,
    sums_at,
    tickets_at,
    y_at,
    y_stride,
    heads,
    TOKENS: tl.constexpr,
    COUNTED: tl.constexpr,  # a power of two, at least `count`
    MOST_PARTS: tl.constexpr,  # approximate limit per head
    HEADS: tl.constexpr,
    JOINED: tl.constexpr,
    FIXED: tl.constexpr,  # `single` of `PagedAttention`
    EARLY: tl.constexpr,
):
    """Flash decoding with split keys: each key is read once for all query heads that share it.

    The tiles of cached tokens of all heads and tokens are numbered consecutively, and each program
    takes an equal share of them; the last program to finish a head joins its parts. New keys and
    values, if any, are stored and attended to.
    """
    NEW: tl.constexpr = inputs.key_at is not None
    let_next_begin(EARLY)
    if not FIXED:
        wait_for_earlier(EARLY)
    d = tl.arange(0, heads.WIDTH)
    g = tl.arange(0, heads.ROWS)
    ends, share = _even_shares(tiles, count, heads, TOKENS, COUNTED, MOST_PARTS, NEW, scores.WINDOW)
    tile = tl.program_id(0) * share
    last_tile = tl.minimum(tile + share, tl.max(ends, 0))
    if FIXED:
        wait_for_earlier(EARLY)
    while tile < last_tile:
        nth_row, kv_head, head_begin, head_end = _head_of(tile, ends, heads)
        row = tl.load(tiles.rows + nth_row).to(tl.int64)
        slot = tl.load(tiles.slots + nth_row)
        place = tl.load(tiles.places + nth_row).to(tl.int32)  # of the query
        first = 0
        if scores.WINDOW > 0:
            first = tl.maximum(0, place + 1 - scores.WINDOW) // TOKENS * TOKENS
        begin = first + (tile - head_begin) * TOKENS
        stop = first + (tl.minimum(last_tile, head_end) - head_begin) * TOKENS
        stop = tl.minimum(stop, place if NEW else place + 1)
        table_at = cached.tables_at + slot * cached.table_width
        # Rows beyond the group repeat its last head.
        head = kv_head * heads.G + tl.minimum(g, heads.G - 1)
        inside = (g < heads.G)[:, None] & (d < heads.D)[None, :]
        at = inputs.query_at + row * inputs.token_stride + head[:, None] * heads.D
        query = _turned(at, inside, inputs, row * inputs.R, d[None, :])
        largest, total, mixed = _nothing_seen(heads.ROWS, heads.WIDTH)
        if NEW:  # noqa: SIM102 - known when the kernel is compiled
            if tile == head_begin:
                own = row * inputs.token_stride + kv_head * heads.D
                key = _turned(inputs.key_at + own, d < heads.D, inputs, row * inputs.R, d)
                value = tl.load(inputs.value_at + own + d, mask=d < heads.D, other=0.0)
                _store_token(
                    *(cached, heads, kv_head + tl.zeros((1, 1), tl.int32), table_at, place),
                    *(d[None, :], key[None, :], value[None, :]),
                )
                score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1)
                largest = _in_units_of_log_2(score, scores)
                if scores.TABLE > 0:  # its distance is 0
                    bias = tl.load(scores.bias_at + head * scores.TABLE)
                    largest += bias.to(tl.float32) * _LOG2_E
                total += 1.0
                mixed += value.to(tl.float32)[None, :]
        position = place + tl.zeros((heads.ROWS,), tl.int32)
        whole = begin
        if scores.WINDOW == 0:
            whole = tl.maximum(stop // TOKENS * TOKENS, begin)
            largest, total, mixed = _attend_keys(
                *((largest, total, mixed), query, position, (begin, whole, stop)),
                *(cached, described, kv_head, table_at, scores, head, heads, TOKENS, False),
            )
        if whole < stop:
            largest, total, mixed = _attend_keys(
                *((largest, total, mixed), query, position, (whole, stop, stop)),
                *(cached, described, kv_head, table_at, scores, head, heads, TOKENS, True),
            )
        _leave_head(
            *((largest, total, mixed), tile, head_begin, head_end, share, parts_at, sums_at),
            *(tickets_at + nth_row * heads.K + kv_head,),
            *(y_at + row * y_stride + kv_head * heads.G * heads.D, heads, HEADS, JOINED),
        )
        tile = tl.minimum(last_tile, head_end)
