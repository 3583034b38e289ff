"""What a decoding step does beside its matrix products, in few GPU kernels, in Triton's language.

At one row per lane such work takes launches, not bandwidth. On an H200 a step of a GPT-J-6B took
4.6 ms with torch's kernels, 1.3 ms of them for rotary embedding, cache, attention and norms in 17
kernels a layer; here these are 4 kernels a layer. Import this only where CUDA is: Triton comes
with torch's CUDA builds.
"""

# Shapes: N lanes, H local query heads, K local key/value heads, D head size, R rotated dimensions,
#         S cached tokens, E hidden

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from inference.decoding.kv_cache import KVCache
from inference.model.rotary import Angles
from inference.model.step import AttentionRules

# Cached values of one head that a program holds at once; more do not fit its registers.
_TILE = 8192
# Programs that fill a GPU: a head's tokens are divided until there are so many.
_PROGRAMS = 512
_MOST_PARTS = 64
NORM_MOST_ROWS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _turn_and_store(  # type: ignore[no-untyped-def]
    qkv_at,
    cos_at,
    sin_at,
    rows_at,
    query_at,
    cache_at,
    H: tl.constexpr,  # noqa: N803 - constants of the kernel
    K: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803 - a power of two, at least D
    INTERLEAVED: tl.constexpr,  # noqa: N803
):
    lane, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    inside = d < D
    source = qkv_at + (lane * (H + 2 * K) + head) * D
    x = tl.load(source + d, mask=inside, other=0.0)
    if R > 0:  # noqa: SIM102 - known when the kernel is compiled
        if head < H + K:
            if INTERLEAVED:
                partner = d ^ 1
                sign = tl.where((d & 1) == 0, -1.0, 1.0)
            else:
                partner = tl.where(d < R // 2, d + R // 2, d - R // 2)
                sign = tl.where(d < R // 2, -1.0, 1.0)
            turned = d < R
            other = tl.load(source + tl.where(turned, partner, d), mask=inside, other=0.0)
            cos = tl.load(cos_at + lane * R + d, mask=turned, other=1.0).to(tl.float32)
            sin = tl.load(sin_at + lane * R + d, mask=turned, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * cos + sign * other.to(tl.float32) * sin).to(x.dtype)
    if head < H:
        tl.store(query_at + (lane * H + head) * D + d, x, mask=inside)
    else:
        row = tl.load(rows_at + lane * 2 * K + head - H)
        tl.store(cache_at + row * D + d, x, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    positions_at,
    slopes_at,
    parts_at,
    sums_at,
    scale,
    lane_stride,
    head_stride,
    H: tl.constexpr,  # noqa: N803
    QUERIES_PER_KEY: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803 - 0 for none
    HAS_SLOPES: tl.constexpr,  # noqa: N803
):
    lane, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_at + lane)
    first, stop = 0, position + 1
    if WINDOW > 0:
        first = tl.maximum(0, stop - WINDOW)
    share = tl.cdiv(tl.cdiv(stop - first, TOKENS), PARTS) * TOKENS
    begin = first + part * share
    stop = tl.minimum(begin + share, stop)
    d = tl.arange(0, WIDTH)
    query = tl.load(query_at + (lane * H + head) * D + d, mask=d < D, other=0.0)
    query = query.to(tl.float32) * scale
    mine = lane.to(tl.int64) * lane_stride + (head // QUERIES_PER_KEY) * head_stride
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_at + head)
    # The softmax is summed up as tokens come: the largest score so far, and sums relative to it.
    largest, total = -1e30, 0.0
    mixed = tl.zeros((WIDTH,), tl.float32)
    for start in range(begin, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        place = mine + token[:, None] * D + d[None, :]
        inside = (token[:, None] < stop) & (d[None, :] < D)
        key = tl.load(keys_at + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values_at + place, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(key * query[None, :], 1)
        if HAS_SLOPES:
            score -= slope * (position - token).to(tl.float32)
        score = tl.where(token < stop, score, -1e30)
        new_largest = tl.maximum(largest, tl.max(score, 0))
        shrink = tl.exp(largest - new_largest)
        weight = tl.exp(score - new_largest)
        total = total * shrink + tl.sum(weight, 0)
        mixed = mixed * shrink + tl.sum(weight[:, None] * value, 0)
        largest = new_largest
    number = (lane * H + head) * PARTS + part
    tl.store(parts_at + number * D + d, mixed, mask=d < D)
    tl.store(sums_at + number * 2, largest)
    tl.store(sums_at + number * 2 + 1, total)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(  # type: ignore[no-untyped-def]
    parts_at,
    sums_at,
    y_at,
    D: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    head = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    part = head * PARTS + tl.arange(0, PARTS)
    largest, total = tl.load(sums_at + part * 2), tl.load(sums_at + part * 2 + 1)
    weight = tl.exp(largest - tl.max(largest, 0))
    inside = d[None, :] < D
    mixed = tl.load(parts_at + part[:, None] * D + d[None, :], mask=inside, other=0.0)
    y = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(y_at + head * D + d, y.to(y_at.dtype.element_ty), mask=d < D)


@dataclass(frozen=True)
class FusedAttention:
    """Attention of one new token in each of the first N lanes over all that these have cached."""

    positions: torch.Tensor  # (N,) int64, of the new tokens
    cache_rows: torch.Tensor  # where keys and values go, of `KVCache.token_rows`
    length: int  # no lane holds more tokens
    rules: AttentionRules

    def __call__(
        self,
        qkv: torch.Tensor,
        cache: KVCache,
        *,
        layer: int,
        heads: tuple[int, int],
        angles: Angles | None,
        interleaved: bool,
    ) -> torch.Tensor:
        """Return (N, H*D) for (N, H+2K, D); keys and values are turned and stored.

        Args:
            qkv: Queries, keys and values of the new tokens.
            cache: Holds the earlier tokens.
            layer: Of the cache.
            heads: (H, K).
            angles: By which queries and keys are turned, None for models without.
            interleaved: Whether neighbouring pairs are turned, else the halves.
        """
        (H, K), D = heads, qkv.shape[2]  # noqa: N806 - the shape legend
        query = qkv.new_empty(len(qkv), H, D)
        keys, values = cache.read(layer, 0, cache.shape.lanes + 1, cache.shape.max_len)
        cos, sin = (angles.cos, angles.sin) if angles is not None else (query, query)
        _turn_and_store[(len(qkv), H + 2 * K)](
            *(qkv, cos, sin, self.cache_rows, query, keys),
            H=H,
            K=K,
            D=D,
            R=cos.shape[-1] if angles is not None else 0,
            WIDTH=triton.next_power_of_2(D),
            INTERLEAVED=interleaved,
            num_warps=1,
        )
        return self._mix(query, keys, values)

    def _mix(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return (N, H*D) for queries (N, H, D) and all lanes' (B, K, S, D)."""
        count, H, D = query.shape  # noqa: N806
        width = triton.next_power_of_2(D)
        tokens = max(16, _TILE // width)
        parts = _parts(self.length, tokens, count * H)
        mixed = torch.empty(count * H, parts, D, device=query.device)
        sums = torch.empty(count * H, parts, 2, device=query.device)
        slopes = self.rules.alibi_slopes
        _attend_part[(count, H, parts)](
            *(query, keys, values, self.positions, query if slopes is None else slopes),
            *(mixed, sums, D**-0.5, keys.stride(0), keys.stride(1)),
            H=H,
            QUERIES_PER_KEY=H // keys.shape[1],
            D=D,
            WIDTH=width,
            TOKENS=tokens,
            PARTS=parts,
            WINDOW=self.rules.sliding_window or 0,
            HAS_SLOPES=slopes is not None,
        )
        y = query.new_empty(count, H * D)
        _join_parts[(count * H,)](mixed, sums, y, D=D, WIDTH=width, PARTS=parts)
        return y


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
):
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < size
    x = tl.load(x_at + row * size + place, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    y *= tl.load(weight_at + place, mask=inside, other=0.0).to(tl.float32)
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
    options: dict[str, Any] = {"num_warps": 8}
    _norm[(len(x),)](
        *(x, weight, weight if bias is None else bias, y, x.shape[1], eps),
        WIDTH=triton.next_power_of_2(x.shape[1]),
        CENTRED=centred,
        HAS_BIAS=bias is not None,
        **options,
    )
    return y
