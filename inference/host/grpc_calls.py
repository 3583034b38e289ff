"""KServe over gRPC, answered by this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from inference.front import rules
from inference.front.infer_messages import parsed, without_raw_tensors
from inference.front.kserve_grpc import CallFailedError, KServeGrpc
from inference.front.sessions import Namespace
from inference.host.calls import InferError, InferRequest
from inference.host.describe import (
    found_model,
    index_json,
    model_metadata,
    server_metadata,
    statistics_json,
)
from inference.host.hosted import Hosted
from inference.host.messages import (
    FINAL_PARAMETER,
    SentRequest,
    infer_response,
    read_message,
    with_bytes,
)
from inference.host.models import HostedModel

_NO_STREAMS = "ModelInfer RPC doesn't support models with decoupled transaction policy"
# Requests of one stream that are answered at a time; more are read once one of them has its answer.
_MOST_AT_ONCE = 256
_READY_ANSWER = b"\x08\x01"  # of ServerLive, ServerReady, and Health/Check: true, SERVING


class HostedGrpc(KServeGrpc):
    """Answers calls of gRPC with the models of this process.

    `idle_streams` is the number of open streams without a request that is being answered.
    """

    idle_streams = 0

    async def _healthy(self, *_: object) -> bytes:
        return _READY_ANSWER

    async def _answered(
        self, upstream: Hosted, call: str, owner: str | None, request: bytes, context: Any
    ) -> bytes:
        try:
            if call == rules.INFER_CALL:
                sessions = partial(self._namespace, owner, context)
                model, sent, asked = await self._read(upstream, request, sessions)
                if model.decoupled:
                    raise InferError(_NO_STREAMS, "UNIMPLEMENTED")
                async with contextlib.aclosing(model.infer(asked)) as responses:
                    async for outputs, _ in responses:
                        answer = infer_response(model, sent, outputs)
                return bytes(answer.SerializeToString())
            data = await self._context.guard.message(request)
            name = call.removeprefix(rules.SERVICE)
            message = parsed(getattr(service_pb2, f"{name}Request"), data)
            return bytes(_ANSWERS[name](upstream, message).SerializeToString())
        except InferError as error:
            raise CallFailedError(grpc.StatusCode[error.code], str(error)) from None

    async def _read(
        self, upstream: Hosted, request: bytes, sessions: Callable[[], Namespace]
    ) -> tuple[HostedModel, SentRequest, InferRequest]:
        self._context.guard.note_use()
        request = await self._context.guard.message(request)
        data, raw = without_raw_tensors(request)
        name, version, sent = await self._context.workers.check(
            read_message,
            data,
            len(request),
            self._context.limit,
            upstream.declared,
            size_bytes=len(data),
        )
        model = found_model(upstream.models, name, version)
        whole = memoryview(request)
        parts = [whole[each.content] for each in raw if each.content is not None]
        return model, sent, with_bytes(model, sent, parts, sessions)

    async def _streamed(
        self, upstream: Hosted, owner: str | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers as they come, those of all requests of the stream mixed."""
        sessions = partial(self._namespace, owner, context)
        answers: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        places = asyncio.Semaphore(_MOST_AT_ONCE)

        asked = 0  # requests that are being answered

        async def answer(request: bytes, turn: asyncio.Event, next_turn: asyncio.Event) -> None:
            nonlocal asked
            self.idle_streams -= asked == 0
            asked += 1
            try:
                async for reply in self._frames(upstream, request, sessions, turn):
                    answers.put_nowait(reply)
            except Exception as error:
                answers.put_nowait(error.with_traceback(None))
            finally:
                asked -= 1
                self.idle_streams += asked == 0
                await turn.wait()
                next_turn.set()
                places.release()

        async def read() -> None:
            turn = asyncio.Event()
            turn.set()
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await places.acquire()
                    next_turn = asyncio.Event()
                    group.create_task(answer(request, turn, next_turn))
                    turn = next_turn
            answers.put_nowait(None)

        reading = asyncio.create_task(read())
        self.idle_streams += 1
        try:
            while (reply := await answers.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.idle_streams -= 1

    async def _frames(
        self,
        upstream: Hosted,
        request: bytes,
        sessions: Callable[[], Namespace],
        turn: asyncio.Event,
    ) -> AsyncIterator[bytes]:
        """Yield the answers to one request of a stream, or the error in their place.

        Those of models with one response come in the order of the requests: at their `turn`.
        """
        model: HostedModel | None = None
        sent = SentRequest([])
        try:
            model, sent, asked = await self._read(upstream, request, sessions)
            async with contextlib.aclosing(model.infer(asked)) as responses:
                async for outputs, final in responses:
                    answer = infer_response(model, sent, outputs)
                    answer.parameters[FINAL_PARAMETER].bool_param = final
                    reply = service_pb2.ModelStreamInferResponse(infer_response=answer)
                    if not model.decoupled:
                        await turn.wait()
                    yield reply.SerializeToString()
        except InferError as error:
            if model is None or not model.decoupled:
                await turn.wait()
            yield _stream_error(error, model, sent)


def _stream_error(error: InferError, model: HostedModel | None, sent: SentRequest) -> bytes:
    text = str(error)
    if model is not None and model.decoupled and error.code != "INVALID_ARGUMENT":
        text = f"{error.code}: {text}"  # streams carry no code
    answer = service_pb2.ModelStreamInferResponse(error_message=text)
    answer.infer_response.id = sent.id
    if model is not None:
        answer.infer_response.model_name = model.name
        answer.infer_response.parameters[FINAL_PARAMETER].bool_param = True
    return bytes(answer.SerializeToString())


def _model_ready(hosted: Hosted, message: Any) -> Any:
    is_ready = hosted.has(message.name, message.version)
    return service_pb2.ModelReadyResponse(ready=is_ready)


def _metadata(hosted: Hosted, message: Any) -> Any:
    model = found_model(hosted.models, message.name, message.version)
    return json_format.ParseDict(model_metadata(model), service_pb2.ModelMetadataResponse())


def _config(hosted: Hosted, message: Any) -> Any:
    model = found_model(hosted.models, message.name, message.version)
    return service_pb2.ModelConfigResponse(config=model.config)


def _statistics(hosted: Hosted, message: Any) -> Any:
    found = statistics_json(hosted.models, message.name, message.version)
    for each in found["model_stats"]:
        del each["response_stats"]
    return json_format.ParseDict(found, service_pb2.ModelStatisticsResponse())


def _index(hosted: Hosted, _: Any) -> Any:
    found = {"models": index_json(hosted.models)}
    return json_format.ParseDict(found, service_pb2.RepositoryIndexResponse())


def _server(_: Hosted, __: Any) -> Any:
    return json_format.ParseDict(server_metadata(), service_pb2.ServerMetadataResponse())


_ANSWERS: dict[str, Callable[[Hosted, Any], Any]] = {
    "ModelReady": _model_ready,
    "ModelMetadata": _metadata,
    "ModelConfig": _config,
    "ModelStatistics": _statistics,
    "RepositoryIndex": _index,
    "ServerMetadata": _server,
}
