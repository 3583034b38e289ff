"""Attention over the cache, against plain arithmetic."""

import torch

from inference.model.cached_attention import GroupedAttention
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.step import AttentionRules, Segment

H, K, D, LENGTH, SLOTS = 4, 2, 16, 6, 3


def test_single_bf16_queries_lose_no_more_than_the_rounding_of_their_result():
    generator = torch.Generator().manual_seed(0)
    shape = CacheShape(num_layer=1, slots=SLOTS, kv_head_num=K, max_len=8, size_per_head=D)
    cache = KVCache(shape, dtype=torch.bfloat16, device=torch.device("cpu"))
    slots, positions = torch.arange(SLOTS).repeat_interleave(LENGTH), torch.arange(LENGTH)
    stored = torch.randn(len(slots), 2 * K, D, generator=generator).bfloat16()
    cache.write(0, cache.token_rows(slots, positions.repeat(SLOTS)), stored)
    lengths = torch.tensor([LENGTH, LENGTH - 2, LENGTH])
    segments = [Segment(slot, length - 1, 1) for slot, length in enumerate(lengths.tolist())]
    attention = GroupedAttention(segments, cache, rules=AttentionRules(), dtype=torch.bfloat16)
    query = torch.randn(SLOTS, H, D, generator=generator).bfloat16()

    mixed = attention(query, layer=0)

    keys, values = stored.double().view(SLOTS, LENGTH, 2, K, D).permute(2, 0, 3, 1, 4)
    keys, values = (x.repeat_interleave(H // K, dim=1) for x in (keys, values))
    scores = query.double().unsqueeze(2) @ keys.transpose(2, 3) / D**0.5
    unseen = torch.arange(LENGTH) >= lengths[:, None, None, None]
    expected = (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).flatten(1)
    assert mixed.dtype == torch.bfloat16
    # bf16 has 8 bits: a result is off by half of the last one at most.
    torch.testing.assert_close(mixed.double(), expected, rtol=2**-8, atol=1e-5)
