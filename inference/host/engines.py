"""The server process's side of the models with an engine, each of which has its own process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inference.backend.answering import ANSWERED, CANCEL, CONSUMED
from inference.backend.metrics import ModelMetric
from inference.backend.requests import TOKENS, InferRequest, ModelError, Responses
from inference.host.engine_process import LOST, READ_METRICS, LoadOrder
from inference.host.engine_start import started_engine
from inference.server.processes import exit_reason

_AT_ONCE = 16  # requests to wake before the event loop reads its sockets again
_END_S = 10.0  # for the ranks to end
_GONE_S = 0.5
# Batches of answers to one order.
_Answers = asyncio.Queue[Sequence[Any]]


class EngineProcess:
    """The process of one engine; it ends with the server process.

    Attributes:
        steps: the engine's step count as last reported.
    """

    def __init__(self, folder: Path, on_failure: Callable[[str], None]) -> None:
        """Start it for the model in `folder`; `on_failure` gets the reason if it fails.

        The process ends with the thread that starts it, which must be the event loop's.
        """
        self.steps = 0
        self._name, self._on_failure = folder.name, on_failure
        self._numbers = itertools.count(LOST + 1)
        self._waiting: dict[int, _Answers] = {}
        self._process = started_engine(str(folder.parent))
        self._link = self._process.link
        self._loop = asyncio.get_running_loop()
        self._undelivered: dict[int, list[Any]] = {}  # answers by the number of their order
        self._loop.add_reader(self._link.fileno(), self._read)

    async def load(self, order: LoadOrder) -> None:
        """Load a model. Raises ValueError if it cannot be loaded."""
        if problem := await self._answer_to(order):
            raise ValueError(problem)

    async def metrics(self) -> list[ModelMetric]:
        """Return the metrics of the model. Raises ModelError."""
        found: list[ModelMetric] = await self._answer_to(READ_METRICS)
        return found

    async def infer(
        self, request: InferRequest, *, queued: Callable[[float], None] = lambda _: None
    ) -> Responses:
        """Yield (outputs, is final) for each response. Raises ModelError.

        Closing the generator cancels the request, or completes it if it `is_answered`. `queued`
        gets the seconds in the engine's queue.
        """
        tokens: list[list[int]] = []
        final = False
        with self._order(request) as (number, answers):
            try:
                while not final:
                    batch = [*await answers.get()]
                    while not answers.empty():  # the client is slow
                        batch += answers.get_nowait()
                    for count, answer in enumerate(batch, start=1):
                        if isinstance(answer, ModelError):
                            final = True
                            raise answer
                        outputs, final, waited_s = answer
                        if TOKENS in outputs and not final:
                            tokens = tokens or [[] for _ in outputs[TOKENS]]
                            for ids, new in zip(tokens, outputs[TOKENS], strict=True):
                                ids += new
                            if count < len(batch):
                                continue  # the next response includes these tokens
                            outputs = {TOKENS: tokens}
                        if final:
                            queued(waited_s)
                        yield outputs, final
                        if not (final or TOKENS in outputs):
                            self._send(number, CONSUMED)
            finally:
                if not final:
                    self._send(number, ANSWERED if request.is_answered else CANCEL)

    async def _answer_to(self, order: Any) -> Any:
        with self._order(order) as (_, answers):
            answer, *_ = await answers.get()
        if isinstance(answer, ModelError):
            raise answer
        return answer

    @contextlib.contextmanager
    def _order(self, order: Any) -> Any:
        """Send an order; yield its number and the queue of its answers."""
        number = next(self._numbers)
        answers = self._waiting[number] = _Answers()
        try:
            self._send(number, order)
            yield number, answers
        finally:
            del self._waiting[number]

    def _send(self, number: int, order: Any) -> None:
        try:
            self._link.send_bytes(pickle.dumps((number, order), pickle.HIGHEST_PROTOCOL))
        except OSError:  # the process has ended, or the link was closed
            if (answers := self._waiting.get(number)) is not None:
                answers.put_nowait([ModelError("the model's process has ended", "UNAVAILABLE")])

    def _read(self) -> None:
        """Read everything that has arrived, so that a slow client gets its tokens in one piece."""
        batch = []
        try:
            while self._link.poll():
                self.steps, more = pickle.loads(self._link.recv_bytes())
                batch += more
        except (EOFError, OSError):
            self._loop.remove_reader(self._link.fileno())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GONE_S)  # it closes the link before its memory is freed
            status = self._process.returncode
            reason = "has ended" if status is None else exit_reason(status)
            batch.append((LOST, f"its process {reason}"))
        is_idle = not self._undelivered
        for number, answer in batch:
            if number == LOST:
                self._end(answer)
            else:
                self._undelivered.setdefault(number, []).append(answer)
        if is_idle:
            self._wake()

    def _wake(self) -> None:
        """Wake a few requests, and let the event loop read its sockets before the next few."""
        for number in [*itertools.islice(self._undelivered, _AT_ONCE)]:
            came = self._undelivered.pop(number)
            if (answers := self._waiting.get(number)) is not None:
                answers.put_nowait(came)
        if self._undelivered:
            self._loop.call_soon(self._wake)

    def _end(self, reason: str) -> None:
        text = f"{self._name} is out of service: {reason}"
        for number in self._waiting:
            self._undelivered.setdefault(number, []).append(ModelError(text, "UNAVAILABLE"))
        self._on_failure(text)

    async def close(self) -> None:
        """End the engine and its ranks; may be called more than once."""
        if self._link.closed:
            return
        self._loop.remove_reader(self._link.fileno())
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _END_S)
        self._process.kill()
        self._process.wait()
