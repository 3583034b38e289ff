"""What a decoding step does beside its matrix products, in few GPU kernels, in Triton's language.

At one row per lane such work takes launches, not bandwidth. On an H200 a step of a GPT-J-6B took
4.6 ms with torch's kernels, 1.3 ms of them for rotary embedding, cache, attention and norms in 17
kernels a layer; here these are one kernel for attention and one for each norm. Import this only
where Triton is.
"""

# Shapes: N lanes, H local query heads, K local key/value heads, D head size, R rotated dimensions,
#         S cached tokens, T entries of a bias table, E hidden

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from inference.model.kv_cache import KVCache
from inference.model.rotary import Angles
from inference.model.step import AttentionRules
from inference.parallel.launch_cuda import launch_options, let_next_begin, wait_for_earlier

# Cached values of one head that a program holds at once; more do not fit its registers.
_TILE = 8192
# Programs that fill a GPU: a head's tokens are divided until there are so many. At 256 tokens
# GPT-J-6B's attention takes 21 us in one part, 11 us in 4 and 8 us in 8 or 16.
_PROGRAMS = 512
_MOST_PARTS = 64
NORM_MOST_ROWS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    at,
    cos_at,
    sin_at,
    D: tl.constexpr,  # noqa: N803 - constants of the kernel
    R: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803 - a power of two, at least D
    INTERLEAVED: tl.constexpr,  # noqa: N803
):
    """Return one head's values (WIDTH,), the first R turned."""
    d = tl.arange(0, WIDTH)
    x = tl.load(at + d, mask=d < D, other=0.0)
    if R > 0:
        if INTERLEAVED:
            partner = d ^ 1
            sign = tl.where((d & 1) == 0, -1.0, 1.0)
        else:
            partner = tl.where(d < R // 2, d + R // 2, d - R // 2)
            sign = tl.where(d < R // 2, -1.0, 1.0)
        turned = d < R
        other = tl.load(at + tl.where(turned, partner, d), mask=d < D, other=0.0)
        cos = tl.load(cos_at + d, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_at + d, mask=turned, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + sign * other.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query_at,
    key_at,
    value_at,
    token_stride,
    cos_at,
    sin_at,
    keys_at,
    values_at,
    lane_stride,
    head_stride,
    cached_at,
    rows_at,
    store_at,
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
    INTERLEAVED: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    NEW: tl.constexpr,  # noqa: N803 - whether a new key and value are stored and seen
    WINDOW: tl.constexpr,  # noqa: N803 - 0 for none
    HAS_SLOPES: tl.constexpr,  # noqa: N803
    TABLE: tl.constexpr,  # noqa: N803 - T, 0 for none
    EARLY: tl.constexpr,  # noqa: N803
):
    """One part of one head's tokens; the last part that ends puts all of them together."""
    let_next_begin(EARLY)
    lane, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (H // K)
    d = tl.arange(0, WIDTH)
    wait_for_earlier(EARLY)
    cached = tl.load(cached_at + lane)  # tokens before the new one, which has this position
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, cached + 1 - WINDOW)
    share = tl.cdiv(tl.cdiv(cached - first, TOKENS), PARTS) * TOKENS
    begin = first + part * share
    stop = tl.minimum(begin + share, cached)
    cos_at += lane * R
    sin_at += lane * R
    at = query_at + lane * token_stride + head * D
    query = _turned(at, cos_at, sin_at, D, R, WIDTH, INTERLEAVED).to(tl.float32) * scale
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(bias_at + head)
    # The softmax is summed up as tokens come: the largest score so far, and sums relative to it.
    largest, total = -1e30, 0.0
    mixed = tl.zeros((WIDTH,), tl.float32)
    if NEW:  # noqa: SIM102 - known when the kernel is compiled
        if part == 0:
            at = key_at + lane * token_stride + kv_head * D
            key = _turned(at, cos_at, sin_at, D, R, WIDTH, INTERLEAVED)
            value = tl.load(value_at + lane * token_stride + kv_head * D + d, mask=d < D, other=0.0)
            if head % (H // K) == 0:
                row_at = rows_at + lane * 2 * K + kv_head
                tl.store(store_at + tl.load(row_at) * D + d, key, mask=d < D)
                tl.store(store_at + tl.load(row_at + K) * D + d, value, mask=d < D)
            largest = tl.sum(query * key.to(tl.float32), 0)
            if TABLE > 0:
                largest += tl.load(bias_at + head * TABLE).to(tl.float32)
            total = 1.0
            mixed = value.to(tl.float32)
    mine = lane.to(tl.int64) * lane_stride + kv_head * head_stride
    for start in range(begin, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        place = mine + token[:, None] * D + d[None, :]
        inside = (token < stop)[:, None] & (d < D)[None, :]
        keys = tl.load(keys_at + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(values_at + place, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(keys * query[None, :], 1)
        if HAS_SLOPES:
            score -= slope * (cached - token).to(tl.float32)
        if TABLE > 0:
            distance = tl.minimum(cached - token, TABLE - 1)
            score += tl.load(bias_at + head * TABLE + distance, mask=token < stop, other=0.0).to(
                tl.float32
            )
        score = tl.where(token < stop, score, -1e30)
        new_largest = tl.maximum(largest, tl.max(score, 0))
        shrink = tl.exp(largest - new_largest)
        weight = tl.exp(score - new_largest)
        total = total * shrink + tl.sum(weight, 0)
        mixed = mixed * shrink + tl.sum(weight[:, None] * values, 0)
        largest = new_largest
    y_at += lane * y_stride + head * D
    if PARTS == 1:
        tl.store(y_at + d, (mixed / total).to(y_at.dtype.element_ty), mask=d < D)
    else:
        mine = (lane * H + head) * PARTS
        tl.store(parts_at + (mine + part) * D + d, mixed, mask=d < D)
        tl.store(sums_at + (mine + part) * 2, largest)
        tl.store(sums_at + (mine + part) * 2 + 1, total)
        tl.debug_barrier()  # all of this program's values are stored before its ticket is drawn
        if tl.atomic_add(tickets_at + lane * H + head, 1) == PARTS - 1:
            tl.debug_barrier()
            every = mine + tl.arange(0, PARTS)
            best, sums = tl.load(sums_at + every * 2), tl.load(sums_at + every * 2 + 1)
            weights = tl.exp(best - tl.max(best, 0))
            all_mixed = tl.load(
                parts_at + every[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0
            )
            y = tl.sum(all_mixed * weights[:, None], 0) / tl.sum(sums * weights, 0)
            tl.store(y_at + d, y.to(y_at.dtype.element_ty), mask=d < D)
            tl.store(tickets_at + lane * H + head, 0)


@dataclass(frozen=True)
class FusedAttention:
    """Attention of one token in each of the first N lanes over all that these have cached."""

    cached: torch.Tensor  # (N,) int64, tokens that each lane sees, the new one aside
    length: int  # no lane holds more tokens
    rules: AttentionRules
    tickets: torch.Tensor  # (lanes * H or more,) int32, all zero between the kernels

    def __call__(
        self,
        query: torch.Tensor,
        cache: KVCache,
        *,
        layer: int,
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        angles: Angles | None = None,
        interleaved: bool = False,
        scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (N, H*D) for queries (N, H, D); new keys and values are turned and stored.

        Args:
            query: Not turned yet, heads side by side.
            cache: Holds the earlier tokens.
            layer: Of the cache.
            new: Keys and values of the tokens themselves, (N, K, D) each, and where they go, of
                `KVCache.token_rows`. None where the cache has all.
            angles: By which queries and keys are turned, None for models without.
            interleaved: Whether neighbouring pairs are turned, else the halves.
            scale: On the scores, None for 1 / sqrt(D).
            out: Takes the result, the queries' own place for example.
        """
        count, H, D = query.shape  # noqa: N806 - the shape legend
        keys, values = cache.read(layer, 0, cache.shape.lanes + 1, cache.shape.max_len)
        width = triton.next_power_of_2(D)
        tokens = max(16, _TILE // width)
        parts = _parts(self.length, tokens, count * H)
        mixed = torch.empty(count * H, parts, D, device=query.device)
        sums = torch.empty(count * H, parts, 2, device=query.device)
        y = query.new_empty(count, H * D) if out is None else out
        bias, constants = self._bias(query)
        cos, sin = (angles.cos, angles.sin) if angles is not None else (query, query)
        key, value, rows = (query, query, query) if new is None else new
        assert count == 1 or key.stride(0) == value.stride(0) == query.stride(0)
        _attend[(count, H, parts)](
            *(query, key, value, query.stride(0), cos, sin),
            *(keys, values, keys.stride(0), keys.stride(1), self.cached, rows, keys, bias),
            *(mixed, sums, self.tickets, y, y.stride(0), D**-0.5 if scale is None else scale),
            H=H,
            K=keys.shape[1],
            D=D,
            R=cos.shape[-1] if angles is not None else 0,
            WIDTH=width,
            INTERLEAVED=interleaved,
            TOKENS=tokens,
            PARTS=parts,
            NEW=new is not None,
            **constants,
            **launch_options(query),
        )
        return y

    def _bias(self, query: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return what is added to scores, and the kernel's constants that say how."""
        slopes, table = self.rules.alibi_slopes, self.rules.distance_bias
        bias = slopes if table is None else table.contiguous()
        return query if bias is None else bias, {
            "WINDOW": self.rules.sliding_window or 0,
            "HAS_SLOPES": slopes is not None,
            "TABLE": 0 if table is None else table.shape[1],
        }


def _parts(length: int, tokens: int, programs: int) -> int:
    """Return among how many programs a head's tokens are divided, a power of two."""
    most = min(-(-length // tokens), _PROGRAMS // programs, _MOST_PARTS)
    return 1 << (max(most, 1).bit_length() - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x_at,
    weight_at,
    bias_at,
    y_at,
    size,
    eps,
    WIDTH: tl.constexpr,  # noqa: N803
    CENTRED: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
):
    let_next_begin(EARLY)
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < size
    weight = tl.load(weight_at + place, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(EARLY)
    x = tl.load(x_at + row * size + place, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    y *= weight
    if HAS_BIAS:
        y += tl.load(bias_at + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at + row * size + place, y.to(y_at.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float, centred: bool
) -> torch.Tensor:
    """Return LayerNorm (`centred`) or RMSNorm of a few rows x (N, E); torch's take 3 times as long.

    `weight` and `bias` are (E,).
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    _norm[(len(x),)](
        *(x, weight, weight if bias is None else bias, y, x.shape[1], eps),
        WIDTH=triton.next_power_of_2(x.shape[1]),
        CENTRED=centred,
        HAS_BIAS=bias is not None,
        num_warps=8,
        **launch_options(x),
    )
    return y
