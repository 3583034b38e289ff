"""Attention of new tokens over the cached blocks of their sequences, in Triton's language.

A launch serves the sequences of a step together, whatever their lengths: in each layer one stores
the new keys and values, and one attends for prompts, one for single tokens. Few sequences with one
new token each take a kernel of their own, which also rotates and stores the new keys and values and
divides long contexts among programs: at batch 1 a step is bound by launches, not by bandwidth.
Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, H local query heads, K local key/value heads, G query heads of
#         a key/value head, D head size, R rotated dimensions, T entries of a bias table

from __future__ import annotations

from dataclasses import dataclass
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
    K: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803 - a power of two, at least K
    WIDTH: tl.constexpr,  # noqa: N803 - a power of two, at least D
    BLOCK: tl.constexpr,  # noqa: N803 - tokens of a block
    INTERLEAVED: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
):
    """Store the rotated keys and the values of one token."""
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
    slot, place = tl.load(slots_at + tile), tl.load(places_at + tile)
    first_row, count = tl.load(rows_at + tile).to(tl.int64), tl.load(counts_at + tile)
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
        key = _turned(key_at + own, d < D, cos_at + turn, sin_at + turn, d, R, INTERLEAVED)
        value = tl.load(value_at + own + d, mask=d < D, other=0.0)
        if count > 0:
            block = tl.load(tables_at + slot * table_width + place // BLOCK).to(tl.int64)
            target = block * block_stride + kv_head * head_stride + (place % BLOCK) * D + d
            tl.store(keys_at + target, key, mask=d < D)
            tl.store(values_at + target, value, mask=d < D)
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
def _attend_one(  # type: ignore[no-untyped-def] # noqa: C901 - constants choose
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
    FIXED: tl.constexpr,  # noqa: N803 - see `PagedAttention`
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
    if not FIXED:
        wait_for_earlier(EARLY)
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
        if FIXED:
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
                key = _turned(key_at + own, d < D, cos_at, sin_at, d, R, INTERLEAVED)
                value = tl.load(value_at + own + d, mask=d < D, other=0.0)
                if head % (H // K) == 0:
                    block = tl.load(table_at + place // BLOCK).to(tl.int64)
                    target = block * block_stride + (place % BLOCK) * D
                    tl.store(keys_at + target + d, key, mask=d < D)
                    tl.store(values_at + target + d, value, mask=d < D)
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
            score = tl.sum(keys.to(tl.float32) * query[None, :], 1)
            if HAS_SLOPES:
                score -= slope * (place - token).to(tl.float32)
            if TABLE > 0:
                distance = tl.minimum(place - token, TABLE - 1)
                bias = tl.load(bias_at + head * TABLE + distance, mask=token < stop, other=0.0)
                score += bias.to(tl.float32)
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


@dataclass(frozen=True)
class Tiles:
    """Neighbouring new tokens of a sequence, for each program of one launch; (n,) integers each."""

    slots: torch.Tensor
    places: torch.Tensor  # of the first token
    rows: torch.Tensor  # of the first token among the step's
    counts: torch.Tensor  # at most `size`
    size: int


@dataclass(frozen=True)
class PagedAttention:
    """Attention of a step's tokens, any number of them for each sequence.

    `tickets`, (sequences * H or more,) int32 that are all zero between kernels, is given where
    every sequence has one new token. `fixed` is true in a graph that writes none of `slots`,
    `places` and the cache's tables: kernels then read the cache before the ones before them end.
    """

    slots: torch.Tensor  # (N,) integers: slot of each token
    places: torch.Tensor  # (N,) integers: its index among the sequence's cached tokens
    tiles: tuple[Tiles, ...]
    rules: AttentionRules
    tickets: torch.Tensor | None = None
    fixed: bool = False

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
            query: Not rotated yet, heads side by side.
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
        if self.tickets is not None and count * H <= _most_programs(D):
            launch.one_token_each(new, self.tickets)
            return y
        if new is not None and self.tickets is None:
            launch.store(new)
            new = None
        for tiles in self.tiles:
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
        """Store the new keys and values."""
        constants = self._constants()
        keys, values = new
        heads = triton.next_power_of_2(keys.shape[1])
        assert len(keys) == 1 or keys.stride(0) == values.stride(0)
        _store[(len(keys),)](
            *(keys, values, keys.stride(0), *self._angles(), *self._stored()),
            *(self.step.slots, self.step.places),
            K=keys.shape[1],
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

    def one_token_each(
        self, new: tuple[torch.Tensor, torch.Tensor] | None, tickets: torch.Tensor
    ) -> None:
        """Do all of it in one kernel, for few sequences of one new token each."""
        constants = self._constants()
        count, H, D = self.query.shape  # noqa: N806
        few = count * H <= multiprocessors(self.query.device)
        tokens = max(16, (_HELD_VALUES_OF_FEW if few else _HELD_VALUES) // constants["WIDTH"])
        parts = _parts(self.cache.shape.max_len, tokens, count * H)
        mixed = torch.empty(count * H, parts, D, device=self.query.device)
        sums = torch.empty(count * H, parts, 2, device=self.query.device)
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
            FIXED=self.step.fixed,
            num_warps=8 if few else 4,
            **choices,
            **constants,
        )


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
    return {"TOKENS": tokens, "num_stages": 2, "num_warps": 8 if width > 64 else 4}
