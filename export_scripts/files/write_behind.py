"""Background writes: a worker fills one buffer while the previous one is written."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

Step = Callable[[], object]


class WriteBehind:
    """One worker's write queue: its steps run in order in a thread of their own.

    At most one step is pending when a worker starts another, so two alternating buffers are
    enough.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "write")
        self._last: concurrent.futures.Future[object] | None = None

    def wait(self) -> None:
        """Wait for all steps; raise the last one's error."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def run(self, step: Step) -> None:
        """Wait for the previous step, raising its error, and start this one."""
        self.wait()
        self._last = self._thread.submit(step)

    def run_next(self, step: Step) -> None:
        """Queue a step after the previous one without waiting; it is skipped if that one failed."""
        before = self._last

        def after() -> None:
            if before is not None:
                before.result()
            step()

        self._last = self._thread.submit(after)

    def settle(self) -> None:
        """Wait for all steps, failed ones included."""
        last, self._last = self._last, None
        if last is not None:
            concurrent.futures.wait([last])

    def close(self) -> None:
        """Wait for all steps, failed ones included, and end the thread."""
        self._thread.shutdown(wait=True)


class AtOnce:
    """The synchronous counterpart of `WriteBehind` for small files: every step runs at once."""

    def run(self, step: Step) -> None:
        """Run a step."""
        step()

    run_next = run

    def settle(self) -> None:
        """Return at once; no step is pending."""
