"""Worker processes for work of unbounded cost, set by a client or a checkpoint: JSON, templates.

The event loop never blocks on it. Processes rather than threads, because a worker that takes too
long or too much memory must be killed; a new one replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from inference.front.guard import RejectedError
from inference.system.parent_process import end_with_parent

_T = TypeVar("_T")

WORK_S = 5.0  # limit for one request, plus WORK_S_PER_MIB for its size
WORK_S_PER_MIB = 2.0
MEMORY_BYTES = 2 << 30  # limit of one process, with what it has loaded
QUICK_BYTES = 64 << 10  # larger requests leave one worker free for small ones
INLINE_BYTES = 16 << 10  # up to this size a check takes a few milliseconds
_START_S = 120.0


class Workers:
    """A pool of processes, started on first use; large requests use all but one.

    `work_s` is the time limit in seconds for an empty request; larger ones get more.
    """

    def __init__(self, count: int = 2, *, work_s: float = WORK_S) -> None:
        self._warm_up: Callable[[], None] = _nothing
        self._work_s = work_s
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._workers = [_Worker() for _ in range(count)]
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._large = asyncio.Semaphore(max(count - 1, 1))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")

    async def start(self, warm_up: Callable[[], None]) -> None:
        """Start every process now; each, and each replacement, runs `warm_up` first.

        Raises what `warm_up` raises.
        """
        self._warm_up = warm_up
        await asyncio.gather(*(self.run(_nothing, size_bytes=0) for _ in self._workers))

    async def check(self, work: Callable[..., _T], *args: Any, size_bytes: int) -> _T:
        """Run work whose time grows with the request; for small ones, in this process."""
        if size_bytes <= INLINE_BYTES:
            return work(*args)
        return await self.run(work, *args, size_bytes=size_bytes)

    async def run(self, work: Callable[..., _T], *args: Any, size_bytes: int) -> _T:
        """Run a module-level function in a worker; return or raise what it does.

        Raises RejectedError if it takes too long or too much memory.
        """
        async with contextlib.AsyncExitStack() as stack:
            if size_bytes > QUICK_BYTES:
                await stack.enter_async_context(self._large)
            worker = await self._free.get()
            limit_s = self._work_s + WORK_S_PER_MIB * size_bytes / (1 << 20)
            call = asyncio.get_running_loop().run_in_executor(
                self._threads, worker.ask, (work, args), limit_s, self._warm_up
            )
            call.add_done_callback(lambda _: self._free.put_nowait(worker))
            # Work continues after its client has left, and holds its semaphore until it ends.
            succeeded, result = await asyncio.shield(call)
        if not succeeded:
            raise result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """One process, used by one thread at a time."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None
        self._ending = threading.Lock()

    def ask(
        self, call: tuple[Callable[..., Any], Any], limit_s: float, warm_up: Callable[[], None]
    ) -> tuple[bool, Any]:
        """Return whether a call succeeded, and its result or its error."""
        if self._process is None or not self._process.is_alive():
            context = get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_work, args=(other,), daemon=True)
            self._process.start()
            other.close()
            is_warm, reason = self._answer((warm_up, ()), _START_S)
            if not is_warm:
                self.end()
                return False, reason
        return self._answer(call, limit_s)

    def _answer(self, call: tuple[Callable[..., Any], Any], limit_s: float) -> tuple[bool, Any]:
        assert self._pipe is not None
        try:
            self._pipe.send(call)
            if self._pipe.poll(limit_s):
                found: tuple[bool, Any] = self._pipe.recv()
                return found
            self.end()
            return False, RejectedError(f"the request takes more than {limit_s:.0f} s to read")
        except (EOFError, OSError):
            self.end()
            return False, RejectedError("the request takes too much memory to read")

    def end(self) -> None:
        # The server's shutdown and the thread of an interrupted call may both come here: a
        # descriptor that is closed twice may belong to another file by then.
        with self._ending:
            if self._process is not None:
                self._process.kill()
                self._process.join()
            if self._pipe is not None:
                self._pipe.close()
            self._process = self._pipe = None


def _nothing() -> None:
    """Do nothing."""


def _work(pipe: Connection) -> None:
    """Answer calls until the other end of the pipe is closed."""
    end_with_parent()  # also if the server is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            return
        try:
            found = pickle.dumps((True, work(*args)), protocol=pickle.HIGHEST_PROTOCOL)
        except MemoryError:
            return  # ending the process frees its memory
        except Exception as error:  # the caller gets every kind
            found = pickle.dumps((False, error))
        pipe.send_bytes(found)
