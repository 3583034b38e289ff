"""Words in messages and equal tensors, as tests look for them."""

from collections.abc import Iterable

import torch


def mentions(texts: Iterable[str], words: str) -> bool:
    """Return whether one of the texts holds the words."""
    return any(words in text for text in texts)


def assert_exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
