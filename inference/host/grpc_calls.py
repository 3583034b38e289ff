"""KServe's protocol over gRPC: checks each call and answers it with the served models.

gRPC itself refuses messages that are too large. No message of a refused call is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from itertools import takewhile
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from inference.backend.requests import InferRequest
from inference.front import rules
from inference.front.context import FrontContext
from inference.front.guard import RejectedError
from inference.front.infer_messages import (
    message_id,
    parsed,
    read_message,
    read_message_head,
    without_raw_tensors,
)
from inference.front.request_log import REQUEST_ID, accepted_id, named_call
from inference.front.rules import InferError
from inference.front.sessions import Namespace
from inference.front.tracing import Tracer
from inference.front.validation import MAX_HEAD_BYTES, SentRequest
from inference.host.describe import (
    config_message,
    find_model,
    index_json,
    model_metadata,
    server_metadata,
    statistics_json,
)
from inference.host.hosted import Hosted
from inference.host.messages import FINAL_PARAMETER, infer_response, with_bytes
from inference.host.models import HostedModel

_NO_STREAMS = "ModelInfer RPC doesn't support models with decoupled transaction policy"
# Concurrent requests of one stream; the next one is read once one of them has its answer.
_MAX_CONCURRENT = 256
_MAX_UNREAD = 64  # answers of one stream that its client has not read; models wait beyond that
_READY_ANSWER = b"\x08\x01"  # of ServerLive, ServerReady, and Health/Check: true, SERVING
# Clients refuse more than 8 KiB of metadata, where percent-encoding turns a byte into three.
_MAX_REASON_BYTES = 2 << 10
_CODES = {
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class KServeGrpc(grpc.GenericRpcHandler):  # type: ignore[misc]  # the library has no types
    """Answers the gRPC calls of a port."""

    def __init__(
        self,
        context: FrontContext[Hosted],
        *,
        port: int,
        logs: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """With `logs`, write a line of the access log for each call."""
        self._context, self._port = context, port
        self._named = partial(named_call, logs=logs, tracer=tracer)

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call."""
        call = details.method
        metadata = dict(details.invocation_metadata or ())
        name = accepted_id(str(metadata.get(REQUEST_ID.lower(), "")))
        if not rules.passes_grpc(call):
            return self._short_call(name, call, (grpc.StatusCode.PERMISSION_DENIED, rules.CLOSED))
        if rules.is_health(call):
            return self._short_call(name, call)
        try:
            owner = self._context.guard.token_owner(metadata.get("authorization"))
        except RejectedError as error:
            return self._short_call(name, call, (grpc.StatusCode.UNAUTHENTICATED, str(error)))
        if call == rules.STREAM_CALL:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, name, owner))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, name, call, owner))

    def _short_call(
        self, name: str, call: str, refused: tuple[grpc.StatusCode, str] | None = None
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a refused call or of a health check, which needs no token.

        Its type is a stream, so that gRPC reads no message.
        """

        async def answer(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            with self._named(name, call, context):
                if refused is not None:
                    await context.abort(*refused)
                is_unready = call in rules.UNREADY_ANSWERS and not self._context.is_ready()
                yield rules.UNREADY_ANSWERS[call] if is_unready else _READY_ANSWER

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _unary(
        self, name: str, call: str, owner: str | None, request: bytes, context: Any
    ) -> bytes:
        with self._named(name, call, context):
            # Abort outside of the except block: inside, the error of abort would refer to the
            # caught one, whose traceback holds the request and forms a reference cycle.
            try:
                with self._context.use() as hosted:
                    return await self._answer(hosted, call, owner, request, context)
            except RejectedError as error:
                refused = _status_of(error)
            del request
            await context.abort(*refused)
        raise AssertionError("abort raises")

    async def _stream(
        self, name: str, owner: str | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        refused = None
        with self._named(name, rules.STREAM_CALL, context):
            try:
                async with contextlib.aclosing(
                    self._interleaved(owner, requests, context)
                ) as answers:
                    async for reply in answers:
                        yield reply
            except RejectedError as error:
                refused = _status_of(error)
            if refused is not None:
                await context.abort(*refused)

    def _namespace(self, owner: str | None, context: Any) -> Namespace:
        _, _, peer = urllib.parse.unquote(context.peer()).partition(":")  # ipv6:[::1]:50000
        address, _, port = peer.rpartition(":")
        return self._context.sessions.namespace(owner, address.strip("[]"), int(port), self._port)

    async def _answer(
        self, hosted: Hosted, call: str, owner: str | None, request: bytes, context: Any
    ) -> bytes:
        """Return the serialized answer to a call. Raises RejectedError."""
        data = await self._context.guard.message(request)
        if call == rules.INFER_CALL:
            sessions = partial(self._namespace, owner, context)
            model, sent, asked = await self._read(hosted, data, sessions)
            if model.decoupled:
                raise InferError(_NO_STREAMS, "UNIMPLEMENTED")
            answer = infer_response(model, sent, await model.answer(asked))
            sent.set_matched(model)
            return bytes(answer.SerializeToString())
        name = call.removeprefix(rules.SERVICE)
        message = parsed(getattr(service_pb2, f"{name}Request"), data)
        return bytes(_ANSWERS[name](hosted, message).SerializeToString())

    async def _read(
        self, hosted: Hosted, request: bytes, sessions: Callable[[], Namespace]
    ) -> tuple[HostedModel, SentRequest, InferRequest]:
        """Read a decompressed request. Raises RejectedError."""
        self._context.guard.note_use()
        data, raw = without_raw_tensors(request)
        try:
            read = read_message_head if raw and len(data) < MAX_HEAD_BYTES else read_message
            sent = await self._context.workers.check(read, data, len(request), size_bytes=len(data))
        except RejectedError as error:  # an InferError does not end the stream of other requests
            raise InferError(str(error)) from None
        model = find_model(hosted.models, sent.model_name, sent.model_version)
        whole = memoryview(request)
        parts = [whole[position] for position in raw]
        return model, sent, with_bytes(model, sent, parts, sessions)

    async def _interleaved(
        self, owner: str | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers to all requests of a stream as they arrive, interleaved.

        A stream may stay open for days: each request uses the models that are current when it
        arrives. A refused request ends the stream after the answers to earlier ones. A client that
        does not read blocks its models, so that few answers wait in memory.
        """
        sessions = partial(self._namespace, owner, context)
        answers: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_MAX_UNREAD)
        places = asyncio.Semaphore(_MAX_CONCURRENT)
        tasks: dict[asyncio.Task[None], None] = {}  # of unanswered requests, in their order
        earlier = partial(_earlier, tasks)

        async def answer(request: bytes) -> None:
            refused = None
            try:
                with self._context.use() as hosted:
                    async for reply in self._frames(hosted, request, sessions, earlier):
                        await answers.put(reply)
            except Exception as error:
                refused = error.with_traceback(None)
            if refused is not None:
                await earlier()
                await answers.put(refused)
            places.release()

        async def read() -> None:
            try:
                async for request in requests:
                    await places.acquire()
                    task = asyncio.create_task(answer(request))
                    tasks[task] = None
                    task.add_done_callback(tasks.pop)
            except Exception as error:  # the connection has failed
                await answers.put(error)
            while tasks:
                await asyncio.wait(tasks)
            await answers.put(None)

        reading = asyncio.create_task(read())
        try:
            while (reply := await answers.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            for task in (*tasks, reading):
                task.cancel()
            await asyncio.gather(reading, *tasks, return_exceptions=True)

    async def _frames(
        self,
        hosted: Hosted,
        request: bytes,
        sessions: Callable[[], Namespace],
        earlier: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[bytes]:
        """Yield the answers to one request of a stream, or its error.

        Models with one response answer in the order of the requests: after the `earlier` ones.
        """
        model = None
        sent = SentRequest()
        request = await self._context.guard.message(request)
        try:
            model, sent, asked = await self._read(hosted, request, sessions)
            async with contextlib.aclosing(model.infer(asked)) as responses:
                async for outputs, final in responses:
                    if not outputs and not sent.parameters.triton_enable_empty_final_response:
                        continue
                    answer = infer_response(model, sent, outputs)
                    answer.parameters[FINAL_PARAMETER].bool_param = final
                    reply = service_pb2.ModelStreamInferResponse(infer_response=answer)
                    if not model.decoupled:
                        await earlier()
                    yield reply.SerializeToString()
        except InferError as error:
            if model is None:
                sent = SentRequest.model_construct(id=message_id(request))
            if model is None or not model.decoupled:
                await earlier()
            yield _stream_error(error, model, sent)


async def _earlier(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for the end of all tasks before the current one."""
    own = asyncio.current_task()
    while before := [*takewhile(lambda task: task is not own, tasks)]:
        await asyncio.wait(before[-1:])


def _status_of(error: RejectedError) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC status of a refusal and its reason, truncated."""
    if isinstance(error, InferError):
        code = grpc.StatusCode[error.grpc_code]
    else:
        code = _CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT)
    reason = str(error).encode()
    if len(reason) > _MAX_REASON_BYTES:
        reason = reason[:_MAX_REASON_BYTES] + b" ..."
    return code, reason.decode(errors="ignore")


def _stream_error(error: InferError, model: HostedModel | None, sent: SentRequest) -> bytes:
    text = str(error)
    if model is not None and model.decoupled and error.grpc_code != "INVALID_ARGUMENT":
        text = f"{error.grpc_code}: {text}"  # errors on streams have no field for the code
    answer = service_pb2.ModelStreamInferResponse(error_message=text)
    answer.infer_response.id = sent.id
    if model is not None:
        answer.infer_response.model_name = model.name
        answer.infer_response.parameters[FINAL_PARAMETER].bool_param = True
    return bytes(answer.SerializeToString())


def _filled(answer: Any, found: dict[str, Any]) -> Any:
    """Fill a message from JSON; keys that it has no field for are ignored."""
    return json_format.ParseDict(found, answer, ignore_unknown_fields=True)


_ANSWERS: dict[str, Callable[[Hosted, Any], Any]] = {
    "ModelReady": lambda hosted, asked: service_pb2.ModelReadyResponse(
        ready=hosted.serves(asked.name, asked.version)
    ),
    # The message has no field for parameters; ModelConfig has one.
    "ModelMetadata": lambda hosted, asked: _filled(
        service_pb2.ModelMetadataResponse(),
        model_metadata(find_model(hosted.models, asked.name, asked.version)),
    ),
    "ModelConfig": lambda hosted, asked: service_pb2.ModelConfigResponse(
        config=config_message(find_model(hosted.models, asked.name, asked.version))
    ),
    "ModelStatistics": lambda hosted, asked: _filled(
        service_pb2.ModelStatisticsResponse(),
        statistics_json(hosted.models, asked.name, asked.version),
    ),
    "RepositoryIndex": lambda hosted, _: service_pb2.RepositoryIndexResponse(
        models=index_json(hosted.models)
    ),
    "ServerMetadata": lambda *_: service_pb2.ServerMetadataResponse(**server_metadata()),
}
