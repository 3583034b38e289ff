"""Models of a tritonserver: requests reach it as they were read, and its answers come back."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from inference.backend.requests import InferRequest
from inference.decoding.rows import SessionTurn
from inference.front.rules import InferError
from inference.front.validation import SentRequest
from inference.host.messages import infer_response
from inference.host.models import HostedModel
from inference.host.release_2_51 import Cancellations
from inference.host.remote import TritonConnection, remote_models, stream_error
from inference.host.tensors import array_of
from tests.fake_triton import FakeTriton, RefusedError, served

CONFIG = {
    "name": "m",
    "backend": "python",
    "max_batch_size": 4,
    "input": [
        {"name": "ids", "data_type": "TYPE_UINT32", "dims": [-1]},
        {"name": "half", "data_type": "TYPE_BF16", "dims": [-1], "optional": True},
        {"name": "text", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    ],
    "output": [{"name": "y", "data_type": "TYPE_BF16", "dims": [1]}],
}
IDS = np.array([[1, 2]], np.uint32)
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


def config_of(**more: Any) -> Any:
    return json_format.ParseDict({**CONFIG, **more}, model_config_pb2.ModelConfig())


def with_model(
    fake: FakeTriton, check: Callable[[HostedModel], Awaitable[None]], **options: Any
) -> None:
    """Run a check with the model of a stand-in of tritonserver."""

    async def main(address: str) -> None:
        server = TritonConnection(address)
        config = config_of(**options)
        models = remote_models({("m", "1"): config}, server, takes_canaries=True)
        await check(models["m"])
        await server.channel.close()

    with served(fake) as address:
        asyncio.run(main(address))


def refuse(words: str) -> Callable[[Any], None]:
    def infer(_: Any) -> None:
        raise RefusedError(words)

    return infer


@pytest.mark.parametrize("options", [{}, DECOUPLED])
def test_a_request_arrives_as_it_was_read(options):
    fake = FakeTriton({})
    half = np.array([[1.0, -2.0]], np.float32)
    text = np.array([[b"\xff\0"]], object)
    request = InferRequest(
        {"ids": IDS, "half": half, "text": text},
        ["y"],
        SessionTurn("mine", starts=True, ends=False),
        "7",
        is_canary=True,
        parameters={"priority": 1, "own": "a"},
    )

    async def check(model: HostedModel) -> None:
        responses = [each async for each in model.infer(request)]
        assert responses[-1][1]
        assert not any(final for _, final in responses[:-1])

    with_model(fake, check, **options)
    (sent,) = fake.requests
    assert (sent.model_name, sent.model_version, sent.id) == ("m", "1", "7")
    raw = dict(zip((each.name for each in sent.inputs), sent.raw_input_contents, strict=True))
    assert raw == {
        "ids": IDS.tobytes(),
        "half": np.array([0x3F80, 0xC000], np.uint16).tobytes(),
        "text": b"\2\0\0\0\xff\0",
    }
    given = sent.parameters
    assert (given["priority"].int64_param, given["own"].string_param) == (1, "a")
    assert (given["sequence_id"].string_param, given["sequence_start"].bool_param) == ("mine", True)
    assert given["slipway_canary"].bool_param
    assert [each.name for each in sent.outputs] == ["y"]


def test_a_stream_that_has_ended_is_not_cancelled(monkeypatch):
    cancelled = list[object]()
    monkeypatch.setattr(Cancellations, "cancel", lambda _, call: cancelled.append(call))

    async def check(model: HostedModel) -> None:
        for _ in range(5):
            assert [each async for each in model.infer(InferRequest({"ids": IDS}))][-1][1]

    with_model(FakeTriton({}), check, **DECOUPLED)
    assert not cancelled


def test_an_output_keeps_its_type_and_bytes():
    raw = np.array([0x3F80], np.uint16).tobytes()
    value = array_of(raw, "BF16", (1, 1), name="y")
    assert value.tolist() == [[1.0]]
    config = config_of()
    model = HostedModel(config, "1")
    answer = infer_response(model, SentRequest(), {"y": value})
    assert (answer.outputs[0].datatype, answer.raw_output_contents[0]) == ("BF16", raw)


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        ({}, "out of memory", "INTERNAL"),
        (DECOUPLED, "UNAVAILABLE: the queue is full", "UNAVAILABLE"),
        (DECOUPLED, "too long: lower it", "INVALID_ARGUMENT"),
    ],
)
def test_an_error_keeps_its_code(options, words, code):
    async def check(model: HostedModel) -> None:
        with pytest.raises(InferError) as caught:
            async for _ in model.infer(InferRequest({"ids": IDS})):
                pass
        assert caught.value.grpc_code == code
        assert str(caught.value) == words.removeprefix("UNAVAILABLE: ")

    with_model(FakeTriton({}, refuse(words)), check, **options)


def test_a_server_that_is_gone_is_unavailable_and_not_named():
    async def main() -> None:
        server = TritonConnection("unix:/tmp/slipway-sockets-none/grpc:8001")
        config = config_of()
        model = remote_models({("m", "1"): config}, server, takes_canaries=True)["m"]
        with pytest.raises(InferError) as caught:
            async for _ in model.infer(InferRequest({"ids": IDS})):
                pass
        assert caught.value.grpc_code == "UNAVAILABLE"
        assert "slipway-sockets" not in str(caught.value)

    asyncio.run(main())


def test_the_latest_version_answers_where_none_is_named():
    async def main() -> None:
        server = TritonConnection("127.0.0.1:9")
        configs = {("m", each): config_of() for each in ("2", "10")}
        (model,) = remote_models(configs, server, takes_canaries=True).values()
        assert model.version == "10"
        assert {*model.versions} == {"2", "10"}
        await server.channel.close()

    asyncio.run(main())


def test_error_of_a_stream_begins_with_its_code():
    assert stream_error("INTERNAL: a fault").grpc_code == "INTERNAL"
    assert stream_error("a: b").grpc_code == "INVALID_ARGUMENT"


def test_streams_are_cancelled_in_order_with_pauses():
    class Stream:
        cancelled_at: float | None = None

        def cancel(self) -> bool:
            self.cancelled_at = time.monotonic()
            return True

    streams = [Stream() for _ in range(5)]

    async def leave() -> None:
        server = TritonConnection("127.0.0.1:9")
        for stream in streams:
            server.cancellations.cancel(stream)
        while streams[-1].cancelled_at is None:
            await asyncio.sleep(0)
        await server.channel.close()

    asyncio.run(leave())
    times = [stream.cancelled_at or 0.0 for stream in streams]
    assert all(later - earlier > 0.01 for earlier, later in itertools.pairwise(times))
