"""The scores of tokens under the model."""

from __future__ import annotations

import pytest
import torch

from inference.decoding.processors import token_scores

LOGITS = torch.randn(4, 52, generator=torch.Generator().manual_seed(0))


def own_scores(logits: torch.Tensor, next_ids: list[int]) -> list[float]:
    return [score.log_prob for score in token_scores(logits, next_ids, top=0, vocab_size=52)]


def test_virtual_tokens_and_padded_vocabulary_do_not_count() -> None:
    padded = torch.nn.functional.pad(LOGITS, (0, 12), value=50.0)
    first, last = own_scores(LOGITS[[0, 3]], [5, 8])
    assert own_scores(padded, [5, 52, 60, 8]) == [first, 0, 0, last]
    # Negative ids name embeddings that were sent with the request.
    assert own_scores(padded, [5, -1, -2, 8]) == [first, 0, 0, last]


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
