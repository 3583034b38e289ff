"""The endpoint over HTTP: routes, access, and answers as JSON or server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from inference.gateway.access import Access
from inference.gateway.rules import Rules, browser_problem
from inference.gateway.validation import MOST_JSON_MB, MalformedError, parse_json
from inference.openai.codec import Codec
from inference.openai.completion import CompletionRun, begin_chat, begin_completion
from inference.openai.errors import ApiError
from inference.openai.generation import Generator
from inference.openai.parameters import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)

BODY_TIMEOUT_S = 120.0  # for a request's body to arrive
HEALTH_PATH = "/health"
_OWNER = "slipway"
_RETRY_AFTER_S = "1"

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAIEndpoint:
    """Answers OpenAI's requests with the models of one server.

    Args:
        models: Models by the name that requests give.
        codec: Encodes and decodes their texts.
        access: Limits of its clients.
        listens_at: Address that clients reach.
        is_ready: Returns whether the server would answer a request now.
    """

    def __init__(
        self,
        models: Mapping[str, Generator],
        codec: Codec,
        access: Access,
        *,
        listens_at: str,
        is_ready: Callable[[], Awaitable[bool]],
    ) -> None:
        self._models = dict(models)
        self._codec = codec
        self._max_bytes = min(access.max_request_bytes, MOST_JSON_MB << 20)
        self._rules = Rules(tokens=access.tokens(), client_shared_memory=False)
        self._listens_at = listens_at
        self._is_ready = is_ready
        self._created = int(time.time())

    def application(self) -> web.Application:
        """Return the routes."""
        application = web.Application(middlewares=[self._guard()], client_max_size=self._max_bytes)
        application.add_routes(
            [
                web.get(HEALTH_PATH, self._health),
                web.get("/v1/models", self._list),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                # As vLLM has them; lm-evaluation-harness then needs no tokenizer of its own.
                web.get("/tokenizer_info", self._tokenizer_info),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
            ]
        )
        return application

    def _guard(self) -> Any:
        """Return the middleware that admits requests and gives errors OpenAI's form."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                self._check(request)
                return await handler(request)
            except ApiError as error:
                return _refusal(error)
            except web.HTTPRequestEntityTooLarge:
                size = self._max_bytes >> 20
                return _refusal(
                    ApiError(
                        f"the request is larger than {size} MiB; send fewer prompts",
                        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    )
                )
            except web.HTTPException as error:
                status = HTTPStatus(error.status)
                reason = f"{request.method} {request.path[:200]}: {status.phrase.lower()}"
                return _refusal(ApiError(reason, status=status, code="unknown_url"))
            except Exception:  # an error of this program, whose text is for the log alone
                logger.exception("a request failed")
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                return _refusal(ApiError("the endpoint failed; its log says why", status=status))

        return guarded

    def _check(self, request: web.Request) -> None:
        if problem := browser_problem(request.headers, listens_at=self._listens_at):
            raise ApiError(problem, status=HTTPStatus.FORBIDDEN)
        if request.path != HEALTH_PATH and not self._rules.is_authorized(
            request.headers.get("Authorization")
        ):
            raise ApiError(
                # LiteLLM knows the error by its first words.
                "Incorrect API key provided, or none: this server asks for one of its tokens, as "
                "`Authorization: Bearer <token>`",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )

    async def _health(self, request: web.Request) -> web.Response:
        del request
        if await self._is_ready():
            return web.json_response({"status": "ok"})
        status = HTTPStatus.SERVICE_UNAVAILABLE
        return web.json_response({"status": "the server is not ready"}, status=status)

    async def _list(self, request: web.Request) -> web.Response:
        del request
        data = [self._described(name) for name in self._models]
        return web.json_response({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._generator(name)
        return web.json_response(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        facts = self._models[name].facts
        about = {"id": name, "object": "model", "created": self._created, "owned_by": _OWNER}
        return about | {"max_model_len": facts.context_len}

    def _generator(self, name: str) -> Generator:
        if name in self._models:
            return self._models[name]
        served = ", ".join(self._models)
        raise ApiError(
            f"the model {name[:100]!r} does not exist; this server has {served}",
            status=HTTPStatus.NOT_FOUND,
            param="model",
            code="model_not_found",
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = parse_completion(await _body(request))
        model = self._generator(asked.model)
        course = await asyncio.to_thread(begin_completion, model, self._codec, asked)
        about = _about("cmpl", "text_completion", asked.model)
        if asked.stream:
            return await _streamed(request, course, about, include_usage=asked.include_usage)
        return await _whole(course, about)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = parse_chat(await _body(request))
        model = self._generator(asked.model)
        course = await asyncio.to_thread(begin_chat, model, self._codec, asked)
        if asked.stream:
            about = _about("chatcmpl", "chat.completion.chunk", asked.model)
            return await _streamed(request, course, about, include_usage=asked.include_usage)
        return await _whole(course, _about("chatcmpl", "chat.completion", asked.model))

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        del request
        return web.json_response(self._codec.description())

    async def _tokenize(self, request: web.Request) -> web.Response:
        text, special = parse_tokenize(await _body(request))
        tokens = await asyncio.to_thread(self._codec.tokenize, text, special=special)
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = parse_detokenize(await _body(request))
        return web.json_response({"prompt": await asyncio.to_thread(self._codec.text, tokens)})


def _about(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return what every part of an answer carries."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
    }


async def _body(request: web.Request) -> Any:
    try:
        data = await asyncio.wait_for(request.read(), BODY_TIMEOUT_S)
    except asyncio.TimeoutError as error:
        raise ApiError(
            f"the body has not arrived within {BODY_TIMEOUT_S:g} s",
            status=HTTPStatus.REQUEST_TIMEOUT,
        ) from error
    except (web.RequestPayloadError, ConnectionError) as error:  # or the client has gone
        raise ApiError("the body cannot be decoded") from error
    try:
        return await asyncio.to_thread(parse_json, data)
    except MalformedError as error:
        raise ApiError(str(error)) from error


async def _whole(course: CompletionRun, about: Mapping[str, Any]) -> web.Response:
    choices = await course.whole()
    return web.json_response({**about, "choices": choices, "usage": course.usage.body()})


async def _streamed(
    request: web.Request,
    course: CompletionRun,
    about: Mapping[str, Any],
    *,
    include_usage: bool,
) -> web.StreamResponse:
    """Send the chunks; an error before the first is an answer of its own, later a last chunk."""
    usage = {"usage": None} if include_usage else {}
    response: web.StreamResponse | None = None
    try:
        async for piece in course.pieces():
            if response is None:
                response = await _event_stream(request)
            await _send(response, {**about, "choices": [piece], **usage})
    except ApiError as error:
        if response is None:
            raise
        await _send(response, error.body())
        await response.write_eof()
        return response
    assert response is not None, "every answer has a piece"
    if include_usage:
        await _send(response, {**about, "choices": [], "usage": course.usage.body()})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _event_stream(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")


def _refusal(error: ApiError) -> web.Response:
    response = web.json_response(error.body(), status=error.status)
    if error.status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers["Retry-After"] = _RETRY_AFTER_S
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        response.force_close()  # what is left of the body is not read
    return response
