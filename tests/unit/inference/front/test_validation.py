"""Requests that no model should get are refused with the reason."""

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from inference.backend.requests import InferRequest
from inference.decoding.rows import SessionTurn
from inference.front.guard import RejectedError
from inference.front.infer_messages import read_message, without_raw_tensors
from inference.front.sessions import Namespace
from inference.front.strict_json import MAX_JSON_MB, parse_json
from inference.front.validation import (
    MAX_TEXTS,
    SentRequest,
    check_index,
    length_of_json,
    read_generate,
    read_head,
    read_infer,
)
from inference.host.messages import with_bytes
from inference.host.models import HostedModel
from inference.system.supervision import CANARY_PARAMETER

MINE = Namespace("me", b"key")
_TYPES = {"x": "UINT32", "y": "INT8", "text": "BYTES", "scale": "FP32", "stream": "BOOL"}
MODEL = {name: (datatype, (-1, -1)) for name, datatype in _TYPES.items()}
FLAG = service_pb2.InferParameter(bool_param=True)
X: dict[str, Any] = {"name": "x", "shape": [1, 2], "datatype": "UINT32", "data": [[1, 2]]}


def turn_of(sent: SentRequest) -> SessionTurn | None:
    """Return the session of a request without inputs."""
    request: InferRequest = with_bytes(HostedModel, sent, [], lambda: MINE)  # type: ignore[arg-type]
    return request.turn


def infer(**changes: Any) -> bytes:
    return json.dumps({"inputs": [{**X, **changes}]}).encode()


def check_body(body: bytes, header: str | None = None) -> None:
    """Check a body of `infer` as a server does."""
    data = body[: length_of_json(header, len(body))]
    read_infer(data, len(body))


def check_message(message: Any, size_bytes: int) -> None:
    read_message(message.SerializeToString(), size_bytes)


def nested(opening: str, depth: int, closing: str) -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (nested('{"a":', 1_000, "}"), "at most 32 levels"),
        (nested('{"a":', 40, "}"), "at most 32 levels"),
        (b'{"inputs":[{"shape":[1],"data":' + nested("[", 100_000, "]") + b"}]}", "32 levels"),
        (b"[" * 1_000_000, "32 levels"),
        (b'{"a":"' + b"a" * (MAX_JSON_MB << 20) + b'"}', "as binary data"),
        (b"", "^the body is not JSON: EOF"),
        (b"\xff", "^the body is not JSON: expected"),
        ('{"inputs":[]}'.encode("utf-16"), "not JSON"),
        (b'{"inputs":[NaN]}', "expected value at line 1 column 12"),
        (b'{"inputs":[1e999]}', "a number is out of range"),
        (b'{"inputs":[], "\\u0069nputs":[1]}', "Detected duplicate key"),
        (b'{"inputs":[' + b"9" * 5000 + b"]}", "number out of range"),
        (b"[1]", "not an object"),
        (b'{"inputs":{}}', "inputs: should be a valid list"),
        (b'{"inputs":[1]}', r"inputs\[0\]: should be"),
        (infer(shape={}), r"inputs\[0\].shape: should be a valid list"),
        (b'{"outputs":null}', "outputs: should be a valid list"),
        (b'{"outputs":[5]}', r"outputs\[0\]: should be"),
        (b'{"outputs":[{}]}', r"outputs\[0\].name is missing"),
        (b'{"inputs":[{"name":"x","shape":[1]}]}', r"inputs\[0\].datatype is missing"),
        (b'{"id":"\\ud800"}', "not JSON"),
        (b'{"\\ud800":1}', "not JSON"),
        (b'{"a\\u0000b":1}', "a key has a null character"),
        (infer(datatype=5), r"inputs\[0\].datatype: .* is 5"),
        (infer(data=[[1, 2.0]]), "input 'x' has 2.0; UINT32 should be"),
        (infer(data=[[1, True]]), "input 'x' has true; UINT32 should be"),
        (infer(data=["1", "2"], datatype="FP32"), "input 'x' has \"1\"; FP32 should be"),
        (infer(data=[0, 1], datatype="BOOL"), "input 'x' has 0; BOOL should be"),
        (infer(data=[1]), r"shape \[1, 2\], 2 elements, and 1 in its data"),
        (b'{"parameters":[1]}', "parameters: should be"),
        (infer(shape=[1.5]), r"shape\[0\]: .* is 1.5"),
        (infer(shape=[True]), r"shape\[0\]: .* is true"),
        (infer(shape=[-1, -2]), r"shape\[1\]: .* is -2"),
        (infer(shape=[0, 0]), "sizes are positive"),
        (infer(shape=[2**63 - 1]), "fewer elements were sent"),
        (infer(shape=[1, 2**62 + 2]), "fewer elements were sent"),
        (infer(shape=[1] * 1000), r"1000 inputs\[0\].shape"),
        (json.dumps({"inputs": [X] * 300}).encode(), "300 inputs, 256 at most"),
        (json.dumps({"outputs": [{}] * 300}).encode(), "300 outputs, 256 at most"),
        (json.dumps({"parameters": dict.fromkeys(map(str, range(300)))}).encode(), "300 param"),
        (infer(parameters=dict.fromkeys(map(str, range(300)))), "300 parameters"),
        (
            b'{"outputs":[{"name":"y","parameters":{"classification":1}}]}',
            r"outputs\[0\].parameters.classification: is not taken",
        ),
        (
            infer(parameters={"shared_memory_region": "a", "shared_memory_byte_size": 4096}),
            r"inputs\[0\].parameters.shared_memory_region: is not taken: no memory",
        ),
        (infer(data=[[1, 1 << 32]]), "'x' has 4294967296; UINT32"),
        (infer(data=[-1, 1]), "'x' has -1; UINT32"),
        (infer(datatype="INT8", data=[[[127]], -129]), "'x' has -129; INT8"),
    ],
)
def test_malformed_bodies_are_refused(body, said):
    with pytest.raises(RejectedError, match=said) as caught:
        check_body(body)
    assert len(str(caught.value)) < 400


