"""Equal scores: the lower id is the better token, the earlier beam the better parent.

The scores here are equal to the last bit, which no order of a sum changes.
"""

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


@settings(max_examples=50)
@given(LEVELS, st.integers(2, 4), st.booleans())
def test_beams_are_those_of_the_earlier_parents_and_lower_ids(logits, beams, pool):
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
