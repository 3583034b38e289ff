"""config.pbtxt as Triton's own schema reads it."""

import pytest

from export_scripts.triton.model_config import TritonModelConfig, ensemble_steps, parse_config
from export_scripts.triton.signature import (
    MODEL_SIGNATURES,
    ensemble,
    interactive,
    model_signature,
)

GPT = model_signature("GPT", data_type="fp16")


def test_scalars_are_sent_as_columns_and_reach_the_model_flat():
    text = TritonModelConfig("m", "python", 8, GPT).to_text()
    inputs = {tensor.name: tensor for tensor in parse_config(text).input}
    assert list(inputs["input_lengths"].dims) == [1]
    assert inputs["input_lengths"].HasField("reshape")
    assert list(inputs["input_lengths"].reshape.shape) == []
    assert list(inputs["request_output_len"].dims) == [-1]
    assert not inputs["request_output_len"].HasField("reshape")
    assert list(inputs["stop_words_list"].dims) == [2, -1]


def test_ragged_inputs_bring_the_shapes_that_the_cpp_backend_asks_for():
    config = TritonModelConfig("m", "fastertransformer", 8, GPT)
    message = parse_config(config.to_text())
    assert [list(each.target_name) for each in message.batch_input] == [["input_ids_item_shape"]]
    assert [list(each.source_input) for each in message.batch_input] == [["input_ids"]]


def test_every_model_has_exactly_one_cpu_group():
    message = parse_config(TritonModelConfig("m", "python", 8, GPT, instance_count=2).to_text())
    assert [(group.kind, group.count) for group in message.instance_group] == [(2, 2)]


def test_interactive_models_keep_sessions():
    config = TritonModelConfig("m", "fastertransformer", 1, interactive(GPT), interactive=True)
    batching = parse_config(config.to_text()).sequence_batching
    assert batching.max_sequence_idle_microseconds == 60_000_000
    assert [control.name for control in batching.control_input] == ["START", "END"]


def test_malformed_text_is_refused():
    with pytest.raises(ValueError, match="not a Triton model configuration"):
        parse_config("input { label: 3 }")


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("model_type", ["GPT", "GPT-J", "GPT-NeoX"])
def test_every_ensemble_tensor_has_one_source_and_fitting_names(model_type, decoupled):
    model = MODEL_SIGNATURES[model_type]
    outer = ensemble(model)
    steps = ensemble_steps(model, model_name="gpt", decoupled=decoupled)
    available = {tensor.name for tensor in outer.inputs}
    for step in steps:
        assert set(step.input_map.values()) <= available, step.model_name
        assert not set(step.output_map.values()) & available, step.model_name
        available |= set(step.output_map.values())
    assert {tensor.name for tensor in outer.outputs} <= available
    assert set(steps[1].input_map) == {tensor.name for tensor in model.inputs}
    if decoupled:
        # Triton refuses a step that mixes a streaming model's outputs with anything else.
        assert set(steps[2].input_map.values()) <= set(steps[1].output_map.values())
