"""A request to an engine, from its arrival to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any


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
