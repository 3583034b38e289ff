"""T5's position bias: every distance in the bucket the original puts it in."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from inference.model.encoder_decoder import distance_bias
from inference.model.ragged import EncoderStep, ragged_rows
from inference.model.step import AttentionRules

HEADS, WIDTH = 3, 300


def theirs(table: torch.Tensor, *, max_distance: int, bidirectional: bool) -> torch.Tensor:
    places = torch.arange(WIDTH)
    buckets = T5Attention._relative_position_bucket(
        places - places[:, None],
        bidirectional=bidirectional,
        num_buckets=table.shape[1],
        max_distance=max_distance,
    )
    return table[:, buckets]  # (heads, query, key)


@pytest.mark.parametrize("buckets", [8, 32])
@pytest.mark.parametrize("max_distance", [20, 64, 128, 256])
def test_bidirectional_bias_is_that_of_transformers(buckets: int, max_distance: int) -> None:
    table = torch.randn(HEADS, buckets)
    by_offset = distance_bias(table, max_distance=max_distance, bidirectional=True)
    expected = theirs(table, max_distance=max_distance, bidirectional=True)
    rows = ragged_rows([WIDTH], torch.device("cpu"))
    bias = EncoderStep(rows, AttentionRules(distance_bias=by_offset))._bias
    assert bias is not None
    assert torch.equal(bias, expected)


@pytest.mark.parametrize("buckets", [8, 32])
@pytest.mark.parametrize("max_distance", [20, 64, 128, 256])
def test_causal_bias_is_that_of_transformers(buckets: int, max_distance: int) -> None:
    table = torch.randn(HEADS, buckets)
    by_distance = distance_bias(table, max_distance=max_distance, bidirectional=False)
    expected = theirs(table, max_distance=max_distance, bidirectional=False)[:, WIDTH - 1]
    back = (WIDTH - 1 - torch.arange(WIDTH)).clamp_max(max_distance)
    assert torch.equal(by_distance[:, back], expected)
