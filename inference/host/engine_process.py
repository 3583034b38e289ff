"""The process of a model with an engine, started with the arguments FD and FOLDER.

The server process sends orders over the connection FD and gets answers in batches. The engine thus
shares no interpreter lock with the protocols. FOLDER only shows in the process list.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ml_dtypes import bfloat16

from inference.backend.answering import Answering
from inference.backend.arguments import ModelArguments
from inference.backend.engine_model import EngineModel, fork_ranks
from inference.backend.metrics import ModelMetrics
from inference.backend.requests import InferRequest, ModelError, Outputs, readable
from inference.system.parent_process import end_with_parent
from inference.system.process_memory import import_modules

LOST = 0  # number of the unsolicited answer that says why the engine has failed
READ_METRICS = "read metrics"
# Responses of a request that may wait for its client; the model pauses then. In tensors, each is as
# large as the whole answer so far.
MAX_UNREAD = 64
# Import everything that loading a model and a forked rank need.
_MODULES = ("inference.engine.engine", "inference.ranks.worker")


@dataclass(frozen=True)
class LoadOrder:
    """One of this project's models and the arguments to load it with.

    An engine's process reuses the engine of its previous model if the two agree.
    """

    kind: type[Any]
    arguments: ModelArguments


class ModelProcess(Answering):
    """Receives the orders of the server process and sends it the model's answers in batches.

    The main thread only takes orders, so that the server process never blocks on sending one.
    """

    max_unread = MAX_UNREAD

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._model: EngineModel | None = None
        self._metrics: ModelMetrics | None = None
        self._batch: list[tuple[int, Any]] = []
        self._steps = 0  # the engine's step count as last reported

    def show(self, metrics: ModelMetrics) -> None:
        """Keep the metrics for READ_METRICS orders."""
        self._metrics = metrics

    def warn(self, message: str) -> None:
        """Write a warning to the server's log."""
        sys.stderr.write(f"warning: {message}\n")

    def go_out_of_service(self, reason: str) -> None:
        """Report the engine's failure, after the answers to its requests."""
        self._reply(LOST, lambda: reason)

    def serve(self, number: int, order: Any) -> NoReturn:
        """Execute a first order, then others until the server process closes the connection."""
        self._thread.start()
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._execute(number, order)
                number, order = pickle.loads(self._connection.recv_bytes())
        if self._model is not None:
            self._model.close()
        os._exit(0)

    def _execute(self, number: int, order: Any) -> None:
        if isinstance(order, InferRequest):
            assert self._model is not None
            self.ask(number, self._model, order)
        elif isinstance(order, LoadOrder):
            problem = self._load(order)
            self._reply(number, lambda: problem)
        elif order == READ_METRICS:
            self._reply(number, lambda: [] if self._metrics is None else [*self._metrics.read()])
        else:
            self.enqueue(number, order)

    def _load(self, order: LoadOrder) -> str:
        """Load a model; return the reason if it cannot be loaded, or else ""."""
        model = order.kind()
        model.former, self._model = self._model, None
        try:
            model.load(order.arguments, self)
        except Exception as error:  # bad files can cause errors of any kind
            return readable(error)
        self._model = model
        return ""

    def _reply(self, number: int, answer: Callable[[], Any]) -> None:
        """Queue the answer to an order behind the earlier ones."""
        self._calls.put(lambda: self._batch.append((number, answer())))

    def _send(self, key: int, outputs: Outputs, *, final: bool, queued_s: float) -> None:
        portable = {name: _portable(value) for name, value in outputs.items()}
        self._batch.append((key, (portable, final, queued_s)))

    def _fail(self, key: int, error: ModelError) -> None:
        self._batch.append((key, error))

    def _flush(self) -> None:
        steps = self._steps if self._model is None else self._model.engine.steps
        if self._batch or steps != self._steps:
            self._steps, batch, self._batch = steps, self._batch, []
            with contextlib.suppress(OSError):  # the server process has ended
                data = pickle.dumps((steps, batch), pickle.HIGHEST_PROTOCOL)
                self._connection.send_bytes(data)


def _portable(value: Any) -> Any:
    """Return an output that a process without torch can unpickle."""
    if not hasattr(value, "is_contiguous"):
        return value
    import torch

    value = value.contiguous().cpu()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(bfloat16)
    return value.numpy()


def main() -> None:
    """Serve one model until the server process ends."""
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):  # the server process ends this one
        signal.signal(number, signal.SIG_IGN)
    import_modules(_MODULES)
    connection = Connection(int(sys.argv[1]))
    try:
        number, order = pickle.loads(connection.recv_bytes())
    except EOFError:  # the server has no use for this process
        return
    fork_ranks(order.arguments)
    ModelProcess(connection).serve(number, order)
