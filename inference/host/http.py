"""KServe over HTTP, answered by this process."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from inference.front.guard import RejectedError
from inference.front.kserve_http import JSON_LENGTH, KServeHttp, json_length
from inference.front.rules import READY_PATH
from inference.front.validation import check_index
from inference.host.calls import InferError, InferRequest, Outputs
from inference.host.describe import (
    config_json,
    found_model,
    index_json,
    model_metadata,
    server_metadata,
    statistics_json,
)
from inference.host.hosted import Hosted
from inference.host.messages import (
    generate_request,
    generated,
    json_answer,
    read_generate,
    read_infer,
    with_bytes,
)
from inference.host.models import HostedModel
from inference.host.statistics import triton_metrics

STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
}
_PATH = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?(?:/(?P<action>\w+))?"
)
_LIVE_PATH, _ALL_STATS = "/v2/health/live", "/v2/models/stats"
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}
_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)
_NO_STREAMS = "HTTP end point doesn't support models with decoupled transaction policy"
# Of an answer; smaller ones are not compressed.
_LEAST_COMPRESSED_BYTES = 1 << 10


class HostedHttp(KServeHttp[Hosted]):
    """Answers requests of HTTP with the models of this process."""

    async def _got(self, upstream: Hosted, request: web.BaseRequest) -> web.StreamResponse:
        path, models = request.path, upstream.models
        if path in (_LIVE_PATH, READY_PATH):
            return web.Response(content_type="text/plain")
        if path == _ALL_STATS:
            return _json(statistics_json(models))
        if (found := _PATH.fullmatch(path)) is None:
            return _json(server_metadata())
        name, version, action = found["model"], found["version"] or "", found["action"]
        with _refusals():
            if action == "ready":
                if not upstream.has(name, version):
                    raise RejectedError("Model version not ready")
                return web.Response(content_type="text/plain")
            if action == "stats":
                return _json(statistics_json(models, name, version))
            model = found_model(models, name, version)
            return _json(config_json(model) if action == "config" else model_metadata(model))

    async def _metrics(self, upstream: Hosted, _: web.BaseRequest) -> web.StreamResponse:
        statistics = [each.statistics for each in upstream.models.values()]
        lines = [*triton_metrics(statistics), *upstream.repository.registry.lines(), ""]
        return web.Response(text="\n".join(lines))

    async def _posted(
        self, upstream: Hosted, request: web.BaseRequest, body: bytes, owner: str | None
    ) -> web.StreamResponse:
        with _refusals():
            if (found := _PATH.fullmatch(request.path)) is None:
                if body:
                    await self._context.workers.check(check_index, body, size_bytes=len(body))
                return _json(index_json(upstream.models))
            model = found_model(upstream.models, found["model"], found["version"] or "")
            if found["action"] == "infer":
                return await self._inferred(upstream, model, request, body, owner)
            return await self._generated(
                upstream, model, request, body, streams=found["action"] == "generate_stream"
            )

    async def _inferred(
        self,
        upstream: Hosted,
        model: HostedModel,
        request: web.BaseRequest,
        body: bytes,
        owner: str | None,
    ) -> web.StreamResponse:
        length = json_length(request, body)
        data = body[:length]
        declared = upstream.declared.get(model.name)
        sent = await self._context.workers.check(
            read_infer, data, len(body), self._context.limit, declared, size_bytes=len(data)
        )
        if model.decoupled:
            raise InferError(_NO_STREAMS, "UNIMPLEMENTED")
        rest = memoryview(body)[length:]
        asked = with_bytes(model, sent, rest, lambda: self._sessions(request, owner))
        outputs = await _only(model, asked)
        answer, raw = json_answer(model, sent, outputs)
        headers = {JSON_LENGTH: str(len(answer))} if raw else {}
        response = web.Response(
            body=b"".join((answer, *raw)),
            headers=headers,
            content_type="application/octet-stream" if raw else "application/json",
        )
        if len(answer) > _LEAST_COMPRESSED_BYTES or raw:
            response.enable_compression()
        return response

    async def _generated(
        self,
        upstream: Hosted,
        model: HostedModel,
        request: web.BaseRequest,
        body: bytes,
        *,
        streams: bool,
    ) -> web.StreamResponse:
        values = await self._context.workers.check(
            read_generate, body, upstream.declared.get(model.name), size_bytes=len(body)
        )
        asked = generate_request(model, values)

        def encoded(outputs: Outputs) -> bytes:
            return generated(model, asked, values, outputs)

        if not streams:
            if model.decoupled:
                raise InferError(_ONE_RESPONSE)
            answer = encoded(await _only(model, asked))
            return web.Response(body=answer, content_type="application/json")
        async with contextlib.aclosing(_frames(model, asked)) as frames:
            return await _streamed(request, frames, encoded)


async def _frames(model: HostedModel, request: InferRequest) -> AsyncGenerator[Outputs, None]:
    async with contextlib.aclosing(model.infer(request)) as responses:
        async for outputs, _ in responses:
            yield outputs


async def _only(model: HostedModel, request: InferRequest) -> Outputs:
    """Return the outputs of a model that answers with one response."""
    frames = [outputs async for outputs in _frames(model, request)]
    return frames[-1]


async def _streamed(
    request: web.BaseRequest,
    frames: AsyncGenerator[Outputs, None],
    encoded: Callable[[Outputs], bytes],
) -> web.StreamResponse:
    """Send the frames as events; an error before the first decides the status of the answer."""
    response = web.StreamResponse(headers=_EVENTS)
    response.enable_chunked_encoding()
    try:
        async for outputs in frames:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: " + encoded(outputs) + b"\n\n")
    except InferError as error:
        if not response.prepared:
            response.set_status(STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR))
            await response.prepare(request)
        text = json.dumps({"error": str(error)}, separators=(",", ":")).encode()
        await response.write(b"data: " + text + b"\n\n")
    await response.write_eof()
    return response


class _refusals(contextlib.AbstractContextManager[None]):  # noqa: N801 - as contextlib's own
    """Turns an InferError within the block into the refusal of a request of HTTP."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, InferError):
            status = STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
            raise RejectedError(str(error), status) from None


def _json(value: Any) -> web.Response:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return web.Response(body=text.encode(), content_type="application/json")
