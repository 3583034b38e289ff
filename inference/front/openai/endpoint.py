"""OpenAI's protocol over HTTP: routes, and responses as JSON or server-sent events."""

import asyncio
import base64
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from inference.front.guard import Guard, RejectedError, refusal
from inference.front.http_server import event_stream
from inference.front.openai.codec import CodecFiles
from inference.front.openai.completion import CompletionRun, TokenModel
from inference.front.openai.description import openai_description
from inference.front.openai.prepare import (
    detokenize,
    model_facts,
    prepare_embeddings,
    prepare_generation,
    tokenize,
)
from inference.front.openai.requests import (
    SPELLINGS,
    ChatRequest,
    CompletionRequest,
    Sampling,
    StreamOptions,
)
from inference.front.request_log import ABOUT, request_id
from inference.front.strict_json import MAX_JSON_BYTES
from inference.front.tracing import describe_span
from inference.front.workers import Workers

HEALTH_PATH = "/health"
_MODELS_PATH = "/v1/models"
_RUN_KEY = "slipway_run"
_PREFLIGHT = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
# Request type, prefix of ids, and `object` of a complete answer and of a chunk.
_COMPLETION = (CompletionRequest, "cmpl", "text_completion", "text_completion")
_CHAT = (ChatRequest, "chatcmpl", "chat.completion", "chat.completion.chunk")

# A small body without any of these words needs no grammar compiled: the event loop reads it.
_SLOW_WORDS = (b"\\u", *(name.encode() for name in SPELLINGS["structured_outputs"]))

logger = logging.getLogger(__name__)
Answer = Awaitable[web.StreamResponse]


