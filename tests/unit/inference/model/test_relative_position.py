"""T5's position bias: every distance in the bucket the original puts it in."""

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


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", [8, 32])
@pytest.mark.parametrize("max_distance", [20, 64, 128, 256])
def test_the_bias_is_that_of_transformers(buckets, max_distance, bidirectional):
    table = torch.randn(HEADS, buckets)
    found = distance_bias(table, max_distance=max_distance, bidirectional=bidirectional)
    expected = theirs(table, max_distance=max_distance, bidirectional=bidirectional)
    if bidirectional:
        rows = ragged_rows([WIDTH], torch.device("cpu"))
        bias = EncoderStep(rows, AttentionRules(distance_bias=found))._bias
        assert bias is not None
        assert torch.equal(bias, expected)
    else:
        back = (WIDTH - 1 - torch.arange(WIDTH)).clamp_max(max_distance)
        assert torch.equal(found[:, back], expected[:, WIDTH - 1])
