"""The scores of tokens under the model."""

import torch

from inference.decoding.processors import token_scores

LOGITS = torch.randn(4, 52, generator=torch.Generator().manual_seed(0))


def own_scores(logits: torch.Tensor, next_ids: list[int]) -> list[float]:
    return [score.log_prob for score in token_scores(logits, next_ids, top=0, vocab_size=52)]


def test_virtual_tokens_and_padded_vocabulary_do_not_count():
    padded = torch.nn.functional.pad(LOGITS, (0, 12), value=50.0)
    first, last = own_scores(LOGITS[[0, 3]], [5, 8])
    assert own_scores(padded, [5, 52, 60, 8]) == [first, 0, 0, last]
    # Negative ids name embeddings that were sent with the request.
    assert own_scores(padded, [5, -1, -2, 8]) == [first, 0, 0, last]
