"""Wait for what threads and other processes do; see whether a process runs; kill several."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# A wait ends as soon as its condition holds; only a failure takes as long as this.
LIMIT_S = 120.0


def until(condition: Callable[[], bool], what: str = "", *, limit_s: float = LIMIT_S) -> None:
    """Wait for a condition; fail, naming it, if it does not come true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what or 'it'} did not happen within {limit_s:g} s"
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Return whether a process runs (one that ended and waits to be collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes, some of which may already have ended because of those killed before."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
