"""Ask again what a server has put off: after the time it names, or later each time."""

import itertools
import random
import time
from collections.abc import Callable
from typing import TypeVar

from inference.evaluation.task import PutOffError, Tally

_Answer = TypeVar("_Answer")
_MOST_WAIT_S = 30.0  # between two attempts, unless the server asks for more


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
            if is_over or (error.is_lost and not lost_too):
                raise
        tally.count("retried")
        time.sleep(wait_s)
    raise AssertionError("counting has no end")
