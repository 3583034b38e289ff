"""Attention over the cache, against plain arithmetic."""

from __future__ import annotations

import torch

from inference.model.cached_attention import attend_group
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.step import AttentionGroup, AttentionMask, AttentionRules

H, K, D, LENGTH, SLOTS = 4, 2, 16, 6, 3


def test_single_bf16_queries_lose_no_more_than_the_rounding_of_their_result() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = CacheShape(num_layer=1, slots=SLOTS, kv_head_num=K, max_len=8, size_per_head=D)
    cache = KVCache(shape, dtype=torch.bfloat16, device=torch.device("cpu"))
    slots, positions = torch.arange(SLOTS).repeat_interleave(LENGTH), torch.arange(LENGTH)
    stored = torch.randn(len(slots), 2 * K, D, generator=generator).bfloat16()
    cache.write(0, cache.token_rows(slots, positions.repeat(SLOTS)), stored)
    bias = torch.zeros(SLOTS, 1, 1, LENGTH, dtype=torch.bfloat16)
    bias[1, ..., -2:] = float("-inf")
    masks = (AttentionMask(bias, causal=False),)
    group = AttentionGroup(slice(0, SLOTS), 0, SLOTS, 1, LENGTH, AttentionRules(), masks)
    query = torch.randn(SLOTS, H, 1, D, generator=generator).bfloat16()

    mixed = attend_group(query, group, cache, 0)

    keys, values = stored.double().view(SLOTS, LENGTH, 2, K, D).permute(2, 0, 3, 1, 4)
    keys, values = (x.repeat_interleave(H // K, dim=1) for x in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) / D**0.5 + bias.double()
    expected = scores.softmax(-1) @ values
    assert mixed.dtype == torch.bfloat16
    # bf16 has 8 bits: a result is off by half of the last one at most.
    torch.testing.assert_close(mixed.double(), expected, rtol=2**-8, atol=1e-5)
