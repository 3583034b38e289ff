"""Attention groups of a step's sequences, and the tokens that each token sees."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from inference.model.cached_attention import AttentionMask, GroupedAttention
from inference.model.kv_cache import CacheShape, KVCache
from inference.model.layers import alibi_slopes
from inference.model.step import (
    AttentionRules,
    Segment,
    attention_bias,
)

CACHE = KVCache(
    CacheShape(num_layer=2, slots=40, kv_head_num=2, max_len=2000, size_per_head=4),
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def attention_of(segments: list[Segment], rules: AttentionRules | None = None) -> GroupedAttention:
    return GroupedAttention(segments, CACHE, rules=rules or AttentionRules(), dtype=torch.float32)


def spans(attention: GroupedAttention) -> list[tuple[int, int, int, int]]:
    """Return (first row, slots, new tokens, length) of each group."""
    return [
        (g.rows.start, g.slot_count, g.new_tokens, g.read(0)[0].shape[2]) for g in attention.groups
    ]


def test_decoding_slots_side_by_side_share_one_call() -> None:
    attention = attention_of([Segment(slot, 10 + slot, 1) for slot in range(2, 6)])
    assert spans(attention) == [(0, 4, 1, 16)]
    assert attention.places.tolist() == [12, 13, 14, 15]
    bias = attention.groups[0].masks[None].bias
    assert bias is not None
    assert bias.isinf().sum(-1).flatten().tolist() == [3, 2, 1, 0]


def test_slots_of_one_length_need_no_bias() -> None:
    (group,) = attention_of([Segment(slot, 7, 1) for slot in range(3)]).groups
    assert group.masks == {None: AttentionMask(None, causal=False)}


def test_a_gap_or_a_prompt_begins_another_group() -> None:
    segments = [Segment(0, 5, 1), Segment(2, 5, 1), Segment(3, 0, 4), Segment(4, 6, 1)]
    assert spans(attention_of(segments)) == [(0, 1, 1, 6), (1, 1, 1, 6), (2, 1, 4, 4), (6, 1, 1, 7)]


def test_very_unequal_lengths_are_not_padded() -> None:
    segments = [Segment(0, 10, 1), Segment(1, 1500, 1), Segment(2, 1400, 1)]
    assert spans(attention_of(segments)) == [(0, 1, 1, 11), (1, 2, 1, 1501)]


def test_a_later_chunk_sees_all_before_it() -> None:
    (group,) = attention_of([Segment(0, 3, 2)]).groups
    (mask,) = group.masks.values()
    assert mask.bias is not None
    assert mask.bias[0, 0].isinf().tolist() == [[False] * 4 + [True], [False] * 5]


def test_a_sliding_window_hides_farther_tokens() -> None:
    bias = attention_bias(torch.tensor([4]), 2, 6, AttentionRules(), 3)
    assert bias[0, 0].isinf().tolist() == [
        [True, True, False, False, False, True],
        [True, True, True, False, False, False],
    ]


def test_layers_with_and_without_a_window_have_masks_of_their_own() -> None:
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


def test_linear_bias_grows_with_the_distance() -> None:
    rules = AttentionRules(alibi_slopes=torch.tensor([0.5, 0.25]))
    bias = attention_bias(torch.tensor([2]), 1, 3, rules)
    assert bias[0, :, 0].tolist() == [[-1.0, -0.5, 0.0], [-0.5, -0.25, 0.0]]


@pytest.mark.parametrize("heads", [4, 6, 8, 12])
def test_slopes_are_those_of_the_library(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mask = torch.ones(1, 2)
    expected = bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
    assert alibi_slopes(heads).allclose(expected)


def test_biased_attention_equals_causal_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    bias = attention_bias(torch.tensor([5]), 4, 9, AttentionRules())
    part = functional.scaled_dot_product_attention(q[:, :, 5:], k, v, attn_mask=bias)
    torch.testing.assert_close(part, whole[:, :, 5:])


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(4, 7, 1), Segment(5, 7, 1)],
        [Segment(4, 7, 1), Segment(5, 8, 1)],  # other places
        [Segment(4, 7, 1), Segment(6, 7, 1)],  # a slot between them
        [Segment(4, 7, 2)],  # several tokens
    ],
)
def test_keys_and_values_are_stored_at_their_tokens(segments: list[Segment]) -> None:
    attention = attention_of(segments)
    new = torch.randn(2, 4, 4)  # (N, 2 * heads, D)
    attention(torch.randn(2, 2, 4), layer=0, new=new)
    tokens = [(s.slot, place) for s in segments for place in range(s.start, s.stop)]
    for (slot, place), expected in zip(tokens, new, strict=True):
        keys, values = CACHE.reader(slot, 1, place + 1)(0)
        assert torch.cat((keys[0, :, place], values[0, :, place])).equal(expected)
