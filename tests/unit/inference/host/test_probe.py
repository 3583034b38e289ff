"""The small request that shows whether a model answers."""

from typing import Any

import pytest

from export_scripts.triton.model_config import TritonModelConfig, parse_config
from export_scripts.triton.signature import (
    ModelSignature,
    ensemble,
    interactive,
    model_signature,
)
from inference.host.models import HostedModel
from inference.host.probe import probe_tensors


def model_of(signature: ModelSignature, **options: Any) -> HostedModel:
    """Return a model with a configuration as a server reports it."""
    settings: dict[str, Any] = {"name": "m", "backend": "python", "max_batch_size": 4} | options
    text = TritonModelConfig(signature=signature, **settings).to_text()
    return HostedModel(parse_config(text), "1")


def tensors_of(model: HostedModel, hidden: int | None = None) -> dict[str, Any]:
    found = probe_tensors(model, hidden=hidden)
    assert found is not None
    return found


def values(array: Any, dtype: str) -> list[Any]:
    assert array.dtype == dtype
    found: list[Any] = array.tolist()
    return found


@pytest.mark.parametrize("model_type", ["GPT", "GPT-J", "GPT-NeoX", "Llama"])
def test_request_to_a_generator_is_two_tokens_in_and_two_out(model_type):
    tensors = tensors_of(model_of(model_signature(model_type, data_type="fp16")))
    assert set(tensors) == {"input_ids", "input_lengths", "request_output_len"}
    assert values(tensors["input_ids"], "<u4") == [[0, 0]]
    assert values(tensors["input_lengths"], "<u4") == [[2]]
    assert values(tensors["request_output_len"], "<u4") == [[2]]


def test_request_to_an_encoder_decoder_has_its_names():
    tensors = tensors_of(model_of(model_signature("T5", data_type="fp32")))
    assert set(tensors) == {"input_ids", "sequence_length", "max_output_len"}


def test_request_to_an_ensemble_is_a_short_text():
    signature = ensemble(model_signature("GPT", data_type="fp32"))
    tensors = tensors_of(model_of(signature))
    assert set(tensors) == {"INPUT_0", "INPUT_1"}
    assert values(tensors["INPUT_0"], "O") == [[b"Hello"]]


@pytest.mark.parametrize(
    ("data_type", "dtype", "ones"), [("fp32", "<f4", 1.0), ("fp16", "<f2", 1.0)]
)
def test_request_of_hidden_states_needs_their_width(data_type, dtype, ones):
    model = model_of(model_signature("bert", data_type=data_type))
    assert probe_tensors(model, hidden=None) is None
    tensors = tensors_of(model, hidden=3)
    assert values(tensors["input_hidden_state"], dtype) == [[[ones] * 3] * 2]
    assert values(tensors["sequence_lengths"], "<i4") == [[2]]


def test_request_of_a_session_says_how_much_it_holds():
    signature = interactive(model_signature("GPT", data_type="fp32"))
    tensors = tensors_of(model_of(signature, interactive=True, max_batch_size=1))
    assert tensors["input_ids"].shape == (1, 1, 2)
    assert tensors["session_len"].shape == (1, 1, 1)
