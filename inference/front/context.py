"""The models behind the ports, and what the protocols in front of them share."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from inference.front.access import Access
from inference.front.guard import Guard
from inference.front.sessions import ClientSessions
from inference.front.workers import Workers

_POLL_S = 0.05
_T = TypeVar("_T")


class Exchangeable(Generic[_T]):
    """A value that requests use: `current` for new ones, each keeps the one that it began with."""

    def __init__(self, value: _T) -> None:
        self.current = value
        self._users: Counter[_T] = Counter()

    @contextmanager
    def use(self) -> Iterator[_T]:
        """Yield the value, which stays in use for the duration of the block."""
        value = self.current
        self._users[value] += 1
        try:
            yield value
        finally:
            self._users[value] -= 1

    def users(self) -> int:
        """Return the number of blocks that use a value, current or former."""
        return self._users.total()

    async def exchange(self, value: _T) -> _T:
        """Use another value from now on; return the former one once its use has ended."""
        former, self.current = self.current, value
        while self._users[former]:
            await asyncio.sleep(_POLL_S)
        del self._users[former]
        return former


class FrontContext(Exchangeable[_T]):
    """The models behind the ports of one server, and the parts that its protocols share.

    `is_ready` returns whether it would answer. `guard_of` makes a guard that lets in web pages of
    `origins`, and calls `note_use` for each request for a model.
    """

    def __init__(
        self,
        access: Access,
        served: _T,
        *,
        host: str,
        is_ready: Callable[[], bool],
        note_use: Callable[[], None],
        workers: Workers,
    ) -> None:
        super().__init__(served)
        self.is_ready = is_ready
        self.guard_of = partial(Guard, access, listens_at=host, note_use=note_use)
        self.guard = self.guard_of()
        self.sessions = ClientSessions(host)
        self.workers = workers
