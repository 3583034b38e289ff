"""The served models, and the state that the protocols in front of them share."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, TypeVar

from inference.front.access import Access
from inference.front.guard import Guard
from inference.front.sessions import ClientSessions
from inference.front.workers import Workers

_POLL_S = 0.05
_T = TypeVar("_T")


class FrontContext(Generic[_T]):
    """The served models of one server, and the state that its protocols share.

    `current` are the models for new requests; a request keeps the models that it began with.
    `is_ready` returns whether the server would answer. `guard_of(origins=...)` returns a guard that
    admits web pages of these origins and calls `note_use` for each request to a model.
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
        self.current = served
        self._users: Counter[_T] = Counter()
        self.is_ready = is_ready
        self.guard_of = partial(Guard, access, listens_at=host, note_use=note_use)
        self.guard = self.guard_of()
        self.sessions = ClientSessions(host)
        self.workers = workers

    def use(self) -> AbstractContextManager[_T]:
        """Return a block with the current models, which counts them as in use until its end."""
        return _Use(self.current, self._users)

    def users(self) -> int:
        """Return the number of open `use` blocks, of current and former models."""
        return self._users.total()

    async def exchange(self, served: _T) -> _T:
        """Switch new requests to `served`; return the former models once no request uses them."""
        former, self.current = self.current, served
        while self._users[former]:
            await asyncio.sleep(_POLL_S)
        del self._users[former]
        return former


class _Use(AbstractContextManager[_T]):
    """A use of models; a class, because a generator takes three times as long."""

    def __init__(self, served: _T, users: Counter[_T]) -> None:
        self._served, self._users = served, users

    def __enter__(self) -> _T:
        self._users[self._served] += 1
        return self._served

    def __exit__(self, *_: object) -> None:
        self._users[self._served] -= 1
