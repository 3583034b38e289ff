"""`python -m inference.front.relay deploy/endpoint.json`: one address for a server that moves.

It listens where clients find it for good, such as on a login node, and passes every request on to
the server whose address the file holds. When another job's server takes over (`deploy.uptime`),
further requests go there; those under way end where they began, and no connection is closed. Who
may ask what is decided by the server's own front.
"""

import argparse
import asyncio
import contextlib
import re
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from aiohttp import web
from yarl import URL

from export_scripts.values import PORT
from inference.front.access import MOST_REQUEST_MB, Access, published_endpoint
from inference.front.context import Exchangeable
from inference.front.grpc_server import CHANNEL_OPTIONS, grpc_server
from inference.front.guard import Guard, RejectedError, ask_for_body, refusal
from inference.front.http_server import http_server
from inference.front.link import LONGEST_REQUEST_S, Stop
from inference.system.ports import DEFAULT_PORTS, host_and_port

_POLL_S = 0.2
# Headers of one connection (RFC 9110, 7.6.1), and the host, which is another one behind the relay.
_OF_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding",
     "upgrade", "host"}
)  # fmt: skip
# Metadata that gRPC sets itself.
_OF_CALL = re.compile(r"grpc-.*|:.*|user-agent|content-type|te")
_UNREACHABLE = "no server answers at the address in the endpoint file; one may be starting"


