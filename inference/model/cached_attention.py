"""Attention of a step's tokens over the cache of their slots, or over the encoder's output, on CPU.

torch's kernels serve groups of sequences.
"""

# Shapes: N tokens of the step, B slots of a group, Q new tokens per slot, H local query
#         heads, K local key/value heads, D head size, S cached tokens

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch.nn import functional

from inference.model.kv_cache import KVCache
from inference.model.rotary import Angles
from inference.model.step import (
    AttentionGroup,
    AttentionRules,
    Segment,
    attention_groups,
    segment_numbers,
    token_places,
)


class GroupedAttention:
    """A `CachedAttention` of rotated queries and keys."""

    rotates: ClassVar[bool] = False

    def __init__(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        *,
        rules: AttentionRules,
        dtype: torch.dtype,
    ) -> None:
        """Lay it out. Segments come in the order of their tokens, with ascending slots."""
        self._segments, self._cache = segments, cache
        self.groups = attention_groups(segments, rules, dtype, cache)
        self.slots, self.places = map(torch.from_numpy, token_places(segment_numbers(segments)))

    @cached_property
    def direct_places(self) -> Sequence[torch.Tensor] | None:
        """The views (N, 2, K, D) of each layer's cache that receive new keys and values.

        None but for neighbours with one new token each at the same place.
        """
        if not self._segments or not self._cache.shape.is_whole:
            return None
        first, count = self._segments[0], len(self._segments)
        for nth, each in enumerate(self._segments):
            if (each.slot, each.start, each.count) != (first.slot + nth, first.start, 1):
                return None
        return self._cache.places(first.slot, count, first.start)

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self._cache.token_rows(self.slots, self.places)

    def __call__(
        self,
        query: torch.Tensor,
        *,
        layer: int,
        new: torch.Tensor | None = None,
        angles: Angles | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (N, H*D) as a `CachedAttention` does."""
        assert angles is None
        assert out is None
        if new is not None and self.direct_places is not None:
            place = self.direct_places[layer]
            place.copy_(new.view(place.shape))
        elif new is not None:
            self._cache.write(layer, self._rows, new)
        if len(self.groups) == 1:
            return _attend_rows(query, self.groups[0], self._cache, layer)
        parts = [
            _attend_rows(query[group.rows], group, self._cache, layer) for group in self.groups
        ]
        return torch.cat(parts)


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
