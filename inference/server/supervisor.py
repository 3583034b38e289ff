"""Supervisor of one server: ends all of the server's processes when its owner ends.

A small process: PROGRAM with the arguments LINK_FD SHM_PREFIX GRACE_S COMMAND... The owner holds
the other end of the link. When that closes, the command gets SIGTERM, and SIGKILL after GRACE_S.
When the command ends, the supervisor ends every process that it has left behind and removes the
shared memory with the prefix. SIGTERM is passed on to the command; KILL over the link kills it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from inference.server.processes import descendants
from inference.server.segments import close_segments, shared_memory_of
from inference.system.parent_process import adopt_orphans, checkout_program, end_with_parent

PROGRAM = checkout_program("inference.server.supervisor", "-I")
KILL = b"kill"  # the owner's order
LEFTOVER_GRACE_S = 2.0  # between SIGTERM and SIGKILL for processes that the command left behind
_POLL_S = 0.1


def _signal_descendants(number: int) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap_all() -> bool:
    """Reap ended children; return whether none is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False


def _stop_leftovers(grace_s: float) -> None:
    """Kill all remaining descendants of this process, which adopts orphans."""
    deadline = time.monotonic() + grace_s
    if grace_s > 0:
        _signal_descendants(signal.SIGTERM)
    while not _reap_all():
        if time.monotonic() > deadline:
            _signal_descendants(signal.SIGKILL)
        time.sleep(_POLL_S / 4)


def _status_of(
    child: subprocess.Popen[bytes], owner: Connection, prefix: str, grace_s: float
) -> int:
    """Wait for the command to end, and end it after the owner; return its status."""
    kill_at = None
    while (status := child.poll()) is None:
        close_segments(prefix)
        if kill_at is not None:
            if time.monotonic() >= kill_at:
                child.kill()
            time.sleep(_POLL_S / 4)
            continue
        try:
            if owner.poll(_POLL_S) and owner.recv_bytes() == KILL:
                child.kill()
        except (EOFError, OSError):  # the owner has ended
            child.terminate()
            kill_at = time.monotonic() + grace_s
    return status


def main() -> int:
    """Run a command for the owner of a link; return its status, 128 + n for signal n."""
    _, number, prefix, grace, *command = sys.argv
    owner, grace_s = Connection(int(number)), float(grace)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with shared_memory_of(prefix):
        status = -signal.SIGKILL
        try:
            child = subprocess.Popen(command, preexec_fn=end_with_parent)
            signal.signal(signal.SIGTERM, lambda *_: child.terminate())
            status = _status_of(child, owner, prefix, grace_s)
        finally:
            # After a kill, the remaining processes get no time either.
            _stop_leftovers(LEFTOVER_GRACE_S if status != -signal.SIGKILL else 0.0)
    return status if status >= 0 else 128 - status
