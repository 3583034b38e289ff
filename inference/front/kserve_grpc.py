"""KServe's protocol over gRPC: check a call, pass its messages on to tritonserver and back.

Messages are passed on as they are, if they have the form of a request; gRPC itself refuses those
that are too large. Of a call that is refused, no message is read.
"""

import urllib.parse
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

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
from inference.front.sessions import Namespace
from inference.front.upstream import FrontContext, Upstream
from inference.ports import host_and_port

_ERROR_FIELD = b"\x0a"  # of a ModelStreamInferResponse; answers have none
# Before the token is read; by itself gRPC (1.67) refuses at random between 8 and 16 KiB.
MOST_METADATA_BYTES = 8 << 10
SERVER_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # refuse a port that another process has
    ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
    ("grpc.max_metadata_size", MOST_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
    # By itself gRPC (1.67) expands a message whole, however large, before it looks at its size.
    ("grpc.per_message_decompression", 0),
]
# Of an error: clients refuse more than 8 KiB of metadata, in which a byte may take three.
_MOST_REASON_BYTES = 2 << 10
_CODES = {
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class KServeGrpc(grpc.GenericRpcHandler):  # type: ignore[misc]  # the library has no types
    """Answers calls of gRPC from a server that listens on a Unix socket."""

    def __init__(self, context: FrontContext, *, port: int) -> None:
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
                    yield await _reply(upstream, call, b"", context)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _unary(self, call: str, owner: str | None, request: bytes, context: Any) -> bytes:
        with self._context.use() as upstream:
            try:
                if call == rules.INFER_CALL:
                    sessions = partial(self._namespace, owner, context)
                    request = await self._checked(upstream, request, sessions)
                else:
                    request = await self._context.guard.message(request)
                if call == rules.REGISTER_CALL:
                    kind = service_pb2.SystemSharedMemoryRegisterRequest
                    rules.check_shared_memory(parsed(kind, request).key)
            except RejectedError as error:
                await _refuse(context, error)
            reply = await _reply(upstream, call, request, context)
        if call != rules.INDEX_CALL:
            return reply
        index = service_pb2.RepositoryIndexResponse.FromString(reply)
        for model in index.models:
            model.ClearField("reason")
        return bytes(index.SerializeToString())

    async def _stream(
        self, owner: str | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        refusal: RejectedError | None = None
        sessions = partial(self._namespace, owner, context)

        async def checked(upstream: Upstream) -> AsyncIterator[bytes]:
            nonlocal refusal
            async for request in requests:
                try:
                    yield await self._checked(upstream, request, sessions)
                except RejectedError as error:
                    refusal = error
                    return  # what was asked before is still answered

        with self._context.use() as upstream:
            stream = upstream.channel.stream_stream(rules.STREAM_CALL)
            call = stream(checked(upstream), timeout=context.time_remaining())
            try:
                async for reply in call:
                    is_error = reply.startswith(_ERROR_FIELD) or rules.has_internal_names(reply)
                    yield _without_names(reply) if is_error else reply
            except grpc.aio.AioRpcError as error:
                await _fail(context, error)
            finally:
                if not call.done():
                    upstream.cancellations.add(call)
        if refusal is not None:
            await _refuse(context, refusal)

    async def _checked(
        self, upstream: Upstream, request: bytes, sessions: Callable[[], Namespace]
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
        return request if own is None else own + b"".join(request[place] for place in raw)

    def _namespace(self, owner: str | None, context: Any) -> Namespace:
        _, _, peer = urllib.parse.unquote(context.peer()).partition(":")  # ipv6:[::1]:50000
        address, _, port = peer.rpartition(":")
        return self._context.sessions.namespace(owner, address.strip("[]"), int(port), self._port)


def grpc_server(
    access: Access, handler: grpc.GenericRpcHandler, *, host: str, port: int
) -> grpc.aio.Server:
    """Return a gRPC server that has opened a port but does not answer yet. Raises OSError."""
    address = host_and_port(host, port)
    limit = ("grpc.max_receive_message_length", access.max_request_bytes)
    server = grpc.aio.server(options=[limit, *SERVER_OPTIONS])
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
        await _fail(context, error)


async def _fail(context: Any, error: grpc.aio.AioRpcError) -> NoReturn:
    details = rules.without_internal_names(error.details() or "").encode()
    if len(details) > _MOST_REASON_BYTES:
        details = details[:_MOST_REASON_BYTES] + b" ..."
    await context.abort(error.code(), details.decode(errors="ignore"))
    raise AssertionError("abort raises")


async def _refuse(context: Any, error: RejectedError) -> NoReturn:
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT), str(error))
    raise AssertionError("abort raises")


def _without_names(reply: bytes) -> bytes:
    message = service_pb2.ModelStreamInferResponse.FromString(reply)
    message.error_message = rules.without_internal_names(message.error_message)
    return bytes(message.SerializeToString())
