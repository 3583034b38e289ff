"""KServe over HTTP: admit a request, and pass it on to tritonserver where that is the host."""

import asyncio
import json
import logging
import re
import resource
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError
from yarl import URL

from inference.front import rules
from inference.front.access import Access
from inference.front.guard import IDLE_S, RejectedError, refusal
from inference.front.link import LONGEST_REQUEST_S
from inference.front.sessions import Namespace
from inference.front.strict_json import parse_json
from inference.front.tracing import traced
from inference.front.upstream import FrontContext, Upstream
from inference.front.validation import check_generate, check_index, check_infer, length_of_json

# A request that is not HTTP or cannot be decoded, and a client that has left before its end.
_CLIENTS_ERRORS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
_T = TypeVar("_T")
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_MODELS_PATH = "/v2/models/"
_METRICS_PATH = "/metrics"
_INDEX_PATH = "/v2/repository/index"
JSON_LENGTH = "Inference-Header-Content-Length"
# What the server looks at; a number that it cannot read in another header would end it.
_PASSED_ON = frozenset(
    {"accept", "content-type", "endpoint-load-metrics-format", JSON_LENGTH.lower()}
)
# Descriptors for files, ranks, workers and servers behind the front; the others are for clients.
_OWN_DESCRIPTORS, _PORTS = 512, 4
_MOST_NAMES_BYTES = 4096  # of a request that names shared memory
_ACCEPT_ENCODING = "Accept-Encoding"
_CODING = r"\s*[\w*-]+\s*(?:;\s*q=[01](?:\.[0-9]{0,3})?\s*)?"
_CODINGS = re.compile(rf"{_CODING}(?:,{_CODING})*")
_ERROR = b'{"error":'
_NOT_PASSED_BACK = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})

# Triton (2.51) stops the clock of a request when the Python backend has taken it over, long before
# the answer. With the engine's values in their place, dashboards that read these metrics are right.
_ENGINE = re.compile(
    r"^slipway_request_(?P<which>duration|queue)_seconds_sum\{"
    r'(?:[^}]*,)?model="(?P<model>[^"]+)"[^}]*\} (?P<value>\S+)$',
    re.MULTILINE,
)
_TRITON = re.compile(
    r"^(?P<name>nv_inference_(?P<which>request|queue|compute_infer)_duration_us"
    r'\{(?:[^}]*,)?model="(?P<model>[^"]+)"[^}]*\}) \S+$',
    re.MULTILINE,
)


