"""The signature tables against the tables of the serving contract."""

import pytest

from export_scripts.triton.signature import (
    MODEL_SIGNATURES,
    ModelSignature,
    as_sent_by_fastertransformer,
    ensemble,
    interactive,
    model_signature,
    postprocessing,
)

GENERATION = {"input_ids", "input_lengths", "request_output_len"}
SHIPPED_GPTJ = {
    "runtime_top_k", "runtime_top_p", "beam_search_diversity_rate", "temperature", "len_penalty",
    "repetition_penalty", "random_seed", "is_return_log_probs", "beam_width", "start_id", "end_id",
    "stop_words_list", "bad_words_list", "prompt_learning_task_name_ids", "top_p_decay",
    "top_p_min", "top_p_reset_ids",
}  # fmt: skip
SHIPPED_GPT = SHIPPED_GPTJ | {
    "is_return_context_embeddings", "request_prompt_embedding", "request_prompt_lengths",
    "request_prompt_type",
}  # fmt: skip


def _names(model: ModelSignature, *, optional: bool) -> set[str]:
    return {tensor.name for tensor in model.inputs if tensor.optional == optional}


def test_gpt_takes_the_shipped_inputs_and_the_additions():
    model = MODEL_SIGNATURES["GPT"]
    added = {"presence_penalty", "min_length", "is_return_context_cum_log_probs"}
    assert _names(model, optional=False) == GENERATION
    assert _names(model, optional=True) == SHIPPED_GPT | added


@pytest.mark.parametrize("model_type", ["GPT-J", "GPT-NeoX"])
def test_rotary_families_take_no_prompt_embeddings(model_type):
    model = MODEL_SIGNATURES[model_type]
    assert _names(model, optional=True) == SHIPPED_GPTJ | {"presence_penalty", "min_length"}
    outputs = [tensor.name for tensor in model.outputs]
    assert outputs == ["output_ids", "sequence_length", "cum_log_probs", "output_log_probs"]


def test_only_gpt_prompts_are_ragged():
    ragged = {
        (kind, tensor.name)
        for kind, model in MODEL_SIGNATURES.items()
        for tensor in model.inputs
        if tensor.ragged and kind != "Llama"
    }
    assert ragged == {("GPT", "input_ids")}


def test_t5_has_sequence_length_as_input_and_as_output_of_other_type():
    model = MODEL_SIGNATURES["T5"]
    assert model.input("sequence_length").dtype == "UINT32"
    assert model.output("sequence_length").dtype == "INT32"
    assert _names(model, optional=False) == {"input_ids", "sequence_length", "max_output_len"}


@pytest.mark.parametrize(("data_type", "dtype"), [("fp16", "FP16"), ("fp32", "FP32")])
def test_encoder_outputs_have_the_computation_type(data_type, dtype):
    for model_type in ("T5-Encoder", "bert"):
        model = model_signature(model_type, data_type=data_type)
        assert model.output("output_hidden_state").dtype == dtype


@pytest.mark.parametrize(
    ("data_type", "dtype"), [("fp16", "FP16"), ("fp32", "FP32"), ("bf16", "FP32")]
)
def test_prompt_embeddings_never_need_a_type_that_clients_cannot_send(data_type, dtype):
    model = model_signature("GPT", data_type=data_type)
    assert model.input("request_prompt_embedding").dtype == dtype


def test_ensemble_takes_text_and_every_option_under_its_own_name():
    model = ensemble(model_signature("GPT", data_type="fp16"))
    names = [tensor.name for tensor in model.inputs]
    assert names[:4] == ["INPUT_0", "INPUT_1", "INPUT_2", "INPUT_3"]
    assert set(names[4:]) == _names(MODEL_SIGNATURES["GPT"], optional=True) - {
        "bad_words_list",
        "stop_words_list",
    }
    assert [tensor.name for tensor in model.outputs] == [
        "OUTPUT_0",
        "sequence_length",
        "cum_log_probs",
        "output_log_probs",
    ]


def test_interactive_shapes_gain_an_axis():
    model = interactive(model_signature("GPT", data_type="fp16"))
    assert model.input("input_ids").dims == (-1, -1)
    assert model.input("runtime_top_k").dims == (-1, 1)
    assert model.input("runtime_top_k").reshape == (-1,)
    assert model.input("session_len").dtype == model.input("memory_len").dtype == "UINT32"
    assert model.output("output_ids").dims == (-1, -1, -1)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("GPT", "INT32"), ("GPT-J", "INT32"), ("GPT-NeoX", "UINT32"), ("T5", "INT32")],
)
def test_models_around_nvidias_backend_take_the_lengths_that_it_sends(model_type, dtype):
    model = model_signature(model_type, data_type="fp16")
    sent = as_sent_by_fastertransformer(model, model_type)
    assert postprocessing(sent).input("sequence_length").dtype == dtype
    assert ensemble(sent).output("sequence_length").dtype == dtype
    assert [tensor.name for tensor in sent.outputs] == [tensor.name for tensor in model.outputs]
