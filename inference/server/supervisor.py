"""Run one command so that nothing of it outlives its owner.

A small process of its own, standard library only: `supervisor.py LIFELINE_FD COMMAND...`. The
owner holds the other end of the lifeline pipe; when it closes, however the owner ended, or when the
command ends, every process that descends from the command is stopped. SIGTERM asks the command to
end by itself, SIGQUIT ends it at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

OWNER_LOST_GRACE_S = 5.0  # between SIGTERM and SIGKILL once nobody waits for the command any more
LEFTOVER_GRACE_S = 2.0  # for processes that the command itself left behind
_POLL_S = 0.05

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _die_with_parent() -> None:
    """Have the kernel end the calling process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the process ids below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid ...": the name may hold blanks and parentheses.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _signal_descendants(number: int) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap_all() -> bool:
    """Collect ended children; return whether none is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False


def _stop_leftovers() -> None:
    """End everything that is still below this process, which adopts orphans."""
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    _signal_descendants(signal.SIGTERM)
    while not _reap_all():
        if time.monotonic() > deadline:
            _signal_descendants(signal.SIGKILL)
        time.sleep(_POLL_S)


def _wait(child: subprocess.Popen[bytes], lifeline: int) -> int:
    """Wait for the command, or for the end of the lifeline and then for the command."""
    kill_at = None
    while (status := child.poll()) is None:
        timeout_s = _POLL_S if kill_at else 4 * _POLL_S
        if kill_at is None and select.select([lifeline], [], [], timeout_s)[0]:
            child.terminate()
            kill_at = time.monotonic() + OWNER_LOST_GRACE_S
        elif kill_at is not None:
            if time.monotonic() > kill_at:
                child.kill()
            time.sleep(timeout_s)
    return status


def main(argv: list[str]) -> int:
    """Run `argv[1:]` under the lifeline `argv[0]`; return its status, 128 + n for signal n."""
    lifeline = int(argv[0])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(argv[1:], preexec_fn=_die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    signal.signal(signal.SIGQUIT, lambda *_: child.kill())
    try:
        status = _wait(child, lifeline)
    finally:
        _stop_leftovers()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