class KServeHttp(ABC, Generic[_T]):
    """Admits requests of HTTP, which a subclass answers."""

    def __init__(self, context: FrontContext[_T]) -> None:
        self._context = context
        self._guard = context.guard

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            is_open = rules.passes_http(
                request.method, request.path, shared_memory=self._context.shared_memory
            )
            owner = self._admitted(request, is_open=is_open)
            if request.path == rules.READY_PATH and not self._context.is_ready():
                reason = "the server is starting, or a model does not answer its owner"
                raise RejectedError(reason, HTTPStatus.SERVICE_UNAVAILABLE)
            body = None if request.method == "GET" else await self._guard.body(request)
            with self._context.use() as upstream:
                if body is None:
                    return await self._got(upstream, request)
                return await self._posted(upstream, request, body, owner)
        except RejectedError as error:
            return refusal(error, {"error": str(error)})

    async def answer_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request for metrics."""
        try:
            is_open = request.method == "GET" and request.path == _METRICS_PATH
            self._admitted(request, is_open=is_open)
            with self._context.use() as upstream:
                answer = await self._metrics(upstream, request)
            if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
                text = answer.body.decode(errors="replace")
                answer.body = with_engine_durations(text).encode()
            return answer
        except RejectedError as error:
            return refusal(error, {"error": str(error)})

    @abstractmethod
    async def _got(self, upstream: _T, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request without a body."""

    @abstractmethod
    async def _posted(
        self, upstream: _T, request: web.BaseRequest, body: bytes, owner: str | None
    ) -> web.StreamResponse:
        """Answer a request with a body, of the holder of a token. Raises RejectedError."""

    @abstractmethod
    async def _metrics(self, upstream: _T, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request for metrics."""

    def _admitted(self, request: web.BaseRequest, *, is_open: bool) -> str | None:
        """Return the holder of a request's token; refuse it where its body does not matter."""
        self._guard.check_page(request.headers)
        owner = None
        if not rules.is_health(request.path):
            owner = self._guard.token_owner(request.headers.get("Authorization"))
        # The path must be relayed as it was checked: no character may have a second spelling.
        if not is_open or request.raw_path.partition("?")[0] != request.path:
            raise RejectedError(rules.CLOSED, HTTPStatus.FORBIDDEN)
        return owner

    def _sessions(self, request: web.BaseRequest, owner: str | None) -> Namespace:
        """Return the sessions of a client."""
        ends = (request.get_extra_info(name) or ("", 0) for name in ("peername", "sockname"))
        (address, port, *_), (_, own_port, *_) = ends
        return self._context.sessions.namespace(owner, address, port, own_port)


def json_length(request: web.BaseRequest, body: bytes) -> int:
    """Return how much of a body is JSON. Raises RejectedError."""
    lengths = request.headers.getall(JSON_LENGTH, [])
    if len(lengths) > 1:
        raise RejectedError(f"{JSON_LENGTH} is given twice")
    return length_of_json(lengths[0] if lengths else None, len(body))


class PassingHttp(KServeHttp[Upstream]):
    """Passes requests of HTTP on to a server that listens on Unix sockets."""

    async def _got(self, upstream: Upstream, request: web.BaseRequest) -> web.StreamResponse:
        return await _passed_on(upstream.http, request, None, {})

    async def _metrics(self, upstream: Upstream, request: web.BaseRequest) -> web.StreamResponse:
        return await _passed_on(upstream.metrics, request, None, {})

    async def _posted(
        self, upstream: Upstream, request: web.BaseRequest, body: bytes, owner: str | None
    ) -> web.StreamResponse:
        headers = {
            name: text for name, text in request.headers.items() if name.lower() in _PASSED_ON
        }
        workers = self._context.workers
        model = upstream.models.get(request.path.removeprefix(_MODELS_PATH).partition("/")[0])
        if request.path.endswith("/infer"):
            length = json_length(request, body)
            data, rest = body[:length], body[length:]
            sessions = self._sessions(request, owner)
            arguments = (data, len(body), self._context.limit, model, sessions)
            checked = await workers.check(check_infer, *arguments, size_bytes=len(data))
            if checked != data:  # it has a session
                body = checked + rest
                if JSON_LENGTH in request.headers:
                    headers = {n: e for n, e in headers.items() if n.lower() != JSON_LENGTH.lower()}
                    headers[JSON_LENGTH] = str(len(checked))
        elif request.path.endswith(("/generate", "/generate_stream")):
            await workers.check(check_generate, body, model, size_bytes=len(body))
        elif request.path.endswith("/register"):
            if len(body) > _MOST_NAMES_BYTES:
                reason = f"the request has {len(body)} bytes; {_MOST_NAMES_BYTES} at most"
                raise RejectedError(reason)
            rules.check_shared_memory(parse_json(body).get("key"))
        elif body:
            await workers.check(check_index, body, size_bytes=len(body))
        return await _passed_on(upstream.http, request, body, headers)


async def http_server(
    access: Access, handler: Handler, *, host: str, port: int
) -> web.ServerRunner:
    """Return a server of HTTP that listens. Raises OSError if the port is unavailable."""
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    handler = traced(handler, access.otlp_collector)
    server = BoundServer(handler, most=most_connections())
    runner = web.ServerRunner(server, shutdown_timeout=LONGEST_REQUEST_S)
    await runner.setup()
    await web.TCPSite(runner, host, port, ssl_context=access.ssl_context()).start()
    return runner


class BoundServer(web.Server):
    """A server of HTTP with at most so many connections.

    A further one takes the place of another: of those that have never sent a whole request the one
    that came first, or else of those between two requests the one that waits longest. Strangers
    who send nothing, or half a request, therefore displace each other.
    """

    def __init__(self, handler: Handler, *, most: int) -> None:
        # Bodies are decompressed by the guard, once the client may ask.
        super().__init__(
            partial(self._answered, handler),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            auto_decompress=False,
        )
        self._most = most
        self._open: set[Any] = set()
        self._new: dict[Any, asyncio.Transport] = {}
        self._idle: dict[Any, asyncio.Transport] = {}

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Take a connection in (called by aiohttp)."""
        super().connection_made(handler, transport)
        self._new[handler] = transport
        self._open.add(handler)
        if len(self._open) > self._most:
            waiting = self._new if len(self._new) > 1 else self._idle or self._new
            displaced = next(iter(waiting))
            waiting.pop(displaced).abort()
            self._open.remove(displaced)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Forget a connection (called by aiohttp)."""
        self._forget(handler)
        self._open.discard(handler)
        super().connection_lost(handler, exc)

    def _forget(self, handler: Any) -> None:
        self._new.pop(handler, None)
        self._idle.pop(handler, None)

    async def _answered(self, handler: Handler, request: web.BaseRequest) -> web.StreamResponse:
        protocol, transport = request.protocol, request.transport
        request.content.on_eof(partial(self._forget, protocol))
        try:
            return await handler(request)
        finally:
            self._forget(protocol)
            if transport is not None and not transport.is_closing():
                self._idle[protocol] = transport


def most_connections() -> int:
    """Return the most connections of one of this process's ports.

    All of them together leave a part of the descriptors that the process may have to its own work.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    own = min(limit // 3, _OWN_DESCRIPTORS)
    return max((limit - own) // _PORTS, 1)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for a client's error, of which aiohttp would log a traceback each time."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_ERRORS))


async def _passed_on(
    session: aiohttp.ClientSession,
    request: web.BaseRequest,
    body: bytes | None,
    headers: dict[str, str],
) -> web.StreamResponse:
    if _CODINGS.fullmatch(codings := request.headers.get(_ACCEPT_ENCODING, "")):
        headers = {**headers, _ACCEPT_ENCODING: codings}
    url = URL(f"http://tritonserver{request.raw_path}", encoded=True)
    try:
        async with session.request(
            request.method, url, data=body, headers=headers, allow_redirects=False
        ) as answer:
            return await _passed_back(request, answer)
    except aiohttp.ClientError:
        raise RejectedError(rules.UNREACHABLE, HTTPStatus.SERVICE_UNAVAILABLE) from None


async def _passed_back(
    request: web.BaseRequest, answer: aiohttp.ClientResponse
) -> web.StreamResponse:
    headers = {
        name: text for name, text in answer.headers.items() if name.lower() not in _NOT_PASSED_BACK
    }
    if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
        return await _streamed(request, answer, headers)
    data, status = await answer.read(), answer.status
    if request.path == _INDEX_PATH and status == HTTPStatus.OK:
        index = json.loads(data)
        models = [{key: each[key] for key in each if key != "reason"} for each in index]
        data = json.dumps(models).encode()
    elif status != HTTPStatus.OK or rules.has_internal_names(data):
        data = rules.without_internal_names(data.decode(errors="replace")).encode()
    if status == HTTPStatus.OK and data.startswith(_ERROR):  # of `generate` where a model streams
        status = HTTPStatus.BAD_REQUEST
    return web.Response(status=status, headers=headers, body=data)


async def _streamed(
    request: web.BaseRequest, answer: aiohttp.ClientResponse, headers: dict[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.enable_chunked_encoding()
    await response.prepare(request)
    try:
        async for part in answer.content.iter_any():
            await response.write(part)
    except aiohttp.ClientPayloadError:  # the server has ended, and a stream has no second status
        error = json.dumps({"error": rules.UNREACHABLE}).encode()
        await response.write(b"data: " + error + b"\n\n")
    await response.write_eof()
    return response


def with_engine_durations(metrics: str) -> str:
    """Return the text of `/metrics` with the durations that the engine has measured.

    A request's time in the queue counts as queue, the rest as inference. Models without an engine
    are left as they are.
    """
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for each in _ENGINE.finditer(metrics):  # an engine for each instance of a model
        sums[each["model"], each["which"]] += float(each["value"])

    def replaced(line: re.Match[str]) -> str:
        request_s = sums.get((line["model"], "duration"))
        if request_s is None:
            return line[0]
        queue_s = sums.get((line["model"], "queue"), 0.0)
        seconds = {"request": request_s, "queue": queue_s, "compute_infer": request_s - queue_s}
        return f"{line['name']} {round(max(seconds[line['which']], 0.0) * 1e6)}"

    return _TRITON.sub(replaced, metrics)
