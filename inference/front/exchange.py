"""A value that can be exchanged while requests use it, such as a connection to a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")
_POLL_S = 0.05


@dataclass
class _Use(Generic[_T]):
    value: _T
    users: int = 0


class Exchangeable(Generic[_T]):
    """A value that requests use; each of them keeps the one that it began with."""

    def __init__(self, value: _T) -> None:
        self._current = _Use(value)

    @property
    def current(self) -> _T:
        """The value for new requests."""
        return self._current.value

    @contextmanager
    def use(self) -> Iterator[_T]:
        """Yield the value, which stays in use for the duration of the block."""
        current = self._current
        current.users += 1
        try:
            yield current.value
        finally:
            current.users -= 1

    def exchange(self, value: _T) -> Callable[[], Awaitable[_T]]:
        """Use another value from now on; return a wait for the end of the former one's use."""
        former, self._current = self._current, _Use(value)

        async def unused() -> _T:
            while former.users:
                await asyncio.sleep(_POLL_S)
            return former.value

        return unused
