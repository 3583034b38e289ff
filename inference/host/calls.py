"""Errors that clients see, and the way from engines' threads to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from http import HTTPStatus

from inference.front.guard import RejectedError
from inference.front.rules import without_internal_names

_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
}

_AT_ONCE = 16

logger = logging.getLogger(__name__)


class InferError(RejectedError):
    """A model does not answer a request. `grpc_code` is the name of gRPC's status."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        text = without_internal_names(message) or "the model does not answer"
        super().__init__(text, _STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR))
        self.grpc_code = code


class Mailbox:
    """Calls from engines' threads to the event loop: one wake-up for all that wait.

    A step of an engine has an answer for every sequence. Between a few of them the loop reads its
    sockets, so that a new request reaches the engine before the next step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_woken = False

    def post(self, call: Callable[[], None]) -> None:
        """Call a function in the event loop's thread, in the order of posting."""
        with self._lock:
            self._calls.append(call)
            wakes, self._is_woken = not self._is_woken, True
        if wakes:
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        with self._lock:
            calls = [self._calls.popleft() for _ in range(min(_AT_ONCE, len(self._calls)))]
            goes_on = self._is_woken = bool(self._calls)
        for call in calls:
            _called(call)
        if goes_on:
            self._loop.call_soon(self._run)


def _called(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the calls of other requests follow
        logger.exception("an answer could not be handed on")
