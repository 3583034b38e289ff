"""Requests to a model with an engine, in both servers: one thread sends all the answers.

A request goes to the engine at once; the engine's results are queued for that thread, which sends
the answers in order. A failed request gets an error without affecting others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from inference.backend.metrics import ModelMetrics
from inference.backend.requests import TOKENS, InferRequest, ModelError, Outputs, Submitted
from inference.engine.errors import EngineBusyError, EngineFailedError

# News from the client: it cancels, has read a response, or needs no further one.
CANCEL, CONSUMED, ANSWERED = "cancel", "consumed", "answered"
_INLINE_BYTES = 16 << 10  # larger requests are parsed in a thread
_LARGE_AT_ONCE = 4  # threads for them
# gRPC code of an error, and the reason in the metrics.
_FAILURES: dict[type[Exception], tuple[str, str]] = {
    ValueError: ("INVALID_ARGUMENT", "invalid"),
    EngineBusyError: ("UNAVAILABLE", "busy"),
    EngineFailedError: ("UNAVAILABLE", "unavailable"),
}

logger = logging.getLogger(__name__)


class AnsweringModel(Protocol):
    """The part of `EngineModel` that this module uses."""

    metrics: ModelMetrics
    running: set[EngineRequest]

    def submit(self, request: InferRequest, on_step: Callable[[Any], bool]) -> Submitted:
        """Queue a request in the engine."""

    def check_progress(self) -> None:
        """Refuse a canary while the engine is busy. Raises ModelError."""


class Answering:
    """Runs requests on models and sends the answers; subclasses send, by the key of the request.

    Attributes:
        max_unread: tensor responses of a request that its client may leave unread; the request
            pauses beyond that.
        pause_s: longest time between two calls of `_flush`.
    """

    max_unread: float = math.inf
    pause_s = 0.5

    def __init__(self) -> None:
        self._running: dict[Any, EngineRequest] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(_LARGE_AT_ONCE)
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)

    def ask(self, key: Any, model: AnsweringModel, request: InferRequest) -> None:
        """Start a request to a model; its answers are sent under `key`."""
        running = EngineRequest(model, request, partial(self.enqueue, key), credit=self.max_unread)
        self._running[key] = running
        if sum(tensor.nbytes for tensor in request.tensors.values()) > _INLINE_BYTES:
            self._readers.submit(running.submit)
        else:
            running.submit()

    def enqueue(self, key: Any, news: Any) -> None:
        """Queue a result of the engine or news from the client; called by any thread."""
        self._calls.put(partial(self._handle, key, news))

    def _work(self) -> None:
        """Handle the queue until closed; an internal error ends the process."""
        try:
            while not self._is_closing:
                with contextlib.suppress(queue.Empty):
                    self._calls.get(timeout=self.pause_s)()
                    for _ in range(self._calls.qsize()):
                        self._calls.get()()
                self._flush()
        except Exception:
            logger.exception("the answers of an engine cannot be made")
            os._exit(1)

    def _handle(self, key: Any, news: Any) -> None:
        if (running := self._running.get(key)) is None:  # it has ended
            return
        if news == CANCEL:
            self._end(key)
        elif news == CONSUMED:
            running.credit += 1
        elif news == ANSWERED:
            running.credit, running.is_answered = math.inf, True
        else:
            running.results.append(news)
        while running.results and running.credit:
            self._respond(key, running)

    def _respond(self, key: Any, running: EngineRequest) -> None:
        try:
            outputs, final = running.response(running.results.popleft())
            if outputs is None:
                return
            self._send(key, outputs, final=final, queued_s=running.queued_s)
            running.credit -= TOKENS not in outputs
        except Exception as error:
            final = True
            if not isinstance(error, ModelError):  # an internal error
                logger.exception("a request has failed")
                error = ModelError(str(error) or type(error).__name__, "INTERNAL")
            self._fail(key, error)
        if final:
            self._end(key)

    def _end(self, key: Any) -> None:
        running = self._running.pop(key)
        running.results.clear()
        running.end()

    def _send(self, key: Any, outputs: Outputs, *, final: bool, queued_s: float) -> None:
        """Send a response to a request that has spent `queued_s` in the engine's queue."""
        raise NotImplementedError

    def _fail(self, key: Any, error: ModelError) -> None:
        """Send the error that ends a request."""
        raise NotImplementedError

    def _flush(self) -> None:
        """Send buffered answers, and do periodic work; called when the queue is empty."""