_WRONG: dict[str, list[Any]] = {
    "a flag": ["true", 1, 1.0, None, [True], {}],
    "a number": ["7", 1.5, 7.0, -1, 1 << 64, True, None, [1], {}],
    "a text": [5, 1.5, True, None, ["a"], {}, "a\0b"],
    "a number or a text": [1.5, -1, 1 << 64, True, None, [1], {}, "a\0b", "x" * 129, "ä" * 65],
}


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("sequence_id", "a number or a text"),
        *((name, "a flag") for name in ("sequence_start", "sequence_end", "binary_data_output")),
        *((name, "a number") for name in ("priority", "timeout")),
    ],
)
def test_a_parameter_of_the_wrong_type_is_named_with_what_is_expected(name, takes):
    for value in _WRONG[takes]:
        shown = re.escape(json.dumps(value)[:40])
        with pytest.raises(RejectedError, match=f"parameters.{name}: should .* is {shown}"):
            check_body(json.dumps({"parameters": {name: value}, "inputs": [X]}).encode())


def test_ids_and_parameters_of_tensors_have_types_too():
    for value in _WRONG["a text"]:
        for check in (check_body, lambda body: read_generate(body, MODEL)):
            with pytest.raises(RejectedError, match=r"^id: should "):
                check(json.dumps({"id": value}).encode())
    for value in filter(None, _WRONG["a number"]):
        with pytest.raises(RejectedError, match=r"\[0\].parameters.binary_data_size: "):
            check_body(infer(parameters={"binary_data_size": value}))
    for value in _WRONG["a flag"]:
        output = {"name": "y", "parameters": {"binary_data": value}}
        with pytest.raises(RejectedError, match=r"\[0\].parameters.binary_data: "):
            check_body(json.dumps({"outputs": [output]}).encode())


def test_parameters_of_the_protocol_pass():
    flags = {"sequence_start": True, "sequence_end": False, "binary_data_output": True}
    for sequence_id in (0, (1 << 64) - 1, "", "x" * 128):
        parameters = {"sequence_id": sequence_id, **flags, "priority": 1, "timeout": 5, "own": 1.5}
        check_body(json.dumps({"id": "a", "parameters": parameters, "inputs": [X]}).encode())


