"""KServe's protocol over HTTP: checks each request and answers it with the served models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web

from inference.backend.metrics import vllm_line
from inference.backend.requests import Outputs, Responses
from inference.front import rules
from inference.front.context import FrontContext
from inference.front.guard import RejectedError, headers_of, refusal
from inference.front.http_server import event_stream
from inference.front.rules import InferError
from inference.front.sessions import Namespace
from inference.front.validation import (
    MAX_HEAD_BYTES,
    SentRequest,
    check_index,
    length_of_json,
    read_generate,
    read_head,
    read_infer,
)
from inference.host.describe import (
    api_description,
    config_json,
    find_model,
    index_json,
    model_metadata,
    server_metadata,
    statistics_json,
)
from inference.host.hosted import Hosted
from inference.host.messages import (
    check_parameters,
    generated,
    json_answer,
    parts_of,
    with_bytes,
)
from inference.host.models import HostedModel
from inference.host.statistics import triton_metrics
from inference.host.tensors import compact_json

_METRICS_PATH = "/metrics"
_JSON_LENGTH = "Inference-Header-Content-Length"
_JSON, _BINARY = "application/json", "application/octet-stream"
_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)
_NO_STREAMS = "HTTP end point doesn't support models with decoupled transaction policy"
_MIN_COMPRESSED_BYTES = 1 << 10  # smaller JSON answers are not compressed
_MAX_INLINE_ELEMENTS = 1 << 12  # elements that take a few milliseconds to encode
_T = TypeVar("_T")


class KServeHttp:
    """Answers HTTP requests."""

    def __init__(self, context: FrontContext[Hosted]) -> None:
        self._context = context
        self._guard = context.guard

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            parts = rules.parts_of_path(request.method, request.path)
            owner = self._admit(request, is_open=parts is not None)
            assert parts is not None, "others are refused"
            if request.path == rules.READY_PATH and not self._context.is_ready():
                reason = "the server is starting, or a model does not answer its owner"
                raise RejectedError(reason, HTTPStatus.SERVICE_UNAVAILABLE)
            if request.method != "POST":
                return _get(self._context.current, request.path, *parts)
            with self._context.use() as hosted:
                body = await self._guard.body(request)
                return await self._post(hosted, request, body, owner, *parts)
        except RejectedError as error:
            return refusal(error, {"error": str(error)})

    async def answer_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request to the metrics port."""
        try:
            is_open = request.method in ("GET", "HEAD") and request.path == _METRICS_PATH
            self._admit(request, is_open=is_open)
            with self._context.use() as hosted:
                statistics = [model.statistics for model in hosted.all_versions()]
                lines = [*triton_metrics(statistics), *await hosted.metrics(), ""]
            if (names := request.query.get("names")) is not None:
                if names != "vllm":
                    raise RejectedError(f"names={names[:40]} is unknown; names=vllm is known")
                lines = [*map(vllm_line, lines)]
            return web.Response(text="\n".join(lines))
        except RejectedError as error:
            return refusal(error, {"error": str(error)})

    def _admit(self, request: web.BaseRequest, *, is_open: bool) -> str | None:
        """Check a request without its body; return the owner of its token. Raises RejectedError."""
        self._guard.check_page(request.headers)
        owner = None
        if not rules.is_health(request.path):
            owner = self._guard.token_owner(request.headers.get("Authorization"))
        # Percent-encoded paths are refused: each path has one spelling.
        if not is_open or request.raw_path.partition("?")[0] != request.path:
            raise RejectedError(rules.CLOSED, HTTPStatus.FORBIDDEN)
        return owner

    def _sessions(self, request: web.BaseRequest, owner: str | None) -> Namespace:
        """Return the namespace of the client's sessions."""
        ends = (request.get_extra_info(name) or ("", 0) for name in ("peername", "sockname"))
        (address, port, *_), (_, own_port, *_) = ends
        return self._context.sessions.namespace(owner, address, port, own_port)

    async def _post(
        self,
        hosted: Hosted,
        request: web.BaseRequest,
        body: bytes,
        owner: str | None,
        model: str,
        version: str,
        action: str,
    ) -> web.StreamResponse:
        """Answer a POST request; `owner` is the owner of its token. Raises RejectedError."""
        if not model:
            if body:
                await self._context.workers.check(check_index, body, size_bytes=len(body))
            return _json(index_json(hosted.models))
        found = find_model(hosted.models, model, version)
        if action == "infer":
            return await self._infer(found, request, body, owner)
        streams = action == "generate_stream"
        return await self._generate(found, request, body, owner, streams=streams)

    async def _infer(
        self, model: HostedModel, request: web.BaseRequest, body: bytes, owner: str | None
    ) -> web.StreamResponse:
        length = _json_length(request, body)
        data = body[:length]
        read = read_head if length < min(len(body), MAX_HEAD_BYTES) else read_infer
        sent = await self._context.workers.check(read, data, len(body), size_bytes=length)
        if model.decoupled:
            raise InferError(_NO_STREAMS, "UNIMPLEMENTED")
        parts = parts_of(sent, memoryview(body)[length:])
        asked = with_bytes(model, sent, parts, lambda: self._sessions(request, owner))
        outputs = await model.answer(asked)
        sent.set_matched(model)
        answer, raw = await _encoded(json_answer, model, sent, outputs)
        response = web.Response(
            body=b"".join((answer, *raw)), content_type=_BINARY if raw else _JSON
        )
        if raw:
            response.headers[_JSON_LENGTH] = str(len(answer))
        if raw or len(answer) > _MIN_COMPRESSED_BYTES:
            response.enable_compression()  # if the client accepts it
        return response

    async def _generate(
        self,
        model: HostedModel,
        request: web.BaseRequest,
        body: bytes,
        owner: str | None,
        *,
        streams: bool,
    ) -> web.StreamResponse:
        sent = await self._context.workers.check(
            read_generate, body, model.forms, size_bytes=len(body)
        )
        check_parameters(model, sent)
        asked = with_bytes(model, sent, (), lambda: self._sessions(request, owner))
        if not streams:
            if model.decoupled:
                raise InferError(_ONE_RESPONSE)
            answer = await _encoded(generated, model, sent, await model.answer(asked))
            return web.Response(body=answer, content_type=_JSON)
        async with contextlib.aclosing(model.infer(asked)) as responses:
            return await _stream(request, responses, partial(generated, model, sent))


