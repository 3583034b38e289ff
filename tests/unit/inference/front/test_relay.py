"""The relay: an address that stays while servers come and go behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import BaseTestServer, RawTestServer
from yarl import URL

from inference.front.access import OPEN_ACCESS
from inference.front.grpc_server import grpc_server
from inference.front.guard import ask_for_body
from inference.front.relay import MovingServer, Relay, main
from inference.system.ports import pick_free_ports

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def upstream(http: int, grpc_port: int = 1) -> MovingServer:
    endpoint = {"host": "127.0.0.1", "http": http, "grpc": grpc_port, "uses_tls": False}
    return MovingServer(endpoint, None)


@asynccontextmanager
async def relayed(first: Handler) -> AsyncIterator[tuple[Relay, BaseTestServer]]:
    async with RawTestServer(first) as server:
        assert server.port is not None
        relay = Relay(upstream(server.port), listens_at="127.0.0.1")
        async with RawTestServer(partial(relay.answer, "http")) as front:
            yield relay, front
        await relay.aclose()


def test_request_reaches_the_server_as_it_was_sent_and_the_answer_comes_back_so() -> None:
    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        assert request.raw_path == "/v2/models/a%20b/infer?x=%2F"
        assert request.headers["Authorization"] == "Bearer t"
        assert "Accept-Encoding" not in request.headers
        body = await request.read()
        return web.Response(
            status=429, body=body[::-1], headers={"X-Mine": "1", "Retry-After": "7"}
        )

    async def ask() -> None:
        async with relayed(echo) as (_, front), ClientSession() as client:
            url = f"http://127.0.0.1:{front.port}/v2/models/a%20b/infer?x=%2F"
            async with client.post(
                URL(url, encoded=True),
                data=b"ab\0",
                headers={"Authorization": "Bearer t"},
                skip_auto_headers=["Accept-Encoding"],
            ) as answer:
                assert (answer.status, await answer.read()) == (429, b"\0ba")
                assert (answer.headers["X-Mine"], answer.headers["Retry-After"]) == ("1", "7")
                assert answer.content_length == 3

    asyncio.run(ask())


@pytest.mark.parametrize(
    "target",
    ["CONNECT @127.0.0.1:{}", "CONNECT a:b@127.0.0.1:{}", "GET http://127.0.0.1:{}/", "OPTIONS *"],
)
def test_no_request_goes_to_an_address_that_it_names_itself(target: str) -> None:
    async def server(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="reached")

    async def ask() -> None:
        async with relayed(server) as (_, front), RawTestServer(server) as other:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(
                f"{target.format(other.port)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()

    asyncio.run(asyncio.wait_for(ask(), 30))


@pytest.mark.parametrize("is_wanted", [True, False])
def test_client_that_waits_to_send_its_body_is_asked_for_it_if_the_server_wants_it(
    is_wanted: bool,
) -> None:
    async def server(request: web.BaseRequest) -> web.StreamResponse:
        if not is_wanted:
            return web.Response(status=401)
        await ask_for_body(request)
        return web.Response(body=await request.read())

    async def ask() -> None:
        async with relayed(server) as (_, front), ClientSession() as client:
            url = f"http://127.0.0.1:{front.port}/"
            async with client.post(url, data=b"ab", expect100=True) as answer:
                assert answer.status == (200 if is_wanted else 401)
                assert await answer.read() == (b"ab" if is_wanted else b"")

    asyncio.run(asyncio.wait_for(ask(), 30))


def test_stream_ends_where_it_began_and_later_requests_go_to_the_successor() -> None:
    goes_on = asyncio.Event()

    async def first(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one ")
        await goes_on.wait()
        await response.write(b"two")
        return response

    async def second(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="second")

    async def ask() -> None:
        async with relayed(first) as (relay, front), RawTestServer(second) as other:
            url = f"http://127.0.0.1:{front.port}/"
            assert other.port is not None
            async with ClientSession() as client:
                stream = await client.get(url)
                assert await stream.content.read(4) == b"one "
                exchanged = asyncio.ensure_future(relay.exchange(upstream(other.port)))
                await asyncio.sleep(0)
                async with client.get(url) as answer:
                    assert await answer.text() == "second"
                assert not exchanged.done()
                goes_on.set()
                assert await stream.text() == "two"
                await asyncio.wait_for(exchanged, 10)

    asyncio.run(ask())


def test_answer_that_breaks_off_is_not_passed_on_as_whole() -> None:
    async def breaks_off(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    async def ask() -> None:
        async with relayed(breaks_off) as (_, front), ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                async with client.get(f"http://127.0.0.1:{front.port}/") as answer:
                    await answer.read()

    asyncio.run(ask())


def test_absent_server_and_a_rebound_name_are_refused() -> None:
    async def ask() -> None:
        (free,) = pick_free_ports("127.0.0.1", 1)
        relay = Relay(upstream(free), listens_at="127.0.0.1")
        async with RawTestServer(partial(relay.answer, "http")) as front, ClientSession() as client:
            url = f"http://127.0.0.1:{front.port}/"
            async with client.get(url) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            async with client.get(url, headers={"Host": "evil.example"}) as answer:
                assert answer.status == 403
        await relay.aclose()

    asyncio.run(ask())


class _Echo(grpc.GenericRpcHandler):
    """Answers each message of a stream, and fails for one."""

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        metadata = dict(details.invocation_metadata)
        token, tenant = metadata["authorization"], metadata.get("tenant-id")

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                if request == b"bad":
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
                yield f"{details.method} {token} {tenant} ".encode() + request

        return grpc.stream_stream_rpc_method_handler(answer)


def test_calls_pass_with_their_metadata_and_come_back_with_their_status() -> None:
    async def ask() -> None:
        behind, port = pick_free_ports("127.0.0.1", 2)
        server = grpc_server(OPEN_ACCESS, _Echo(), host="127.0.0.1", port=behind)
        relay = Relay(upstream(1, behind), listens_at="127.0.0.1")
        front = grpc_server(OPEN_ACCESS, relay, host="127.0.0.1", port=port)
        await server.start()
        await front.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            token = (("authorization", "t"), ("tenant-id", "i"))
            assert await channel.unary_unary("/s/One")(b"x", metadata=token) == b"/s/One t i x"
            call = channel.stream_stream("/s/Many")(iter([b"a", b"b", b"bad"]), metadata=token)
            assert [await call.read(), await call.read()] == [b"/s/Many t i a", b"/s/Many t i b"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert (caught.value.code(), caught.value.details()) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "no",
            )
        await front.stop(None)
        await server.stop(None)
        await relay.aclose()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("[]", [], "error: the relay cannot serve: {path} is not a JSON object"),
        (
            '{"host": "n1", "uses_tls": false}',
            [],
            "is not the endpoint.json of a deploy job: no ",
        ),
        (
            '{"host": 5, "uses_tls": false, "http": 1, "grpc": 1, "metrics": 1, "openai": null, '
            '"job_id": "7"}',
            [],
            "is not the endpoint.json of a deploy job: its host is 5.",
        ),
        (
            '{"host": "x", "uses_tls": false, "http": "1", "grpc": 1, "metrics": 1, '
            '"openai": null, "job_id": "7"}',
            [],
            "is not the endpoint.json of a deploy job: its http is 1.",
        ),
        ("{}", ["--grpc-port", "65536"], "65536 is not a port, which are 0 to 65535"),
    ],
)
def test_wrong_files_and_ports_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, options: list[str], said: str
) -> None:
    path = tmp_path / "endpoint.json"
    path.write_text(content)
    with pytest.raises(SystemExit) if options else contextlib.nullcontext():
        assert main([str(path), *options]) == 1
    assert said.format(path=path) in capsys.readouterr().err
