"""A request to an engine, from its arrival to its answer, and the base class of schedulers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

from inference.ranks.base import StepResult


class QueuedRequest:
    """A request that waits or runs; `waiting` are its rows that have not begun."""

    future: Future[Any]
    arrival: int
    waiting: Sequence[object]

    @property
    def waiting_rows(self) -> int:
        """Rows that have not begun."""
        return len(self.waiting)

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless the client has gone."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return

    def succeed(self, result: object) -> None:
        """Answer, unless the client has gone."""
        try:
            self.future.set_result(result)
        except InvalidStateError:
            return


RequestT = TypeVar("RequestT", bound=QueuedRequest)


class StepScheduler(ABC, Generic[RequestT]):
    """Decides what the steps of an engine compute; belongs to the thread of its loop."""

    def __init__(self) -> None:
        self._requests: dict[RequestT, None] = {}  # in order of arrival

    @property
    def idle(self) -> bool:
        """Return whether no work is left."""
        return not self._requests

    @property
    def requests(self) -> list[RequestT]:
        """Requests that are not answered yet."""
        return list(self._requests)

    @property
    def waiting_rows(self) -> int:
        """Rows that have not begun."""
        return sum(request.waiting_rows for request in self._requests)

    @abstractmethod
    def add(self, request: RequestT) -> None:
        """Add a request, or fail it with the reason."""

    @abstractmethod
    def drop(self, request: RequestT) -> None:
        """Drop a request and free its resources."""

    @abstractmethod
    def plan(self, *, under_way: bool = False) -> Any:
        """Return the next `Planned` step, or None if nothing can run.

        `under_way` means that the step before is not finished.
        """

    @abstractmethod
    def finish(self, step: Any, result: StepResult, *, seconds: float) -> None:
        """Process the results of a planned step, in the order in which they were planned."""
