"""KServe's protocol over gRPC: check a call, pass its messages on to tritonserver and back.

Messages are passed on as they are, if they have the form of a request; gRPC itself refuses those
that are too large. Of a call that is refused, no message is read.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc

from inference.front.access import Access
from inference.front.cancellation import Cancellations
from inference.front.declared_inputs import DeclaredInputs
from inference.front.exchange import Exchangeable
from inference.front.guard import Guard, RequestRefusedError
from inference.front.rules import (
    CLOSED,
    INDEX_CALL,
    INFER_CALL,
    REGISTER_CALL,
    STREAM_CALL,
    UNREADY_ANSWERS,
    Rules,
    has_internal_names,
    is_health,
    shared_memory_problem,
    without_internal_names,
)
from inference.front.sessions import ClientSessions, Namespace
from inference.front.sockets import ServerSockets
from inference.front.validation import check_infer_message, without_raw_tensors
from inference.front.workers import Workers

_ERROR_FIELD = b"\x0a"  # of a ModelStreamInferResponse; answers have none
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def server_channel(sockets: ServerSockets) -> grpc.aio.Channel:
    """Return a channel to tritonserver's socket."""
    options = [*UNLIMITED, ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(f"unix:{sockets.grpc}", options=options)


class KServeGrpc(grpc.GenericRpcHandler):  # type: ignore[misc]  # the library has no types
    """Answers calls of gRPC from a server that listens on a Unix socket.

    Args:
        guard: Decides who may ask.
        rules: The calls that pass.
        channel: To tritonserver.
        unready: File that exists while the server is not ready.
        workers: Processes that check large requests.
        models: Inputs of the models, by name.
        sessions: The namespaces of clients.
        limit: Bytes of the largest request.
        port: Port that clients reach.
        cancellations: Ends the streams that clients leave.
    """

    def __init__(
        self,
        guard: Guard,
        rules: Rules,
        *,
        channel: grpc.aio.Channel,
        unready: Path,
        workers: Workers,
        models: Mapping[str, DeclaredInputs],
        sessions: ClientSessions,
        limit: int,
        port: int,
        cancellations: Cancellations,
    ) -> None:
        self._guard = guard
        self._rules = rules
        self._channel = Exchangeable(channel)
        self._unready = unready
        self._workers = workers
        self._models = models
        self._sessions = sessions
        self._limit = limit
        self._port = port
        self._cancellations = cancellations
        self._calls: dict[str, Callable[..., Any]] = {}

    def exchange(
        self, channel: grpc.aio.Channel, unready: Path
    ) -> Callable[[], Awaitable[grpc.aio.Channel]]:
        """Pass calls on to another server; return a wait for the end of those under way."""
        self._unready = unready
        self._calls.clear()
        return self._channel.exchange(channel)

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call."""
        call = details.method
        if not self._rules.passes_grpc(call):
            return _refusal(grpc.StatusCode.PERMISSION_DENIED, CLOSED)
        if is_health(call):
            return self._health(call)
        metadata = dict(details.invocation_metadata or ())
        try:
            owner = self._guard.token_owner(metadata.get("authorization"))
        except RequestRefusedError as error:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if call == STREAM_CALL:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, owner))
        if call == INFER_CALL:
            return grpc.unary_unary_rpc_method_handler(partial(self._infer, owner))

        async def answer(request: bytes, context: Any) -> bytes:
            if call == REGISTER_CALL and (problem := _register_problem(request)):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
            reply = await self._reply(call, request, context)
            return _without_reasons(reply) if call == INDEX_CALL else reply

        return grpc.unary_unary_rpc_method_handler(answer)

    def _health(self, call: str) -> grpc.RpcMethodHandler:
        """Return the handler of a call that needs no token, and whose message says nothing."""

        async def answer(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if call in UNREADY_ANSWERS and self._unready.exists():
                yield UNREADY_ANSWERS[call]
            else:
                yield await self._reply(call, b"", context)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _reply(self, call: str, request: bytes, context: Any) -> bytes:
        with self._channel.use() as channel:
            if call not in self._calls:
                self._calls[call] = channel.unary_unary(call)
            try:
                reply = await self._calls[call](request, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await _fail(context, error)
        return bytes(reply)

    async def _infer(self, owner: str | None, request: bytes, context: Any) -> bytes:
        try:
            checked = await self._checked(request, self._namespace(owner, context))
        except RequestRefusedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return await self._reply(INFER_CALL, checked, context)

    async def _stream(
        self, owner: str | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        problem = None
        sessions = self._namespace(owner, context)

        async def checked() -> AsyncIterator[bytes]:
            nonlocal problem
            async for request in requests:
                try:
                    yield await self._checked(request, sessions)
                except RequestRefusedError as error:
                    problem = str(error)
                    return  # what was asked before is still answered

        with self._channel.use() as channel:
            call = channel.stream_stream(STREAM_CALL)(checked(), timeout=context.time_remaining())
            try:
                async for reply in call:
                    is_error = reply.startswith(_ERROR_FIELD) or has_internal_names(reply)
                    yield _without_names(reply) if is_error else reply
            except grpc.aio.AioRpcError as error:
                await _fail(context, error)
            finally:
                if not call.done():
                    self._cancellations.add(call)
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    async def _checked(self, request: bytes, sessions: Namespace) -> bytes:
        """Return a request as tritonserver gets it. Raises RequestRefusedError."""
        self._guard.note_use()
        data, raw = without_raw_tensors(request)
        arguments = (data, len(request), self._limit, self._models, sessions)
        own = await self._workers.check(check_infer_message, *arguments, size_bytes=len(data))
        return request if own is None else own + b"".join(request[place] for place in raw)

    def _namespace(self, owner: str | None, context: Any) -> Namespace:
        _, _, peer = urllib.parse.unquote(context.peer()).partition(":")  # ipv6:[::1]:50000
        address, _, port = peer.rpartition(":")
        return self._sessions.namespace(owner, address.strip("[]"), int(port), self._port)


def grpc_server(
    access: Access, handler: grpc.GenericRpcHandler, *, address: str
) -> grpc.aio.Server:
    """Return a gRPC server that has opened `address` but does not answer yet.

    Raises:
        OSError: The address is unavailable.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", access.max_request_bytes),
            ("grpc.max_send_message_length", -1),
            # Refuse a port that another process has.
            ("grpc.so_reuseport", 0),
        ]
    )
    server.add_generic_rpc_handlers((handler,))
    try:
        if access.tls_cert is None or access.tls_key is None:
            server.add_insecure_port(address)
        else:
            pair = (access.tls_key.read_bytes(), access.tls_cert.read_bytes())
            server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise OSError(f"{address}: Address already in use, or not of this machine") from error
    return server


def _refusal(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    # As a stream, of which no message is read.
    async def answer(_requests: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(code, reason)

    return grpc.stream_stream_rpc_method_handler(answer)


async def _fail(context: Any, error: grpc.aio.AioRpcError) -> NoReturn:
    details = without_internal_names(error.details() or "")
    await context.abort(error.code(), details)
    raise AssertionError("abort raises")


def _register_problem(request: bytes) -> str | None:
    from tritonclient.grpc import service_pb2

    register = service_pb2.SystemSharedMemoryRegisterRequest
    return shared_memory_problem(register.FromString(request).key)


def _without_reasons(reply: bytes) -> bytes:
    """Return the list of models without the server's reasons for failures."""
    from tritonclient.grpc import service_pb2

    index = service_pb2.RepositoryIndexResponse.FromString(reply)
    for model in index.models:
        model.ClearField("reason")
    return bytes(index.SerializeToString())


def _without_names(reply: bytes) -> bytes:
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelStreamInferResponse.FromString(reply)
    message.error_message = without_internal_names(message.error_message)
    return bytes(message.SerializeToString())