class EngineRequest:
    """One request to an engine, which passes its results to `put`.

    Attributes:
        results: results of the engine that are not answered yet.
        credit: responses that may be sent before the client reads one.
        queued_s: seconds in the engine's queue, set with the last response.
        is_answered: whether the client needs no further response.
    """

    queued_s = 0.0
    is_answered = False

    def __init__(
        self,
        model: AnsweringModel,
        request: InferRequest,
        put: Callable[[Any], None],
        *,
        credit: float = math.inf,
    ) -> None:
        """`put` is called from any thread: with each step, and with None at the end."""
        self.results, self.credit = deque[Any](), credit
        self._model, self._request, self._put = model, request, put
        self._began = time.perf_counter()
        self._future: Future[Any] = Future()  # the engine's, or one that holds a refusal
        self._outputs_of: Callable[[Any], Outputs | None] = lambda _: None
        self._outcome = "cancelled"
        self._is_refused = self._is_cancelled = False
        self._submitting = threading.Lock()  # the first step may come before `submit` returns

    def submit(self) -> None:
        """Queue the request in the engine; a refusal becomes its response."""
        with self._submitting:
            try:
                if self._request.is_canary:
                    self._model.check_progress()
                self._future, self._outputs_of = self._model.submit(self._request, self._on_step)
                self._model.running.add(self)
            except Exception as error:  # of any kind: it concerns this request alone
                self._is_refused, self._future = True, Future()
                self._future.set_exception(error.with_traceback(None))  # its frames hold `self`
        # The engine has put all steps before.
        self._future.add_done_callback(lambda _: self._put(None))
        if self._is_cancelled:  # while it was parsed
            self._free()

    def _on_step(self, step: Any) -> bool:
        self._put(step)
        return self.is_answered

    def response(self, step: Any) -> tuple[Outputs | None, bool]:
        """Return the outputs of a result, None for no response, and whether they are the last.

        Raises ModelError.
        """
        with self._submitting:
            pass
        try:
            if step is not None:
                return self._outputs_of(step), False
            result = self._future.result()
            times = getattr(result, "times", None)
            self.queued_s = getattr(times, "queued_s", None) or 0.0
            last = self._outputs_of(result)
        except CancelledError:
            raise ModelError("the request was cancelled", "CANCELLED") from None
        except ModelError:  # a canary's
            self._outcome = ""
            raise
        except Exception as error:  # a refusal, or an error of the engine
            answer, reason = model_error(error)
            self._outcome = "failed"
            if self._is_refused and reason:
                self._outcome = ""
                self._model.metrics.refused(reason)
            raise answer from None
        assert last is not None, "the last step is never reported on its own"
        self._outcome = ""
        if not self._request.is_canary:
            self._model.metrics.completed(time.perf_counter() - self._began, times)
        return last, True

    def end(self) -> None:
        """Cancel the request unless it has finished; called once."""
        self._is_cancelled = True
        self._free()
        if self._outcome and not (self._request.is_canary and self._outcome == "cancelled"):
            self._model.metrics.ended(self._outcome)

    def _free(self) -> None:
        self._future.cancel()
        self._model.running.discard(self)


def model_error(error: Exception) -> tuple[ModelError, str]:
    """Return the error to answer with, and its reason in the metrics if it is a refusal, or ""."""
    if isinstance(error, ModelError):
        return error, ""
    for kind, (code, reason) in _FAILURES.items():
        if isinstance(error, kind):
            return ModelError(str(error), code), reason
    return ModelError(str(error) or type(error).__name__, "INTERNAL"), ""
