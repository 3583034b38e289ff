"""Attention of new tokens over the cached blocks of their sequences, in Triton's language.

A launch serves the sequences of a step together, whatever their lengths: in each layer one stores
the new keys and values and rotates the queries, one attends for prompts, one for single tokens. The
last divides all cached tokens evenly among its programs: none waits for the longest sequence. In a
step of single tokens alone it also rotates and stores the new keys and values. Few sequences take a
kernel of their own, because at batch 1 a step is bound by launches, not by bandwidth.
Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, H local query heads, K local key/value heads, G query heads of
#         a key/value head, D head size, R rotated dimensions, T entries of a bias table

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from inference.model.kv_cache import KVCache
from inference.model.rotary import Angles
from inference.model.step import AttentionRules
from inference.parallel.launch_cuda import (
    launch_options,
    let_next_begin,
    multiprocessors,
    wait_for_earlier,
)

# Cached values of one head that a program of `_attend_one` holds at once; more do not fit its
# registers.
_HELD_VALUES = 8192
# The same where each multiprocessor has one program or none: most contexts then are read in one
# piece, before the kernel waits, and need not be put together. A step of GPT-2 350M takes 0.44 ms
# with this, 0.47 without.
_HELD_VALUES_OF_FEW = 16384
# Programs that fill a GPU: a head's tokens are divided until there are so many. At 256 tokens
# GPT-J-6B's attention takes 21 us in one part, 11 us in 4 and 8 us in 8 or 16.
_PROGRAMS = 512
_MOST_PARTS = 64
# Query rows of a tile, (token, head of the group) each: what a tensor core multiplies at least.
LEAST_ROWS = 16
# Ways of reading the cache for single tokens, by head size. 64 sequences of GPT-J-6B, of 192 tokens
# each, take 63 us of a layer this way, and 69 with 32 tokens and 4 warps; reading takes 46.
_SINGLE_TILES: dict[int, dict[str, int]] = {
    64: {"TOKENS": 32, "num_stages": 2, "num_warps": 2},
    256: {"TOKENS": 16, "num_stages": 4, "num_warps": 2},
}
# The same for prompts. Two programs must fit a multiprocessor: 8 prompts of 512 tokens take 140 us
# of a layer with 32 heads of 128, and 268 in one program of 64 tokens and 8 warps.
_PROMPT_TILES: dict[int, dict[str, int]] = {
    128: {"TOKENS": 32, "num_stages": 2, "num_warps": 4, "maxnreg": 128},
    256: {"TOKENS": 16, "num_stages": 3, "num_warps": 4},
}
# Cached values that a program of `_attend_evenly` reads at once, and programs of a multiprocessor.
# A program is one warp, which has no other to wait for. 256 sequences of GPT-J-6B, of 32 to 700
# tokens, take 386 us of a layer, and 495 with one program for each head; reading takes 356.
_EVEN_VALUES = 1024
_EVEN_PROGRAMS = 12
_EVEN_REGISTERS = 168  # of a thread; all programs must fit the 65,536 of a multiprocessor
# Values of all queries from which on even shares are faster than `_attend_one`.
_LEAST_EVEN = 16384
_LEAST_EVEN_ROWS = 256  # one kernel serves all steps of fewer


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    at,
    inside,
    cos_at,
    sin_at,
    d,
    R: tl.constexpr,  # noqa: N803 - constants of the kernel
    INTERLEAVED: tl.constexpr,  # noqa: N803
):
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


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
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
    H: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803 - a power of two, at least H
    PAIRS: tl.constexpr,  # noqa: N803 - a power of two, at least R / 2
    HEADS: tl.constexpr,  # noqa: N803 - a power of two, at least K
    WIDTH: tl.constexpr,  # noqa: N803 - a power of two, at least D
    BLOCK: tl.constexpr,  # noqa: N803 - tokens of a block
    INTERLEAVED: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
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


@triton.jit  # type: ignore[untyped-decorator]
def _cache_new(  # type: ignore[no-untyped-def]
    key_at,
    value_at,
    cos_at,
    sin_at,
    keys_at,
    values_at,
    table_at,
    place,
    stores,
    d,
    block_stride,
    D: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
):
    """Return one head's new key, rotated, and value; the cache receives them if `stores`."""
    key = _turned(key_at, d < D, cos_at, sin_at, d, R, INTERLEAVED)
    value = tl.load(value_at + d, mask=d < D, other=0.0)
    if stores:
        block = tl.load(table_at + place // BLOCK).to(tl.int64)
        cell = block * block_stride + (place % BLOCK) * D + d
        tl.store(keys_at + cell, key, mask=d < D)
        tl.store(values_at + cell, value, mask=d < D)
    return key, value


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tile(  # type: ignore[no-untyped-def]
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
    bias_at,
    y_at,
    y_stride,
    scale,
    G: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803 - a power of two, at least G
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803 - cached ones that are read at once
    INTERLEAVED: tl.constexpr,  # noqa: N803
    NEW: tl.constexpr,  # noqa: N803 - whether the new key and value are stored and seen
    WINDOW: tl.constexpr,  # noqa: N803 - 0 for none
    HAS_SLOPES: tl.constexpr,  # noqa: N803
    TABLE: tl.constexpr,  # noqa: N803 - T, 0 for none
    EARLY: tl.constexpr,  # noqa: N803
):
    """Some new tokens of one sequence, with all query heads of one key/value head.

    With NEW each tile is one token, whose key and value are not in the cache yet.
    """
    let_next_begin(EARLY)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    token, head = row // GROUP, kv_head * G + row % GROUP
    d = tl.arange(0, WIDTH)
    wait_for_earlier(EARLY)
    count = tl.load(counts_at + tile)
    if count == 0:  # a graph has more tiles than most steps
        return
    slot, place = tl.load(slots_at + tile), tl.load(places_at + tile)
    first_row = tl.load(rows_at + tile).to(tl.int64)
    real = (token < count) & (row % GROUP < G)
    inside = real[:, None] & (d < D)[None, :]
    at = query_at + (first_row + token)[:, None] * token_stride + head[:, None] * D
    angle = (first_row + token)[:, None] * R
    query = _turned(at, inside, cos_at + angle, sin_at + angle, d[None, :], R, INTERLEAVED)
    if HAS_SLOPES:
        slope = tl.load(bias_at + head, mask=real, other=0.0)
    position, stop = place + token, place + count
    begin = 0
    if WINDOW > 0:
        # Tokens are read by the same tiles wherever the query's own tile begins.
        begin = tl.maximum(0, place + 1 - WINDOW) // TOKENS * TOKENS
    # The softmax is summed up as tokens come: the largest score so far, and sums relative to it.
    largest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    if NEW:
        own = first_row * token_stride + kv_head * D
        turn = first_row * R
        key, value = _cache_new(
            *(key_at + own, value_at + own, cos_at + turn, sin_at + turn),
            *(keys_at + kv_head * head_stride, values_at + kv_head * head_stride),
            *(tables_at + slot * table_width, place, True, d, block_stride),
            *(D, R, BLOCK, INTERLEAVED),
        )
        largest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        if TABLE > 0:
            largest += tl.load(bias_at + head * TABLE, mask=real, other=0.0).to(tl.float32)
        total += 1.0
        mixed += value.to(tl.float32)[None, :]
        stop = place
    for start in range(begin, stop, TOKENS):
        cached = start + tl.arange(0, TOKENS)
        block = tl.load(
            tables_at + slot * table_width + cached // BLOCK, mask=cached < stop, other=0
        ).to(tl.int64)
        source = block * block_stride + kv_head * head_stride + (cached % BLOCK) * D
        there = (cached < stop)[:, None] & (d < D)[None, :]
        keys = tl.load(keys_at + source[:, None] + d[None, :], mask=there, other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        distance = position[:, None] - cached[None, :]
        seen = distance > 0 if NEW else distance >= 0
        if WINDOW > 0:
            seen &= distance < WINDOW
        if HAS_SLOPES:
            score -= slope[:, None] * distance.to(tl.float32)
        if TABLE > 0:
            entry = head[:, None] * TABLE + tl.minimum(distance, TABLE - 1)
            score += tl.load(bias_at + entry, mask=seen & real[:, None], other=0.0).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(tl.where(seen, score, -1e30), 1))
        shrink = tl.exp(largest - new_largest)
        weight = tl.where(seen, tl.exp(score - new_largest[:, None]), 0.0)
        total = total * shrink + tl.sum(weight, 1)
        values = tl.load(values_at + source[:, None] + d[None, :], mask=there, other=0.0)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weight.to(values.dtype), values, mixed, input_precision="ieee")
        largest = new_largest
    at = y_at + (first_row + token)[:, None] * y_stride + head[:, None] * D + d[None, :]
    tl.store(at, (mixed / total[:, None]).to(y_at.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _cached(  # type: ignore[no-untyped-def]
    keys_at,
    values_at,
    table_at,
    token,
    stop,
    d,
    block_stride,
    D: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return one head's keys and values of cached tokens, zeros from `stop` on."""
    block = tl.load(table_at + token // BLOCK, mask=token < stop, other=0).to(tl.int64)
    cell = (block * block_stride + (token % BLOCK) * D)[:, None] + d[None, :]
    inside = (token < stop)[:, None] & (d < D)[None, :]
    keys = tl.load(keys_at + cell, mask=inside, other=0.0)
    return keys, tl.load(values_at + cell, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    query,
    keys,
    token,
    place,
    stop,
    bias_at,
    slope,
    head,
    HAS_SLOPES: tl.constexpr,  # noqa: N803
    TABLE: tl.constexpr,  # noqa: N803
):
    """Return one query's scores of cached tokens, with the bias of their distance, in fp32."""
    score = tl.sum(keys.to(tl.float32) * query[None, :], 1)
    if HAS_SLOPES:
        score -= slope * (place - token).to(tl.float32)
    if TABLE > 0:
        distance = tl.minimum(place - token, TABLE - 1)
        bias = tl.load(bias_at + head * TABLE + distance, mask=token < stop, other=0.0)
        score += bias.to(tl.float32)
    return score


@triton.jit  # type: ignore[untyped-decorator]
def _attend_one(  # type: ignore[no-untyped-def]
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
    bias_at,
    parts_at,
    sums_at,
    tickets_at,
    y_at,
    y_stride,
    scale,
    H: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803 - most programs that share a head's tokens
    INTERLEAVED: tl.constexpr,  # noqa: N803
    NEW: tl.constexpr,  # noqa: N803 - whether a new key and value are stored and seen
    WINDOW: tl.constexpr,  # noqa: N803
    HAS_SLOPES: tl.constexpr,  # noqa: N803
    TABLE: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
):
    """One part of one head's tokens; the last part that ends puts all of them together."""
    let_next_begin(EARLY)
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (H // K)
    d = tl.arange(0, WIDTH)
    slot = tl.load(slots_at + row)
    place = tl.load(places_at + row)  # of the query
    cached = place if NEW else place + 1  # tokens that come from the cache
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, place + 1 - WINDOW)
    tiles = tl.cdiv(cached - first, TOKENS)
    share = tl.cdiv(tiles, PARTS)  # tiles of a part
    parts = tl.maximum(tl.cdiv(tiles, tl.maximum(share, 1)), 1)
    if part < parts:
        begin = first + part * share * TOKENS
        stop = tl.minimum(begin + share * TOKENS, cached)
        table_at = tables_at + slot * table_width
        keys_at += kv_head * head_stride
        values_at += kv_head * head_stride
        token = begin + tl.arange(0, TOKENS)
        keys, values = _cached(keys_at, values_at, table_at, token, stop, d, block_stride, D, BLOCK)
        wait_for_earlier(EARLY)
        cos_at += row * R
        sin_at += row * R
        at = query_at + row * token_stride + head * D
        query = _turned(at, d < D, cos_at, sin_at, d, R, INTERLEAVED).to(tl.float32) * scale
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(bias_at + head)
        largest, total = -1e30, 0.0
        mixed = tl.zeros((WIDTH,), tl.float32)
        if NEW:  # noqa: SIM102 - known when the kernel is compiled
            if part == 0:
                own = row * token_stride + kv_head * D
                key, value = _cache_new(
                    *(key_at + own, value_at + own, cos_at, sin_at, keys_at, values_at, table_at),
                    *(place, head % (H // K) == 0, d, block_stride, D, R, BLOCK, INTERLEAVED),
                )
                largest = tl.sum(query * key.to(tl.float32), 0)
                if TABLE > 0:
                    largest += tl.load(bias_at + head * TABLE).to(tl.float32)
                total = 1.0
                mixed = value.to(tl.float32)
        for start in range(begin, stop, TOKENS):
            if start > begin:
                token = start + tl.arange(0, TOKENS)
                keys, values = _cached(
                    keys_at, values_at, table_at, token, stop, d, block_stride, D, BLOCK
                )
            score = _scores(
                query, keys, token, place, stop, bias_at, slope, head, HAS_SLOPES, TABLE
            )
            score = tl.where(token < stop, score, -1e30)
            new_largest = tl.maximum(largest, tl.max(score, 0))
            shrink = tl.exp(largest - new_largest)
            weight = tl.exp(score - new_largest)
            total = total * shrink + tl.sum(weight, 0)
            mixed = mixed * shrink + tl.sum(weight[:, None] * values.to(tl.float32), 0)
            largest = new_largest
        y_at += row * y_stride + head * D
        if parts == 1:
            tl.store(y_at + d, (mixed / total).to(y_at.dtype.element_ty), mask=d < D)
        else:
            mine = (row * H + head) * PARTS
            tl.store(parts_at + (mine + part) * D + d, mixed, mask=d < D)
            tl.store(sums_at + (mine + part) * 2, largest)
            tl.store(sums_at + (mine + part) * 2 + 1, total)
            tl.debug_barrier()  # all of this program's values are stored before its ticket is drawn
            if tl.atomic_add(tickets_at + row * H + head, 1) == parts - 1:
                tl.debug_barrier()
                every = tl.arange(0, PARTS)
                best = tl.load(sums_at + (mine + every) * 2, mask=every < parts, other=-1e30)
                sums = tl.load(sums_at + (mine + every) * 2 + 1, mask=every < parts, other=0.0)
                weights = tl.exp(best - tl.max(best, 0))
                all_mixed = tl.load(
                    parts_at + (mine + every)[:, None] * D + d[None, :],
                    mask=(every < parts)[:, None] & (d < D)[None, :],
                    other=0.0,
                )
                y = tl.sum(all_mixed * weights[:, None], 0) / tl.sum(sums * weights, 0)
                tl.store(y_at + d, y.to(y_at.dtype.element_ty), mask=d < D)
                tl.store(tickets_at + row * H + head, 0)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _attend_evenly(  # type: ignore[no-untyped-def] # noqa: C901 - constants choose
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
    H: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803 - a power of two, at least `count`
    INTERLEAVED: tl.constexpr,  # noqa: N803
    NEW: tl.constexpr,  # noqa: N803 - whether a new key and value are stored and seen
    FIXED: tl.constexpr,  # noqa: N803 - see `PagedAttention`
    WINDOW: tl.constexpr,  # noqa: N803
    HAS_SLOPES: tl.constexpr,  # noqa: N803
    TABLE: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
):
    """An equal share of all single tokens' heads; who ends a head's last part joins its parts.

    The heads of all tokens lie end to end, cut into tiles of cached tokens; a program takes as many
    neighbouring tiles as any other. A tile's tokens have a softmax each, which are joined where
    the program leaves the head: until then no thread needs another's result.
    """
    let_next_begin(EARLY)
    if not FIXED:
        wait_for_earlier(EARLY)
    program = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    nth = tl.arange(0, TOKENS)
    rows = tl.arange(0, ROWS)
    there = (rows < count) & (tl.load(counts_at + rows, mask=rows < count, other=0) > 0)
    places = tl.load(places_at + rows, mask=there, other=0).to(tl.int32)
    read = places if NEW else places + 1
    if WINDOW > 0:
        read -= tl.maximum(0, places + 1 - WINDOW) // TOKENS * TOKENS
    tiles = tl.where(there, tl.maximum(tl.cdiv(read, TOKENS), 1), 0) * H
    ends = tl.cumsum(tiles, 0)  # of each token's tiles
    all_tiles = tl.max(ends, 0)
    share = tl.cdiv(all_tiles, tl.num_programs(0))
    tile = program * share
    last_tile = tl.minimum(tile + share, all_tiles)
    while tile < last_tile:
        nth_row = tl.sum((ends <= tile).to(tl.int32), 0)
        row_begin = tl.max(tl.where(ends <= tile, ends, 0), 0)
        row_end = tl.min(tl.where(ends > tile, ends, all_tiles), 0)
        head_tiles = (row_end - row_begin) // H
        head = (tile - row_begin) // head_tiles
        head_begin = row_begin + head * head_tiles
        head_end = head_begin + head_tiles
        first_program = head_begin // share
        parts = (head_end - 1) // share - first_program + 1
        row = tl.load(rows_at + nth_row).to(tl.int64)
        slot = tl.load(slots_at + nth_row)
        place = tl.load(places_at + nth_row).to(tl.int32)  # of the query
        cached = place if NEW else place + 1  # tokens that come from the cache
        first = 0
        if WINDOW > 0:
            first = tl.maximum(0, place + 1 - WINDOW) // TOKENS * TOKENS
        begin = first + (tile - head_begin) * TOKENS
        stop = tl.minimum(first + (tl.minimum(last_tile, head_end) - head_begin) * TOKENS, cached)
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
                    *(head_keys_at, head_values_at, table_at, place, True, d, block_stride),
                    *(D, R, BLOCK, INTERLEAVED),
                )
                score = tl.sum(query * key.to(tl.float32), 0)
                if TABLE > 0:
                    score += tl.load(bias_at + head * TABLE).to(tl.float32)
                largest = tl.where(nth == 0, score, largest)
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
            score = _scores(
                query, keys, token, place, stop, bias_at, slope, head, HAS_SLOPES, TABLE
            )
            seen = token < stop
            if WINDOW > 0:
                seen &= place - token < WINDOW
            new_largest = tl.maximum(largest, tl.where(seen, score, -1e30))
            shrink = tl.exp(largest - new_largest)
            weight = tl.where(seen, tl.exp(score - new_largest), 0.0)
            total = total * shrink + weight
            mixed = mixed * shrink[:, None] + weight[:, None] * values.to(tl.float32)
            largest = new_largest
            keys, values = next_keys, next_values
        best = tl.max(largest, 0)
        factor = tl.exp(largest - best)
        one_total = tl.sum(total * factor, 0)
        one_mixed = tl.sum(mixed * factor[:, None], 0)
        target_at = y_at + row * y_stride + head * D
        if parts == 1:
            tl.store(target_at + d, (one_mixed / one_total).to(y_at.dtype.element_ty), mask=d < D)
        else:
            # A program has at most two heads that it shares: that of its first tile, and a later.
            mine = 2 * program + (tile == head_begin).to(tl.int32)
            tl.store(parts_at + mine * D + d, one_mixed, mask=d < D)
            tl.store(sums_at + mine * 2, best)
            tl.store(sums_at + mine * 2 + 1, one_total)
            tl.debug_barrier()  # all of this program's values are stored before its ticket is drawn
            if tl.atomic_add(tickets_at + nth_row * H + head, 1) == parts - 1:
                tl.debug_barrier()
                mine = 2 * first_program + 1
                best = tl.load(sums_at + mine * 2)
                one_total = tl.load(sums_at + mine * 2 + 1)
                one_mixed = tl.load(parts_at + mine * D + d, mask=d < D, other=0.0)
                for other in range(first_program + 1, first_program + parts):
                    others_best = tl.load(sums_at + other * 4)
                    new_best = tl.maximum(best, others_best)
                    shrink, grow = tl.exp(best - new_best), tl.exp(others_best - new_best)
                    one_total = one_total * shrink + tl.load(sums_at + other * 4 + 1) * grow
                    part = tl.load(parts_at + 2 * other * D + d, mask=d < D, other=0.0)
                    one_mixed = one_mixed * shrink + part * grow
                    best = new_best
                tl.store(
                    target_at + d, (one_mixed / one_total).to(y_at.dtype.element_ty), mask=d < D
                )
                tl.store(tickets_at + nth_row * H + head, 0)
        tile = tl.minimum(last_tile, head_end)


@dataclass(frozen=True)
class Tiles:
    """Runs of new tokens that one launch serves, each of one sequence; (n,) integers each."""

    slots: torch.Tensor
    places: torch.Tensor  # of the first token
    rows: torch.Tensor  # of the first token among the step's
    counts: torch.Tensor  # at most `size`
    size: int


@dataclass(frozen=True)
class PagedAttention:
    """Attention of a step's tokens, any number of them for each sequence.

    `single` is true in a graph for steps of one new token of each sequence, which writes none of
    `slots`, `places` and the cache's tables: kernels then read the cache before the ones before
    them end.
    """

    slots: torch.Tensor  # (N,) integers: slot of each token
    places: torch.Tensor  # (N,) integers: its index among the sequence's cached tokens
    tiles: tuple[Tiles, ...]
    rules: AttentionRules
    single: bool = False

    def __call__(
        self,
        query: torch.Tensor,
        cache: KVCache,
        *,
        layer: int,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        angles: Angles | None = None,
        interleaved: bool = False,
        scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (N, H*D) for queries (N, H, D); new keys and values are rotated and stored first.

        Args:
            query: Not rotated yet, heads side by side; rotated where it lies, or left as it is.
            cache: Holds the earlier tokens.
            layer: Of the cache.
            new: Keys and values of the tokens themselves, (N, K, D) each; None where the cache has
                all.
            angles: Rotation of queries and keys, None for models without.
            interleaved: Whether neighbouring pairs are rotated, else the halves.
            scale: On the scores, None for 1 / sqrt(D).
            out: Receives the result; may be the queries' own memory.
        """
        count, H, D = query.shape  # noqa: N806 - the shape legend
        y = query.new_empty(count, H * D) if out is None else out
        launch = _Launch(self, query, cache, layer, angles, interleaved, scale, y)
        if self.single and not self.rules.batch_invariant:
            evenly = launch.can_share and query.numel() >= _LEAST_EVEN
            if not evenly and count * H <= _most_programs(D):
                launch.one_token_each(new)
                return y
        elif new is not None:
            launch.store(new)
            launch, new = replace(launch, angles=None), None
        for tiles in self.tiles:
            if launch.can_share and tiles.size == 1:
                launch.attend_evenly(tiles, new)
            else:
                launch.attend(tiles, new)
        return y


@dataclass(frozen=True)
class _Launch:
    """The arguments that the kernels of one layer share."""

    step: PagedAttention
    query: torch.Tensor
    cache: KVCache
    layer: int
    angles: Angles | None
    interleaved: bool
    scale: float | None
    y: torch.Tensor

    def _angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Absent tensors are not read, but need some pointer in their place.
        return (
            (self.query, self.query) if self.angles is None else (self.angles.cos, self.angles.sin)
        )

    def _stored(self) -> tuple[Any, ...]:
        keys, values = self.cache.blocks(self.layer)
        tables = self.cache.tables
        return keys, values, keys.stride(0), keys.stride(1), tables, tables.stride(0)

    def _constants(self) -> dict[str, Any]:
        size = self.query.shape[2]
        return {
            "D": size,
            "R": 0 if self.angles is None else self.angles.cos.shape[-1],
            "WIDTH": max(LEAST_ROWS, triton.next_power_of_2(size)),
            "BLOCK": self.cache.shape.block_tokens,
            "INTERLEAVED": self.interleaved,
            **launch_options(self.query),
        }

    def _bias(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the additions to the scores, and the kernel's constants for them."""
        rules = self.step.rules
        slopes, table = rules.alibi_slopes, rules.distance_bias
        bias = slopes if table is None else table.contiguous()
        return self.query if bias is None else bias, {
            "WINDOW": rules.sliding_window or 0,
            "HAS_SLOPES": slopes is not None,
            "TABLE": 0 if table is None else table.shape[1],
        }

    def _new_or_any(
        self, new: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values, whose tokens have the stride of the queries."""
        if new is None:
            return self.query, self.query  # not read
        strides = {part.stride(0) for part in (self.query, *new)}
        assert len(self.query) == 1 or len(strides) == 1
        return new

    @property
    def _factor(self) -> float:
        return self.query.shape[2] ** -0.5 if self.scale is None else self.scale

    def store(self, new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Store the new keys and values, rotated, and rotate the queries in place."""
        constants = self._constants()
        keys, values = self._new_or_any(new)
        H, K = self.query.shape[1], keys.shape[1]  # noqa: N806
        heads = triton.next_power_of_2(K)
        _store[(len(keys),)](
            *(self.query, keys, values, self.query.stride(0), *self._angles(), *self._stored()),
            *(self.step.slots, self.step.places),
            H=H,
            K=K,
            QUERIES=triton.next_power_of_2(H),
            PAIRS=triton.next_power_of_2(max(constants["R"] // 2, 1)),
            HEADS=heads,
            num_warps=8 if heads * constants["WIDTH"] > 4096 else 4,
            **constants,
        )

    def attend(self, tiles: Tiles, new: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Attend for the queries of some tiles, which are one token each where `new` is given."""
        constants = self._constants()
        group = self.query.shape[1] // self.cache.shape.kv_head_num
        padded = triton.next_power_of_2(group)
        rows = max(LEAST_ROWS, tiles.size * padded)
        bias, choices = self._bias()
        keys, values = self._new_or_any(new)
        _attend_tile[(len(tiles.slots), self.cache.shape.kv_head_num)](
            *(self.query, keys, values, self.query.stride(0), *self._angles(), *self._stored()),
            *(tiles.slots, tiles.places, tiles.rows, tiles.counts),
            *(bias, self.y, self.y.stride(0), self._factor),
            G=group,
            GROUP=padded,
            ROWS=rows,
            NEW=new is not None,
            **_tile_options(rows, constants["WIDTH"], self.query.dtype.itemsize),
            **choices,
            **constants,
        )

    @property
    def can_share(self) -> bool:
        """Whether `_attend_evenly` serves single tokens of this layer.

        It reads the keys and values of each query head, so heads that share theirs are left to
        `_attend_tile`.
        """
        one_each = self.query.shape[1] == self.cache.shape.kv_head_num
        invariant = self.step.rules.batch_invariant
        return one_each and self.query.dtype.itemsize == 2 and not invariant

    def attend_evenly(self, tiles: Tiles, new: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Attend for tiles of one token each; new keys and values, if any, are stored first."""
        constants = self._constants()
        _, H, D = self.query.shape  # noqa: N806
        count, device = len(tiles.slots), self.query.device
        programs = multiprocessors(device) * _EVEN_PROGRAMS
        mixed = torch.empty(programs, 2, D, device=device)
        sums = torch.empty(programs, 2, 2, device=device)
        tickets = _tickets(device, triton.next_power_of_2(count * H))
        bias, choices = self._bias()
        keys, values = self._new_or_any(new)
        _attend_evenly[(programs,)](
            *(self.query, keys, values, self.query.stride(0), *self._angles(), *self._stored()),
            *(tiles.slots, tiles.places, tiles.rows, tiles.counts, count),
            *(bias, mixed, sums, tickets),
            *(self.y, self.y.stride(0), self._factor),
            H=H,
            TOKENS=_EVEN_VALUES // constants["WIDTH"],
            ROWS=max(triton.next_power_of_2(count), _LEAST_EVEN_ROWS),
            NEW=new is not None,
            FIXED=self.step.single,
            num_warps=1,
            maxnreg=_EVEN_REGISTERS,
            **choices,
            **constants,
        )

    def one_token_each(self, new: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Do all of it in one kernel, for few sequences of one new token each."""
        constants = self._constants()
        count, H, D = self.query.shape  # noqa: N806
        few = count * H <= multiprocessors(self.query.device)
        tokens = max(16, (_HELD_VALUES_OF_FEW if few else _HELD_VALUES) // constants["WIDTH"])
        parts = _parts(self.cache.shape.max_len, tokens, count * H)
        mixed = torch.empty(count * H, parts, D, device=self.query.device)
        sums = torch.empty(count * H, parts, 2, device=self.query.device)
        tickets = _tickets(self.query.device, triton.next_power_of_2(count * H))
        bias, choices = self._bias()
        keys, values = self._new_or_any(new)
        _attend_one[(count, H, parts)](
            *(self.query, keys, values, self.query.stride(0), *self._angles(), *self._stored()),
            *(self.step.slots, self.step.places, bias, mixed, sums, tickets),
            *(self.y, self.y.stride(0), self._factor),
            H=H,
            K=self.cache.shape.kv_head_num,
            TOKENS=tokens,
            PARTS=parts,
            NEW=new is not None,
            num_warps=8 if few else 4,
            **choices,
            **constants,
        )


@cache
def _tickets(device: torch.device, count: int) -> torch.Tensor:
    """Return zeros, one for each token's head; every kernel leaves them zero."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _most_programs(head_size: int) -> int:
    """Return up to how many pairs of a sequence and a head `_attend_one` is the faster kernel."""
    return 1024 if head_size <= 64 else _PROGRAMS - 1


def _parts(length: int, tokens: int, programs: int) -> int:
    """Return the number of programs that share a head's tokens, a power of two."""
    most = min(-(-length // tokens), max(_PROGRAMS // programs, 1), _MOST_PARTS)
    return 1 << (max(most, 1).bit_length() - 1)


def _tile_options(rows: int, width: int, item_bytes: int) -> dict[str, int]:
    """Return a tile's way of reading the cache: tokens at once, loads in flight, warps."""
    tokens = 32 if width > 128 else 64
    if item_bytes == 4:
        return {"TOKENS": tokens // 2, "num_stages": 1, "num_warps": 4}
    if rows == LEAST_ROWS:
        return _SINGLE_TILES.get(width, {"TOKENS": tokens, "num_stages": 3, "num_warps": 4})
    return _PROMPT_TILES.get(
        width, {"TOKENS": tokens, "num_stages": 2, "num_warps": 8 if width > 64 else 4}
    )
