"""KServe's protocol over HTTP: requests that arrive slowly, and models that are busy."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from inference.backend.requests import InferRequest, Responses
from inference.front.access import OPEN_ACCESS
from inference.front.context import FrontContext
from inference.front.http_server import http_server
from inference.front.rules import InferError
from inference.front.workers import Workers
from inference.host.http import KServeHttp
from inference.host.models import HostedModel
from inference.system.ports import pick_free_ports

CONFIG = {
    "name": "m",
    "input": [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}],
    "output": [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}],
    "model_transaction_policy": {"decoupled": True},
}
ASKED = b"POST /v2/models/m/%b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


class Busy(HostedModel):
    """Refuses every request."""

    async def _answer(self, _: InferRequest) -> Responses:
        raise InferError("busy", "UNAVAILABLE")
        yield {}, True


class Large(HostedModel):
    """Answers with many numbers."""

    async def _answer(self, _: InferRequest) -> Responses:
        yield {"x": np.random.default_rng(1).random(1 << 19)}, True


class Served:
    """The models of a repository."""

    def __init__(self, kind: type[HostedModel], *, decoupled: bool) -> None:
        config = json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig())
        config.model_transaction_policy.decoupled = decoupled
        self.models = {"m": kind(config, "1")}


def with_server(served: Served, check: Callable[[FrontContext[Any], int], Awaitable[None]]) -> None:
    async def main() -> None:
        (port,) = pick_free_ports("127.0.0.1", 1)
        workers = Workers()
        context = FrontContext[Any](
            OPEN_ACCESS,
            served,
            host="127.0.0.1",
            is_ready=lambda: True,
            note_use=lambda: None,
            workers=workers,
        )
        answer = KServeHttp(context).answer
        runner = await http_server(OPEN_ACCESS, answer, host="127.0.0.1", port=port, logs=True)
        await check(context, port)
        await runner.cleanup()
        workers.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_request_whose_body_arrives_is_under_way_and_may_come_again():
    async def check(context: FrontContext[Any], port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED % (b"generate_stream", 7) + b'{"x"')
        while not context.users():  # a server that ends waits for it
            await asyncio.sleep(0.01)
        writer.write(b":1}")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert b" 503 " in head
        assert b"\r\nRetry-After: 1\r\n" in head

    with_server(Served(Busy, decoupled=True), check)


@pytest.mark.parametrize("kept", [b"", b"Connection: keep-alive\r\n"])
def test_a_stream_of_http_1_0_ends_with_its_connection(kept):
    async def check(_: FrontContext[Any], port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = ASKED.replace(b"/1.1", b"/1.0").replace(b"Host: localhost\r\n", kept)
        writer.write(asked % (b"generate_stream", 7) + b'{"x":1}')
        head, body = (await asyncio.wait_for(reader.read(), 30)).split(b"\r\n\r\n", 1)
        writer.close()
        assert b" 200 " in head
        assert b"chunked" not in head
        assert body.startswith(b"data: {")

    with_server(Served(Large, decoupled=True), check)


@pytest.mark.parametrize(("action", "decoupled"), [("generate", False), ("generate_stream", True)])
def test_an_answer_and_the_log_have_the_id_of_the_request(action, decoupled, capfd):
    async def check(_: FrontContext[Any], port: int) -> None:
        url = f"http://127.0.0.1:{port}/v2/models/m/{action}"
        async with aiohttp.ClientSession() as session:
            for given in ("mine", "two\u00e9 words", None):
                headers = {} if given is None else {"X-Request-Id": given}
                async with session.post(url, json={"x": 1}, headers=headers) as answer:
                    names.append(answer.headers["X-Request-Id"])
                    await answer.read()

    names: list[str] = []
    with_server(Served(Large, decoupled=decoupled), check)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]
    assert [(each["request_id"], each["status"]) for each in lines] == [(n, 200) for n in names]
    assert names[0] == "mine"
    assert len(set(names)) == 3
    assert {len(each) for each in names[1:]} == {32}


def test_the_event_loop_goes_on_while_a_large_answer_is_written():
    async def check(_: FrontContext[Any], port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED % (b"generate", 7) + b'{"x":1}')
        answering = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        turns = 0
        while not answering.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert b" 200 " in answering.result()
        assert turns > 10  # 1 where it waits
        writer.transport.abort()

    with_server(Served(Large, decoupled=False), check)
