"""gRPC of the gateway: check a call, pass its messages on to tritonserver's socket and back.

Messages are passed on as they are, if they have the form of a request; gRPC itself refuses those
that are too large.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import grpc

from inference.gateway.access import Access
from inference.gateway.cancellation import Cancellations
from inference.gateway.check_process import CheckProcess
from inference.gateway.declared_inputs import DeclaredInputs
from inference.gateway.rules import (
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
from inference.gateway.sockets import ServerSockets
from inference.gateway.validation import (
    MalformedError,
    check_infer_message,
    without_raw_tensors,
)

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcRelay(grpc.GenericRpcHandler):  # type: ignore[misc]  # the library has no types
    """Answers calls of gRPC from a server that listens on a Unix socket.

    Args:
        access: The limits.
        rules: The calls that pass.
        sockets: Sockets of tritonserver.
        checks: Process that checks large requests.
        models: Inputs of the models, by name.
    """

    def __init__(
        self,
        access: Access,
        rules: Rules,
        *,
        sockets: ServerSockets,
        checks: CheckProcess,
        models: Mapping[str, DeclaredInputs],
    ) -> None:
        self._checks = checks
        self._models = models
        self._limit = access.max_request_bytes
        self._rules = rules
        options = [*_UNLIMITED, ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
        self._unready = sockets.unready
        self._channel = grpc.aio.insecure_channel(f"unix:{sockets.grpc}", options=options)
        self._calls: dict[str, Callable[..., Any]] = {}
        self._cancellations = Cancellations()

    async def close(self) -> None:
        """Close the connection to the server."""
        await self._channel.close()

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call."""
        call = details.method
        metadata = dict(details.invocation_metadata or ())
        if not self._rules.passes_grpc(call):
            return _refusal(grpc.StatusCode.PERMISSION_DENIED, CLOSED)
        if not is_health(call) and not self._rules.is_authorized(metadata.get("authorization")):
            reason = "this server requires `authorization: Bearer <token>`"
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, reason)
        if call == STREAM_CALL:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if call not in self._calls:
            self._calls[call] = self._channel.unary_unary(call)

        async def answer(request: bytes, context: Any) -> bytes:
            if call in UNREADY_ANSWERS and self._unready.exists():
                return UNREADY_ANSWERS[call]
            if call == REGISTER_CALL and (problem := _register_problem(request)):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
            if call == INFER_CALL and (problem := await self._infer_problem(request)):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
            try:
                reply: bytes = await self._calls[call](request, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await _fail(context, error)
            return _without_reasons(reply) if call == INDEX_CALL else reply

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        problem = None

        async def checked() -> AsyncIterator[bytes]:
            nonlocal problem
            async for request in requests:
                if problem := await self._infer_problem(request):
                    return  # what was asked before is still answered
                yield request

        call = self._channel.stream_stream(STREAM_CALL)(checked(), timeout=context.time_remaining())
        try:
            async for reply in call:
                yield _without_names(reply) if has_internal_names(reply) else reply
        except grpc.aio.AioRpcError as error:
            await _fail(context, error)
        finally:
            if not call.done():
                self._cancellations.add(call)
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    async def _infer_problem(self, request: bytes) -> str | None:
        """Return why a request is not passed on, None if it is."""
        try:
            data = without_raw_tensors(request)
            await self._checks.run(
                check_infer_message,
                data,
                size_bytes=len(request),
                limit=self._limit,
                models=self._models,
            )
        except MalformedError as error:
            return str(error)
        return None


def grpc_server(access: Access, relay: GrpcRelay, *, address: str) -> grpc.aio.Server:
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
