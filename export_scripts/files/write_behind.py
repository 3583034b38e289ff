"""Write in the background what a worker has made, while it makes more."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

Step = Callable[[], None]


class WriteBehind:
    """One worker's way to the disk: its steps run in order in a thread of their own.

    No more than one step waits for the disk when a worker starts another, so that two buffers in
    turn are enough.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "write")
        self._last: concurrent.futures.Future[None] | None = None

    def wait(self) -> None:
        """Wait for all steps; raise what the last one raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def run(self, step: Step) -> None:
        """Start a step once the one before is done; raise what that one raised."""
        self.wait()
        self._last = self._thread.submit(step)

    def run_next(self, step: Step) -> None:
        """Start a step after the one before without waiting; not if that one failed."""
        before = self._last

        def after() -> None:
            if before is not None:
                before.result()
            step()

        self._last = self._thread.submit(after)

    def settle(self) -> None:
        """Wait for all steps, whatever became of them."""
        last, self._last = self._last, None
        if last is not None:
            concurrent.futures.wait([last])

    def close(self) -> None:
        """Wait for all steps, whatever became of them, and end the thread."""
        self._thread.shutdown(wait=True)


class AtOnce:
    """In place of `WriteBehind` for what is too little to hand over: every step runs when given."""

    def run(self, step: Step) -> None:
        """Run a step."""
        step()

    run_next = run

    def settle(self) -> None:
        """Nothing is on its way."""
