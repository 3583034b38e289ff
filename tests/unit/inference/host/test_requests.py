"""Requests as this project's own server reads them, and answers as it writes them."""

import asyncio
import contextlib
import json
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from inference.backend.metrics import METRICS, ModelMetric, family_lines
from inference.backend.requests import InferRequest, Responses
from inference.decoding.rows import SessionTurn
from inference.front.guard import RejectedError
from inference.front.infer_messages import read_message
from inference.front.rules import InferError
from inference.front.sessions import Namespace
from inference.front.validation import SentRequest, read_generate, read_infer
from inference.host.messages import (
    check_parameters,
    generated,
    infer_response,
    json_answer,
    parts_of,
    with_bytes,
)
from inference.host.models import HostedModel, OpenSessions
from inference.host.statistics import triton_metrics
from inference.host.tensors import array_of, raw_of

CONFIG = {
    "name": "m",
    "backend": "python",
    "max_batch_size": 4,
    "input": [
        {"name": "text", "data_type": "TYPE_STRING", "dims": [1]},
        {"name": "ids", "data_type": "TYPE_UINT32", "dims": [-1], "optional": True},
        {"name": "flat", "data_type": "TYPE_UINT32", "dims": [1], "optional": True,
         "reshape": {"shape": []}},
    ],
    "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [1]}],
}  # fmt: skip


class Echo(HostedModel):
    """Answers with the text of its request, twice."""

    seen: InferRequest

    async def _answer(self, request: InferRequest) -> Responses:
        self.seen = request
        for final in (False, True):
            yield {"y": request.tensors["text"]}, final


@pytest.fixture
def model() -> Echo:
    return Echo(json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig()), "1")


def mine() -> Namespace:
    return Namespace("me", b"key")


def read(model: Echo, body: dict[str, Any], rest: bytes = b"") -> InferRequest:
    data = json.dumps(body).encode()
    sent = read_infer(data, len(data) + len(rest))
    return with_bytes(model, sent, parts_of(sent, memoryview(rest)), mine)


def ask(model: Echo, request: InferRequest) -> list[tuple[Any, bool]]:
    async def main() -> list[tuple[Any, bool]]:
        return [each async for each in model.infer(request)]

    return asyncio.run(main())


def text(value: str = "a", **more: Any) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [value], **more}


def test_texts_and_halves_keep_their_bytes():
    texts = np.array([[b"", b"\xff\0"], [b"abc", "\xe9".encode()]], object)
    assert (array_of(raw_of(texts), "BYTES", [2, 2], name="x") == texts).all()
    halves = array_of(np.array([0x3F80, 0xC000], np.uint16).tobytes(), "BF16", [2], name="x")
    assert halves.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("raw", [b"", b"\5\0\0\0ab", b"\1\0\0\0ab", b"\xff\xff\xff\xffab"])
def test_bytes_that_are_not_the_texts_of_a_shape_are_refused(raw):
    with pytest.raises(InferError, match="input x has"):
        array_of(raw, "BYTES", [1], name="x")


def test_an_output_of_a_wrong_size_is_the_fault_of_the_server():
    with pytest.raises(InferError, match="output byte size mismatch for output x") as caught:
        array_of(b"1", "UINT32", [1], name="x", kind="output")
    assert caught.value.grpc_code == "INTERNAL"