@pytest.mark.parametrize("text", ["a\0b", "x" * 129])
def test_a_sequence_of_a_message_has_a_short_name(text):
    message = service_pb2.ModelInferRequest(model_name="m")
    message.parameters["sequence_id"].string_param = text
    with pytest.raises(RejectedError, match=r"sequence_id: should be a text of up to 128"):
        check_message(message, message.ByteSize())


@pytest.mark.parametrize("length", ["-1", "abc", "1e3", "", " 5", "9" * 30, "٣"])
def test_the_length_of_the_json_lies_within_the_body(length):
    with pytest.raises(RejectedError, match="is not a length within a body"):
        check_body(infer(), length)


def test_requests_that_clients_send_pass():
    check_body(infer())
    check_body(infer() + bytes(8), str(len(infer())))
    check_body(infer(shape=[1, 0], data=[]))
    check_body(infer(data=[0, (1 << 32) - 1]))
    check_body(infer(datatype="INT64", data=[-(1 << 63), (1 << 63) - 1]))
    check_body(infer(datatype="FP32", data=[1 << 80, 0.5]))
    check_body(infer(parameters=None))
    check_body(b'{"outputs":[{"name":"y","parameters":null}]}')
    read_generate(b'{"text_input": "It was", "parameters": {"max_tokens": 4}}', {})


def test_a_generate_request_is_checked_too():
    with pytest.raises(RejectedError, match="32 levels"):
        read_generate(b'{"x":' + nested("[", 50_000, "]") + b"}", MODEL)
    with pytest.raises(RejectedError, match="300 inputs"):
        read_generate(json.dumps(dict.fromkeys(map(str, range(300)))).encode(), MODEL)


@pytest.mark.parametrize(
    ("request_body", "said"),
    [
        ({"x": 1 << 32}, "input 'x' has 4294967296; UINT32"),
        ({"x": [[2, -1]]}, "input 'x' is a list of lists; generate takes one row"),
        ({"x": [[2], -1]}, "input 'x' is a list of lists"),
        ({"parameters": {"y": 128}}, "input 'y' has 128; INT8"),
        ({"x": 1.0}, "input 'x' has 1.0; UINT32"),
        ({"x": True}, "input 'x' has true; UINT32 should be"),
        ({"x": None}, "input 'x' has null; UINT32"),
        ({"text": 5}, "input 'text' has 5; BYTES"),
        ({"text": {"a": 1}}, "BYTES should be"),
        ({"scale": False}, "input 'scale' has false; FP32"),
        ({"stream": 1}, "input 'stream' has 1; BOOL"),
    ],
)
def test_a_value_to_generate_fits_the_type_of_its_input(request_body, said):
    body = json.dumps(request_body).encode()
    with pytest.raises(RejectedError, match=said):
        read_generate(body, MODEL)


@pytest.mark.parametrize("value", [[1], {"a": 1}, None, 1 << 64])
def test_a_parameter_that_no_model_could_get_is_refused_by_name(value):
    for body in ({"own": value}, {"parameters": {"own": value}}):
        with pytest.raises(RejectedError, match="parameter own is "):
            read_generate(json.dumps(body).encode(), MODEL)
    with pytest.raises(RejectedError, match="parameter own is "):
        check_body(json.dumps({"parameters": {"own": value}, "inputs": [X]}).encode())


def test_values_that_fit_pass():
    values = {"x": [0, (1 << 32) - 1], "text": ["a"], "scale": [1, 0.5], "stream": True}
    read_generate(json.dumps({**values, "else": "a"}).encode(), MODEL)
    read_generate(json.dumps({"parameters": values}).encode(), MODEL)
    read_generate(json.dumps({**values, "parameters": None}).encode(), MODEL)


@pytest.mark.parametrize("name", ["x", "own"])
def test_a_value_that_generate_is_given_twice_is_refused(name):
    with pytest.raises(RejectedError, match=f"{name} is given twice"):
        read_generate(json.dumps({name: 1, "parameters": {name: 2}}).encode(), MODEL)


@pytest.mark.parametrize("shape", [[-1], [0, 2], [2**62, 4], [2**63 - 1], [1] * 100])
def test_malformed_messages_are_refused(shape):
    message = service_pb2.ModelInferRequest(model_name="x")
    message.inputs.add(name="x", datatype="UINT32", shape=shape)
    with pytest.raises(RejectedError, match=r"inputs\[0\]"):
        check_message(message, message.ByteSize())


