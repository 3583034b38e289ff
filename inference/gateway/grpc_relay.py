"""gRPC of the gateway: check a call, pass its messages on to tritonserver's socket and back.

Messages are passed on as they are; gRPC itself refuses those that are too large.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc

from inference.gateway.access import Access
from inference.gateway.rules import (
    CLOSED,
    INDEX_CALL,
    REGISTER_CALL,
    STREAM_CALL,
    Rules,
    has_internal_names,
    is_health,
    shared_memory_problem,
    without_internal_names,
)

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# Of one connection, or set by the library itself.
_NOT_PASSED_ON = ("authorization", "user-agent", "te", "content-type")


class GrpcRelay(grpc.GenericRpcHandler):  # type: ignore[misc]  # the library has no types
    """Answers calls of gRPC from a server that listens on a Unix socket.

    Args:
        rules: The calls that pass.
        socket: Of tritonserver.
    """

    def __init__(self, rules: Rules, *, socket: Path) -> None:
        self._rules = rules
        options = [*_UNLIMITED, ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=options)
        self._calls: dict[str, Callable[..., Any]] = {}

    async def close(self) -> None:
        """Close the connection to the server."""
        await self._channel.close()

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """Return what answers a call."""
        call = details.method
        metadata = dict(details.invocation_metadata or ())
        if not self._rules.passes_grpc(call):
            return _refusal(grpc.StatusCode.PERMISSION_DENIED, CLOSED)
        if not is_health(call) and not self._rules.is_authorized(metadata.get("authorization")):
            reason = "this server asks for `authorization: Bearer <token>`"
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, reason)
        if call == STREAM_CALL:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if call not in self._calls:
            self._calls[call] = self._channel.unary_unary(call)

        async def answer(request: bytes, context: Any) -> bytes:
            if call == REGISTER_CALL and (problem := _register_problem(request)):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
            try:
                reply: bytes = await self._calls[call](request, **_passed_on(context))
            except grpc.aio.AioRpcError as error:
                await _fail(context, error)
            return _without_reasons(reply) if call == INDEX_CALL else reply

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        call = self._channel.stream_stream(STREAM_CALL)(requests, **_passed_on(context))
        try:
            async for reply in call:
                yield _without_names(reply) if has_internal_names(reply) else reply
        except grpc.aio.AioRpcError as error:
            await _fail(context, error)
        finally:
            call.cancel()


def grpc_server(access: Access, relay: GrpcRelay, *, address: str) -> grpc.aio.Server:
    """Return a server of gRPC that has opened `address` and answers nothing yet.

    Raises:
        OSError: The address cannot be had.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", access.max_request_bytes),
            ("grpc.max_send_message_length", -1),
            # A port that somebody has is taken.
            ("grpc.so_reuseport", 0),
        ]
    )
    server.add_generic_rpc_handlers((relay,))
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


def _passed_on(context: Any) -> dict[str, Any]:
    """Return deadline and metadata of a call, for the call that passes it on."""
    metadata = [
        (key, value)
        for key, value in context.invocation_metadata() or ()
        if key not in _NOT_PASSED_ON and not key.startswith("grpc-")
    ]
    return {"timeout": context.time_remaining(), "metadata": metadata}


async def _fail(context: Any, error: grpc.aio.AioRpcError) -> NoReturn:
    details = without_internal_names(error.details() or "")
    await context.abort(error.code(), details)
    raise AssertionError("abort raises")


def _register_problem(request: bytes) -> str | None:
    from tritonclient.grpc import service_pb2

    register = service_pb2.SystemSharedMemoryRegisterRequest
    return shared_memory_problem(register.FromString(request).key)


def _without_reasons(reply: bytes) -> bytes:
    """Return the list of models without what the server says of those that have failed."""
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
