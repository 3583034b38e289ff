"""Requests to the server, and the use of its answers."""

from collections.abc import Mapping

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from export_scripts.triton.signature import GPT, PREPROCESSING, ensemble, model_signature
from inference.backend.tokenizer import Tokenizer
from inference.evaluation.run.served_model import ServedModel, ServedTokenizer
from inference.evaluation.task import RequestFailedError, RetryableError
from inference.server.client import TritonClient

_NUMPY = {"UINT32": "uint32", "FP32": "float32", "BOOL": "bool", "BYTES": "object"}


class FakeClient(TritonClient):
    """Answers each model with prepared outputs and keeps what it was sent."""

    def __init__(self, **outputs: Mapping[str, np.ndarray]) -> None:
        self.outputs = outputs
        self.sent: list[tuple[str, dict[str, np.ndarray]]] = []
        self.error: Exception | None = None
        self.signature = model_signature("GPT", data_type="fp32")

    def input_types(self, model):
        if model == "postprocessing":
            return {"TOKENS_BATCH": "INT32"}
        return {tensor.name: tensor.dtype for tensor in self.signature.inputs}

    def infer(self, model, inputs, *, outputs=None, **_):
        if self.error is not None:
            raise self.error
        self.sent.append((model, dict(inputs)))
        found = self.outputs[model]
        return {name: found[name] for name in outputs or found}


class Letters(Tokenizer):
    """Every letter is a token."""

    def encode(self, text, **_):
        return [ord(each) for each in text]

    def decode(self, ids, **_):
        return "".join(chr(each) for each in ids)


def answer_ids(*ids: int, length: int) -> dict[str, np.ndarray]:
    return {
        "output_ids": np.array([[ids]], np.uint32),
        "sequence_length": np.array([[length]], np.uint32),
    }


def text_of(text: str) -> dict[str, np.ndarray]:
    return {
        "OUTPUT_0": np.array([[text.encode()]], dtype=object),
        "sequence_length": np.array([[len(text)]], np.uint32),
    }


def test_answer_ids_are_those_after_the_prompt_up_to_the_length():
    client = FakeClient(fastertransformer=answer_ids(7, 8, 9, 5, 1, 1, length=4))
    model = ServedModel(client, Letters())
    assert model.complete_ids([7, 8], output_len=4) == (9, 5)


def test_the_request_has_the_contract_s_names_types_and_shapes():
    client = FakeClient(
        fastertransformer=answer_ids(7, 8, length=2)
        | {"cum_log_probs": np.zeros((1, 1)), "output_log_probs": np.zeros((1, 1, 1))},
        ensemble=text_of("hi")
        | {"cum_log_probs": np.zeros((1, 1)), "output_log_probs": np.zeros((1, 1, 1))},
    )
    model = ServedModel(client, Letters())
    model.complete_ids([7], output_len=1)
    model.context_log_prob([7, 8])
    model.complete_text("hi", output_len=1)
    for name, inputs in client.sent:
        signature = GPT if name == "fastertransformer" else ensemble(GPT)
        for tensor, array in inputs.items():
            declared = signature.input(tensor)
            assert array.dtype == np.dtype(_NUMPY[declared.dtype]), tensor
            assert array.shape[0] == 1
            assert array.ndim == 1 + len(declared.dims)


def test_rows_of_one_request_are_padded_and_cut_apart():
    client = FakeClient(
        fastertransformer={
            "output_ids": np.array([[[7, 8, 9, 5, 6]], [[3, 4, 2, 1, 1]]], np.uint32),
            "sequence_length": np.array([[5], [4]], np.uint32),  # counted from the padded length
        }
    )
    answers = ServedModel(client, Letters()).complete_rows([[7, 8, 9], [3]], output_len=2)
    assert answers == [(5, 6), (4,)]
    ((_, inputs),) = client.sent
    assert inputs["input_ids"].tolist() == [[7, 8, 9], [3, 3, 3]]
    assert inputs["input_lengths"].tolist() == [[3], [1]]
    assert inputs["runtime_top_k"].tolist() == [[1], [1]]


def test_greedy_decoding_is_asked_for_explicitly():
    client = FakeClient(fastertransformer=answer_ids(7, 8, length=2))
    ServedModel(client, Letters()).complete_ids([7], output_len=1)
    ((_, inputs),) = client.sent
    assert inputs["runtime_top_k"].item() == 1
    assert inputs["beam_width"].item() == 1


def test_context_log_probability_leaves_the_generated_token_out():
    client = FakeClient(
        fastertransformer={
            "cum_log_probs": np.array([[-12.5]], np.float32),
            "output_log_probs": np.array([[[-2.5]]], np.float32),
        }
    )
    assert ServedModel(client, Letters()).context_log_prob([7, 8]) == -10.0
    ((_, inputs),) = client.sent
    # The nucleus path: the other one reports 0 for a greedy token.
    assert inputs["runtime_top_k"].item() == 0
    assert 0 < inputs["runtime_top_p"].item() < 1e-3
    assert inputs["is_return_context_cum_log_probs"].item()


@pytest.mark.parametrize("answer", ["a bc", " bc"])
def test_the_ensemble_may_repeat_the_prompt_or_not(answer):
    model = ServedModel(FakeClient(ensemble=text_of(answer)), Letters())
    assert model.complete_text("a", output_len=3).text == " bc"


def test_a_prompt_that_decodes_otherwise_is_taken_off_as_decoded():
    class Lower(Letters):
        def encode(self, text, **_):
            return super().encode(text.lower())

    model = ServedModel(FakeClient(ensemble=text_of("hi there")), Lower())
    assert model.complete_text("HI", output_len=6).text == " there"


