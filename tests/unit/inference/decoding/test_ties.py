"""Equal scores: the lower id is the better token, the earlier beam the better parent.

The scores here are equal to the last bit, which no order of a sum changes.
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.decoding.rows import SequenceRequest
from inference.decoding.sampler import Sampler
from inference.decoding.sampling_params import SamplingParams

VOCAB = 24
END = 0
# Whole numbers, so that sums are exact; few of them, so that most are equal.
LEVELS = st.lists(st.sampled_from([-2.0, 0.0, 1.0]), min_size=VOCAB, max_size=VOCAB)


def best_ids(logits: list[float]) -> list[int]:
    """Return all ids by the rule: logit down, then id up."""
    return sorted(range(VOCAB), key=lambda token: (-logits[token], token))


def first_token(logits: list[float], options: SamplingParams) -> int:
    sampler = Sampler(VOCAB)
    decoded = sampler.begin(SequenceRequest((1,), 1, options, (1,)))
    sampler.step([decoded], torch.tensor([logits]))
    return int(decoded.tokens[0])


@given(LEVELS)
def test_best_token_is_the_lowest_of_equal_ids(logits: list[float]) -> None:
    plain = SamplingParams(end_id=END)
    ruled = SamplingParams(end_id=END, return_log_probs=True)
    assert first_token(logits, plain) == first_token(logits, ruled) == best_ids(logits)[0]


@given(LEVELS, st.integers(2, VOCAB - 1), st.integers(0, 2**32))
def test_top_k_keeps_the_lowest_of_equal_ids(logits: list[float], top_k: int, seed: int) -> None:
    options = SamplingParams(end_id=END, top_k=top_k, random_seed=seed)
    assert first_token(logits, options) in best_ids(logits)[:top_k]


@given(st.floats(0.05, 0.95), st.integers(0, 2**32))
def test_nucleus_keeps_the_lowest_of_equal_ids(top_p: float, seed: int) -> None:
    options = SamplingParams(end_id=END, top_k=0, top_p=top_p, random_seed=seed)
    assert first_token([1.0] * VOCAB, options) <= top_p * VOCAB


@settings(max_examples=50)
@given(LEVELS, st.integers(2, 4), st.booleans())
def test_beams_are_those_of_the_earlier_parents_and_lower_ids(
    logits: list[float], beams: int, pool: bool
) -> None:
    """The same logits at each step: the two orders of two tokens have the same score."""
    logits[END] = -50.0
    row = SequenceRequest((1,), 2, SamplingParams(end_id=END, beam_width=beams), (1,))
    sampler = Sampler(VOCAB, hypothesis_pool=pool)
    decoded = sampler.begin(row)
    for _ in range(2):
        sampler.step([decoded], torch.tensor([logits] * decoded.slots))
    assert decoded.is_finished

    ids = best_ids(logits)[: 2 * beams]
    pairs = itertools.product(ids[:beams], ids)  # by parent, then by rank
    expected = sorted(pairs, key=lambda pair: -(logits[pair[0]] + logits[pair[1]]))[:beams]
    assert decoded.result().output_ids == tuple(expected)
