"""The log probability of a prompt under the model, from the raw logits of its positions."""

# Shapes: T positions, V vocabulary, X V rounded up to ALIGNMENT

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference.decoding.processors import pad_vocabulary


@torch.inference_mode()
def context_log_prob(logits: torch.Tensor, next_ids: Sequence[int], *, vocab_size: int) -> float:
    """Return the summed natural log probability of `next_ids` after their positions.

    Args:
        logits: (T, V) fp32 or wider, unprocessed, of positions t .. t+T-1 of a prompt. A prompt
            may be given in pieces; their scores add up.
        next_ids: the token after each position, T of them. Virtual tokens, whose ids are negative
            or outside the vocabulary, have no score.
        vocab_size: how many of the columns are real.
    """
    assert len(next_ids) == len(logits), f"{len(next_ids)} tokens for {len(logits)} positions"
    scored = [t for t, token in enumerate(next_ids) if 0 <= token < vocab_size]
    if not scored:
        return 0.0
    x = pad_vocabulary(logits[:, :vocab_size])  # (T, X)
    rows = torch.tensor(scored, device=x.device)
    ids = torch.tensor([next_ids[t] for t in scored], device=x.device)
    return float(torch.log_softmax(x, dim=-1)[rows, ids].double().sum())
