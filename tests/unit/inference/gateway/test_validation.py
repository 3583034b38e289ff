"""Requests in forms that end, hang or slow tritonserver 2.51 are refused with the reason."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from inference.gateway.validation import (
    MOST_JSON_MB,
    MalformedError,
    check_generate,
    check_infer,
    check_message,
    parse_json,
)

LIMIT = 1 << 20
X: dict[str, Any] = {"name": "x", "shape": [1, 2], "datatype": "UINT32", "data": [[1, 2]]}


def infer(**changes: Any) -> bytes:
    return json.dumps({"inputs": [{**X, **changes}]}).encode()


def nested(opening: str, depth: int, closing: str) -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (nested('{"a":', 1_000, "}"), "more than 32 levels"),
        (nested('{"a":', 40, "}"), "more than 32 levels"),
        (b'{"inputs":[{"shape":[1],"data":' + nested("[", 100_000, "]") + b"}]}", "32 levels"),
        (b"[" * 1_000_000, "32 levels"),
        (b'{"a":"' + b"a" * (MOST_JSON_MB << 20) + b'"}', "as binary data"),
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        ('{"inputs":[]}'.encode("utf-16"), "not JSON"),
        (b'{"inputs":[NaN]}', "NaN is not a number of JSON"),
        (b'{"inputs":[], "\\u0069nputs":[1]}', "a key stands twice"),
        (b"[1]", "not an object"),
        (b'{"inputs":{}}', "'inputs' is not a list"),
        (b'{"inputs":[1]}', "an input is not an object"),
        (b'{"inputs":[{"shape":{}}]}', "'shape' is not a list"),
        (b'{"parameters":[1]}', "'parameters' is not an object"),
        (infer(shape=[1.5]), "not a list of integers"),
        (infer(shape=[True]), "not a list of integers"),
        (infer(shape=[-1, -2]), "sizes are positive"),
        (infer(shape=[0, 0]), "sizes are positive"),
        (infer(shape=[2**63 - 1]), "fewer elements were sent"),
        (infer(shape=[1, 2**62 + 2]), "fewer elements were sent"),
        (infer(shape=[1] * 1000), "1000 dimensions"),
        (json.dumps({"inputs": [X] * 300}).encode(), "300 inputs, 256 at most"),
        (json.dumps({"outputs": [{}] * 300}).encode(), "300 outputs, 256 at most"),
        (json.dumps({"parameters": dict.fromkeys(map(str, range(300)))}).encode(), "300 param"),
        (infer(parameters=dict.fromkeys(map(str, range(300)))), "300 parameters"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(MalformedError, match=said) as caught:
        check_infer(body, None, limit=LIMIT)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("length", ["-1", "abc", "1e3", "", " 5", "9" * 30, "٣"])
def test_the_length_of_the_json_lies_within_the_body(length: str) -> None:
    with pytest.raises(MalformedError, match="is not a length within a body"):
        check_infer(infer(), length, limit=LIMIT)


def test_requests_that_clients_send_pass() -> None:
    check_infer(infer(), None, limit=LIMIT)
    check_infer(infer() + bytes(8), str(len(infer())), limit=LIMIT)
    check_infer(infer(shape=[1, 0], data=[]), None, limit=LIMIT)
    memory = {"shared_memory_region": "a", "shared_memory_byte_size": 4096}
    check_infer(infer(shape=[1, 1024], parameters=memory), None, limit=LIMIT)
    check_generate(b'{"text_input": "It was", "parameters": {"max_tokens": 4}}')


def test_a_generate_request_is_checked_too() -> None:
    with pytest.raises(MalformedError, match="32 levels"):
        check_generate(b'{"x":' + nested("[", 50_000, "]") + b"}")
    with pytest.raises(MalformedError, match="300 inputs"):
        check_generate(json.dumps(dict.fromkeys(map(str, range(300)))).encode())


@pytest.mark.parametrize("shape", [[-1], [0, 2], [2**62, 4], [2**63 - 1], [1] * 100])
def test_malformed_messages_are_refused(shape: list[int]) -> None:
    message = service_pb2.ModelInferRequest(model_name="x")
    message.inputs.add(name="x", shape=shape)
    with pytest.raises(MalformedError, match="input 'x' has"):
        check_message(message, message.ByteSize(), limit=LIMIT)


@pytest.mark.parametrize("entries", ["inputs", "outputs", "parameters"])
def test_a_message_has_few_entries(entries: str) -> None:
    message = service_pb2.ModelInferRequest()
    for number in range(300):
        if entries == "parameters":
            message.parameters[str(number)].bool_param = True
        else:
            getattr(message, entries).add(name=str(number))
    with pytest.raises(MalformedError, match=f"300 {entries}, 256 at most"):
        check_message(message, message.ByteSize(), limit=LIMIT)


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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(value=st.dictionaries(_KEYS, _JSON | st.lists(st.dictionaries(_KEYS, _JSON), max_size=3)))
def test_whatever_is_sent_is_read_as_it_is_and_passed_or_refused(value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    assert parse_json(body) == value
    for check in (lambda: check_infer(body, None, limit=LIMIT), lambda: check_generate(body)):
        with contextlib.suppress(MalformedError):
            check()
