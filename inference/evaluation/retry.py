"""Ask again what a server has put off: after the time it names, or later each time."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from inference.evaluation.task import PutOffError, Tally

_Answer = TypeVar("_Answer")
_MOST_WAIT_S = 30.0  # between two attempts, unless the server asks for more
_interrupted = threading.Event()


@contextmanager
def no_retries_after_interrupt() -> Iterator[None]:
    """Have threads that wait to ask again give up once an interrupt ends the block.

    Whoever ends the block waits for its threads, and their server may have ended, too.
    """
    _interrupted.clear()
    try:
        yield
    except KeyboardInterrupt:
        _interrupted.set()
        raise


def patiently(
    ask: Callable[[], _Answer], *, within_s: float, tally: Tally, lost_too: bool = True
) -> _Answer:
    """Return what `ask` returns, called again for up to `within_s` while a server puts it off.

    `tally` counts the attempts after the first. Without `lost_too` a connection that is lost, or
    was never there, ends it.

    Raises:
        RequestFailedError: The last attempt's, also where waiting as asked would take too long.
    """
    deadline = time.monotonic() + within_s
    for attempt in itertools.count():
        try:
            return ask()
        except PutOffError as error:
            wait_s = error.after_s
            if wait_s is None:  # spread, so that those put off together do not come back together
                wait_s = random.uniform(0.5, 1) * min(2.0**attempt, _MOST_WAIT_S)
            is_over = time.monotonic() + wait_s > deadline
            if is_over or (error.is_lost and not lost_too) or _interrupted.wait(wait_s):
                raise
        tally.count("retried")
    raise AssertionError("counting has no end")
