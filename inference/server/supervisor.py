"""Supervisor of one server: it ends the server with its owner, or when a part of it is lost.

A small process: PROGRAM, with the arguments LINK_FD SHM_PREFIX COMMAND... The owner holds
the other end of the link. When that closes, or the command ends, every descendant of the command is
stopped, and the shared memory whose names begin with the prefix is removed. The owner sends END, or
SIGTERM, to ask the command to end by itself, KILL to end it at once. READY states that the server
is ready: from then on the supervisor ends it if the process of a model is gone or one of its
processes stays stopped, neither of which Triton notices. It sends the owner the reason: that of the
model, which has reported it at the socket that the variables name, or what it has seen itself.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from inference.parent_process import adopt_orphans, end_with_parent, signal_name
from inference.server.segments import close_segments, shared_memory_of
from inference.supervision import REPORTS_VARIABLE

# Of this checkout, whatever the folder and the variables of the owner.
PROGRAM = (
    *(sys.executable, "-I", "-c"),
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
    "from inference.server.supervisor import main; sys.exit(main(sys.argv[1:]))",
)
READY, END, KILL = b"ready", b"end", b"kill"  # from the owner
OWNER_LOST_GRACE_S = 5.0  # between SIGTERM and SIGKILL once the owner is gone
LEFTOVER_GRACE_S = 2.0  # for processes that an orderly end of the command left behind
STOPPED_LIMIT_S = 3.0  # how long a process may stay stopped by SIGSTOP
_POLL_S = 0.05
_LOOK_S = 0.25  # between looks at the known processes
_SCAN_S = 2.0  # between searches for new ones, which read all of /proc
_SCAN_WHILE_LOADING_S = 0.5
_STUB = "triton_python_backend_stub"  # the program of a model's process
_LONGEST_REPORT = 64 * 1024
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessState:
    """A line of /proc/PID/stat, proc(5).

    Attributes:
        letter: Such as S, R, Z (ended, not collected), T (stopped by a signal).
        started: Start time in clock ticks; distinguishes two processes of the same id.
        cpu_s: Processor time so far, of all its threads.
        exit_code: Wait status of one that has ended; 0 where this user may not see it.
        program: The first 15 bytes of its name, which also one that has ended still has.
    """

    letter: str
    parent: int
    cpu_s: float
    started: int
    exit_code: int
    program: str


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, None if there is none of this id."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")  # a name is any bytes
    except OSError:
        return None
    # "pid (name) state ppid ...": the name may hold blanks and parentheses.
    before, _, after = text.rpartition(")")
    fields = after.split()
    return ProcessState(
        letter=fields[0],
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        started=int(fields[19]),
        exit_code=int(fields[49]),
        program=before.partition("(")[2],
    )


def descendants(pid: int) -> list[int]:
    """Return the process ids below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (state := process_state(int(entry.name))) is not None:
            children.setdefault(state.parent, []).append(int(entry.name))
    found: list[int] = []
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
    """A process of a server. `model` is the one that it runs, `fault` what has happened to it."""

    pid: int
    started: int
    model: str | None = None
    stopped_since: float | None = None
    fault: str | None = None
    has_ended: bool = False
    may_be_replaced: bool = False  # by a process of the same model that started later

    def look(self, now: float, stopped_limit_s: float) -> None:
        """Note whether the process has ended, or has been stopped for too long."""
        state = process_state(self.pid)
        is_same = state is not None and state.started == self.started
        self.has_ended = state is None or not is_same or state.letter in "ZX"
        if self.has_ended:
            self.fault = _how_ended(state.exit_code) if state and is_same else "has ended"
        elif state is None or state.letter != "T":
            self.fault = self.stopped_since = None
        else:
            self.stopped_since = self.stopped_since or now
            if now - self.stopped_since >= stopped_limit_s:
                self.fault = f"has been stopped for {stopped_limit_s:g} s"


