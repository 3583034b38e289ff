"""Attention on CPU, of a step's tokens over the cache of their slots or the encoder's output.

torch's kernels serve groups of sequences, the project's own library serves single tokens.
"""

# Shapes: N tokens of the step, B slots of a group, Q new tokens per slot, H local query
#         heads, K local key/value heads, D head size, S cached tokens

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from inference.model.kv_cache import KVCache
from inference.model.rotary import Angles
from inference.model.step import (
    AttentionRules,
    Segment,
    attention_bias,
    segment_numbers,
    token_places,
)
from inference.parallel.native_cpu import attend, has_library

# Sequences share a call if padding multiplies the work by at most this, or adds at most the number
# of tokens that take as long as another call.
_MAX_PADDED = 1.25
_CALL_TOKENS = 256


@dataclass(frozen=True)
class AttentionMask:
    """The tokens that the queries of a group see.

    No query sees the `first` cached tokens. `bias` (B or 1, H or 1, Q, S) is added to the scores of
    the others, with -inf for hidden tokens; None shows all of them to every query, or with `causal`
    only earlier ones. `spans` are the argument of `attend`, used instead of the other fields.
    """

    bias: Tensor | None
    causal: bool
    first: int = 0
    spans: Tensor | None = None


@dataclass(frozen=True)
class AttentionGroup:
    """Adjacent slots with equal numbers of new tokens, which share an attention call.

    `masks` has a mask per window; `read` returns a layer's keys and values (B, K, S, D).
    """

    rows: slice  # tokens of the step
    slot_count: int
    new_tokens: int
    masks: Mapping[int | None, AttentionMask]
    read: Callable[[int], tuple[Tensor, Tensor]]


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
        """Divide segments into groups; they are in the order of their tokens, by ascending slot."""
        self._cache, self._rules, self._dtype = cache, rules, dtype
        unsupported = (rules.alibi_slopes, rules.distance_bias, rules.softcap)
        in_place = cache.shape.is_contiguous and not cache.shape.fp8
        self._takes_spans = unsupported == (None, None, None) and in_place and has_library()
        self.groups: list[AttentionGroup] = []
        first_row = 0
        for run in _runs(segments):
            self.groups.append(self._group(first_row, run))
            first_row += sum(segment.tokens for segment in run)
        self.slots, self.places = map(torch.from_numpy, token_places(segment_numbers(segments)))

    def of_rows(self, rows: Tensor) -> "GroupedAttention":
        """Return this attention, which computes all tokens."""
        del rows
        return self

    @cached_property
    def _rows(self) -> Tensor:
        return self._cache.token_rows(self.slots, self.places)

    def __call__(
        self,
        query: Tensor,
        *,
        layer: int,
        new: Tensor | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """Return (N, H*D) as a `CachedAttention` does."""
        assert angles is None
        if new is not None:
            self._cache.write(layer, self._rows, new)
        if len(self.groups) == 1:
            return self._attend(query, self.groups[0], layer)
        return torch.cat([self._attend(query[each.rows], each, layer) for each in self.groups])

    def _group(self, first_row: int, run: list[Segment]) -> AttentionGroup:
        new_tokens, length = run[0].tokens, max(s.stop for s in run)
        windows = {self._rules.window(layer) for layer in range(self._cache.shape.num_layer)}
        # A window as long as the longest context hides nothing.
        reach = {each: each if each is not None and each < length else None for each in windows}
        distinct = {each: self._mask(run, each) for each in set(reach.values())}
        masks = {window: distinct[each] for window, each in reach.items()}
        rows = slice(first_row, first_row + len(run) * new_tokens)
        read = self._cache.reader(run[0].slot, len(run), length)
        return AttentionGroup(rows, len(run), new_tokens, masks, read)

    def _mask(self, run: list[Segment], window: int | None) -> AttentionMask:
        rules, new_tokens, length = self._rules, run[0].tokens, max(s.stop for s in run)
        if new_tokens == 1 and self._takes_spans:
            firsts = [0 if window is None else max(s.stop - window, 0) for s in run]
            spans = torch.tensor((firsts, [s.stop for s in run]))
            return AttentionMask(None, causal=False, spans=spans)
        even = all(s.stop == length for s in run)
        first = 0 if window is None else max(min(s.start for s in run) + 1 - window, 0)
        if rules.alibi_slopes is None and rules.distance_bias is None and even:
            if new_tokens == 1 or not rules.causal:
                return AttentionMask(None, causal=False, first=first)
            # `_attend_capped` has no causal flag.
            if run[0].start == 0 and window is None and rules.softcap is None:
                return AttentionMask(None, causal=True)
        starts = torch.tensor([s.start - first for s in run])
        bias = attention_bias(starts, new_tokens, length - first, rules, window)
        return AttentionMask(bias.to(self._dtype), causal=False, first=first)

    def _attend(self, query: Tensor, group: AttentionGroup, layer: int) -> Tensor:
        """Return the attention of a group's tokens, (B*Q, H*D) for (B*Q, H, D)."""
        rules, dtype = self._rules, query.dtype
        keys, values = group.read(layer)  # (B, K, S, D)
        mask = group.masks[rules.window(layer)]
        if mask.spans is not None:
            scale = query.shape[2] ** -0.5 if rules.scale is None else rules.scale
            return attend(query, keys, values, mask.spans, scale=scale)
        single = group.new_tokens == 1
        if single:
            query = query.unsqueeze(2)  # (B, H, Q, D)
        else:
            sizes = group.slot_count, group.new_tokens, *query.shape[1:]
            query = query.reshape(sizes).transpose(1, 2)
        bias = mask.bias
        if mask.first:
            keys, values = keys[:, :, mask.first :], values[:, :, mask.first :]
        if rules.softcap is not None or (dtype == torch.bfloat16 and single):
            # torch takes 1.6 to 3.6 times as long for single queries in bf16 as in converted fp32.
            query, keys, values = query.float(), keys.float(), values.float()
            bias = None if bias is None else bias.float()
        if rules.softcap is not None:
            mixed = _attend_capped(query, keys, values, bias, rules)
        else:
            mixed = functional.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=bias,
                is_causal=mask.causal,
                scale=rules.scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
        mixed = mixed.to(dtype)
        return mixed.flatten(1) if single else mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def _runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments in runs, each of which shares an attention call."""
    found: list[list[Segment]] = []
    for segment in segments:
        if found and _can_join(found[-1], segment):
            found[-1].append(segment)
        else:
            found.append([segment])
    return found


def _can_join(run: list[Segment], segment: Segment) -> bool:
    """Return whether single tokens of adjacent slots are padded to the longest, in one call."""
    if segment.tokens != 1 or run[-1].tokens != 1 or segment.slot != run[-1].slot + 1:
        return False
    lengths = [each.stop for each in (*run, segment)]
    padded, true = max(lengths) * len(lengths), sum(lengths)
    return padded - true <= _CALL_TOKENS or padded <= _MAX_PADDED * true


def _attend_capped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    rules: AttentionRules,
) -> Tensor:
    """Return attention (B, H, Q, D) with soft-capped scores, which torch's does not support."""
    assert rules.softcap is not None
    scale = query.shape[3] ** -0.5 if rules.scale is None else rules.scale
    # Query heads grouped by key head: (B, K, G*Q, D).
    shared = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
    scores = (shared @ keys.transpose(2, 3)).view(*query.shape[:3], -1)  # (B, H, Q, S)
    scores = scores.mul_(scale / rules.softcap).tanh_().mul_(rules.softcap)
    weights = (scores if bias is None else scores.add_(bias)).softmax(-1)
    return (weights.view(*shared.shape[:3], -1) @ values).view(query.shape)