def test_json_and_bytes_make_one_request(model):
    ids = {"name": "ids", "datatype": "UINT32", "shape": [1, 3]}
    plain = read(model, {"inputs": [text(), {**ids, "data": [[1, 2, 3]]}]})
    binary = {**ids, "parameters": {"binary_data_size": 12}}
    rest = np.array([1, 2, 3], np.uint32).tobytes()
    mixed = read(model, {"inputs": [text(), binary]}, rest)
    for name, value in plain.tensors.items():
        np.testing.assert_array_equal(mixed.tensors[name], value)
    for wrong in (rest[:8], rest + b"1"):
        with pytest.raises(InferError, match="additional"):
            read(model, {"inputs": [text(), binary]}, wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body["inputs"].append(text()), "already exists"),
        (lambda body: body["inputs"][0].update(name="other"), "unexpected inference input 'other'"),
        (lambda body: body["inputs"][0].update(datatype="UINT8", data=[1]), "expects 'BYTES'"),
        (lambda body: body["inputs"][0].update(datatype="TEXT"), "invalid datatype"),
        (lambda body: body["inputs"][0].pop("data"), "neither data nor"),
        (lambda body: body["inputs"][0].update(parameters={"binary_data_size": 0}), "one of them"),
        (lambda body: body.update(outputs=[{"name": "z"}]), "unexpected inference output 'z'"),
        (lambda body: body["inputs"][0].update(shape=[5, 1], data=["a"] * 5), "must be <= 4"),
        (lambda body: body["inputs"][0].update(shape=[1]), "unexpected shape"),
        (lambda body: body.update(inputs=[]), "lacks 'text'"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(model, change, said):
    body: dict[str, Any] = {"inputs": [text()]}
    change(body)
    with pytest.raises(RejectedError, match=said):
        ask(model, read(model, body))
    assert model.statistics.pending == 0


def test_values_by_name_fill_the_last_free_axis(model):
    body = json.dumps({"text": "a", "ids": [1, 2, 3], "flat": 7, "id": "5", "stream": True})
    sent = read_generate(body.encode(), model.forms)
    request = with_bytes(model, sent, (), mine)
    shapes = {name: list(value.shape) for name, value in request.tensors.items()}
    assert shapes == {"text": [1, 1], "ids": [1, 3], "flat": [1, 1]}
    assert len(ask(model, request)) == 2
    assert model.seen.tensors["flat"].shape == (1,)  # as its configuration reshapes it
    outputs = {"y": np.array([[b"b"]], object)}
    answer = json.loads(generated(model, sent, outputs))
    assert answer == {"model_name": "m", "model_version": "1", "id": "5", "y": "b"}


def test_a_name_that_is_not_an_input_reaches_models_of_others_alone(model):
    for body in ({"text": "a", "txet": 1}, {"text": "a", "parameters": {"txet": 1}}):
        sent = read_generate(json.dumps(body).encode(), model.forms)
        model.takes_parameters = False
        with pytest.raises(InferError, match="model 'm' takes no txet; its inputs are flat, ids"):
            check_parameters(model, sent)
        model.takes_parameters = True
        check_parameters(model, sent)
        assert with_bytes(model, sent, (), mine).parameters == {"txet": 1}


def test_a_session_is_the_same_for_generate_and_infer(model):
    named = {"sequence_id": 7, "sequence_start": True}
    sent = read_generate(json.dumps({"text": "a", **named}).encode(), model.forms)
    turn = with_bytes(model, sent, (), mine).turn
    assert turn == read(model, {"inputs": [text()], "parameters": named}).turn
    assert turn == SessionTurn(mine().inside(7), starts=True)


def test_outputs_are_sent_as_they_are_asked_for(model):
    for asked, expected in ((False, b""), (True, b"\1\0\0\0b")):
        body = {"inputs": [text()], "parameters": {"binary_data_output": asked}}
        data = json.dumps(body).encode()
        sent = read_infer(data, len(data))
        answer, raw = json_answer(model, sent, {"y": np.array([[b"b"]], object)})
        assert b"".join(raw) == expected
        (output,) = json.loads(answer)["outputs"]
        assert output.get("data") == (None if asked else ["b"])


@pytest.mark.parametrize("count", [0, 1, 2, 1023, 1024, 1025, 3000])
def test_elements_are_written_in_pieces_as_at_once(model, count):
    values = np.arange(count, dtype=np.float32) / 3
    answer, raw = json_answer(model, read_infer(b"{}", 2), {"y": values.reshape(1, -1)})
    assert not raw
    assert json.loads(answer)["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, count], "data": values.tolist()}
    ]
    row = json.loads(generated(model, SentRequest(), {"y": values}))["y"]
    assert row == (values.tolist() if count != 1 else values[0])


def test_requests_are_counted_as_triton_counts_them(model):
    ask(model, read(model, {"inputs": [text()]}))
    with pytest.raises(InferError):
        ask(model, InferRequest({}))
    lines = list(triton_metrics([model.statistics]))
    assert 'nv_inference_request_success{model="m",version="1"} 1' in lines
    assert 'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 1' in lines


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_request_that_is_closed_early_is_cancelled_unless_it_is_answered(is_answered, model):
    async def main() -> None:
        request = InferRequest({"text": np.array([[b"a"]], object)}, is_answered=is_answered)
        async with contextlib.aclosing(model.infer(request)) as responses:
            await anext(responses)

    asyncio.run(main())
    counts = (model.statistics.failures["CANCELED"], model.statistics.successes)
    assert counts == ((0, 1) if is_answered else (1, 0))


def test_a_histogram_counts_what_is_up_to_each_bound():
    row = next(each for each in METRICS if each.name == "slipway_request_queue_seconds")
    metric = ModelMetric(row, {"model": 'a"b'})
    for value in (0.005, 0.5, 500):
        metric.observe(value)
    lines = [*family_lines(row.name, row.text, "histogram", metric.samples())][2:]
    assert lines[0] == 'slipway_request_queue_seconds_count{model="a\\"b"} 3'
    found = {line.split('le="')[-1] for line in lines}
    assert {'0.005"} 1', '0.25"} 1', '0.5"} 2', '120"} 2', '+Inf"} 3'} <= found


def test_a_canary_that_a_busy_model_refuses_is_no_failure():
    class Busy(Echo):
        async def _answer(self, _: InferRequest) -> Responses:
            raise InferError("busy", "UNAVAILABLE")
            yield {}, True

    model = Busy(json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig()), "1")
    tensors = {"text": np.array([[b"a"]], object)}
    for is_canary, failures in ((True, 0), (False, 1)):
        with pytest.raises(InferError):
            ask(model, InferRequest(tensors, is_canary=is_canary))
        assert model.statistics.failures["REJECTED"] == failures


