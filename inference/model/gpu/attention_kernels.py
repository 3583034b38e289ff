"""Kernels of attention over the cached blocks of sequences, in Triton's language.

`attention` launches them. Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, H local query heads, K local key/value heads, G query heads of
#         a key/value head, D head size, R rotated dimensions, T entries of a bias table

import triton
import triton.language as tl

from inference.parallel.launch_cuda import let_next_begin, wait_for_earlier

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _turned(at, inside, cos_at, sin_at, d, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return heads' values at `at` + `d`, the first R dimensions of each rotated.

    `at`, `cos_at` and `sin_at` point to the beginnings of heads and of their tokens' angles, and
    broadcast with the dimensions `d`.
    """
    x = tl.load(at + d, mask=inside, other=0.0)
    if R > 0:
        if INTERLEAVED:
            partner = d ^ 1
            sign = tl.where((d & 1) == 0, -1.0, 1.0)
        else:
            partner = tl.where(d < R // 2, d + R // 2, d - R // 2)
            sign = tl.where(d < R // 2, -1.0, 1.0)
        turns = d < R
        other = tl.load(at + tl.where(turns, partner, d), mask=inside, other=0.0)
        cos = tl.load(cos_at + d, mask=inside & turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_at + d, mask=inside & turns, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + sign * other.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit
def _capped(score, SOFTCAP: tl.constexpr):
    """Return SOFTCAP * tanh(score / SOFTCAP), of 0 the score itself."""
    if SOFTCAP > 0:
        score = SOFTCAP * (2 * tl.sigmoid(score * (2 / SOFTCAP)) - 1)
    return score


@triton.jit
def store_new_tokens(
    query_at,
    key_at,
    value_at,
    token_stride,
    cos_at,
    sin_at,
    keys_at,
    values_at,
    block_stride,
    head_stride,
    tables_at,
    table_width,
    slots_at,
    places_at,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    QUERIES: tl.constexpr,  # a power of two, at least H
    PAIRS: tl.constexpr,  # a power of two, at least R / 2
    HEADS: tl.constexpr,  # a power of two, at least K
    WIDTH: tl.constexpr,  # a power of two, at least D
    BLOCK: tl.constexpr,  # tokens of a block
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Store the rotated keys and the values of one token; rotate its queries where they lie."""
    let_next_begin(EARLY)
    token = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    inside = (head < K) & (d < D)
    wait_for_earlier(EARLY)
    slot, place = tl.load(slots_at + token), tl.load(places_at + token)
    block = tl.load(tables_at + slot * table_width + place // BLOCK).to(tl.int64)
    target = block * block_stride + head * head_stride + (place % BLOCK) * D + d
    source = token.to(tl.int64) * token_stride + head * D
    angle = token * R
    key = _turned(key_at + source, inside, cos_at + angle, sin_at + angle, d, R, INTERLEAVED)
    tl.store(keys_at + target, key, mask=inside)
    value = tl.load(value_at + source + d, mask=inside, other=0.0)
    tl.store(values_at + target, value, mask=inside)
    if R > 0:
        # Both of a pair are read before either is written.
        query = tl.arange(0, QUERIES)[:, None]
        pair = tl.arange(0, PAIRS)[None, :]
        turns = pair < R // 2
        inside = (query < H) & turns
        one = 2 * pair if INTERLEAVED else pair
        other = one + 1 if INTERLEAVED else one + R // 2
        at = query_at + token.to(tl.int64) * token_stride + query * D
        x = tl.load(at + one, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_at + angle + one, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_at + angle + one, mask=turns, other=0.0).to(tl.float32)
        tl.store(at + one, (x * cos - y * sin).to(query_at.dtype.element_ty), mask=inside)
        cos = tl.load(cos_at + angle + other, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_at + angle + other, mask=turns, other=0.0).to(tl.float32)
        tl.store(at + other, (y * cos + x * sin).to(query_at.dtype.element_ty), mask=inside)


@triton.jit
def _cache_new(
    key_at,
    value_at,
    cos_at,
    sin_at,
    keys_at,
    values_at,
    table_at,
    place,
    d,
    block_stride,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return one head's new key, rotated, and value, which are stored in the cache."""
    key = _turned(key_at, d < D, cos_at, sin_at, d, R, INTERLEAVED)
    value = tl.load(value_at + d, mask=d < D, other=0.0)
    block = tl.load(table_at + place // BLOCK).to(tl.int64)
    cell = block * block_stride + (place % BLOCK) * D + d
    tl.store(keys_at + cell, key, mask=d < D)
    tl.store(values_at + cell, value, mask=d < D)
    return key, value


@triton.jit
def _attend_keys(  # noqa: C901 - constants choose
    largest,
    total,
    mixed,
    query,
    position,
    begin,
    end,
    stop,
    keys_at,
    values_at,
    kv_head,
    block_stride,
    head_stride,
    table_at,
    bias_at,
    head,
    slope,
    scale,
    K: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    TMA: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    TABLE: tl.constexpr,
    MASKED: tl.constexpr,  # whether some queries do not see some of the tokens
):
    """Return the online softmax of queries (ROWS, WIDTH) with cached tokens [begin, end) added.

    The state is each row's largest score so far, in units of log 2, the sum of the weights and the
    sum of the weighted values, both relative to it. Nothing lies at `stop` and beyond. With TMA
    `keys_at` is the descriptor of the layer's cache, as rows of one head's key or value.
    """
    d = tl.arange(0, WIDTH)[None, :]
    ONE_BLOCK: tl.constexpr = BLOCK % TOKENS == 0  # TOKENS never lie in two
    block = tl.full((), 0, tl.int32)
    if ONE_BLOCK:
        # One step ahead: the compiler can then load keys ahead, too.
        block = tl.load(table_at + begin // BLOCK, mask=begin < end, other=0)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        there = (token < stop)[:, None]
        if TMA:
            row = (block * (2 * K) + kv_head) * BLOCK + start % BLOCK
            keys = keys_at.load([row, 0])
        else:
            if ONE_BLOCK:
                offset = block.to(tl.int64) * block_stride + (start % BLOCK + token - start) * D
            else:
                each = tl.load(table_at + token // BLOCK, mask=token < stop, other=0)
                offset = each.to(tl.int64) * block_stride + (token % BLOCK) * D
            at = offset[:, None] + kv_head * head_stride + d
            if MASKED:
                keys = tl.load(keys_at + at, mask=there & (d < D), other=0.0)
            elif WIDTH != D:
                keys = tl.load(keys_at + at, mask=d < D, other=0.0)
            else:
                keys = tl.load(keys_at + at)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if SOFTCAP > 0:
            score = _capped(score * scale, SOFTCAP) * _LOG2_E
        else:
            score *= scale * _LOG2_E
        distance = position[:, None] - token[None, :]
        if HAS_SLOPES:
            score -= (slope * _LOG2_E)[:, None] * distance.to(tl.float32)
        if TABLE > 0:
            entry = head[:, None] * TABLE + tl.maximum(tl.minimum(distance, TABLE - 1), 0)
            score += tl.load(bias_at + entry).to(tl.float32) * _LOG2_E
        if MASKED:
            seen = (distance >= 0) & (token < stop)[None, :]
            if WINDOW > 0:
                seen &= distance < WINDOW
            score = tl.where(seen, score, -1e30)
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])
        if MASKED and WINDOW > 0:  # a row may see none of these
            weight = tl.where(seen, weight, 0.0)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, 1)
        if TMA:
            values = keys_at.load([row + K * BLOCK, 0])
            if MASKED:  # what lies there need not be finite
                values = tl.where(there, values, 0.0)
        elif MASKED:
            values = tl.load(values_at + at, mask=there & (d < D), other=0.0)
        elif WIDTH != D:
            values = tl.load(values_at + at, mask=d < D, other=0.0)
        else:
            values = tl.load(values_at + at)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weight.to(values.dtype), values, mixed, input_precision="ieee")
        largest = new_largest
        if ONE_BLOCK:
            following = start + TOKENS
            block = tl.load(table_at + following // BLOCK, mask=following < end, other=0)
    return largest, total, mixed


@triton.jit
def flash_attend_prompts(
    query_at,
    token_stride,
    keys_at,
    values_at,
    block_stride,
    head_stride,
    tables_at,
    table_width,
    slots_at,
    places_at,
    rows_at,
    counts_at,
    bias_at,
    y_at,
    y_stride,
    scale,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,  # cached ones that are read at once
    TMA: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    SOFTCAP: tl.constexpr,  # likewise
    HAS_SLOPES: tl.constexpr,
    TABLE: tl.constexpr,  # T, 0 for none
    EARLY: tl.constexpr,
):
    """Flash attention of some new tokens of one sequence, all query heads of one key/value head.

    Tokens whose keys all queries of the tile see are added without masks.
    """
    let_next_begin(EARLY)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    token, head = row // G, kv_head * G + row % G
    d = tl.arange(0, WIDTH)
    wait_for_earlier(EARLY)
    count = tl.load(counts_at + tile)
    if count == 0:  # a graph has more tiles than most steps
        return
    slot, place = tl.load(slots_at + tile), tl.load(places_at + tile).to(tl.int32)
    first_row = tl.load(rows_at + tile).to(tl.int64)
    real = token < count
    inside = real[:, None] & (d < D)[None, :]
    at = query_at + (first_row + token)[:, None] * token_stride + head[:, None] * D + d[None, :]
    query = tl.load(at, mask=inside, other=0.0)
    slope = tl.zeros((ROWS,), tl.float32)
    if HAS_SLOPES:
        slope = tl.load(bias_at + head)
    position, stop = place + token, place + count.to(tl.int32)
    # Tokens are read by the same tiles wherever the query's own tile begins.
    begin, all_seen = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(0, place + 1 - WINDOW) // TOKENS * TOKENS
        all_seen = tl.maximum(0, stop - WINDOW + TOKENS - 1) // TOKENS * TOKENS
    end = (place + 1) // TOKENS * TOKENS
    largest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    table_at = tables_at + slot * table_width
    for phase in tl.static_range(3):
        first, last = begin, tl.minimum(all_seen, stop)
        if phase == 1:
            first, last = all_seen, end
        if phase == 2:
            first, last = tl.maximum(end, all_seen), stop
        if phase > 0 or WINDOW > 0:
            largest, total, mixed = _attend_keys(
                *(largest, total, mixed, query, position, first, last, stop),
                *(keys_at, values_at, kv_head, block_stride, head_stride, table_at),
                *(bias_at, head, slope, scale),
                *(K, D, WIDTH, BLOCK, TOKENS, TMA, WINDOW, SOFTCAP, HAS_SLOPES, TABLE, phase != 1),
            )
    at = y_at + (first_row + token)[:, None] * y_stride + head[:, None] * D + d[None, :]
    tl.store(at, (mixed / total[:, None]).to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def _even_shares(
    places_at,
    counts_at,
    count,
    heads: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    NEW: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return where each single token's tiles of cached tokens end, and how many a program takes.

    The heads of all tokens lie end to end; (ROWS,) ends. Programs take equal shares of neighbouring
    tiles, and about MOST_PARTS share a head at the most.
    """
    rows = tl.arange(0, ROWS)
    there = (rows < count) & (tl.load(counts_at + rows, mask=rows < count, other=0) > 0)
    places = tl.load(places_at + rows, mask=there, other=0).to(tl.int32)
    read = places if NEW else places + 1
    if WINDOW > 0:
        read -= tl.maximum(0, places + 1 - WINDOW) // TOKENS * TOKENS
    tiles = tl.where(there, tl.maximum(tl.cdiv(read, TOKENS), 1), 0)
    ends = tl.cumsum(tiles, 0) * heads
    share = tl.cdiv(tl.max(ends, 0), tl.num_programs(0))
    return ends, tl.maximum(share, tl.cdiv(tl.max(tiles, 0), MOST_PARTS))


@triton.jit
def _head_of(tile, ends, heads: tl.constexpr):
    """Return the token and the head that a tile is of, and the head's first and end tile."""
    nth_row = tl.sum((ends <= tile).to(tl.int32), 0)
    row_begin = tl.max(tl.where(ends <= tile, ends, 0), 0)
    row_end = tl.min(tl.where(ends > tile, ends, tl.max(ends, 0)), 0)
    head_tiles = (row_end - row_begin) // heads
    head = (tile - row_begin) // head_tiles
    head_begin = row_begin + head * head_tiles
    return nth_row, head, head_begin, head_begin + head_tiles


@triton.jit
def _tokens_of(
    tile,
    last_tile,
    head_begin,
    head_end,
    place,
    TOKENS: tl.constexpr,
    NEW: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the first of the cached tokens that a program reads of a head, and where they end."""
    cached = place if NEW else place + 1  # tokens that come from the cache
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, place + 1 - WINDOW) // TOKENS * TOKENS
    begin = first + (tile - head_begin) * TOKENS
    stop = tl.minimum(first + (tl.minimum(last_tile, head_end) - head_begin) * TOKENS, cached)
    return begin, stop


@triton.jit
def _leave_head(
    largest,
    total,
    mixed,
    tile,
    head_begin,
    head_end,
    share,
    parts_at,
    sums_at,
    ticket_at,
    target_at,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,  # a power of two, at least G
    JOINED: tl.constexpr,  # parts that are read at once
):
    """Store G query heads' results; of a head in parts, this part: who stores the last joins all.

    The state is that of `_attend_keys`, of GROUP rows.
    """
    program = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    g = tl.arange(0, GROUP)
    inside = (g < G)[:, None] & (d < D)[None, :]
    first_program = head_begin // share
    parts = (head_end - 1) // share - first_program + 1
    if parts == 1:
        y = (mixed / total[:, None]).to(target_at.dtype.element_ty)
        tl.store(target_at + g[:, None] * D + d[None, :], y, mask=inside)
    else:
        # A program has at most two heads that it shares: that of its first tile, and a later.
        mine = 2 * program + (tile == head_begin).to(tl.int32)
        cell = mine * (HEADS * WIDTH) + g[:, None] * WIDTH + d[None, :]
        tl.store(parts_at + cell, mixed, mask=inside)
        tl.store(sums_at + mine * (2 * HEADS) + g, largest, mask=g < G)
        tl.store(sums_at + mine * (2 * HEADS) + HEADS + g, total, mask=g < G)
        tl.debug_barrier()  # all of this program's values are stored before its ticket is drawn
        if tl.atomic_add(ticket_at, 1) == parts - 1:
            tl.debug_barrier()
            h = tl.arange(0, HEADS)
            best = tl.full((HEADS,), -1e30, tl.float32)
            all_total = tl.zeros((HEADS,), tl.float32)
            all_mixed = tl.zeros((HEADS, WIDTH), tl.float32)
            for first_part in range(0, parts, JOINED):
                nth = first_part + tl.arange(0, JOINED)
                other = 2 * (first_program + nth) + (nth == 0).to(tl.int32)
                known = (nth < parts)[:, None] & (h < G)[None, :]
                sum_at = sums_at + other[:, None] * (2 * HEADS) + h[None, :]
                place_at = other[:, None, None] * (HEADS * WIDTH) + h[None, :, None] * WIDTH
                each = tl.load(
                    parts_at + place_at + d[None, None, :],
                    mask=known[:, :, None] & (d < D)[None, None, :],
                    other=0.0,
                )
                bests = tl.load(sum_at, mask=known, other=-1e30)
                totals = tl.load(sum_at + HEADS, mask=known, other=0.0)
                new_best = tl.maximum(best, tl.max(bests, 0))
                shrink = tl.exp2(best - new_best)
                grow = tl.exp2(bests - new_best[None, :])
                all_total = all_total * shrink + tl.sum(totals * grow, 0)
                all_mixed = all_mixed * shrink[:, None] + tl.sum(each * grow[:, :, None], 0)
                best = new_best
            y = (all_mixed / all_total[:, None]).to(target_at.dtype.element_ty)
            within = (h < G)[:, None] & (d < D)[None, :]
            tl.store(target_at + h[:, None] * D + d[None, :], y, mask=within)
            tl.store(ticket_at, 0)


@triton.jit(do_not_specialize=["count"])
def flash_decode_grouped(
    query_at,
    key_at,
    value_at,
    token_stride,
    cos_at,
    sin_at,
    cache_at,
    keys_at,
    values_at,
    block_stride,
    head_stride,
    tables_at,
    table_width,
    slots_at,
    places_at,
    rows_at,
    counts_at,
    count,
    bias_at,
    parts_at,
    sums_at,
    tickets_at,
    y_at,
    y_stride,
    scale,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,  # a power of two, at least G, that a tensor core multiplies
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least `count`
    MOST_PARTS: tl.constexpr,  # of a head, about
    HEADS: tl.constexpr,
    JOINED: tl.constexpr,
    TMA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NEW: tl.constexpr,  # whether the new key and value are stored and seen
    FIXED: tl.constexpr,  # see `PagedAttention`
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    TABLE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Flash decoding with split keys: each key is read once for all query heads that share it.

    As in `flash_decode_evenly` all tokens' heads lie end to end, in tiles of cached tokens, of
    which each program takes an equal share; who ends a head's last part joins its parts.
    """
    let_next_begin(EARLY)
    if not FIXED:
        wait_for_earlier(EARLY)
    d = tl.arange(0, WIDTH)
    g = tl.arange(0, GROUP)
    ends, share = _even_shares(
        places_at, counts_at, count, K, TOKENS, ROWS, MOST_PARTS, NEW, WINDOW
    )
    tile = tl.program_id(0) * share
    last_tile = tl.minimum(tile + share, tl.max(ends, 0))
    if FIXED:
        wait_for_earlier(EARLY)
    while tile < last_tile:
        nth_row, kv_head, head_begin, head_end = _head_of(tile, ends, K)
        row = tl.load(rows_at + nth_row).to(tl.int64)
        slot = tl.load(slots_at + nth_row)
        place = tl.load(places_at + nth_row).to(tl.int32)  # of the query
        begin, stop = _tokens_of(tile, last_tile, head_begin, head_end, place, TOKENS, NEW, WINDOW)
        table_at = tables_at + slot * table_width
        head = kv_head * G + g
        inside = (g < G)[:, None] & (d < D)[None, :]
        turn = row * R
        at = query_at + row * token_stride + head[:, None] * D
        query = _turned(at, inside, cos_at + turn, sin_at + turn, d[None, :], R, INTERLEAVED)
        slope = tl.zeros((GROUP,), tl.float32)
        if HAS_SLOPES:
            slope = tl.load(bias_at + head, mask=g < G, other=0.0)
        largest = tl.full((GROUP,), -1e30, tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        mixed = tl.zeros((GROUP, WIDTH), tl.float32)
        if NEW:  # noqa: SIM102 - known when the kernel is compiled
            if tile == head_begin:
                own = row * token_stride + kv_head * D
                key, value = _cache_new(
                    *(key_at + own, value_at + own, cos_at + turn, sin_at + turn),
                    *(keys_at + kv_head * head_stride, values_at + kv_head * head_stride),
                    *(table_at, place, d, block_stride, D, R, BLOCK, INTERLEAVED),
                )
                score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
                score = _capped(score, SOFTCAP)
                if TABLE > 0:
                    score += tl.load(bias_at + head * TABLE, mask=g < G, other=0.0).to(tl.float32)
                largest = score * _LOG2_E
                total += 1.0
                mixed += value.to(tl.float32)[None, :]
        position = place + tl.zeros((GROUP,), tl.int32)
        whole = begin
        if WINDOW == 0:
            whole = tl.maximum(stop // TOKENS * TOKENS, begin)
            largest, total, mixed = _attend_keys(
                *(largest, total, mixed, query, position, begin, whole, stop),
                *(cache_at, values_at, kv_head, block_stride, head_stride, table_at, bias_at),
                *(tl.minimum(head, K * G - 1), slope, scale),
                *(K, D, WIDTH, BLOCK, TOKENS, TMA, WINDOW, SOFTCAP, HAS_SLOPES, TABLE, False),
            )
        if whole < stop:
            largest, total, mixed = _attend_keys(
                *(largest, total, mixed, query, position, whole, stop, stop),
                *(cache_at, values_at, kv_head, block_stride, head_stride, table_at, bias_at),
                *(tl.minimum(head, K * G - 1), slope, scale),
                *(K, D, WIDTH, BLOCK, TOKENS, TMA, WINDOW, SOFTCAP, HAS_SLOPES, TABLE, True),
            )
        _leave_head(
            *(largest, total, mixed, tile, head_begin, head_end, share, parts_at, sums_at),
            *(tickets_at + nth_row * K + kv_head, y_at + row * y_stride + kv_head * G * D),
            *(G, D, GROUP, WIDTH, HEADS, JOINED),
        )
        tile = tl.minimum(last_tile, head_end)


@triton.jit
def _cached(
    keys_at, values_at, table_at, token, stop, d, block_stride, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Return one head's keys and values of cached tokens, zeros from `stop` on."""
    block = tl.load(table_at + token // BLOCK, mask=token < stop, other=0).to(tl.int64)
    cell = (block * block_stride + (token % BLOCK) * D)[:, None] + d[None, :]
    inside = (token < stop)[:, None] & (d < D)[None, :]
    keys = tl.load(keys_at + cell, mask=inside, other=0.0)
    return keys, tl.load(values_at + cell, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["count"])
def flash_decode_evenly(
    query_at,
    key_at,
    value_at,
    token_stride,
    cos_at,
    sin_at,
    keys_at,
    values_at,
    block_stride,
    head_stride,
    tables_at,
    table_width,
    slots_at,
    places_at,
    rows_at,
    counts_at,
    count,
    bias_at,
    parts_at,
    sums_at,
    tickets_at,
    y_at,
    y_stride,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least `count`
    MOST_PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NEW: tl.constexpr,  # whether a new key and value are stored and seen
    FIXED: tl.constexpr,  # see `PagedAttention`
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    TABLE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """An equal share of all single tokens' heads; who ends a head's last part joins its parts.

    The heads of all tokens lie end to end, cut into tiles of cached tokens; a program takes as many
    neighbouring tiles as any other. A tile's tokens have a softmax each, which are joined where
    the program leaves the head: until then no thread needs another's result.
    """
    let_next_begin(EARLY)
    if not FIXED:
        wait_for_earlier(EARLY)
    d = tl.arange(0, WIDTH)
    nth = tl.arange(0, TOKENS)
    ends, share = _even_shares(
        places_at, counts_at, count, H, TOKENS, ROWS, MOST_PARTS, NEW, WINDOW
    )
    tile = tl.program_id(0) * share
    last_tile = tl.minimum(tile + share, tl.max(ends, 0))
    while tile < last_tile:
        nth_row, head, head_begin, head_end = _head_of(tile, ends, H)
        row = tl.load(rows_at + nth_row).to(tl.int64)
        slot = tl.load(slots_at + nth_row)
        place = tl.load(places_at + nth_row).to(tl.int32)  # of the query
        begin, stop = _tokens_of(tile, last_tile, head_begin, head_end, place, TOKENS, NEW, WINDOW)
        table_at = tables_at + slot * table_width
        head_keys_at = keys_at + head * head_stride
        head_values_at = values_at + head * head_stride
        token = begin + nth
        keys, values = _cached(
            head_keys_at, head_values_at, table_at, token, stop, d, block_stride, D, BLOCK
        )
        if FIXED:
            wait_for_earlier(EARLY)
        turn = row * R
        at = query_at + row * token_stride + head * D
        query = _turned(at, d < D, cos_at + turn, sin_at + turn, d, R, INTERLEAVED)
        query = query.to(tl.float32) * scale
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(bias_at + head)
        largest = tl.full((TOKENS,), -1e30, tl.float32)
        total = tl.zeros((TOKENS,), tl.float32)
        mixed = tl.zeros((TOKENS, WIDTH), tl.float32)
        if NEW:  # noqa: SIM102 - known when the kernel is compiled
            if tile == head_begin:
                own = row * token_stride + head * D
                key, value = _cache_new(
                    *(key_at + own, value_at + own, cos_at + turn, sin_at + turn),
                    *(head_keys_at, head_values_at, table_at, place, d, block_stride),
                    *(D, R, BLOCK, INTERLEAVED),
                )
                score = _capped(tl.sum(query * key.to(tl.float32), 0), SOFTCAP)
                if TABLE > 0:
                    score += tl.load(bias_at + head * TABLE).to(tl.float32)
                largest = tl.where(nth == 0, score * _LOG2_E, largest)
                total = tl.where(nth == 0, 1.0, total)
                mixed = tl.where((nth == 0)[:, None], value.to(tl.float32)[None, :], mixed)
        for start in range(begin, stop, TOKENS):
            token = start + nth
            next_keys, next_values = _cached(
                head_keys_at,
                head_values_at,
                table_at,
                token + TOKENS,
                stop,
                d,
                block_stride,
                D,
                BLOCK,
            )
            score = _capped(tl.sum(keys.to(tl.float32) * query[None, :], 1), SOFTCAP)
            if HAS_SLOPES:
                score -= slope * (place - token).to(tl.float32)
            if TABLE > 0:
                entry = head * TABLE + tl.minimum(place - token, TABLE - 1)
                bias = tl.load(bias_at + entry, mask=token < stop, other=0.0)
                score += bias.to(tl.float32)
            seen = token < stop
            if WINDOW > 0:
                seen &= place - token < WINDOW
            new_largest = tl.maximum(largest, tl.where(seen, score * _LOG2_E, -1e30))
            shrink = tl.exp2(largest - new_largest)
            weight = tl.where(seen, tl.exp2(score * _LOG2_E - new_largest), 0.0)
            total = total * shrink + weight
            mixed = mixed * shrink[:, None] + weight[:, None] * values.to(tl.float32)
            largest = new_largest
            keys, values = next_keys, next_values
        best = tl.max(largest, 0, keep_dims=True)
        factor = tl.exp2(largest - best)
        total = tl.sum(total * factor, 0, keep_dims=True)
        mixed = tl.sum(mixed * factor[:, None], 0, keep_dims=True)
        _leave_head(
            *(best, total, mixed, tile, head_begin, head_end, share, parts_at, sums_at),
            *(tickets_at + nth_row * H + head, y_at + row * y_stride + head * D),
            *(1, D, 1, WIDTH, 1, JOINED),
        )
        tile = tl.minimum(last_tile, head_end)