def test_without_an_ensemble_the_model_is_asked():
    client = FakeClient(fastertransformer=answer_ids(97, 98, 99, length=3))
    model = ServedModel(client, Letters(), ensemble_name=None)
    assert model.complete_text("a", output_len=2).text == "bc"


def test_without_an_ensemble_an_answer_keeps_the_space_before_it():
    class Sentences(Letters):
        """Decodes as SentencePiece does: without the space that the first word begins with."""

        def decode(self, ids, **_):
            return super().decode(ids).removeprefix(" ")

    client = FakeClient(fastertransformer=answer_ids(97, 32, 98, length=3))
    model = ServedModel(client, Sentences(), ensemble_name=None)
    assert model.complete_text("a", output_len=2).text == " b"


def test_failures_of_the_client_become_failed_requests():
    client = FakeClient()
    model = ServedModel(client, Letters())
    for error in (InferenceServerException("too long"), ConnectionError("refused")):
        client.error = error
        with pytest.raises(RequestFailedError, match=r"fastertransformer: .*(too long|refused)"):
            model.complete_ids([1], output_len=1)


@pytest.mark.parametrize(
    ("text", "status"),
    [("UNAVAILABLE: full", None), ("full", "StatusCode.UNAVAILABLE"), ("full", "503")],
)
def test_requests_to_a_busy_server_can_be_repeated(text, status):
    client = FakeClient()
    client.error = InferenceServerException(text, status)
    with pytest.raises(RetryableError, match="full"):
        ServedModel(client, Letters()).complete_ids([1], output_len=1)


def test_tokens_of_a_text_answer_are_counted():
    model = ServedModel(FakeClient(ensemble=text_of("a bc")), Letters())
    assert model.complete_text("a", output_len=9).generated == 3


def test_an_answer_ends_before_the_end_token():
    model = ServedModel(FakeClient(), Letters(), end_ids=(98, 100))
    assert model.decode_answer([97, 97, 98, 97]) == "aa"
    assert model.decode_answer([97, 100, 97]) == model.decode_answer([97]) == "a"


def test_further_tensors_are_sent_for_every_row():
    client = FakeClient(
        fastertransformer={
            "output_ids": np.array([[[7, 9, 9]], [[8, 9, 9]]], np.uint32),
            "sequence_length": np.array([[3], [3]], np.uint32),
            "response_input_lengths": np.array([[1], [1]], np.int32),  # one of two is virtual
        }
    )
    tensors = {
        "request_prompt_embedding": [[0.5, 1.5]],
        "request_prompt_lengths": 1,
        "request_prompt_type": 3,
    }
    answers = ServedModel(client, Letters()).complete_rows(
        [[100, 7], [100, 8]], output_len=2, tensors=tensors
    )
    assert answers == [(9, 9), (9, 9)]
    ((_, inputs),) = client.sent
    assert inputs["request_prompt_embedding"].tolist() == [[[0.5, 1.5]]] * 2
    assert inputs["request_prompt_embedding"].dtype == np.float32
    assert inputs["request_prompt_type"].tolist() == [[3], [3]]


def test_a_tensor_that_the_model_does_not_take_is_reported():
    with pytest.raises(RequestFailedError, match="has no input ia3_tasks"):
        ServedModel(FakeClient(), Letters()).complete_ids(
            [7], output_len=1, tensors={"ia3_tasks": 0}
        )


@pytest.fixture
def t5_client() -> FakeClient:
    client = FakeClient(
        fastertransformer={
            "output_ids": np.array([[[5, 6, 1, 0]]], np.int32),
            "sequence_length": np.array([[3]], np.int32),
        },
        ensemble=text_of("Guten Tag"),
    )
    client.signature = model_signature("T5", data_type="fp32")
    return client


def test_an_encoder_decoder_answers_with_its_own_tokens(t5_client):
    model = ServedModel(t5_client, Letters())
    assert model.complete_ids([7, 8], output_len=4) == (5, 6, 1)
    ((_, inputs),) = t5_client.sent
    assert inputs["sequence_length"].tolist() == [[2]]
    assert inputs["max_output_len"].tolist() == [[4]]


def test_an_encoder_decoder_s_text_is_its_answer(t5_client):
    found = ServedModel(t5_client, Letters()).complete_text("Guten", output_len=4)
    assert (found.text, found.generated) == ("Guten Tag", len("Guten Tag"))


def test_text_for_an_encoder_decoder_needs_the_ensemble(t5_client):
    model = ServedModel(t5_client, Letters(), ensemble_name=None)
    with pytest.raises(RequestFailedError, match=r"export\.triton_deployment\.ensemble=true"):
        model.complete_text("hello", output_len=4)


def test_the_served_tokenizer_encodes_once_per_text():
    client = FakeClient(
        preprocessing={
            "INPUT_ID": np.array([[5, 6, 0, 0]], np.uint32),
            "REQUEST_INPUT_LEN": np.array([[2]], np.uint32),
        }
    )
    tokenizer = ServedTokenizer(client)
    assert tokenizer.encode("hello") == tokenizer.encode("hello") == (5, 6)
    ((_, inputs),) = client.sent
    assert set(inputs) == {tensor.name for tensor in PREPROCESSING.inputs}


def test_the_served_tokenizer_decodes_through_postprocessing():
    client = FakeClient(postprocessing={"OUTPUT": np.array([[b" stone"]], dtype=object)})
    assert ServedTokenizer(client).decode([4, 5]) == " stone"
    ((_, inputs),) = client.sent
    assert inputs["TOKENS_BATCH"].tolist() == [[[4, 5]]]
    assert inputs["TOKENS_BATCH"].dtype == np.int32  # as this server declares it