def _get(hosted: Hosted, path: str, model: str, version: str, action: str) -> web.StreamResponse:
    """Answer a GET request. Raises RejectedError."""
    if path in (rules.LIVE_PATH, rules.READY_PATH):
        return web.Response(content_type="text/plain")
    if path == rules.OPENAPI_PATH:
        return _json(api_description())
    if path == rules.STATS_PATH or action == "stats":
        return _json(statistics_json(hosted.models, model, version))
    if not model:
        return _json(server_metadata())
    if action == "ready":
        if not hosted.serves(model, version):
            raise RejectedError("Model version not ready")
        return web.Response(content_type="text/plain")
    found = find_model(hosted.models, model, version)
    return _json(config_json(found) if action == "config" else model_metadata(found))


def _json_length(request: web.BaseRequest, body: bytes) -> int:
    """Return the length of the JSON in a body. Raises RejectedError."""
    lengths = request.headers.getall(_JSON_LENGTH, [])
    if len(lengths) > 1:
        raise RejectedError(f"{_JSON_LENGTH} is given twice")
    return length_of_json(lengths[0] if lengths else None, len(body))


async def _encoded(
    write: Callable[[HostedModel, SentRequest, Outputs], _T],
    model: HostedModel,
    sent: SentRequest,
    outputs: Outputs,
) -> _T:
    """Encode outputs, in a thread if they have many elements."""
    if sum(value.size for value in outputs.values()) > _MAX_INLINE_ELEMENTS:
        return await asyncio.to_thread(write, model, sent, outputs)
    return write(model, sent, outputs)


async def _stream(
    request: web.BaseRequest, responses: Responses, encoded: Callable[[Outputs], bytes]
) -> web.StreamResponse:
    """Send the non-empty responses as events; an error before the first sets the HTTP status."""
    response = event_stream(request)
    last = b""
    try:
        async for outputs, _ in responses:
            if not outputs:
                continue
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: " + encoded(outputs) + b"\n\n")
    except InferError as error:
        if not response.prepared:
            response.set_status(error.status)
            response.headers.update(headers_of(error))
        last = b"data: " + compact_json({"error": str(error)}) + b"\n\n"
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof(last)
    return response


def _json(value: Any) -> web.Response:
    return web.Response(body=compact_json(value), content_type=_JSON)
