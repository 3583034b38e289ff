"""KServe's protocol over HTTP: requests that arrive slowly, and models that are busy."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from inference.front.access import OPEN_ACCESS
from inference.front.context import FrontContext
from inference.front.http_server import http_server
from inference.front.workers import Workers
from inference.host.calls import InferError, InferRequest, Responses
from inference.host.http import KServeHttp
from inference.host.models import HostedModel
from inference.ports import pick_free_ports

CONFIG = {
    "name": "m",
    "input": [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}],
    "output": [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}],
    "model_transaction_policy": {"decoupled": True},
}
HEAD = b"POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\n"


class Busy(HostedModel):
    """Refuses every request."""

    async def _answer(self, _: InferRequest) -> Responses:
        raise InferError("busy", "UNAVAILABLE")
        yield {}, True


class Served:
    """The models of a repository."""

    def __init__(self) -> None:
        config = json_format.ParseDict(CONFIG, model_config_pb2.ModelConfig())
        self.models = {"m": Busy(config, "1")}


def test_a_request_whose_body_arrives_is_under_way_and_may_come_again() -> None:
    async def main() -> bytes:
        (port,) = pick_free_ports("127.0.0.1", 1)
        workers = Workers()
        context = FrontContext[Any](
            OPEN_ACCESS,
            Served(),
            host="127.0.0.1",
            is_ready=lambda: True,
            note_use=lambda: None,
            workers=workers,
        )
        answer = KServeHttp(context).answer
        runner = await http_server(OPEN_ACCESS, answer, host="127.0.0.1", port=port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b'{"x"')
        while not context.users():  # a server that ends waits for it
            await asyncio.sleep(0.01)
        writer.write(b":1}")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await runner.cleanup()
        workers.close()
        return head

    head = asyncio.run(asyncio.wait_for(main(), 10))
    assert b" 503 " in head
    assert b"\r\nRetry-After: 1\r\n" in head
