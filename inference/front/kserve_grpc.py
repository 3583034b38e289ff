"""KServe's protocol over gRPC: check a call, pass its messages on to tritonserver and back.

Messages are passed on as they are, if they have the form of a request; gRPC itself refuses those
that are too large. Of a call that is refused, no message is read.
"""

import contextlib
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from inference.front import rules
from inference.front.access import Access
from inference.front.guard import IDLE_S, RejectedError
from inference.front.infer_messages import (
    SEQUENCE_KEY,
    check_infer_message,
    parsed,
    without_raw_tensors,
)
from inference.front.kserve_http import most_connections
from inference.front.sessions import Namespace
from inference.front.tracing import TracedCalls, tracer_of
from inference.front.upstream import FrontContext, Upstream
from inference.ports import host_and_port

_ERROR_FIELD = b"\x0a"  # of a ModelStreamInferResponse; answers have none
# Before the token is read; by itself gRPC (1.67) refuses at random between 8 and 16 KiB.
MOST_METADATA_BYTES = 8 << 10
SERVER_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # refuse a port that another process has
    ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for the first bytes of a connection
    ("grpc.max_metadata_size", MOST_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
    # By itself gRPC (1.67) expands a message whole, however large, before it looks at its size.
    ("grpc.per_message_decompression", 0),
]
# Of an error: clients refuse more than 8 KiB of metadata, in which a byte may take three.
_MOST_REASON_BYTES = 2 << 10
Refusal = tuple[grpc.StatusCode, str]
_CODES = {
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class KServeGrpc(grpc.GenericRpcHandler):  # type: ignore[misc]  # the library has no types
    """Answers calls of gRPC from a server that listens on a Unix socket.

    A subclass has another server to answer from.
    """

    def __init__(self, context: FrontContext[Any], *, port: int) -> None:
        self._context = context
        self._port = port

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call."""
        call = details.method
        if not rules.passes_grpc(call, shared_memory=self._context.shared_memory):
            return _refusal(grpc.StatusCode.PERMISSION_DENIED, rules.CLOSED)
        if rules.is_health(call):
            return self._health(call)
        metadata = dict(details.invocation_metadata or ())
        try:
            owner = self._context.guard.token_owner(metadata.get("authorization"))
        except RejectedError as error:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if call == rules.STREAM_CALL:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, owner))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, call, owner))

    def _health(self, call: str) -> grpc.RpcMethodHandler:
        """Return the handler of a call that needs no token, and whose message says nothing."""

        async def answer(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if call in rules.UNREADY_ANSWERS and not self._context.is_ready():
                yield rules.UNREADY_ANSWERS[call]
            else:
                with self._context.use() as upstream:
                    yield await self._healthy(upstream, call, context)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _unary(self, call: str, owner: str | None, request: bytes, context: Any) -> bytes:
        # The call is ended outside of the block that caught the error: an error that is raised
        # there refers to the other, whose frames hold the request, and itself.
        refused: Refusal | None = None
        try:
            with self._context.use() as upstream:
                return await self._answered(upstream, call, owner, request, context)
        except RejectedError as error:
            refused = _CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT), str(error)
        except CallFailedError as error:
            refused = error.code, str(error)
        del request
        await context.abort(*refused)
        raise AssertionError("abort raises")

    async def _stream(
        self, owner: str | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        refused: Refusal | None = None
        try:
            with self._context.use() as upstream:
                answers = self._streamed(upstream, owner, requests, context)
                async with contextlib.aclosing(answers):
                    async for reply in answers:
                        yield reply
        except RejectedError as error:
            refused = _CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT), str(error)
        except CallFailedError as error:
            refused = error.code, str(error)
        if refused is not None:
            await context.abort(*refused)

    async def _healthy(self, upstream: Any, call: str, context: Any) -> bytes:
        """Return the answer to a call for health."""
        return await _reply(upstream, call, b"", context)

    async def _answered(
        self, upstream: Any, call: str, owner: str | None, request: bytes, context: Any
    ) -> bytes:
        """Return the answer to a call. Raises RejectedError or CallFailedError."""
        if call == rules.INFER_CALL:
            request = await self._checked(
                upstream, request, partial(self._namespace, owner, context)
            )
        else:
            request = await self._context.guard.message(request)
        if call == rules.REGISTER_CALL:
            kind = service_pb2.SystemSharedMemoryRegisterRequest
            rules.check_shared_memory(parsed(kind, request).key)
        reply = await _reply(upstream, call, request, context)
        if call != rules.INDEX_CALL:
            return reply
        index = service_pb2.RepositoryIndexResponse.FromString(reply)
        for model in index.models:
            model.ClearField("reason")
        return bytes(index.SerializeToString())

    async def _streamed(
        self, upstream: Any, owner: str | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers of a stream. Raises RejectedError or CallFailedError."""
        refusal: list[RejectedError] = []
        sessions = partial(self._namespace, owner, context)

        async def checked() -> AsyncIterator[bytes]:
            async for request in requests:
                try:
                    yield await self._checked(upstream, request, sessions)
                except RejectedError as error:
                    refusal.append(error.with_traceback(None))
                    return  # what was asked before is still answered

        call = upstream.channel.stream_stream(rules.STREAM_CALL)(
            checked(), timeout=context.time_remaining()
        )
        try:
            async for reply in call:
                is_error = reply.startswith(_ERROR_FIELD) or rules.has_internal_names(reply)
                yield _without_names(reply) if is_error else reply
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        finally:
            if not call.done():
                upstream.cancellations.add(call)
        if refusal:
            raise refusal[0]

    async def _checked(
        self, upstream: Any, request: bytes, sessions: Callable[[], Namespace]
    ) -> bytes:
        """Return a request as tritonserver gets it. Raises RejectedError."""
        self._context.guard.note_use()
        request = await self._context.guard.message(request)
        data, raw = without_raw_tensors(request)
        # The kernel is asked for the client's user, which takes a tenth of the front's time.
        own_ids = sessions() if SEQUENCE_KEY in data else None
        arguments = (data, len(request), self._context.limit, upstream.models, own_ids)
        workers = self._context.workers
        own = await workers.check(check_infer_message, *arguments, size_bytes=len(data))
        return request if own is None else own + b"".join(request[each.place] for each in raw)

    def _namespace(self, owner: str | None, context: Any) -> Namespace:
        _, _, peer = urllib.parse.unquote(context.peer()).partition(":")  # ipv6:[::1]:50000
        address, _, port = peer.rpartition(":")
        return self._context.sessions.namespace(owner, address.strip("[]"), int(port), self._port)


class CallFailedError(Exception):
    """A call ends with a status of gRPC."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        details = rules.without_internal_names(reason).encode()
        if len(details) > _MOST_REASON_BYTES:
            details = details[:_MOST_REASON_BYTES] + b" ..."
        super().__init__(details.decode(errors="ignore"))
        self.code = code


def grpc_server(
    access: Access, handler: grpc.GenericRpcHandler, *, host: str, port: int
) -> grpc.aio.Server:
    """Return a gRPC server that has opened a port but does not answer yet. Raises OSError."""
    address = host_and_port(host, port)
    limits = [
        ("grpc.max_receive_message_length", access.max_request_bytes),
        ("grpc.max_allowed_incoming_connections", most_connections()),
    ]
    tracer = tracer_of(access.otlp_collector)
    spans = [] if tracer is None else [TracedCalls(tracer)]
    server = grpc.aio.server(options=[*limits, *SERVER_OPTIONS], interceptors=spans)
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


async def _reply(upstream: Upstream, call: str, request: bytes, context: Any) -> bytes:
    timeout_s = context.time_remaining()
    try:
        return bytes(await upstream.channel.unary_unary(call)(request, timeout=timeout_s))
    except grpc.aio.AioRpcError as error:
        raise _failure(error) from None


def _failure(error: grpc.aio.AioRpcError) -> CallFailedError:
    return CallFailedError(error.code(), error.details() or "")


def _without_names(reply: bytes) -> bytes:
    message = service_pb2.ModelStreamInferResponse.FromString(reply)
    message.error_message = rules.without_internal_names(message.error_message)
    return bytes(message.SerializeToString())