def test_a_fault_of_a_model_is_no_cancellation():
    class Faulty(Echo):
        async def _answer(self, _: InferRequest) -> Responses:
            raise KeyError("a fault")
            yield {}, True

    model = Faulty(json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig()), "1")
    with pytest.raises(KeyError):
        ask(model, InferRequest({"text": np.array([[b"a"]], object)}))
    assert {reason for reason, count in model.statistics.failures.items() if count} == {"OTHER"}


def test_a_session_that_never_started_is_not_open():
    sessions = OpenSessions(60)
    sessions.take(SessionTurn(5), lambda: None)
    assert sessions.count() == 0
    sessions.take(SessionTurn(5, starts=True), lambda: None)
    sessions.take(SessionTurn(5), lambda: None)
    assert sessions.count() == 1


def test_a_session_whose_start_is_refused_is_not_open():
    class Refusing(Echo):
        refuses = False

        async def _answer(self, request: InferRequest) -> Responses:
            assert request.turn is not None
            self.sessions.take(request.turn, lambda: None)
            if self.refuses:
                raise InferError("too long")
            yield {}, True

    config = {**CONFIG, "sequence_batching": {"max_sequence_idle_microseconds": 60_000_000}}
    model = Refusing(json_format.ParseDict(config, model_config_pb2.ModelConfig()), "1")
    tensors = {"text": np.array([[b"a"]], object)}
    ask(model, InferRequest(tensors, turn=SessionTurn(1, starts=True)))
    model.refuses = True
    for session_id, starts in ((2, True), (1, False)):
        with pytest.raises(InferError, match="too long"):
            ask(model, InferRequest(tensors, turn=SessionTurn(session_id, starts=starts)))
    assert (model.sessions.has(1), model.sessions.has(2)) == (True, False)


def sent_message(datatype: str, **contents: Any) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype=datatype, shape=[1])
    for name, values in contents.items():
        getattr(message.inputs[0].contents, name).extend(values)
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("datatype", "contents"),
    [
        ("INT8", {"int_contents": [300]}),
        ("UINT16", {"uint_contents": [1 << 16]}),
        ("BF16", {"bytes_contents": [b"ab"]}),
        ("UINT32", {"fp32_contents": [1.0]}),
    ],
)
def test_contents_that_a_type_cannot_hold_are_refused(datatype, contents):
    data = sent_message(datatype, **contents)
    with pytest.raises(RejectedError, match=datatype):
        read_message(data, len(data))


def test_contents_of_two_types_are_refused():
    data = sent_message("UINT32", uint_contents=[1], fp32_contents=[2.0])
    with pytest.raises(RejectedError, match="uint_contents and fp32_contents"):
        read_message(data, len(data))


def test_a_number_that_no_float_holds_is_refused():
    entry = {"name": "x", "datatype": "FP32", "shape": [1], "data": [10**400]}
    data = json.dumps({"inputs": [entry]}).encode()
    with pytest.raises(RejectedError, match="FP32"):
        read_infer(data, len(data))


def test_parameters_of_strangers_keep_their_sign():
    message = service_pb2.ModelInferRequest(model_name="m")
    for name in ("own", "sequence_id"):
        message.parameters[name].int64_param = -1
    data = message.SerializeToString()
    sent = read_message(data, len(data))
    assert sent.parameters.others() == {"own": -1}
    assert sent.parameters.sequence_id == (1 << 64) - 1
    model = Echo(
        json_format.ParseDict(
            {**CONFIG, "ensemble_scheduling": {}}, model_config_pb2.ModelConfig()
        ),
        "1",
    )
    answer = infer_response(model, sent, {})
    assert answer.parameters["sequence_id"].int64_param == -1