@pytest.mark.parametrize("entries", ["inputs", "outputs", "parameters"])
def test_a_message_has_few_entries(entries):
    message = service_pb2.ModelInferRequest()
    for number in range(300):
        if entries == "parameters":
            message.parameters[str(number)].bool_param = True
        else:
            getattr(message, entries).add(name=str(number))
    with pytest.raises(RejectedError, match=f"300 {entries}, 256 at most"):
        check_message(message, message.ByteSize())


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
_KEYS = st.sampled_from(["inputs", "outputs", "parameters", "shape", "name", "data", "id"])


@settings(max_examples=80)
@given(value=st.dictionaries(_KEYS, _JSON | st.lists(st.dictionaries(_KEYS, _JSON), max_size=3)))
def test_whatever_is_sent_is_read_as_it_is_and_passed_or_refused(value):
    body = json.dumps(value).encode()
    if "\\u0000" not in body.decode():  # which no key may have
        assert parse_json(body) == value
    for check in (lambda: check_body(body), lambda: read_generate(body, MODEL)):
        with contextlib.suppress(RejectedError):
            check()


def as_field(number: int, content: bytes) -> bytes:
    """Return bytes as a field of a message of protobuf."""
    size, left = bytearray(), len(content)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([number << 3 | 2, *size, left]) + content


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            as_field(5, b"") * 2000,
            "more than 1040 fields",
        ),  # inputs; a hundred bytes of memory each
        (as_field(7, b"") * 2000, "more than 1040 fields"),
        (as_field(5, as_field(5, as_field(8, b"") * (5 << 20))), "send large tensors there"),
        (as_field(5, as_field(3, b"\x01" * (9 << 20))), "outside of raw_input_contents"),
        (b"\x3a\xff\xff\xff\xff\x7f", "not a ModelInferRequest"),  # longer than the message
        (b"\xff" * 20, "not a ModelInferRequest"),
        (b"\x2b", "not a ModelInferRequest"),  # a group
    ],
)
def test_messages_that_would_take_much_memory_are_not_parsed(data, said):
    with pytest.raises(RejectedError, match=said):
        without_raw_tensors(data)


@given(
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    raw=st.lists(st.binary(max_size=300), max_size=3),
    value=st.integers(-(2**63), 2**63 - 1),
)
def test_what_is_left_without_raw_tensors_is_the_same_request(shape, raw, value):
    message = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=raw)
    message.inputs.add(name="x", shape=shape, datatype="UINT32")
    message.parameters["a"].int64_param = value
    data = message.SerializeToString()
    rest, places = without_raw_tensors(data)
    assert [data[place] for place in places] == raw
    message.ClearField("raw_input_contents")
    assert service_pb2.ModelInferRequest.FromString(rest) == message
    with contextlib.suppress(RejectedError):
        read_message(rest, len(data))


@pytest.mark.parametrize("given_id", [7, 2**63 + 1, "a chat", -5])
def test_a_session_reaches_the_server_under_its_owners_own_id(given_id):
    others = Namespace("another", MINE.key)
    assert MINE.inside(given_id) == MINE.inside(given_id) != others.inside(given_id)
    message = service_pb2.ModelInferRequest(model_name="m")
    field = "string_param" if isinstance(given_id, str) else "int64_param"
    if isinstance(given_id, int) and given_id >> 63 > 0:
        field = "uint64_param"
    setattr(message.parameters["sequence_id"], field, given_id)
    message.parameters["sequence_start"].bool_param = True
    data = message.SerializeToString()
    turn = turn_of(read_message(data, len(data)))
    assert turn is not None
    own = given_id % (1 << 64) if isinstance(given_id, int) else given_id
    assert (turn.session_id, turn.starts, turn.ends) == (MINE.inside(own), True, False)
    if given_id != -5:  # which JSON's are not
        body = json.dumps({"parameters": {"sequence_id": given_id}, "inputs": []}).encode()
        turn = turn_of(read_infer(body, len(body)))
        assert turn is not None
        assert turn.session_id == MINE.inside(given_id)


