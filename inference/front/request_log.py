"""Ids of requests, which answers carry, and a line of the access log for each."""

import asyncio
import contextlib
import json
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import grpc
from aiohttp import web

from inference.front.tracing import Tracer, note_status

REQUEST_ID = "X-Request-Id"
ABOUT = "slipway_about"
_LEFT = 499  # as nginx has it: the client has left before the end
_KEY = "slipway_request_id"
_IDS = re.compile(r"[!-~]{1,128}")  # printed in logs and headers as they are
# Statuses of gRPC that are failures of a server (OpenTelemetry's semantic conventions).
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def accepted_id(given: str) -> str:
    """Return the id of a request: the client's own, or else a new one."""
    return given if _IDS.fullmatch(given) else secrets.token_hex(16)


def request_id(request: web.BaseRequest) -> str:
    """Return the id of a request of HTTP."""
    if (name := request.get(_KEY)) is None:
        name = request[_KEY] = accepted_id(request.headers.get(REQUEST_ID, ""))
    return str(name)


def log_call(
    name: str, method: str, path: str, status: int | str, began: float, **more: Any
) -> None:
    """Write a line of the access log, of a request that `began` on the monotonic clock."""
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "request_id": name,
        "method": method[:20],
        "path": path[:200],
        "status": status,
        "seconds": round(time.monotonic() - began, 6),
        **more,
    }
    sys.stderr.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def named_call(
    name: str, call: str, context: Any, *, logs: bool, tracer: Tracer | None
) -> Iterator[None]:
    """Give the answer of a call of gRPC its id, and where wanted a line of the log and a span.

    Calls that ask no model have no span; a stream has one.
    """
    began, path = time.monotonic(), call.strip("/")
    context.set_trailing_metadata(((REQUEST_ID.lower(), name),))
    with contextlib.ExitStack() as stack:
        if tracer is not None and call.endswith("Infer"):
            about = {"rpc.system.name": "grpc", "rpc.method": path}
            stack.enter_context(tracer.span(path, dict(context.invocation_metadata()), about))
        try:
            yield
        finally:
            status = _status(context)
            note_status(status, failed=status in _FAILURES)
            if logs:
                log_call(name, "gRPC", call, status, began)


def _status(context: Any) -> str:
    """Return the status of a call of gRPC that ends."""
    code, error = context.code() or grpc.StatusCode.OK, sys.exc_info()[1]
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED"
    name = getattr(code, "name", str(code))
    return "UNKNOWN" if error is not None and name == "OK" else name  # not by abort


def with_ids(handler: _Handler, *, logs: bool) -> _Handler:
    """Return a handler whose answers carry the ids of their requests, with a line of the log.

    What the handler puts under ABOUT in a request is in its line.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        began, status = time.monotonic(), _LEFT
        try:
            response = await handler(request)
            status = response.status
            if not response.prepared:
                response.headers[REQUEST_ID] = request_id(request)
            return response
        finally:
            if logs:
                about = request.get(ABOUT, {})
                log_call(request_id(request), request.method, request.path, status, began, **about)

    return answer
