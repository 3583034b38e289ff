"""Ids of requests, which answers carry, and a line of the access log for each."""

import json
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

from aiohttp import web

REQUEST_ID = "X-Request-Id"
LEFT = 499  # as nginx has it: the client has left before the end
_KEY = "slipway_request_id"
_IDS = re.compile(r"[!-~]{1,128}")  # printed in logs and headers as they are
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def accepted_id(given: str) -> str:
    """Return the id of a request: the client's own, or else a new one."""
    return given if _IDS.fullmatch(given) else uuid.uuid4().hex


def request_id(request: web.BaseRequest) -> str:
    """Return the id of a request of HTTP."""
    if _KEY not in request:
        request[_KEY] = accepted_id(request.headers.get(REQUEST_ID, ""))
    return str(request[_KEY])


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


def log_answer(request: web.BaseRequest, status: int, began: float, **more: Any) -> None:
    """Write a line of the access log for a request of HTTP."""
    log_call(request_id(request), request.method, request.path, status, began, **more)


def with_ids(handler: _Handler, *, logs: bool) -> _Handler:
    """Return a handler whose answers carry the ids of their requests, with a line of the log."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        began, status = time.monotonic(), LEFT
        try:
            response = await handler(request)
            status = response.status
            if not response.prepared:
                response.headers[REQUEST_ID] = request_id(request)
            return response
        finally:
            if logs:
                log_answer(request, status, began)

    return answer
