"""HTTP of the gateway: check a request, pass it on to tritonserver, pass back the answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from inference.gateway.access import Access
from inference.gateway.check_process import CheckProcess
from inference.gateway.declared_inputs import DeclaredInputs
from inference.gateway.durations import with_engine_durations
from inference.gateway.rules import (
    CLOSED,
    READY_PATH,
    UNREACHABLE,
    Rules,
    browser_problem,
    has_internal_names,
    is_health,
    shared_memory_problem,
    without_internal_names,
)
from inference.gateway.sockets import ServerSockets
from inference.gateway.validation import (
    MalformedError,
    check_generate,
    check_infer,
    check_json,
    length_of_json,
    parse_json,
)

BODY_TIMEOUT_S = 120.0  # for a request's body to arrive
_MODELS_PATH = "/v2/models/"
_METRICS_PATH = "/metrics"
_INDEX_PATH = "/v2/repository/index"
_JSON_LENGTH = "Inference-Header-Content-Length"
# What the server looks at; a number that it cannot read in another header would end it.
_PASSED_ON = frozenset(
    {"accept", "content-type", "endpoint-load-metrics-format", _JSON_LENGTH.lower()}
)
_MOST_NAMES_BYTES = 4096  # of a request that names shared memory
_ACCEPT_ENCODING = "Accept-Encoding"
_CODING = r"\s*[\w*-]+\s*(?:;\s*q=[01](?:\.[0-9]{0,3})?\s*)?"
_CODINGS = re.compile(rf"{_CODING}(?:,{_CODING})*")
_ERROR = b'{"error":'
_NOT_PASSED_BACK = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


class _RefusedError(Exception):
    """A request that is not passed on."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpRelay:
    """Answers requests of HTTP from a server that listens on Unix sockets.

    Args:
        access: The limits.
        rules: The requests that pass.
        sockets: Sockets of tritonserver.
        checks: Process that checks large requests.
        models: Inputs of the models, by name.
        listens_at: Address that clients reach.
    """

    def __init__(
        self,
        access: Access,
        rules: Rules,
        *,
        sockets: ServerSockets,
        checks: CheckProcess,
        models: Mapping[str, DeclaredInputs],
        listens_at: str,
    ) -> None:
        self._checks = checks
        self._models = models
        self._limit = access.max_request_bytes
        self._max_request_mb = access.max_request_mb
        self._rules = rules
        self._listens_at = listens_at
        self._unready = sockets.unready
        self._session = _session(sockets.http)
        self._metrics_session = _session(sockets.metrics)

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._session.close()
        await self._metrics_session.close()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            self._check(request, is_open=self._rules.passes_http(request.method, request.path))
            if request.path == READY_PATH and self._unready.exists():
                reason = "a model has not answered the server's owner"
                raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, reason)
            body = await self._body(request)
            if body is not None:
                body = await self._checked(request, body)
            return await _passed_on(self._session, request, body)
        except MalformedError as error:
            return _refusal(HTTPStatus.BAD_REQUEST, str(error))
        except _RefusedError as error:
            return _refusal(error.status, str(error))

    async def answer_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request for metrics."""
        try:
            is_open = request.method == "GET" and request.path == _METRICS_PATH
            self._check(request, is_open=is_open)
            answer = await _passed_on(self._metrics_session, request, None)
            return _with_durations(answer)
        except _RefusedError as error:
            return _refusal(error.status, str(error))

    def _check(self, request: web.BaseRequest, *, is_open: bool) -> None:
        """Raise _RefusedError for a request that is refused regardless of its body."""
        if problem := browser_problem(request.headers, listens_at=self._listens_at):
            raise _RefusedError(HTTPStatus.FORBIDDEN, problem)
        if not is_health(request.path) and not self._rules.is_authorized(
            request.headers.get("Authorization")
        ):
            raise _RefusedError(
                HTTPStatus.UNAUTHORIZED, "this server requires `Authorization: Bearer <token>`"
            )
        # The path must be relayed as it was checked: no character may have a second spelling.
        if not is_open or request.raw_path.partition("?")[0] != request.path:
            raise _RefusedError(HTTPStatus.FORBIDDEN, CLOSED)

    async def _body(self, request: web.BaseRequest) -> bytes | None:
        """Return the body, decompressed; raise _RefusedError if it is too large."""
        if request.method == "GET":
            return None
        if (request.content_length or 0) > self._limit:
            raise self._too_large()
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()

        async def read() -> None:
            async for part in request.content.iter_any():
                if len(body) + len(part) > self._limit:
                    raise self._too_large()
                body.extend(part)

        try:
            await asyncio.wait_for(read(), BODY_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            reason = f"the body has not arrived within {BODY_TIMEOUT_S:g} s"
            raise _RefusedError(HTTPStatus.REQUEST_TIMEOUT, reason) from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "the body cannot be decoded") from error
        return bytes(body)

    async def _checked(self, request: web.BaseRequest, body: bytes) -> bytes:
        """Return a body of a form that the server reads. Raises MalformedError, _RefusedError."""
        model = self._models.get(request.path.removeprefix(_MODELS_PATH).partition("/")[0])
        if request.path.endswith("/infer"):
            lengths = request.headers.getall(_JSON_LENGTH, [])
            if len(lengths) > 1:
                raise MalformedError(f"{_JSON_LENGTH} is given twice")
            data = body[: length_of_json(lengths[0] if lengths else None, len(body))]
            await self._checks.run(
                check_infer, data, size_bytes=len(body), limit=self._limit, model=model
            )
        elif request.path.endswith(("/generate", "/generate_stream")):
            await self._checks.run(check_generate, body, model=model)
        elif request.path.endswith("/register"):
            return _own_shared_memory(body)
        elif body:
            await self._checks.run(check_json, body)
        return body

    def _too_large(self) -> _RefusedError:
        return _RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request is larger than {self._max_request_mb} MiB; send fewer rows, or "
            "raise deploy.max_request_mb",
        )


def _session(socket: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket), limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _own_shared_memory(body: bytes) -> bytes:
    """Return a request to register shared memory.

    Raises:
        MalformedError: It is not JSON, or is too long.
        _RefusedError: The memory is not a client's own.
    """
    if len(body) > _MOST_NAMES_BYTES:
        raise MalformedError(f"the request has {len(body)} bytes; {_MOST_NAMES_BYTES} at most")
    if problem := shared_memory_problem(parse_json(body).get("key")):
        raise _RefusedError(HTTPStatus.FORBIDDEN, problem)
    return body


async def _passed_on(
    session: aiohttp.ClientSession, request: web.BaseRequest, body: bytes | None
) -> web.StreamResponse:
    headers = {name: text for name, text in request.headers.items() if name.lower() in _PASSED_ON}
    if _CODINGS.fullmatch(codings := request.headers.get(_ACCEPT_ENCODING, "")):
        headers[_ACCEPT_ENCODING] = codings
    url = URL(f"http://tritonserver{request.raw_path}", encoded=True)
    try:
        async with session.request(
            request.method, url, data=body, headers=headers, allow_redirects=False
        ) as answer:
            return await _passed_back(request, answer)
    except aiohttp.ClientError:
        raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, UNREACHABLE) from None


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
        data = _without_reasons(data)
    elif has_internal_names(data):
        data = without_internal_names(data.decode(errors="replace")).encode()
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
        await response.write(b"data: " + json.dumps({"error": UNREACHABLE}).encode() + b"\n\n")
    await response.write_eof()
    return response


def _without_reasons(index: bytes) -> bytes:
    """Return the list of models without the server's reasons for failures."""
    models = [{key: each[key] for key in each if key != "reason"} for each in json.loads(index)]
    return json.dumps(models).encode()


def _with_durations(answer: web.StreamResponse) -> web.StreamResponse:
    if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
        answer.body = with_engine_durations(answer.body.decode(errors="replace")).encode()
    return answer


def _refusal(status: HTTPStatus, reason: str) -> web.Response:
    response = web.json_response({"error": reason}, status=status)
    if status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status != HTTPStatus.SERVICE_UNAVAILABLE:
        response.force_close()  # what is left of the body is not read
    return response