class OpenAIEndpoint:
    """Answers OpenAI's requests with the models of one server, by the name in the request.

    `texts` are the files from which worker processes load the codec. `is_ready` returns whether the
    server would answer a request now.
    """

    def __init__(
        self,
        models: Mapping[str, TokenModel],
        texts: CodecFiles,
        guard: Guard,
        workers: Workers,
        *,
        is_ready: Callable[[], bool],
    ) -> None:
        self._models = dict(models)
        facts = {name: model.facts for name, model in models.items()}
        self._generators = {name: model for name, model in facts.items() if not model.encodes}
        self._encoders = {name: model for name, model in facts.items() if model.encodes}
        self._texts = texts
        self._codec = texts.codec()
        self._guard = guard
        self._workers = workers
        self._is_ready = is_ready
        self._created = int(time.time())
        self._routes: dict[tuple[str, str], Callable[[web.BaseRequest], Answer]] = {
            ("GET", HEALTH_PATH): self._health,
            ("HEAD", HEALTH_PATH): self._health,
            ("GET", _MODELS_PATH): self._list,
            ("POST", "/v1/completions"): partial(self._generate, _COMPLETION),
            ("POST", "/v1/chat/completions"): partial(self._generate, _CHAT),
            ("POST", "/v1/embeddings"): self._embeddings,
            # vLLM's routes; with them lm-evaluation-harness needs no tokenizer of its own.
            ("GET", "/tokenizer_info"): self._tokenizer_info,
            ("POST", "/tokenize"): partial(self._convert, tokenize),
            ("POST", "/detokenize"): partial(self._convert, detokenize),
            ("GET", "/openapi.json"): self._description,
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; errors have OpenAI's form.

        Web pages of admitted origins get CORS headers (fetch.spec.whatwg.org).
        """
        headers = self._page_headers(request)
        if headers and request.method == "OPTIONS":  # a browser's preflight, without the token
            headers |= _PREFLIGHT | {
                "Access-Control-Allow-Headers": request.headers.get(
                    "Access-Control-Request-Headers", "authorization, content-type"
                )
            }
            return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers)
        try:
            response = await self._answer(request)
            if not response.prepared:
                response.headers.update(headers)
            return response
        finally:
            if (run := request.get(_RUN_KEY)) is not None:
                _describe(request, run.operation, run.model, run.attributes)
                # The log holds no text of prompts or answers.
                request[ABOUT] = {"model": run.model, **run.usage, "ends": run.ends}

    def _page_headers(self, request: web.BaseRequest) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if origin is None or not self._guard.admits(origin):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._guard.check_page(request.headers)
            if request.path != HEALTH_PATH:
                self._guard.token_owner(request.headers.get("Authorization"))
            return await self._handler(request)(request)
        except ConnectionError:  # the client has left before the end of its body or of a stream
            raise
        except Exception as error:
            return refusal(*error_answer(error, request_id(request)))

    def _handler(self, request: web.BaseRequest) -> Callable[[web.BaseRequest], Answer]:
        method, path = request.method, request.path
        if found := self._routes.get((method, path)):
            return found
        if method == "GET" and path.startswith(f"{_MODELS_PATH}/"):
            return self._model
        is_known = any(path == route for _, route in self._routes)
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_known else HTTPStatus.NOT_FOUND
        reason = f"{method[:20]} {path[:200]}: {status.phrase.lower()}"
        raise RejectedError(reason, status, code="unknown_url")

    async def _health(self, _: web.BaseRequest) -> web.Response:
        is_ready = self._is_ready()
        words = {"status": "ok" if is_ready else "the server is not ready"}
        return web.json_response(words, status=200 if is_ready else 503)

    async def _list(self, _: web.BaseRequest) -> web.Response:
        data = [self._model_entry(name) for name in self._models]
        return web.json_response({"object": "list", "data": data})

    async def _model(self, request: web.BaseRequest) -> web.Response:
        name = request.path.removeprefix(f"{_MODELS_PATH}/")
        return web.json_response(self._model_entry(model_facts(self._models, name).facts.name))

    def _model_entry(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "slipway"}
        facts = self._models[name].facts
        return about | {"max_model_len": facts.context_len, **dict(facts.about)}

    def _fingerprint(self, name: str) -> str | None:
        """Return a fingerprint of the served checkpoint, None if it is unknown."""
        about = dict(self._models[name].facts.about)
        if not about.get("checkpoint"):
            return None
        return "fp_" + hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]

    async def _generate(
        self, kind: tuple[type[Sampling], str, str, str], request: web.BaseRequest
    ) -> web.StreamResponse:
        record, prefix, whole_object, chunk_object = kind
        # A checkpoint's chat template may compute anything: render it in a worker only.
        is_quick = record is CompletionRequest
        work = partial(prepare_generation, record)
        prepared = await self._read(request, work, self._generators, is_quick=is_quick)
        asked = prepared.sampling
        run = CompletionRun(self._models[asked.model], self._codec, prepared)
        request[_RUN_KEY] = run
        about = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": chunk_object if asked.stream else whole_object,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": self._fingerprint(asked.model),
        }
        if record is ChatRequest:
            about["service_tier"] = "default"
        if asked.stream:
            headers = self._page_headers(request)
            return await _stream(request, run, about, headers, asked.stream_options)
        choices = await run.choices()

        def write() -> list[bytes]:
            return [to_json(choice) for choice in choices]

        encoded = write() if run.is_short else await asyncio.to_thread(write)
        rest = json.dumps({"usage": _usage(run), **run.about_prompt}).encode()
        body = _prefix_of(about) + b", ".join(encoded) + b"], " + rest[1:]
        return web.Response(body=body, content_type="application/json")

    async def _embeddings(self, request: web.BaseRequest) -> web.Response:
        asked, rows = await self._read(request, prepare_embeddings, self._encoders)
        count = sum(map(len, rows))
        _describe(request, "embeddings", asked.model, {"gen_ai.usage.input_tokens": count})
        vectors = await self._models[asked.model].embed(rows)

        def body() -> bytes:
            if asked.encoding_format == "float":
                encoded = vectors.tolist()
            else:
                encoded = [
                    base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors
                ]
            data = [
                {"object": "embedding", "index": number, "embedding": vector}
                for number, vector in enumerate(encoded)
            ]
            usage = {"prompt_tokens": count, "total_tokens": count}
            answer = {"object": "list", "data": data, "model": asked.model, "usage": usage}
            return to_json(answer)

        return web.Response(body=await asyncio.to_thread(body), content_type="application/json")

    async def _read(
        self, request: web.BaseRequest, work: Callable[..., Any], *args: Any, is_quick: bool = True
    ) -> Any:
        """Apply `work` to the body in a worker process; if `is_quick`, to small bodies directly."""
        data = await self._guard.body(request, limit=MAX_JSON_BYTES)
        is_quick = is_quick and not any(word in data for word in _SLOW_WORDS)
        run = self._workers.check if is_quick else self._workers.run
        return await run(work, self._texts, *args, data, size_bytes=len(data))

    async def _description(self, _: web.BaseRequest) -> web.Response:
        return web.json_response(openai_description())

    async def _tokenizer_info(self, _: web.BaseRequest) -> web.Response:
        return web.json_response(self._codec.description())

    async def _convert(
        self, work: Callable[[CodecFiles, bytes], Any], request: web.BaseRequest
    ) -> web.Response:
        return web.json_response(await self._read(request, work))


def _describe(
    request: web.BaseRequest, operation: str, model: str, attributes: Mapping[str, Any]
) -> None:
    own = {"slipway.request_id": request_id(request)}
    describe_span(operation, model, {**own, **attributes})


def error_answer(error: Exception, name: str) -> tuple[RejectedError, dict[str, Any]]:
    """Return the error that a client gets, and its body in OpenAI's form."""
    if not isinstance(error, RejectedError):  # an internal error, whose details only the log gets
        logger.error("request %s failed", name, exc_info=error)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        error = RejectedError("the endpoint failed; its log says why", status)
    # LiteLLM recognizes a wrong key by the code and the first words.
    is_key = error.status == HTTPStatus.UNAUTHORIZED
    is_server = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    body = {
        "message": ("Incorrect API key provided, or none: " if is_key else "") + str(error),
        "type": "server_error" if is_server else "invalid_request_error",
        "param": error.param,
        "code": "invalid_api_key" if is_key else error.code,
    }
    return error, {"error": body}


def _usage(run: CompletionRun) -> dict[str, Any]:
    """Return a request's token counts in OpenAI's form; their details are unknown here."""
    return {**run.usage, "prompt_tokens_details": None, "completion_tokens_details": None}


def _prefix_of(about: Mapping[str, Any]) -> bytes:
    """Return the beginning of every response or chunk, up to its choices."""
    return json.dumps(about).encode()[:-1] + b', "choices": ['


async def _stream(
    request: web.BaseRequest,
    run: CompletionRun,
    about: Mapping[str, Any],
    headers: Mapping[str, str],
    options: StreamOptions,
) -> web.StreamResponse:
    """Send the chunks. Raises an error before the first chunk; later ones are sent as a chunk."""
    start, first = (
        b"data: " + _prefix_of(about),
        b"data: " + _prefix_of({**about, **run.about_prompt}),
    )
    end = b'], "usage": null}\n\n' if options.include_usage else b"]}\n\n"
    response = None
    last = b""  # final chunks, sent together with the end of the stream
    try:
        async for chunk in run.chunks():
            opening = start
            if response is None:
                response, opening = event_stream(request), first
                response.headers.update(headers)
                await response.prepare(request)
            if options.include_usage and options.continuous_usage_stats:
                end = b'], "usage": ' + json.dumps(_usage(run)).encode() + b"}\n\n"
            event = opening + to_json(chunk) + end
            if all(run.ends):
                last += event
            else:
                await response.write(event)
    except Exception as error:
        if response is None or isinstance(error, ConnectionError):
            raise
        body = json.dumps(error_answer(error, request_id(request))[1]).encode()
        await response.write_eof(last + b"data: " + body + b"\n\n")
        return response
    assert response is not None, "every answer has at least one chunk"
    if options.include_usage:
        last += start + b'], "usage": ' + json.dumps(_usage(run)).encode() + b"}\n\n"
    await response.write_eof(last + b"data: [DONE]\n\n")
    return response
