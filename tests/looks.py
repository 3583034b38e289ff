"""Words in messages, equal tensors and nearly equal ones, as tests look for them."""

from collections.abc import Iterable
from typing import Any

import torch


def mentions(texts: Iterable[str], words: str) -> bool:
    """Return whether one of the texts holds the words."""
    return any(words in text for text in texts)


def assert_exact(found: Any, expected: Any) -> None:
    """Compare two tensors, or tensors by name, to the bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def relative_error(found: Any, expected: Any) -> float:
    """Return the largest difference of two arrays, relative to the largest value expected."""
    found, expected = (torch.as_tensor(each).cpu() for each in (found, expected))
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())
