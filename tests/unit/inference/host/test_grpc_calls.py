"""Calls of gRPC on streams: their turns, their models, and their ends."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from inference.backend.requests import InferRequest, Responses
from inference.front.access import Access
from inference.front.context import FrontContext
from inference.front.guard import RejectedError
from inference.front.rules import STREAM_CALL
from inference.front.workers import Workers
from inference.host.grpc_calls import KServeGrpc
from inference.host.models import HostedModel

CONFIG = {
    "name": "m",
    "input": [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}],
    "output": [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}],
    "model_transaction_policy": {"decoupled": True},
}
SLOW, QUICK = 1, 2


class Gate(HostedModel):
    """Answers quick requests at once, slow ones once it is open, with its version."""

    def __init__(self, version: str = "1", *, decoupled: bool = True) -> None:
        super().__init__(json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig()), version)
        self.decoupled = decoupled
        self.is_open = asyncio.Event()

    async def _answer(self, request: InferRequest) -> Responses:
        if request.tensors["x"][0] == SLOW:
            await self.is_open.wait()
        yield {"x": request.tensors["x"]}, True


def message(value: int, model: str = "m") -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="UINT32", shape=[1])
    request.raw_input_contents.append(np.array([value], np.uint32).tobytes())
    return bytes(request.SerializeToString())


class Calls:
    """A server of gRPC with one model, and a stream to it."""

    def __init__(self, context: FrontContext[Any], channel: Any, call: Any) -> None:
        self.context, self.channel, self.call = context, channel, call
        self.is_leaving = False

    async def ask(self, value: int, *, model: str = "m") -> None:
        await self.call.write(message(value, model))

    async def answer(self) -> tuple[str, int]:
        reply = service_pb2.ModelStreamInferResponse.FromString(await self.call.read())
        (raw,) = reply.infer_response.raw_output_contents
        return reply.infer_response.model_version, int.from_bytes(raw, "little")

    async def unused(self) -> None:
        while self.context.users():
            await asyncio.sleep(0.01)


class Served:
    """The models of a repository."""

    def __init__(self, model: HostedModel) -> None:
        self.models = {"m": model, "ordered": Gate("3", decoupled=False)}


def with_stream(check: Callable[[Calls, Gate], Awaitable[None]]) -> None:
    async def main() -> None:
        def note_use() -> None:
            if calls.is_leaving:
                raise RejectedError("leaving", HTTPStatus.SERVICE_UNAVAILABLE)

        model, workers = Gate(), Workers()
        context = FrontContext[Any](
            Access(),
            Served(model),
            host="127.0.0.1",
            is_ready=lambda: True,
            note_use=note_use,
            workers=workers,
        )
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        server.add_generic_rpc_handlers((KServeGrpc(context, port=port, logs=True),))
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.stream_stream(STREAM_CALL)(metadata=(("x-request-id", "mine"),))
                calls = Calls(context, channel, call)
                await asyncio.wait_for(check(calls, model), 60)
        finally:
            await server.stop(0)
            workers.close()

    asyncio.run(main())


def test_a_client_that_leaves_ends_all_requests_of_its_stream():
    async def check(calls: Calls, _: Gate) -> None:
        for value in (SLOW, QUICK, SLOW):
            await calls.ask(value)
        assert await calls.answer() == ("1", QUICK)
        while calls.context.users() > 2:  # the quick one now waits for its turn to end
            await asyncio.sleep(0.01)
        calls.call.cancel()
        await calls.unused()

    with_stream(check)


def test_a_message_of_a_stream_is_decompressed_once():
    async def check(calls: Calls, _: Gate) -> None:
        await calls.call.write(gzip.compress(message(QUICK)))
        assert await calls.answer() == ("1", QUICK)
        await calls.call.write(gzip.compress(gzip.compress(message(QUICK))))
        assert await calls.call.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_stream(check)


def test_each_request_of_a_stream_goes_to_the_models_of_its_time():
    async def check(calls: Calls, _: Gate) -> None:
        await calls.ask(QUICK)
        assert await calls.answer() == ("1", QUICK)
        await calls.context.exchange(Served(Gate("2")))
        await calls.ask(QUICK)
        assert await calls.answer() == ("2", QUICK)

    with_stream(check)


def test_finished_requests_make_room_for_others_behind_a_slow_one():
    async def check(calls: Calls, model: Gate) -> None:
        await calls.ask(SLOW)
        for _ in range(300):
            await calls.ask(QUICK)
            assert await calls.answer() == ("1", QUICK)
        model.is_open.set()
        assert await calls.answer() == ("1", SLOW)

    with_stream(check)


def test_a_model_with_one_response_answers_in_the_order_of_its_requests():
    async def check(calls: Calls, _: Gate) -> None:
        await calls.ask(SLOW, model="ordered")
        await calls.ask(QUICK)
        await calls.ask(QUICK, model="ordered")
        assert await calls.answer() == ("1", QUICK)
        await asyncio.sleep(0.1)
        calls.context.current.models["ordered"].is_open.set()
        assert await calls.answer() == ("3", SLOW)
        assert await calls.answer() == ("3", QUICK)

    with_stream(check)


def test_a_request_of_a_wrong_form_leaves_the_others_of_its_stream_alone():
    async def check(calls: Calls, model: Gate) -> None:
        await calls.ask(SLOW)
        wrong = service_pb2.ModelInferRequest(model_name="m", id="7")
        wrong.inputs.add(name="x", datatype="UINT33", shape=[1])
        await calls.call.write(wrong.SerializeToString())
        await asyncio.sleep(0.1)
        model.is_open.set()
        assert await calls.answer() == ("1", SLOW)
        reply = service_pb2.ModelStreamInferResponse.FromString(await calls.call.read())
        assert "UINT33" in reply.error_message
        assert reply.infer_response.id == "7"
        await calls.ask(QUICK)
        assert await calls.answer() == ("1", QUICK)

    with_stream(check)


def test_a_refused_request_ends_its_stream_after_the_answers_before_it():
    async def check(calls: Calls, model: Gate) -> None:
        await calls.ask(SLOW)
        while not calls.context.users():
            await asyncio.sleep(0.01)
        calls.is_leaving = True
        await calls.ask(QUICK)
        await asyncio.sleep(0.1)
        model.is_open.set()
        assert await calls.answer() == ("1", SLOW)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await calls.unused()

    with_stream(check)


def test_a_request_that_is_refused_after_the_last_was_read_ends_its_stream():
    async def check(calls: Calls, _: Gate) -> None:
        calls.is_leaving = True
        await calls.ask(QUICK)
        await calls.call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())["x-request-id"] == "mine"

    with_stream(check)


class Talker(HostedModel):
    """Answers with many responses."""

    def __init__(self) -> None:
        super().__init__(json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig()), "1")

    async def _answer(self, _: InferRequest) -> Responses:
        for number in range(1000):
            yield {"x": np.array([number], np.uint32)}, number == 999


def test_a_client_that_reads_nothing_keeps_its_model_waiting():
    async def main() -> None:
        model, workers = Talker(), Workers()
        served = Served(model)
        context = FrontContext[Any](
            Access(),
            served,
            host="127.0.0.1",
            is_ready=lambda: True,
            note_use=lambda: None,
            workers=workers,
        )
        details = SimpleNamespace(method=STREAM_CALL, invocation_metadata=())
        handler: Any = KServeGrpc(context, port=1).service(details)
        call: Any = SimpleNamespace(
            set_trailing_metadata=lambda _: None, code=lambda: None, peer=lambda: "ipv4:127.0.0.1:1"
        )

        async def requests() -> AsyncIterator[bytes]:
            yield message(0)

        answers: AsyncIterator[bytes] = handler.stream_stream(requests(), call)
        assert await anext(answers)
        for _ in range(3000):  # turns of the event loop, in each of which the model may continue
            await asyncio.sleep(0)
        assert model.responses < 100
        rest = [reply async for reply in answers]
        assert len(rest) == model.responses - 1 == 999
        workers.close()

    asyncio.run(main())


def test_a_refused_stream_can_be_iterated_by_interceptors():
    async def main() -> None:
        def refuse(_: str | None) -> None:
            raise RejectedError("no token", HTTPStatus.UNAUTHORIZED)

        context: Any = SimpleNamespace(guard=SimpleNamespace(token_owner=refuse))
        details = SimpleNamespace(method=STREAM_CALL, invocation_metadata=())
        handler: Any = KServeGrpc(context, port=1).service(details)

        class Context:
            def set_trailing_metadata(self, _: object) -> None: ...

            def code(self) -> None: ...

            async def abort(self, code: grpc.StatusCode, _: str) -> None:
                raise LookupError(code.name)

        answers: AsyncIterator[bytes] = handler.stream_stream(None, Context())
        with pytest.raises(LookupError, match="UNAUTHENTICATED"):
            await anext(answers)

    asyncio.run(main())


def test_refused_calls_and_streams_have_their_lines_in_the_log(
    capfd,
):
    closed = "/inference.GRPCInferenceService/RepositoryModelLoad"
    health = "/grpc.health.v1.Health/Check"

    async def check(calls: Calls, _: Gate) -> None:
        await calls.channel.unary_unary(health)(b"", metadata=(("x-request-id", "probe"),))
        refused = calls.channel.stream_stream(closed)(metadata=(("x-request-id", "closed"),))
        assert await refused.code() is grpc.StatusCode.PERMISSION_DENIED
        calls.is_leaving = True
        await calls.ask(QUICK)
        assert await calls.call.code() is grpc.StatusCode.UNAVAILABLE

    with_stream(check)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]
    assert [(each["request_id"], each["path"], each["status"]) for each in lines] == [
        ("probe", health, "OK"),
        ("closed", closed, "PERMISSION_DENIED"),
        ("mine", STREAM_CALL, "UNAVAILABLE"),
    ]
