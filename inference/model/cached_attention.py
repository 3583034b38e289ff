"""Attention of a step's tokens over the cache of their slots, or over the encoder's output."""

# Shapes: N tokens of the step, B slots of a group, Q new tokens per slot, H local query
#         heads, K local key/value heads, D head size, S cached tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from inference.model.kv_cache import KVCache
from inference.model.step import AttentionGroup

if TYPE_CHECKING:
    from inference.model.gpu.attention import PagedAttention


@dataclass(frozen=True)
class EncodedSlots:
    """The encoder's output that each token of a decoder step reads, all of it.

    `paged`, if given, does all of the attention in place of `groups`.
    """

    groups: tuple[AttentionGroup, ...] = ()
    paged: PagedAttention | None = None


def attend_cached(
    query: torch.Tensor,
    groups: Sequence[AttentionGroup],
    cache: KVCache,
    layer: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of each token over the cache, (N, H*D) for (N, H, D).

    `scale` is on the scores, None for 1 / sqrt(D).
    """
    if len(groups) == 1:
        return _attend_rows(query, groups[0], cache, layer, scale)
    parts = [_attend_rows(query[group.rows], group, cache, layer, scale) for group in groups]
    return torch.cat(parts)


def _attend_rows(
    query: torch.Tensor, group: AttentionGroup, cache: KVCache, layer: int, scale: float | None
) -> torch.Tensor:
    """Return the attention of a group's tokens, (B*Q, H*D) for (B*Q, H, D)."""
    if group.new_tokens == 1:
        return attend_group(query.unsqueeze(2), group, cache, layer, scale=scale).flatten(1)
    queries = query.reshape(group.slot_count, group.new_tokens, *query.shape[1:]).transpose(1, 2)
    mixed = attend_group(queries, group, cache, layer, scale=scale)  # (B, H, Q, D)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def attend_group(
    query: torch.Tensor,
    group: AttentionGroup,
    cache: KVCache,
    layer: int,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of a group's queries over their slots, (B, H, Q, D) like the queries."""
    if group.cached is None:
        keys, values = cache.read(layer, group.slot, group.slot_count, group.length)
    else:
        keys, values = group.cached[layer]  # (B, K, S, D)
    dtype, bias = query.dtype, group.bias
    if dtype == torch.bfloat16 and group.new_tokens == 1 and query.device.type == "cpu":
        # Single queries in bf16 take torch 1.6 to 3.6 times as long as fp32 with its conversion.
        query, keys, values = query.float(), keys.float(), values.float()
        bias = None if bias is None else bias.float()
    mixed = functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=bias,
        is_causal=group.causal,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return mixed.to(dtype)
