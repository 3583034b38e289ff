"""Attention of a step's tokens over the cache of their slots, or over the encoder's output."""

# Shapes: N tokens of the step, B slots of a group, Q new tokens per slot, H local query
#         heads, K local key/value heads, D head size, S cached tokens

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from inference.model.kv_cache import KVCache
from inference.model.step import AttentionGroup, AttentionRules


def attend_cached(
    query: torch.Tensor, groups: Sequence[AttentionGroup], cache: KVCache, layer: int
) -> torch.Tensor:
    """Return the attention of each token over the cache, (N, H*D) for (N, H, D)."""
    if len(groups) == 1:
        return _attend_rows(query, groups[0], cache, layer)
    return torch.cat([_attend_rows(query[group.rows], group, cache, layer) for group in groups])


def _attend_rows(
    query: torch.Tensor, group: AttentionGroup, cache: KVCache, layer: int
) -> torch.Tensor:
    """Return the attention of a group's tokens, (B*Q, H*D) for (B*Q, H, D)."""
    if group.new_tokens == 1:
        return attend_group(query.unsqueeze(2), group, cache, layer).flatten(1)
    queries = query.reshape(group.slot_count, group.new_tokens, *query.shape[1:]).transpose(1, 2)
    mixed = attend_group(queries, group, cache, layer)  # (B, H, Q, D)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def attend_group(
    query: torch.Tensor, group: AttentionGroup, cache: KVCache, layer: int
) -> torch.Tensor:
    """Return the attention of a group's queries over their slots, (B, H, Q, D) like the queries."""
    if group.cached is None:
        keys, values = cache.read(layer, group.slot, group.slot_count, group.length)
    else:
        keys, values = group.cached[layer]  # (B, K, S, D)
    rules = group.rules
    mask = group.masks[rules.window_index(layer)]
    if mask.first:
        keys, values = keys[:, :, mask.first :], values[:, :, mask.first :]
    dtype, bias = query.dtype, mask.bias
    is_slow = dtype == torch.bfloat16 and group.new_tokens == 1 and query.device.type == "cpu"
    if is_slow or rules.softcap is not None:
        # Single queries in bf16 take torch 1.6 to 3.6 times as long as fp32 with its conversion.
        query, keys, values = query.float(), keys.float(), values.float()
        bias = None if bias is None else bias.float()
    if rules.softcap is not None:
        return _attend_capped(query, keys, values, bias, rules).to(dtype)
    mixed = functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=bias,
        is_causal=mask.causal,
        scale=rules.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return mixed.to(dtype)


def _attend_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    rules: AttentionRules,
) -> torch.Tensor:
    """Return attention (B, H, Q, D) whose scores pass a soft cap, which torch's has not."""
    assert rules.softcap is not None
    scale = query.shape[3] ** -0.5 if rules.scale is None else rules.scale
    # The query heads that share a key head, one after the other: (B, K, G*Q, D).
    shared = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
    scores = (shared @ keys.transpose(2, 3)).view(*query.shape[:3], -1)  # (B, H, Q, S)
    scores = scores.mul_(scale / rules.softcap).tanh_().mul_(rules.softcap)
    weights = (scores if bias is None else scores.add_(bias)).softmax(-1)
    return (weights.view(*shared.shape[:3], -1) @ values).view(query.shape)
