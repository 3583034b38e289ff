"""Activations of a model from its first layer to its logits, by place."""

# Shapes: N tokens, W width of a place (hidden, or the vocabulary)

from dataclasses import dataclass

import torch

LOGITS = "logits"
OUTPUT = "output"  # of a model without logits
EMBEDDING = "embedding"  # the first layer's input
# "embedding", "layer 3", "decoder layer 3", "output" or "logits" -> (N, W) fp32, as computed.
Activations = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelInputs:
    """Token ids of the compared pass; `decoder_ids` only for an encoder-decoder."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] = ()


def spread_ids(count: int, vocab_size: int, first: int = 5) -> tuple[int, ...]:
    """Return `count` token ids from all over a vocabulary, the same ones every time."""
    return tuple((first + 7919 * place) % vocab_size for place in range(count))


def size_of_errors(
    expected: torch.Tensor, found: torch.Tensor, *, largest: float
) -> tuple[float, float, float]:
    """Return the largest and the mean error of values, and the first as a share of `largest`.

    Values that are the same on both sides have none, also those that are not finite.
    """
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    error = (found - expected).abs().masked_fill(is_same, 0.0)
    max_abs = float(error.max())
    return max_abs, float(error.mean()), max_abs / largest if largest else max_abs
