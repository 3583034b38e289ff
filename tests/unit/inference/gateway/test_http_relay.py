"""Answers that the gateway passes back from a server on a Unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import ClientSession, web
from aiohttp.test_utils import RawTestServer

from inference.gateway.access import OPEN_ACCESS
from inference.gateway.check_process import CheckProcess
from inference.gateway.http_relay import HttpRelay
from inference.gateway.rules import UNREACHABLE, Rules
from inference.gateway.sockets import ServerSockets

EVENT = 'data: {"y": 1}\n\n'


async def _ends_after_an_event(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(EVENT.encode())
    assert request.transport is not None
    request.transport.close()
    return response


async def _streamed(sockets: ServerSockets) -> str:
    runner = web.ServerRunner(web.Server(_ends_after_an_event))
    await runner.setup()
    await web.UnixSite(runner, str(sockets.http)).start()
    rules = Rules(tokens=None, client_shared_memory=False)
    relay = HttpRelay(
        OPEN_ACCESS,
        rules,
        sockets=sockets,
        checks=CheckProcess(),
        models={},
        listens_at="127.0.0.1",
    )
    async with RawTestServer(relay.answer) as gateway, ClientSession() as client:
        url = gateway.make_url("/v2/models/m/generate_stream")
        async with client.post(url, json={"x": 1}) as answer:
            text = await answer.text()
    await relay.close()
    await runner.cleanup()
    return text


def test_stream_of_a_server_that_ends_has_the_reason_as_its_last_event(tmp_path: Path) -> None:
    text = asyncio.run(_streamed(ServerSockets(tmp_path)))
    assert text == f'{EVENT}data: {{"error": "{UNREACHABLE}"}}\n\n'
