"""A server of HTTP whose clients do not keep to the protocol."""

import asyncio
import socket
import time

import pytest
from aiohttp import web

from inference.front.access import OPEN_ACCESS
from inference.front.http_server import http_server
from inference.system.ports import pick_free_ports


async def _answers(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response()


def test_a_request_that_is_none_of_http_leaves_no_trace_in_the_log(
    caplog,
):
    async def send() -> bytes:
        (port,) = pick_free_ports("127.0.0.1", 1)
        runner = await http_server(OPEN_ACCESS, _answers, host="127.0.0.1", port=port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET http://[ HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await runner.cleanup()
        return answer

    assert b" 400 " in asyncio.run(send())
    assert not caplog.records


@pytest.mark.parametrize("asks", [True, False])
def test_a_client_that_connected_just_before_the_end_is_answered(asks):
    async def end() -> bytes:
        (port,) = pick_free_ports("127.0.0.1", 1)
        runner = await http_server(OPEN_ACCESS, _answers, host="127.0.0.1", port=port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ending = asyncio.ensure_future(runner.cleanup())
        await asyncio.sleep(0.1)
        if asks:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        await ending
        writer.close()
        return answer

    began = time.monotonic()
    assert (b" 200 " in asyncio.run(end())) is asks
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("is_sent_late", [False, True])
def test_a_connection_that_waits_at_the_port_when_it_closes_is_answered(is_sent_late):
    async def send() -> bytes:
        (port,) = pick_free_ports("127.0.0.1", 1)
        runner = await http_server(OPEN_ACCESS, _answers, host="127.0.0.1", port=port)
        with socket.create_connection(("127.0.0.1", port), 10) as client:  # the kernel accepts it
            request = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
            if is_sent_late:
                asyncio.get_running_loop().call_later(0.05, client.sendall, request)
            else:
                client.sendall(request)
            await runner.cleanup()
            return client.recv(1 << 16)

    assert asyncio.run(send()).startswith(b"HTTP/1.1 200 ")
