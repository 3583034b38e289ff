"""Attention of whole rows laid end to end, in Triton's language; needs Triton.

One launch for each layer serves rows of any lengths, without padding.
"""

# Shapes: N tokens of all rows, H heads, D head size, T tiles

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from inference.model.kv_cache import Array
from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier

_QUERIES = 64  # of a tile
_KEYS, _KEYS_OF_WIDE_HEADS = 64, 32  # that a tile reads at once; three such fit a multiprocessor
_LEAST_WIDTH = 16  # that a tensor core multiplies

# The numbers of a tile: its first token, the first token of its row, and the token after its last.
TILE_NUMBERS = 3


def row_tiles(lengths: Sequence[int]) -> Array:
    """Return the tiles (3, T) of rows of some tokens."""
    tiles = [
        (first, start, stop)
        for start, stop in pairwise([0, *accumulate(lengths)])
        for first in range(start, stop, _QUERIES)
    ]
    return np.ascontiguousarray(np.array(tiles, np.int32).T)


@triton.jit
def _with_keys(
    largest,
    total,
    mixed,
    query,
    key_at,
    value_at,
    key_stride,
    value_stride,
    begin,
    start,
    length,
    token,
    across,
    bias_at,
    scale,
    inside,
    KEYS: tl.constexpr,
    REACH: tl.constexpr,
    MASKED: tl.constexpr,  # whether some keys or columns may not be there
):
    """Return the softmax's sums with those of further keys; scores are logarithms to base 2."""
    place = begin + tl.arange(0, KEYS)
    source = (start + place).to(tl.int64)[:, None]
    key_at += source * key_stride + across
    value_at += source * value_stride + across
    if MASKED:
        there = (place < length)[:, None] & inside
        keys = tl.load(key_at, mask=there, other=0.0)
        values = tl.load(value_at, mask=there, other=0.0)
    else:
        keys, values = tl.load(key_at), tl.load(value_at)
    score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if REACH >= 0:
        offset = place[None, :] - (token - start)[:, None]
        offset = tl.minimum(tl.maximum(offset, -REACH), REACH) + REACH
        score += tl.load(bias_at + offset).to(tl.float32) * 1.4426950408889634  # 1 / log(2)
    if MASKED:
        score = tl.where((place < length)[None, :], score, -1e30)
    new_largest = tl.maximum(largest, tl.max(score, 1))
    shrink = tl.exp2(largest - new_largest)
    weight = tl.exp2(score - new_largest[:, None])
    total = total * shrink + tl.sum(weight, 1)
    mixed *= shrink[:, None]
    mixed = tl.dot(weight.to(values.dtype), values, mixed, input_precision="ieee")
    return new_largest, total, mixed


@triton.jit
def _attend_rows(
    query_at,
    key_at,
    value_at,
    query_stride,
    key_stride,
    value_stride,
    tiles_at,
    tile_count,
    bias_at,
    y_at,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least D
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    REACH: tl.constexpr,  # largest offset with a bias of its own, negative for none
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    wait_for_earlier(EARLY)
    stop = tl.load(tiles_at + 2 * tile_count + tile)
    if stop == 0:  # a graph has more tiles than most steps
        return
    first, start = tl.load(tiles_at + tile), tl.load(tiles_at + tile_count + tile)
    length = stop - start
    token = first + tl.arange(0, QUERIES)
    inside = (token < stop)[:, None] & (d < D)[None, :]
    across = head * D + d[None, :]
    query_at += token.to(tl.int64)[:, None] * query_stride + across
    query = tl.load(query_at, mask=inside, other=0.0)
    bias_at += head * (2 * REACH + 1)
    scale *= 1.4426950408889634  # 1 / log(2)
    # The softmax is summed up as keys come: the largest score so far, and sums relative to it.
    largest = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
    whole = length // KEYS * KEYS
    for begin in range(0, whole, KEYS):
        largest, total, mixed = _with_keys(
            *(largest, total, mixed, query, key_at, value_at, key_stride, value_stride),
            *(begin, start, length, token, across, bias_at, scale, (d < D)[None, :]),
            *(KEYS, REACH, D != WIDTH),
        )
    if whole < length:
        largest, total, mixed = _with_keys(
            *(largest, total, mixed, query, key_at, value_at, key_stride, value_stride),
            *(whole, start, length, token, across, bias_at, scale, (d < D)[None, :]),
            *(KEYS, REACH, True),
        )
    y = (mixed / total[:, None]).to(y_at.dtype.element_ty)
    tl.store(y_at + token.to(tl.int64)[:, None] * (H * D) + across, y, mask=inside)


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    tiles: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return each token's mix of the values of its own row, (N, H*D), for three (N, H, D).

    The heads of all three lie side by side. `tiles` (3, T) int32 are those of `row_tiles`; tokens
    that are in no tile get no result. `bias` (H, 2 * reach + 1) is added to the scores, which are
    scaled, by the offset of key and query.
    """
    count, H, D = query.shape
    width = max(_LEAST_WIDTH, triton.next_power_of_2(D))
    keys = _KEYS if width < 128 else _KEYS_OF_WIDE_HEADS
    y = query.new_empty(count, H * D)
    _attend_rows[(tiles.shape[1], H)](
        *(query, key, value, query.stride(0), key.stride(0), value.stride(0)),
        *(tiles, tiles.shape[1], query if bias is None else bias.contiguous(), y, scale),
        H=H,
        D=D,
        WIDTH=width,
        QUERIES=_QUERIES,
        KEYS=keys if query.dtype.itemsize == 2 else 16,
        REACH=-1 if bias is None else bias.shape[1] // 2,
        num_warps=4,
        num_stages=3 if bias is None else 2,
        **launch_options(query),
    )
    return y
