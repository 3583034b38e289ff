"""The score of a prompt under the model."""

from __future__ import annotations

import pytest
import torch

from inference.decoding.processors import context_log_prob, token_scores

LOGITS = torch.randn(4, 52, generator=torch.Generator().manual_seed(0))


def test_score_is_the_sum_over_the_next_tokens() -> None:
    expected = torch.log_softmax(LOGITS.double(), -1)[range(4), [5, 6, 7, 8]].sum()
    score = context_log_prob(LOGITS, [5, 6, 7, 8], vocab_size=52)
    assert score == pytest.approx(float(expected), abs=1e-5)


def test_pieces_add_up_to_the_whole() -> None:
    whole = context_log_prob(LOGITS, [5, 6, 7, 8], vocab_size=52)
    pieces = [
        context_log_prob(LOGITS[part], tokens, vocab_size=52)
        for part, tokens in ((slice(0, 1), [5]), (slice(1, 4), [6, 7, 8]))
    ]
    assert sum(pieces) == pytest.approx(whole, abs=1e-12)


def test_virtual_tokens_and_padded_vocabulary_do_not_count() -> None:
    padded = torch.nn.functional.pad(LOGITS, (0, 12), value=50.0)
    expected = context_log_prob(LOGITS[[0, 3]], [5, 8], vocab_size=52)
    assert context_log_prob(padded, [5, 52, 60, 8], vocab_size=52) == expected
    # Negative ids name embeddings that were sent with the request.
    assert context_log_prob(padded, [5, -1, -2, 8], vocab_size=52) == expected


def test_prompt_of_virtual_tokens_alone_scores_zero() -> None:
    assert context_log_prob(LOGITS[:1], [99], vocab_size=52) == 0.0


def test_scores_of_tokens_and_of_the_best_in_their_places() -> None:
    padded = torch.nn.functional.pad(LOGITS, (0, 12), value=50.0)
    expected = torch.log_softmax(LOGITS, -1)
    for t, score in enumerate(token_scores(padded, [5, 6, 7, 8], top=3, vocab_size=52)):
        assert score.log_prob == pytest.approx(float(expected[t, 5 + t]), abs=1e-5)
        best = expected[t].topk(3)
        assert list(score.top_ids) == best.indices.tolist()
        assert score.top_log_probs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_score_of_the_best_token_is_that_of_the_token() -> None:
    best = LOGITS.argmax(-1).tolist()
    for score in token_scores(LOGITS, best, top=1, vocab_size=52):
        assert score.top_log_probs == (score.log_prob,)
