"""A model with an engine, in a process of its own, with the arguments FD and FOLDER.

The server's process sends orders over the connection FD, and gets batches of answers: all that has
come meanwhile goes out at once. The engine thereby shares no interpreter with the protocols.
FOLDER, the model's, is for the list of processes alone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from inference.backend.arguments import ModelArguments
from inference.backend.engine_model import AskedEngine, EngineModel, fork_ranks
from inference.backend.metrics import ModelMetrics
from inference.backend.requests import TOKENS, InferRequest, ModelError, RawTensor
from inference.system.parent_process import end_with_parent

LOST = 0  # the number of an answer that no order asked for: why the engine has failed
READ_METRICS = "read metrics"
GIVE_UP, TAKEN = "give up", "taken"  # the order, and one of the answers, of the same number
# Tensors of a request that its client has not read: each is as large as the whole answer, and the
# next ones are not made before.
MOST_UNREAD = 64
_STEPS_S = 0.5  # between two reports of steps that have made no answer
_LARGE_AT_ONCE = 4  # requests that take some time to read
# With all that a model imports when it is loaded, and a forked rank.
_MODULES = ("inference.engine.engine", "inference.ranks.worker")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOrder:
    """An order to load a model, into the engine of the one before where the two agree."""

    kind: type[EngineModel]
    arguments: ModelArguments


class ModelProcess:
    """This process as the server around its model.

    One thread takes orders, whatever the others do: the server's process never waits for its
    answers. Requests go from there to the engine at once. A second one makes the answers, and sends
    all that have come meanwhile together.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._model: EngineModel | None = None
        self._metrics: ModelMetrics | None = None
        self._running: dict[int, _Running] = {}
        self._batch: list[tuple[int, Any]] = []
        self._steps = 0  # of the engine, as reported
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.post = self._calls.put
        self._readers = ThreadPoolExecutor(_LARGE_AT_ONCE)

    def show(self, metrics: ModelMetrics) -> None:
        """Keep metrics for the orders that read them."""
        self._metrics = metrics

    def warn(self, message: str) -> None:
        """Write to the server's log."""
        sys.stderr.write(f"warning: {message}\n")

    def leave(self, reason: str) -> None:
        """Report that the engine has failed, once every request has its answer."""
        self.post(partial(self._send, LOST, reason))

    def serve(self, number: int, order: Any) -> NoReturn:
        """Obey a first order, and others until the server's process closes the connection."""
        threading.Thread(target=self._work, name="answers", daemon=True).start()
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._obey(number, order)
                number, order = pickle.loads(self._connection.recv_bytes())
        if self._model is not None:
            self._model.close()
        os._exit(0)

    def _obey(self, number: int, order: Any) -> None:
        if isinstance(order, InferRequest):
            assert self._model is not None
            asked = AskedEngine(self._model, order, partial(self._put, number))
            self._running[number] = _Running(asked)
            if asked.is_large:
                self._readers.submit(asked.submit)
            else:
                asked.submit()
        elif isinstance(order, LoadOrder):
            self.post(partial(self._send, number, self._load(order)))
        else:
            self.post(partial(self._note, number, order))

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

    def _put(self, number: int, step: Any) -> None:
        """Have what an engine has made answered."""
        self.post(partial(self._note, number, step))

    def _work(self) -> None:
        """Do what is posted, and send the answers; a failure of this program ends the process."""
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    self._calls.get(timeout=_STEPS_S)()
                    for _ in range(self._calls.qsize()):
                        self._calls.get()()
                self._flush()
        except Exception:
            logger.exception("the answers of an engine cannot be made")
            os._exit(1)

    def _flush(self) -> None:
        steps = self._steps if self._model is None else self._model.engine.steps
        if self._batch or steps != self._steps:
            self._steps, batch, self._batch = steps, self._batch, []
            with contextlib.suppress(OSError):  # the server's process has ended
                data = pickle.dumps((steps, batch), pickle.HIGHEST_PROTOCOL)
                self._connection.send_bytes(data)

    def _note(self, number: int, news: Any) -> None:
        """Take in an order without a request, or what an engine has made of one."""
        running = self._running.get(number)
        if news == READ_METRICS:
            self._send(number, [] if self._metrics is None else [*self._metrics.read()])
        elif running is None:  # it has ended
            pass
        elif news == GIVE_UP:
            self._end(number)
        elif news == TAKEN:
            running.room += 1
        else:
            running.came.append(news)
        while running is not None and running.came and running.room:
            self._respond(number, running)

    def _respond(self, number: int, running: _Running) -> None:
        try:
            outputs, final = running.asked.response(running.came.popleft())
            if outputs is None:
                return
            portable = {name: _portable(each) for name, each in outputs.items()}
            answer: Any = portable, final, running.asked.queued_s
            running.room -= TOKENS not in outputs
        except Exception as error:
            answer, final = error, True
            if not isinstance(error, ModelError):  # of this program
                logger.exception("a request has failed")
                answer = ModelError(str(error) or type(error).__name__, "INTERNAL")
        self._send(number, answer)
        if final:
            self._end(number)

    def _end(self, number: int) -> None:
        running = self._running.pop(number)
        running.came.clear()
        running.asked.end()

    def _send(self, number: int, answer: Any) -> None:
        self._batch.append((number, answer))


@dataclass(eq=False)
class _Running:
    """A request, what its engine has made and was not answered yet, and the room for answers."""

    asked: AskedEngine
    came: deque[Any] = field(default_factory=deque)
    room: int = MOST_UNREAD


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
    ModelProcess(connection).serve(number, order)