class MovingServer:
    """Connections to the server at an address, as in endpoint.json.

    They trust the certificate authorities in `ca`, PEM; None stands for those of this machine.
    """

    def __init__(self, endpoint: dict[str, Any], ca: Path | None) -> None:
        self.endpoint = endpoint
        self._scheme = "https" if (tls := endpoint["uses_tls"]) else "http"
        context = ssl.create_default_context(cafile=ca) if tls else True
        # Requests of any length and duration pass as they are.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        target = self._address("grpc")
        if tls:
            trusted = grpc.ssl_channel_credentials(None if ca is None else ca.read_bytes())
            self.channel = grpc.aio.secure_channel(target, trusted, options=CHANNEL_OPTIONS)
        else:
            self.channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)

    def url(self, port_name: str, raw_path: str) -> URL:
        """Return where a request for one of the server's ports goes."""
        return URL(f"{self._scheme}://{self._address(port_name)}{raw_path}", encoded=True)

    def _address(self, port_name: str) -> str:
        return host_and_port(self.endpoint["host"], self.endpoint[port_name])

    async def close(self) -> None:
        """Close the connections."""
        await self.session.close()
        await self.channel.close()


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]  # the library has no types
    """Passes requests of HTTP and calls of gRPC on to the server of the moment.

    Clients reach it at the address `listens_at`.
    """

    def __init__(self, upstream: MovingServer, *, listens_at: str) -> None:
        self._upstream = Exchangeable(upstream)
        # Web pages that name their origin meet the server's own rules.
        self._guard = Guard(Access(), listens_at=listens_at, origins=["*"])

    async def exchange(self, upstream: MovingServer) -> None:
        """Pass requests on to another server; return once the former has answered the last."""
        await (await self._upstream.exchange(upstream)).close()

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._upstream.current.close()

    async def answer(self, port_name: str, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of HTTP that has come to one of the ports."""
        with self._upstream.use() as upstream:
            try:
                self._guard.check_page(request.headers)
                if not request.raw_path.startswith("/"):  # it would name the host to ask
                    raise RejectedError("the target of a request is a path, such as /v2")
                async with upstream.session.request(
                    request.method,
                    upstream.url(port_name, request.raw_path),
                    data=_body(request) if request.body_exists else None,
                    headers=_passed_on(request.headers),
                    skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                    allow_redirects=False,
                ) as answer:
                    return await _passed_back(request, answer)
            except aiohttp.ClientError:
                error = RejectedError(_UNREACHABLE, HTTPStatus.SERVICE_UNAVAILABLE)
            except RejectedError as refused:
                error = refused
            return refusal(error, {"error": str(error)})

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call; on the wire, one message is a stream of one."""
        return grpc.stream_stream_rpc_method_handler(partial(self._call, details.method))

    async def _call(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        metadata = [
            (name, value)
            for name, value in context.invocation_metadata()
            if not _OF_CALL.fullmatch(name)
        ]
        with self._upstream.use() as upstream:
            call = upstream.channel.stream_stream(method)(
                requests, timeout=context.time_remaining(), metadata=metadata
            )
            try:
                async for reply in call:
                    yield reply
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()  # of no effect once it has ended


async def _body(request: web.BaseRequest) -> AsyncIterator[bytes]:
    await ask_for_body(request)  # once the server asks for it, too
    async for part in request.content.iter_any():
        yield part


def _passed_on(headers: Any) -> list[tuple[str, str]]:
    return [(name, text) for name, text in headers.items() if name.lower() not in _OF_CONNECTION]


async def _passed_back(
    request: web.BaseRequest, answer: aiohttp.ClientResponse
) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    response.headers.extend(_passed_on(answer.headers))
    await response.prepare(request)
    try:
        async for part in answer.content.iter_any():
            await response.write(part)
    except aiohttp.ClientError:  # the client must not take it for whole
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def _published(path: Path) -> dict[str, Any] | None:
    """Return the published address; None while there is none. Raises ValueError."""
    with contextlib.suppress(OSError):
        # Opening a file makes NFS look whether another has taken its name.
        return published_endpoint(path, *DEFAULT_PORTS, "job_id")
    return None


async def _serve(arguments: argparse.Namespace, access: Access) -> None:
    stop = Stop()
    path, host = arguments.endpoint, arguments.host
    asked = asyncio.ensure_future(stop.stopped.wait())
    while (endpoint := _published(path)) is None and not asked.done():
        await asyncio.wait([asked], timeout=_POLL_S)
    if endpoint is None:
        return
    relay = Relay(MovingServer(endpoint, arguments.ca), listens_at=host)
    ports = {name: getattr(arguments, f"{name}_port") for name in ("http", "metrics", "openai")}
    async with contextlib.aclosing(relay):
        runners = [
            await http_server(access, partial(relay.answer, name), host=host, port=port)
            for name, port in ports.items()
            if endpoint[name]
        ]
        server = grpc_server(access, relay, host=host, port=arguments.grpc_port)
        await server.start()
        former: list[asyncio.Future[None]] = []
        _say(endpoint)
        while not asked.done():
            await asyncio.wait([asked], timeout=_POLL_S)
            found = None
            with contextlib.suppress(ValueError):  # while the file holds something else
                found = _published(path)
            if found is not None and found != endpoint:
                endpoint, successor = found, MovingServer(found, arguments.ca)
                former.append(asyncio.ensure_future(relay.exchange(successor)))
                _say(endpoint)
        ends = [runner.cleanup() for runner in runners]
        await stop.finish(server.stop(LONGEST_REQUEST_S), *ends)
    if former:
        await asyncio.wait(former, timeout=1)  # their last requests have been answered


def _say(endpoint: dict[str, Any]) -> None:
    sys.stderr.write(f"passing requests on to job {endpoint['job_id']} on {endpoint['host']}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Pass requests on until a signal; return 0, 1 if that is impossible or 2 for wrong options."""
    parser = argparse.ArgumentParser(prog="python -m inference.front.relay", description=__doc__)
    add = parser.add_argument
    add("endpoint", type=Path, metavar="ENDPOINT.json", help="published address of the server")
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    for name, port in DEFAULT_PORTS.items():
        add(f"--{name}-port", type=_port, default=port, help="(%(default)s)")
    add("--tls-cert", type=Path, help="certificate chain of the relay, PEM")
    add("--tls-key", type=Path, help="its key, PEM, of mode 600")
    add("--ca", type=Path, help="certificates to trust of a server with TLS, PEM")
    arguments = parser.parse_args(argv)
    # The server has a limit of its own.
    access = Access(MOST_REQUEST_MB, tls_cert=arguments.tls_cert, tls_key=arguments.tls_key)
    if problems := access.problems(prefix="--", joiner="-"):
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
        return 2
    try:
        asyncio.run(_serve(arguments, access))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: the relay cannot serve: {error}\n")
        return 1
    return 0


def _port(text: str) -> int:
    if not 0 <= (number := int(text)) <= PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port, which are 0 to {PORT}")
    return number


if __name__ == "__main__":
    sys.exit(main())
