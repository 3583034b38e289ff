"""A model with an engine, in a process of its own, with the arguments FD and FOLDER.

The server's process sends orders over the connection FD, and gets batches of answers: all that a
turn of the event loop has made goes out at once. The engine thereby shares no interpreter with the
protocols. FOLDER, the model's, is for the list of processes alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from inference.backend.arguments import ModelArguments
from inference.backend.engine_model import EngineModel, fork_ranks
from inference.backend.metrics import ModelMetrics
from inference.backend.requests import TOKENS, InferRequest, ModelError, RawTensor
from inference.system.parent_process import end_with_parent

LOST = 0  # the number of an answer that no order asked for: why the engine has failed
READ_METRICS = "read metrics"
GIVE_UP, TAKEN = "give up", "taken"  # the order, and one of the answers, of the same number
AT_ONCE = 16
# Tensors of a request that its client has not read: each is as large as the whole answer, and the
# next ones are not made before.
MOST_UNREAD = 64
_STEPS_S = 0.5  # between two reports of steps that have made no answer
# With all that a model imports when it is loaded, and a forked rank.
_MODULES = ("inference.engine.engine", "inference.ranks.worker")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOrder:
    """An order to load a model, into the engine of the one before where the two agree."""

    kind: type[EngineModel]
    arguments: ModelArguments


class Mailbox:
    """Calls to the event loop from any thread: one wake-up for all that wait.

    A step of an engine has an answer for every sequence. Between a few of them the loop does other
    work, so that a new request reaches the engine before the next step.
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
            calls = [self._calls.popleft() for _ in range(min(AT_ONCE, len(self._calls)))]
            goes_on = self._is_woken = bool(self._calls)
        for call in calls:
            self._loop.call_soon(call)
        if goes_on:
            self._loop.call_soon(self._run)


class ModelProcess:
    """This process as the server around its model."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection, self._loop = connection, loop
        self._model: EngineModel | None = None
        self._metrics: ModelMetrics | None = None
        self._running: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]] = {}
        self._batch: list[tuple[int, Any]] = []
        self._steps = 0  # of the engine, as reported
        self.post = Mailbox(loop).post

    def show(self, metrics: ModelMetrics) -> None:
        """Keep metrics for the orders that read them."""
        self._metrics = metrics

    def warn(self, message: str) -> None:
        """Write to the server's log."""
        sys.stderr.write(f"warning: {message}\n")

    def leave(self, reason: str) -> None:
        """Report that the engine has failed, once every request has its answer."""
        self.post(partial(self._send, LOST, reason))

    async def serve(self, number: int, order: Any) -> None:
        """Obey a first order, and others until the server's process closes the connection."""
        self._obey(number, order)
        # Orders are taken in whatever the event loop does: the sender never waits for its answers.
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        while True:
            await asyncio.sleep(_STEPS_S)
            if self._model is not None and self._model.engine.steps != self._steps:
                self._flush()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, order = pickle.loads(self._connection.recv_bytes())
                self._loop.call_soon_threadsafe(self._obey, number, order)
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._model is not None:
            self._model.close()
        os._exit(0)

    def _obey(self, number: int, order: Any) -> None:
        if isinstance(order, InferRequest):
            room = asyncio.Semaphore(MOST_UNREAD)
            task = self._loop.create_task(self._answer(number, order, room))
            self._running[number] = task, room
            task.add_done_callback(lambda _: self._running.pop(number))
        elif isinstance(order, LoadOrder):
            self._send(number, self._load(order))
        elif order == READ_METRICS:
            self._send(number, [] if self._metrics is None else [*self._metrics.read()])
        elif number in self._running:
            task, room = self._running[number]
            if order == TAKEN:
                room.release()
            else:
                task.cancel()

    def _load(self, order: LoadOrder) -> str:
        """Load a model; return why that is impossible, "" if it is not."""
        model = order.kind()
        model.former, self._model = self._model, None
        try:
            model.load(order.arguments, self)
        except Exception as error:  # whatever a model's files hold
            text = str(error) or type(error).__name__
            return text.encode(errors="surrogateescape").decode(errors="replace")
        self._model = model
        return ""

    async def _answer(self, number: int, request: InferRequest, room: asyncio.Semaphore) -> None:
        assert self._model is not None
        waited: list[float] = []  # seconds in the queue
        try:
            responses = self._model.infer(request, queued=waited.append)
            async with contextlib.aclosing(responses):
                async for outputs, final in responses:
                    if TOKENS not in outputs:
                        await room.acquire()
                    portable = {name: _portable(each) for name, each in outputs.items()}
                    self._send(number, (portable, final, sum(waited)))
        except ModelError as error:
            self._send(number, error)
        except Exception as error:  # of this program
            logger.exception("a request has failed")
            self._send(number, ModelError(str(error) or type(error).__name__, "INTERNAL"))

    def _send(self, number: int, answer: Any) -> None:
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append((number, answer))

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if self._model is not None:
            self._steps = self._model.engine.steps
        with contextlib.suppress(OSError):  # the server's process has ended
            self._connection.send_bytes(pickle.dumps((self._steps, batch), pickle.HIGHEST_PROTOCOL))


def _portable(value: Any) -> Any:
    """Return an output for a process without torch."""
    if not hasattr(value, "is_contiguous"):
        return value
    import torch

    value = value.contiguous().cpu()
    if value.dtype == torch.bfloat16:
        return RawTensor("BF16", tuple(value.shape), value.view(torch.int16).numpy().tobytes())
    return value.numpy()


def main() -> None:
    """Serve one model until the server's process ends."""
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):  # the server's process ends this one
        signal.signal(number, signal.SIG_IGN)
    for name in _MODULES:
        importlib.import_module(name)
    connection = Connection(int(sys.argv[1]))
    try:
        number, order = pickle.loads(connection.recv_bytes())
    except EOFError:  # the server needs no engine
        return
    fork_ranks(order.arguments)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(ModelProcess(connection, loop).serve(number, order))
