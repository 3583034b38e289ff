"""Request ids, which responses carry, and the access log, a line of JSON for each request."""

import asyncio
import contextlib
import json
import random
import re
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
_LEFT = 499  # nginx's status: the client has disconnected before the response
_KEY = "slipway_request_id"
_IDS = re.compile(r"[!-~]{1,128}")  # safe to print in logs and headers
# gRPC statuses that are the server's failures (OpenTelemetry's semantic conventions).
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def accepted_id(client_id: str) -> str:
    """Return the id of a request: the client's own if it is printable, or else a new one."""
    return client_id if _IDS.fullmatch(client_id) else f"{random.getrandbits(128):032x}"


def request_id(request: web.BaseRequest) -> str:
    """Return the id of an HTTP request to a handler `with_ids`."""
    return str(request[_KEY])


def log_call(
    name: str, method: str, path: str, status: int | str, began: float, **more: Any
) -> None:
    """Write a line of the access log for a request that `began` on the monotonic clock."""
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
    """Attach the request id to a gRPC call's response, and log and trace the call where asked to.

    Only inference calls get a span; a stream gets a single one.
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
    """Return the status of a gRPC call that ends."""
    code, error = context.code() or grpc.StatusCode.OK, sys.exc_info()[1]
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED"
    name = getattr(code, "name", str(code))
    return "UNKNOWN" if error is not None and name == "OK" else name  # not by abort


def with_ids(handler: _Handler, *, logs: bool, tracer: Tracer | None) -> _Handler:
    """Return a handler whose responses carry request ids; log and trace requests where asked to.

    The entries that a handler puts under `request[ABOUT]` are added to the line of the log. Only
    POST requests get a span.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        began, status = time.monotonic(), _LEFT
        name = request[_KEY] = accepted_id(request.headers.get(REQUEST_ID, ""))
        try:
            if tracer is None or request.method != "POST":
                response = await handler(request)
            else:
                about = {"http.request.method": "POST", "url.path": request.path[:200]}
                with tracer.span("POST", request.headers, about):
                    response = await handler(request)
                    note_status(response.status, failed=response.status >= 500)
            status = response.status
            if not response.prepared:
                response.headers[REQUEST_ID] = name
            return response
        finally:
            if logs:
                about = request.get(ABOUT, {})
                log_call(name, request.method, request.path, status, began, **about)

    return answer
