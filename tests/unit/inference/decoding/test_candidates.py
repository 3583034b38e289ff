"""The best tokens come in one total order, however many are asked for and found how."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.decoding.candidates import (
    top_by_chunks,
    top_candidates,
)
from inference.decoding.processors import pad_vocabulary


def plain_order(row: torch.Tensor, width: int) -> list[int]:
    """Sort one row: logit down, then id up."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))[:width]


def tied_logits(*shape: int, levels: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-levels, levels + 1, shape, generator=generator).float() / 2


@settings(max_examples=60)
@given(
    vocab_size=st.integers(40, 5000),
    width=st.integers(1, 40),
    levels=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_both_ways_find_the_lowest_ids_among_equal_logits(vocab_size, width, levels, seed):
    x = pad_vocabulary(tied_logits(3, vocab_size, levels=levels, seed=seed))
    for values, ids in (top_candidates(x, width=width), top_by_chunks(x, width=width)):
        for row, value, found in zip(x, values, ids, strict=True):
            assert found.tolist() == plain_order(row, width)
            assert torch.equal(value, row[found])


def test_negative_zero_equals_zero():
    x = torch.full((1, 64), -1.0)
    x[0, 5], x[0, 9] = -0.0, 0.0
    for _, ids in (top_candidates(x, width=2), top_by_chunks(x, width=2)):
        assert ids.tolist() == [[5, 9]]


@pytest.mark.parametrize("width", [1, 4, 100])
@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_nan_makes_the_best_value_not_finite(width, nan):
    x = torch.randn(2, 4096)
    x[1, 77] = nan
    for values, _ in (top_candidates(x, width=width), top_by_chunks(x, width=width)):
        assert np.isfinite(values[:, 0]).tolist() == [True, False]


def test_row_without_a_usable_token_has_no_finite_best_value():
    x = torch.full((1, 128), -torch.inf)
    for values, _ in (top_candidates(x, width=4), top_by_chunks(x, width=4)):
        assert not np.isfinite(values[0, 0])


def test_banned_tokens_never_fill_a_place_with_a_value():
    x = torch.full((1, 128), -torch.inf)
    x[0, [70, 3]] = torch.tensor([1.0, 2.0])
    for values, ids in (top_candidates(x, width=4), top_by_chunks(x, width=4)):
        assert ids[0, :2].tolist() == [3, 70]
        assert values[0].tolist() == [2.0, 1.0, -torch.inf, -torch.inf]
