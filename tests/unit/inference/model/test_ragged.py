"""Rows of different lengths laid end to end: attention never crosses from one to another."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch.nn import functional

from inference.model.ragged import EncoderStep, RaggedRows, ragged_rows
from inference.model.step import AttentionRules

RULES = AttentionRules(scale=0.5)
CPU = torch.device("cpu")
LENGTHS = [[4], [5, 5, 5], [1, 2, 3], [300, 2, 301, 299], [2, 300]]


def states(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 3, 8, generator=generator) for _ in range(3)]


def attend_alone(parts: list[torch.Tensor], rows: RaggedRows, scale: float) -> torch.Tensor:
    out = []
    for start, stop in pairwise(accumulate(rows.lengths, initial=0)):
        q, k, v = (part[start:stop].transpose(0, 1) for part in parts)
        out.append(
            functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1).flatten(1)
        )
    return torch.cat(out)


@pytest.mark.parametrize("spoilt", range(3))
def test_values_that_are_not_finite_stay_in_their_row(spoilt):
    rows = ragged_rows([2, 3, 5], CPU)
    parts = states(10)
    expected = attend_alone(parts, rows, 0.5)
    tokens = slice(*((0, 2), (2, 5), (5, 10))[spoilt])
    for part in parts:
        part[tokens] = torch.nan
    ours = EncoderStep(rows, RULES).attention(parts[0], layer=0, new=torch.cat(parts[1:], 1))
    assert ours[tokens].isnan().all()
    ours[tokens] = expected[tokens]
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_token_sees_its_own_row_alone(lengths):
    rows, parts, width = ragged_rows(lengths, CPU), states(sum(lengths)), max(lengths)
    expected = attend_alone(parts, rows, 0.5)
    attentions = torch.zeros(len(lengths), 2, 3, width, width)
    for asked in (None, attentions):
        step = EncoderStep(rows, RULES, attentions=asked)
        ours = step.attention(parts[0], layer=1, new=torch.cat(parts[1:], 1))
        assert torch.allclose(ours, expected, atol=1e-5)
    others, weights = attentions.unbind(1)
    assert not others.any()
    for row, length in enumerate(lengths):
        assert torch.allclose(weights[row, :, :length].sum(-1), torch.ones(3, length))
        assert not weights[row, :, length:].any()
        assert not weights[row, :, :, length:].any()
