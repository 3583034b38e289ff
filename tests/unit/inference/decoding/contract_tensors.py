"""Requests as tensors of the contract, two rows each, and what is wrong with them."""

from typing import Any

import numpy as np
import pytest

from inference.decoding.request import parse_request
from inference.decoding.rows import GenerationRequest, ModelLimits, RequestError

GPT = ModelLimits(vocab_size=52, start_id=50, end_id=51, max_pos_seq_len=16, hidden_units=6)
T5 = ModelLimits(vocab_size=52, start_id=0, end_id=1, encoder_decoder=True, hidden_units=6)


def column(*values: Any, dtype: Any = np.uint32) -> np.ndarray:
    return np.asarray(values, dtype)[:, np.newaxis]


def gpt(**more: np.ndarray) -> dict[str, np.ndarray]:
    tensors = {
        "input_ids": np.asarray([[3, 4, 5], [7, 8, 0]], np.uint32),
        "input_lengths": column(3, 2),
        "request_output_len": column(4, 2),
    }
    return {**tensors, **more}


def problems(tensors: dict[str, np.ndarray], limits: ModelLimits = GPT) -> list[str]:
    with pytest.raises(RequestError) as caught:
        parse_request(tensors, limits)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def options(request: GenerationRequest, name: str) -> list[Any]:
    return [getattr(row.options, name) for row in request.rows]
