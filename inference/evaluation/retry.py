"""Retry requests that a server puts off: after the time it names, or with growing delays."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from inference.evaluation.task import RetryableError, Tally

_Answer = TypeVar("_Answer")
_MAX_WAIT_S = 30.0  # between two attempts, unless the server asks for more
_interrupted = threading.Event()


@contextmanager
def no_retries_after_interrupt() -> Iterator[None]:
    """Make threads that wait for a retry give up once an interrupt ends the block.

    The interrupted thread waits for these threads, and their server may have ended as well.
    """
    _interrupted.clear()
    try:
        yield
    except KeyboardInterrupt:
        _interrupted.set()
        raise


def with_retries(
    ask: Callable[[], _Answer], *, within_s: float, tally: Tally, lost_too: bool = True
) -> _Answer:
    """Call `ask`, and again for up to `within_s` while a server puts it off; return its result.

    `tally` counts the attempts after the first. Without `lost_too`, a lost or refused connection is
    not retried.

    Raises:
        RequestFailedError: that of the last attempt, also if the server asks for a longer wait.
    """
    deadline, attempt = time.monotonic() + within_s, 0
    while True:
        try:
            return ask()
        except RetryableError as error:
            wait_s = error.after_s
            if wait_s is None:  # jitter: clients put off together must not return together
                wait_s = random.uniform(0.5, 1) * min(2.0**attempt, _MAX_WAIT_S)
            is_too_late = time.monotonic() + wait_s > deadline
            if is_too_late or (error.is_lost and not lost_too) or _interrupted.wait(wait_s):
                raise
        tally.count("retried")
        attempt += 1