class ServerWatch:
    """The processes of a server: whether all of them are there and run.

    Set `is_ready` once every model has loaded. Until then the server itself reports models whose
    processes end, and a loss is only kept. It does not count if another process of the same model
    has started since: a model whose configuration its backend completes has one for that alone.
    """

    def __init__(self, root: int, *, stopped_limit_s: float = STOPPED_LIMIT_S) -> None:
        self.is_ready = False
        self._root, self._stopped_limit_s = root, stopped_limit_s
        # By start time and id, which orders those of one tick. What ran a model is never forgotten.
        self._known: dict[tuple[int, int], _Process] = {}
        self._scanned_ready = self._looked_ready = False
        self._scanned = self._looked = float("-inf")

    def loss(self) -> str | None:
        """Return what a ready server has lost, None if nothing. Quick enough for a loop."""
        now = time.monotonic()
        # The last model may have started after the last scan.
        is_due = now - self._scanned > (_SCAN_S if self.is_ready else _SCAN_WHILE_LOADING_S)
        if is_due or self.is_ready != self._scanned_ready:
            self._scanned, self._scanned_ready = now, self.is_ready
            self._scan()
        if now - self._looked > _LOOK_S:
            self._looked = now
            for key, each in list(self._known.items()):
                if each.has_ended:
                    continue
                each.look(now, self._stopped_limit_s)
                # What ended between the last look at a loading server and this one had its
                # successor.
                each.may_be_replaced = not self._looked_ready
                if each.has_ended and each.model is None:
                    del self._known[key]  # a scan after readiness judges it
            self._looked_ready = self.is_ready
        lost = filter(None, (self._loss(*each) for each in self._known.items()))
        return next(lost, None) if self.is_ready else None

    def _scan(self) -> None:
        for pid in (self._root, *descendants(self._root)):
            if (state := process_state(pid)) is None:
                continue
            each = self._known.setdefault((state.started, pid), _Process(pid, state.started))
            # Looked at again: a process that has just been made still runs its parent's program.
            each.model = each.model or model_of(pid)
            is_stub = state.program == _STUB[: len(state.program)] != ""
            if each.model is None and self.is_ready and state.letter == "Z" and is_stub:
                each.model = "?"  # a process that has ended no longer says what it ran

    def _loss(self, key: tuple[int, int], process: _Process) -> str | None:
        is_replaced = process.may_be_replaced and any(
            each.model == process.model and later > key for later, each in self._known.items()
        )
        if process.fault is None or (process.has_ended and is_replaced):
            return None
        of_model = f" of model {process.model}" if process.model else ""
        return f"process {process.pid}{of_model} {process.fault}"


def _how_ended(wait_status: int) -> str:
    if (status := os.waitstatus_to_exitcode(wait_status)) >= 0:
        return f"has ended with status {status}"
    # The kernel's log names the process if so.
    hint = ", perhaps because memory ran out" if status == -signal.SIGKILL else ""
    return f"was ended by {signal_name(-status)}{hint}"


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
        time.sleep(_POLL_S)


class _Run:
    """The command, what its models report, and the orders for it."""

    def __init__(self, command: list[str], prefix: str, owner: Connection) -> None:
        self._prefix = prefix
        self._owner = owner
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if path := os.environ.get(REPORTS_VARIABLE):
            self._reports.bind(path)
        self._kill_at: float | None = None
        self._child = subprocess.Popen(command, preexec_fn=end_with_parent)
        self._watch: ServerWatch | None = ServerWatch(self._child.pid)
        signal.signal(signal.SIGTERM, lambda *_: self._end(self._child.terminate))

    def wait(self) -> int:
        """Wait for the command, or for the end of the owner and then for the command."""
        while (status := self._child.poll()) is None:
            if self._kill_at is None:
                self._look()
                continue
            if time.monotonic() > self._kill_at:
                self._child.kill()
            time.sleep(_POLL_S)
        return status

    def _look(self) -> None:
        close_segments(self._prefix)
        is_loading = self._watch is not None and not self._watch.is_ready
        try:
            if self._owner.poll(_POLL_S if is_loading else 4 * _POLL_S):
                order = self._owner.recv_bytes()
                if order != READY:
                    self._end(self._child.kill if order == KILL else self._child.terminate)
                elif self._watch is not None:
                    self._watch.is_ready = True
            if self._watch is not None and (loss := self._watch.loss()):
                reported = []
                with contextlib.suppress(BlockingIOError):
                    while True:
                        reported.append(self._reports.recv(_LONGEST_REPORT))
                # Bytes: the locale, which tritonserver may have for ASCII, has no part in it.
                reason = b"; ".join(reported) or loss.encode(errors="replace")
                os.write(1, b"supervisor: " + reason + b"; ending the server\n")
                self._owner.send_bytes(reason)
                # A lost process never answers the requests it held: close their connections.
                self._end(self._child.kill)
        except (EOFError, OSError):  # there is no owner any more
            self._end(self._child.terminate)
            self._kill_at = time.monotonic() + OWNER_LOST_GRACE_S

    def _end(self, how: Callable[[], None]) -> None:
        self._watch = None  # from now on the end of a process is expected
        how()


def main(argv: list[str]) -> int:
    """Run a command for the owner of a link; return its status, 128 + n for signal n."""
    owner, prefix, command = Connection(int(argv[0])), argv[1], argv[2:]
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with shared_memory_of(prefix):
        status = -signal.SIGKILL
        try:
            status = _Run(command, prefix, owner).wait()
        finally:
            # Processes whose server was killed have nothing to save.
            _stop_leftovers(LEFTOVER_GRACE_S if status != -signal.SIGKILL else 0.0)
    return status if status >= 0 else 128 - status
