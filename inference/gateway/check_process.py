"""A process that checks large requests, which would hold up all others in the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from inference.gateway.validation import MalformedError

_QUICK_BYTES = 64 << 10  # takes some 20 ms at most
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class CheckProcess:
    """Runs checks; the process starts with the first large request."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, check: Callable[..., None], data: bytes, **options: Any) -> None:
        """Call a function of a module with data; raise what it raises, MalformedError as a rule."""
        if len(data) <= _QUICK_BYTES:
            check(data, **options)
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                1, mp_context=get_context("spawn"), initializer=_end_with_the_gateway
            )
        pool, loop = self._pool, asyncio.get_running_loop()
        try:
            await loop.run_in_executor(pool, functools.partial(check, data, **options))
        except BrokenProcessPool:
            if self._pool is pool:
                self._pool = None
            raise MalformedError("the request takes too much memory to check") from None

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _end_with_the_gateway() -> None:
    """Make the kernel end the calling process with its parent, also if that is killed."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
