"""Requests to a served model, and their responses, whatever protocol they came by."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from inference.backend.exchange import INVALID, Array, Exchange
from inference.decoding.rows import SessionTurn
from inference.front.guard import RejectedError
from inference.front.rules import without_internal_names

# TritonError's names to those of gRPC.
_GRPC_NAMES = {INVALID: "INVALID_ARGUMENT"}
_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
}
Outputs = Mapping[str, Any]  # arrays, torch tensors or raw ones by name
Responses = AsyncGenerator[tuple[Outputs, bool], None]  # each with whether it is the last

logger = logging.getLogger(__name__)


class InferError(RejectedError):
    """A model does not answer a request. `grpc_code` is the name of gRPC's status."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        text = without_internal_names(message) or "the model does not answer"
        super().__init__(text, _STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR))
        self.grpc_code = code


@dataclass(frozen=True)
class InferRequest:
    """One request to a model.

    `wanted` are names of outputs, none for all of them. A client chooses `id` for itself.
    `parameters` are those that only models of others read.
    """

    tensors: dict[str, Array]
    wanted: Collection[str] = ()
    turn: SessionTurn | None = None
    id: str = ""
    is_canary: bool = False
    steps: Callable[[Sequence[Sequence[int]]], None] | None = field(default=None, repr=False)
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Mailbox:
    """Calls from engines' threads to the event loop: one wake-up for all that wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
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

    def is_here(self) -> bool:
        """Return whether this is the thread of the event loop."""
        return threading.get_ident() == self._thread

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, deque()
            self._is_woken = False
        for call in calls:
            _called(call)


def _called(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the calls of other requests follow
        logger.exception("an answer could not be handed on")


class HostedExchange(Exchange):
    """A request in progress in an engine, and the responses to it."""

    def __init__(self, request: InferRequest, wanted: Collection[str], mailbox: Mailbox) -> None:
        super().__init__(request.tensors, wanted, turn=request.turn, is_canary=request.is_canary)
        self.steps = request.steps
        self._mailbox = mailbox
        self._came: asyncio.Queue[tuple[Outputs | InferError, bool]] = asyncio.Queue()
        self._has_left = False

    def is_cancelled(self) -> bool:
        """Return whether the client has left."""
        return self._has_left

    def leave(self) -> None:
        """Note that no client waits for responses any more."""
        self._has_left = True

    def send(self, outputs: Mapping[str, Any], *, final: bool) -> None:
        """Send one response."""
        kept = {name: value for name, value in outputs.items() if name in self.wanted}
        self._put((kept, final))

    def fail(self, message: str, code: str) -> None:
        """Answer with an error."""
        self._put((InferError(message, _GRPC_NAMES.get(code, code)), True))

    def _put(self, item: tuple[Outputs | InferError, bool]) -> None:
        if self._mailbox.is_here():
            self._came.put_nowait(item)
        else:
            self._mailbox.post(partial(self._came.put_nowait, item))

    async def responses(self) -> Responses:
        """Yield responses, each with whether it is the last. Raises InferError."""
        final = False
        while not final:
            item, final = await self._came.get()
            if isinstance(item, InferError):
                raise item
            yield item, final
