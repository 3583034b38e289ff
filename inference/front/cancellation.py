"""Cancellation of streams at tritonserver."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

_PAUSE_S = 0.02


class Cancellable(Protocol):
    """A call of gRPC."""

    def cancel(self) -> Any:
        """Cancel it."""
        ...


class Cancellations:
    """Cancels streams one after the other, with a pause between them.

    Server 2.51 is apt to corrupt its memory, and to crash, when many are cancelled at the same
    moment, as those of one client that leaves.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, stream: Cancellable) -> None:
        """Cancel a stream soon; returns at once."""
        task = asyncio.create_task(self._cancel(stream))
        self._tasks.add(task)  # the event loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, stream: Cancellable) -> None:
        async with self._turn:
            stream.cancel()
            await asyncio.sleep(_PAUSE_S)
