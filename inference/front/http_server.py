"""An HTTP server with a limit on its connections."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http import HttpProcessingError

from inference.front.access import Access
from inference.front.guard import IDLE_S
from inference.front.link import MAX_REQUEST_S
from inference.front.request_log import REQUEST_ID, request_id, with_ids
from inference.front.tracing import tracer_of

# The request is not HTTP or cannot be decoded, or the client has disconnected.
_CLIENTS_ERRORS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_EVENTS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx then forwards each event at once
}
_FIRST_REQUEST_S, _POLL_S = 0.3, 0.01  # to wait for the request of a client that has just connected
# File descriptors kept for files, ranks, workers and the servers behind the ports.
_OWN_DESCRIPTORS, _PORTS = 512, 4


async def http_server(
    access: Access, handler: Handler, *, host: str, port: int, logs: bool = False
) -> web.ServerRunner:
    """Return a listening HTTP server; with `logs` it writes an access log.

    Raises OSError if the port is unavailable.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    handler = with_ids(handler, logs=logs, tracer=tracer_of(access.otlp_collector))
    server = BoundServer(handler, limit=max_connections())
    runner = web.ServerRunner(server, shutdown_timeout=MAX_REQUEST_S)
    await runner.setup()
    await _Port(runner, host, port, ssl_context=access.ssl_context()).start()
    return runner


def event_stream(request: web.BaseRequest) -> web.StreamResponse:
    """Return an event stream; HTTP/1.0 has no chunks, so there the connection's end marks its end.

    Proxies use HTTP/1.0 by default.
    """
    response = web.StreamResponse(headers=_EVENTS | {REQUEST_ID: request_id(request)})
    if request.version < HttpVersion11:
        response.force_close()
    return response


class _Port(web.TCPSite):
    """A port that closes without resetting connections that the kernel has already accepted."""

    async def stop(self) -> None:
        """Close the port; connections in its backlog are accepted and their requests answered."""
        loop = asyncio.get_running_loop()
        server, listening = self._runner.server, self._server
        assert isinstance(server, BoundServer)
        assert isinstance(listening, asyncio.Server)
        copies = []
        for listener in listening.sockets:
            copies.append(socket.socket(fileno=os.dup(listener.fileno())))
            loop.remove_reader(listener.fileno())
        for _ in range(2):  # lets the loop set up the connections that it has accepted
            await asyncio.sleep(0)
        waiting = [connection for copy in copies for connection in _accepted(copy)]
        await super().stop()
        for copy in copies:
            copy.close()
        for connection in waiting:
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(server, connection, ssl=self._ssl_context)
        for _ in range(round(_FIRST_REQUEST_S / _POLL_S)):
            if not server.has_new:
                break
            await asyncio.sleep(_POLL_S)


def _accepted(port: socket.socket) -> Iterator[socket.socket]:
    with contextlib.suppress(OSError):  # the backlog is empty
        while True:
            connection, _ = port.accept()
            connection.setblocking(False)
            yield connection


class BoundServer(web.Server):
    """An HTTP server with at most `limit` connections.

    A connection beyond the limit closes another: the oldest one that has never sent a whole
    request, or else the one that has been idle longest. Clients that send nothing, or half a
    request, therefore displace each other.
    """

    def __init__(self, handler: Handler, *, limit: int) -> None:
        # The guard decompresses bodies, after it has admitted the client.
        super().__init__(
            partial(self._answered, handler),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            auto_decompress=False,
        )
        self._limit = limit
        self._open: set[Any] = set()
        self._new: dict[Any, asyncio.Transport] = {}
        self._idle: dict[Any, asyncio.Transport] = {}

    @property
    def has_new(self) -> bool:
        """Whether a connection has not sent its first request yet."""
        return bool(self._new)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Register a connection (called by aiohttp)."""
        super().connection_made(handler, transport)
        self._new[handler] = transport
        self._open.add(handler)
        if len(self._open) > self._limit:
            waiting = self._new if len(self._new) > 1 else self._idle or self._new
            displaced = next(iter(waiting))
            waiting.pop(displaced).abort()
            self._open.remove(displaced)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Remove a connection (called by aiohttp)."""
        self._forget(handler)
        self._open.discard(handler)
        super().connection_lost(handler, exc)

    def _forget(self, handler: Any) -> None:
        self._new.pop(handler, None)
        self._idle.pop(handler, None)

    async def _answered(self, handler: Handler, request: web.BaseRequest) -> web.StreamResponse:
        protocol, transport = request.protocol, request.transport
        if request.content.is_eof():
            self._forget(protocol)
        else:
            request.content.on_eof(partial(self._forget, protocol))
        try:
            return await handler(request)
        finally:
            self._forget(protocol)
            if transport is not None and not transport.is_closing():
                self._idle[protocol] = transport


def max_connections() -> int:
    """Return how many connections each of this process's ports may have.

    Together they leave part of the process's file descriptors for its own work.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    own = min(limit // 3, _OWN_DESCRIPTORS)
    return max((limit - own) // _PORTS, 1)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for an error of a client, for which aiohttp would log a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_ERRORS))
