"""Attention groups of a step's sequences, and the tokens that each token sees."""

import pytest
import torch

from inference.model import cached_attention
from inference.model.cached_attention import AttentionMask, GroupedAttention
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.layers import alibi_slopes
from inference.model.step import (
    AttentionRules,
    Segment,
)
from inference.parallel.native_cpu import has_library

CACHE = KVCache(
    CacheShape(num_layer=2, slots=40, kv_head_num=2, max_len=2000, size_per_head=4),
    dtype=torch.float32,
    device=torch.device("cpu"),
)


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are for torch's kernels."""
    monkeypatch.setattr(cached_attention, "has_library", lambda: False)


def attention_of(segments: list[Segment], rules: AttentionRules | None = None) -> GroupedAttention:
    return GroupedAttention(segments, CACHE, rules=rules or AttentionRules(), dtype=torch.float32)


def spans(attention: GroupedAttention) -> list[tuple[int, int, int, int]]:
    """Return (first row, slots, new tokens, length) of each group."""
    return [
        (g.rows.start, g.slot_count, g.new_tokens, g.read(0)[0].shape[2]) for g in attention.groups
    ]


def test_decoding_slots_side_by_side_share_one_call():
    attention = attention_of([Segment(slot, 10 + slot, 1) for slot in range(2, 6)])
    assert spans(attention) == [(0, 4, 1, 16)]
    assert attention.places.tolist() == [12, 13, 14, 15]
    bias = attention.groups[0].masks[None].bias
    assert bias is not None
    assert bias.isinf().sum(-1).flatten().tolist() == [3, 2, 1, 0]


def test_slots_of_one_length_need_no_bias():
    (group,) = attention_of([Segment(slot, 7, 1) for slot in range(3)]).groups
    assert group.masks == {None: AttentionMask(None, causal=False)}


def test_a_gap_or_a_prompt_begins_another_group():
    segments = [Segment(0, 5, 1), Segment(2, 5, 1), Segment(3, 0, 4), Segment(4, 6, 1)]
    assert spans(attention_of(segments)) == [(0, 1, 1, 6), (1, 1, 1, 6), (2, 1, 4, 4), (6, 1, 1, 7)]


def test_very_unequal_lengths_are_not_padded():
    segments = [Segment(0, 10, 1), Segment(1, 1500, 1), Segment(2, 1400, 1)]
    assert spans(attention_of(segments)) == [(0, 1, 1, 11), (1, 2, 1, 1501)]


def test_layers_with_and_without_a_window_have_masks_of_their_own():
    rules = AttentionRules(sliding_window=3, sliding_layers=(True, False))
    assert [rules.window(layer) for layer in range(2)] == [3, None]
    (short,) = attention_of([Segment(0, 2, 1)], rules).groups
    assert short.masks == dict.fromkeys(
        (None, 3), AttentionMask(None, causal=False)
    )  # the window hides nothing yet
    (group,) = attention_of([Segment(0, 3, 1)], rules).groups
    every, window = group.masks[None], group.masks[3]
    assert every == AttentionMask(None, causal=False)
    assert window == AttentionMask(None, causal=False, first=1)
    (pair,) = attention_of([Segment(0, 3, 1), Segment(1, 4, 1)], rules).groups
    assert pair.masks[3].first == 1
    assert pair.masks[3].bias is not None
    hidden = pair.masks[3].bias.flatten(1).isinf().tolist()
    assert hidden == [[False, False, False, True], [True, False, False, False]]


@pytest.mark.skipif(not has_library(), reason="not compiled when the project was installed")
def test_the_library_sees_the_tokens_that_masks_leave(monkeypatch):
    rules = AttentionRules(sliding_window=9, sliding_layers=(True, False))
    segments = [Segment(1, 3, 1), Segment(2, 12, 1), Segment(4, 6, 3), Segment(5, 30, 1)]
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(CACHE.shape, dtype=torch.float32, device=torch.device("cpu"))
    for layer in range(2):
        cache.rows(layer).copy_(torch.randn(cache.rows(layer).shape, generator=generator))
    query = torch.randn(6, 4, 4, generator=generator)
    found = []
    for is_here in (False, True):
        monkeypatch.setattr(cached_attention, "has_library", lambda is_here=is_here: is_here)
        attention = GroupedAttention(segments, cache, rules=rules, dtype=torch.float32)
        single = attention.groups[0].masks[None]
        assert (single.spans is not None) == is_here
        found.append([attention(query, layer=layer) for layer in range(2)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("heads", [4, 6, 8, 12])
def test_slopes_are_those_of_the_library(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mask = torch.ones(1, 2)
    expected = bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
    assert alibi_slopes(heads).allclose(expected)
