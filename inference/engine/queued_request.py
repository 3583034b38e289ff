"""Base classes of an engine's requests, steps and schedulers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inference.engine.load import EngineLoad
from inference.ranks.base import StepResult
from inference.ranks.plan import StepPlan


class QueuedRequest:
    """A queued or running request; `waiting` holds its rows that have not begun."""

    future: Future[Any]
    arrival: int
    waiting: Sequence[object]

    @property
    def has_begun(self) -> bool:
        """Whether steps may have stored data for it."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless the client has left."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def succeed(self, result: object) -> None:
        """Answer, unless the client has left."""
        with suppress(InvalidStateError):
            self.future.set_result(result)


@dataclass(frozen=True)
class PlannedStep:
    """A plan for every rank, and the requests (`owners`) with work in it, without duplicates.

    If `overlaps`, the next step may be planned before this one has finished.
    """

    plan: StepPlan
    embeddings: Tensor | None  # (plan.embedding_rows, E) fp32
    overlaps: bool
    owners: Sequence[Any]


class StepScheduler(ABC):
    """Decides what each step of an engine computes; only the engine's thread may use it."""

    def __init__(self) -> None:
        # Requests without an answer, in order of arrival.
        self.requests: dict[Any, None] = {}

    def load(self) -> EngineLoad:
        """Return the current load; may be called from any thread."""
        return EngineLoad()

    def add(self, request: Any) -> None:
        """Add a request, or fail it with a reason."""
        self.requests[request] = None

    def drop(self, request: Any) -> None:
        """Drop a request and free its resources."""
        del self.requests[request]

    @abstractmethod
    def plan(self, *, under_way: bool = False) -> PlannedStep | None:
        """Return the next step, or None if nothing can run.

        `under_way` means that the previous step has not finished.
        """

    @abstractmethod
    def finish(self, step: Any, result: StepResult, *, seconds: float) -> None:
        """Process the results of a step; steps finish in the order in which they were planned."""
