"""The end of the front: by a signal, or with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from typing import Any

LONGEST_REQUEST_S = 86400.0  # in effect no limit; the server needs one
_GRACE_S = 1.0
_READ_BYTES = 1 << 16


class Stop:
    """The end of the front: by SIGTERM or Ctrl-C, or with its owner.

    A signal lets running requests finish, however long they take; whoever sends it sets the limit.
    Without its owner, whose end closes the lifeline pipe, the process ends after a moment. Each
    line that comes through the pipe is put into `orders`.
    """

    def __init__(self, lifeline: int | None) -> None:
        self._asked, self._lost = asyncio.Event(), asyncio.Event()
        self.orders: asyncio.Queue[bytes] = asyncio.Queue()
        self._received = b""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked.set)
        if lifeline is not None:
            loop.add_reader(lifeline, self._read, lifeline)

    def _read(self, lifeline: int) -> None:
        if data := os.read(lifeline, _READ_BYTES):
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                self.orders.put_nowait(line)
            return
        asyncio.get_running_loop().remove_reader(lifeline)
        self._lost.set()
        self._asked.set()

    async def wait(self) -> None:
        """Wait for either."""
        await self._asked.wait()

    async def finish(self, *ends: Coroutine[Any, Any, None]) -> None:
        """Wait until the servers that this process runs have ended, after their last answers."""
        ending = asyncio.gather(*ends)
        lost = asyncio.ensure_future(self._lost.wait())
        await asyncio.wait((ending, lost), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ending, _GRACE_S)
