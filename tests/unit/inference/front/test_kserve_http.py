"""Answers that the front passes back from a server on a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import RawTestServer

from inference.front.access import OPEN_ACCESS
from inference.front.kserve_http import PassingHttp, http_server
from inference.front.link import Served
from inference.front.rules import UNREACHABLE
from inference.front.sockets import ServerSockets
from inference.front.upstream import FrontContext, Upstream
from inference.ports import pick_free_ports

EVENT = 'data: {"y": 1}\n\n'


async def _ends_after_an_event(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(EVENT.encode())
    assert request.transport is not None
    request.transport.close()
    return response


async def _refuses_with_success(request: web.BaseRequest) -> web.StreamResponse:
    return web.json_response(text='{"error":"generate expects exactly 1 response"}')


async def _relayed(
    sockets: ServerSockets, server: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
) -> tuple[int, str]:
    """Return the status and the text of what a server answers."""
    runner = web.ServerRunner(web.Server(server))
    await runner.setup()
    await web.UnixSite(runner, str(sockets.http)).start()
    upstream = Upstream(Served(sockets.folder, None))
    context = FrontContext(
        OPEN_ACCESS, upstream, host="127.0.0.1", is_ready=lambda: True, note_use=lambda: None
    )
    http = PassingHttp(context)
    async with RawTestServer(http.answer) as front, ClientSession() as client:
        url = front.make_url("/v2/models/m/generate_stream")
        async with client.post(url, json={"x": 1}) as answer:
            text = await answer.text()
    await context.current.close()
    await runner.cleanup()
    return answer.status, text


def test_stream_of_a_server_that_ends_has_the_reason_as_its_last_event(tmp_path: Path) -> None:
    _, text = asyncio.run(_relayed(ServerSockets(tmp_path), _ends_after_an_event))
    assert text == f'{EVENT}data: {{"error": "{UNREACHABLE}"}}\n\n'


def test_an_error_of_generate_is_not_passed_back_as_success(tmp_path: Path) -> None:
    status, text = asyncio.run(_relayed(ServerSockets(tmp_path), _refuses_with_success))
    assert (status, "exactly 1 response" in text) == (400, True)


def test_a_request_that_is_none_of_http_leaves_no_trace_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def send() -> bytes:
        (port,) = pick_free_ports("127.0.0.1", 1)
        runner = await http_server(OPEN_ACCESS, _refuses_with_success, host="127.0.0.1", port=port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET http://[ HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await runner.cleanup()
        return answer

    assert b" 400 " in asyncio.run(send())
    assert not caplog.records
