"""Process states and trees from /proc, and a watch over a server's processes."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inference.system.parent_process import signal_name

STOPPED_LIMIT_S = 1.0  # how long a process may stay stopped by SIGSTOP
_SCAN_S = 2.0  # between scans of all of /proc for new processes
_STUB = "triton_python_backend_stub"  # tritonserver's program for the process of a model
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessState:
    """The state of a process in /proc/PID/stat, see proc(5).

    Attributes:
        letter: such as S, R, Z (zombie), T (stopped by a signal).
        started: start time in clock ticks; distinguishes two processes with the same id.
        cpu_s: CPU time of all its threads so far, in seconds.
        exit_code: wait status after its end; 0 if this user may not see it.
    """

    letter: str
    parent: int
    cpu_s: float
    started: int
    exit_code: int


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")  # names may be any bytes
    except OSError:
        return None
    # "pid (name) state ppid ...": the name may hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return ProcessState(
        letter=fields[0],
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        started=int(fields[19]),
        exit_code=int(fields[49]),
    )


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended; a stopped one counts as running."""
    state = process_state(pid)
    return state is not None and state.letter not in "ZX"


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (state := process_state(int(entry.name))) is not None:
            children.setdefault(state.parent, []).append(int(entry.name))
    found = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def model_of(pid: int) -> str | None:
    """Return the model that a process of the Python backend runs, None for other processes."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if len(words) < 2 or Path(words[0]).name != _STUB:
        return None
    # <repository>/<model>/<version>/model.py
    return Path(words[1]).parent.parent.name or None


@dataclass
class _Process:
    """A watched process; `name` is set if it must not end, `stopped_since` while it is stopped."""

    pid: int
    started: int
    name: str | None
    stopped_since: float | None = None

    def fault(self, now: float) -> tuple[str | None, bool]:
        """Return what is wrong with the process, None if nothing, and whether it has ended."""
        state = process_state(self.pid)
        is_same = state is not None and state.started == self.started
        if state is None or not is_same:
            return "has ended", True
        if state.letter in "ZX":
            return exit_reason(os.waitstatus_to_exitcode(state.exit_code)), True
        if state.letter != "T":
            self.stopped_since = None
            return None, False
        self.stopped_since = self.stopped_since or now
        is_long = now - self.stopped_since >= STOPPED_LIMIT_S
        return f"has been stopped for {STOPPED_LIMIT_S:g} s" if is_long else None, False


class ServerWatch:
    """Watches the processes of a ready server: none may be stopped, and named ones may not end.

    `names` returns the name of a process that must not end, None for another.

    Attributes:
        lost: None while nothing is lost; then the id of the stopped process, () if it has ended.
    """

    lost: tuple[int, ...] | None = None

    def __init__(self, root: int, *, names: Callable[[int], str | None] = lambda _: None) -> None:
        self._root, self._names = root, names
        self._known: dict[int, _Process] = {}
        self._scanned = float("-inf")

    def loss(self) -> str | None:
        """Return which process the server has lost, None if none. Cheap enough for polling."""
        now = time.monotonic()
        if now - self._scanned > _SCAN_S:
            self._scanned = now
            self._scan()
        for process in list(self._known.values()):
            fault, has_ended = process.fault(now)
            if has_ended and process.name is None:
                del self._known[process.pid]
            elif fault is not None:
                self.lost = () if has_ended else (process.pid,)
                of_model = f" of model {process.name}" if process.name else ""
                return f"process {process.pid}{of_model} {fault}"
        return None

    def _scan(self) -> None:
        for pid in (self._root, *descendants(self._root)):
            if pid not in self._known and (state := process_state(pid)) is not None:
                self._known[pid] = _Process(pid, state.started, self._names(pid))


def exit_reason(status: int) -> str:
    """Return how a process has ended; `status` is -n after signal n."""
    if status >= 0:
        return f"has ended with status {status}"
    # The kernel's log names the processes that the OOM killer ends.
    hint = ", perhaps because memory ran out" if status == -signal.SIGKILL else ""
    return f"was ended by {signal_name(-status)}{hint}"