def test_no_session_stays_none():
    body = json.dumps({"parameters": {"sequence_id": 0}, "inputs": []}).encode()
    assert turn_of(read_infer(body, len(body))) is None
    message = service_pb2.ModelInferRequest(model_name="m").SerializeToString()
    assert turn_of(read_message(message, len(message))) is None


@pytest.mark.parametrize("count", [MAX_TEXTS, MAX_TEXTS + 1])
def test_texts_are_counted(count):
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", shape=[1, count], datatype="BYTES")
    typed = service_pb2.ModelInferRequest(model_name="m")
    typed.inputs.add(name="x", shape=[1, count], datatype="BYTES").contents.bytes_contents.extend(
        [b""] * count
    )
    for each in (message, typed):
        if count > MAX_TEXTS:
            with pytest.raises(RejectedError, match="65537 texts, 65536 at most"):
                check_message(each, 1 << 20)
        else:
            check_message(each, 1 << 20)


def test_empty_tensors_have_no_huge_sizes():
    for shape in ([1, 0, 2**62], [2**40, 0]):
        message = service_pb2.ModelInferRequest(model_name="m")
        message.inputs.add(name="x", shape=shape, datatype="UINT32")
        with pytest.raises(RejectedError, match="fewer elements were sent"):
            check_message(message, 100)


def test_no_name_of_a_message_has_a_second_reading():
    named = service_pb2.ModelInferRequest(model_name="two")
    named.inputs.add(name="x", datatype="UINT32", shape=[1])
    named.outputs.add(name="y")
    changes: dict[str, Callable[[Any], object]] = {
        "model_name: ": lambda each: setattr(each, "model_name", "two\0a"),
        "model_version: ": lambda each: setattr(each, "model_version", "1\0"),
        "id: ": lambda each: setattr(each, "id", "\0"),
        r"inputs.0..name: ": lambda each: setattr(each.inputs[0], "name", "x\0"),
        r"inputs.0..datatype: ": lambda each: setattr(each.inputs[0], "datatype", "UINT32\0"),
        r"outputs.0..name: ": lambda each: setattr(each.outputs[0], "name", "y\0"),
        "^parameters: the name": lambda each: each.parameters["a\0"].MergeFrom(FLAG),
        "^inputs.*: the name": lambda each: each.inputs[0].parameters["a\0"].MergeFrom(FLAG),
        "^outputs.*: the name": lambda each: each.outputs[0].parameters["a\0"].MergeFrom(FLAG),
        "sequence_id: .* is true": lambda each: each.parameters["sequence_id"].MergeFrom(FLAG),
        "sequence_id: .* is null": lambda each: each.parameters["sequence_id"].Clear(),
        "priority: .* is true": lambda each: each.parameters["priority"].MergeFrom(FLAG),
    }
    for said, change in changes.items():
        message = service_pb2.ModelInferRequest.FromString(named.SerializeToString())
        check_message(message, 100)
        change(message)
        with pytest.raises(RejectedError, match=said):
            check_message(message, 100)


@pytest.mark.parametrize("name", [CANARY_PARAMETER, "slipway_stream"])
def test_parameters_of_the_owner_are_taken_from_no_client(name):
    """A model answers canaries out of turn; strangers' ones would make it seem to stand still."""
    parameters = {name: True}
    message = service_pb2.ModelInferRequest(model_name="m")
    message.parameters[name].MergeFrom(FLAG)
    for check in (
        lambda: check_body(json.dumps({"inputs": [X], "parameters": parameters}).encode()),
        lambda: read_generate(json.dumps(parameters).encode(), {}),
        lambda: read_generate(json.dumps({"parameters": parameters}).encode(), {}),
        lambda: check_message(message, 100),
    ):
        with pytest.raises(RejectedError, match=f"parameter {name}"):
            check()


def test_the_list_of_models_is_asked_for_in_its_own_form():
    for body in (b"{}", b'{"ready": true}', b'{"ready": false, "own": [1]}'):
        check_index(body)
    with pytest.raises(RejectedError, match="ready: "):
        check_index(b'{"ready": "yes"}')


def test_what_requests_share_cannot_be_changed():
    head = json.dumps({"inputs": [X, {**X, "name": "y", "data": None}]}).encode()
    first, second = (read_head(bytes(bytearray(head)), len(head) + 8) for _ in range(2))
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first.inputs[0].data[:] = 0
