"""Relations between a process and its parent: signals, orphans, linked processes."""

import contextlib
import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType
from typing import Any

_CHECKOUT = Path(__file__).resolve().parents[2]
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class StopRequested(KeyboardInterrupt):
    """A signal asks the job to end; raised in the main thread, where context managers clean up."""


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, by)


def adopt_orphans() -> None:
    """Become the new parent of all descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def stop_signals(*signals: signal.Signals) -> Iterator[threading.Event]:
    """Raise StopRequested in the main thread at the first of these signals; ignore later ones.

    The event is set once a signal has arrived.
    """
    arrived = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        del frame
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        arrived.set()
        raise StopRequested(signal.Signals(signum).name)

    previous = {number: signal.signal(number, stop) for number in signals}
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted(*signals: signal.Signals) -> Iterator[None]:
    """Ignore these signals during a shutdown that is already in progress."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in signals if is_main}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def set_command_line(words: Sequence[str]) -> None:
    """Change this process's command line in the process list, truncated to its original length.

    It overwrites the memory in which the kernel has put the arguments (proc(5), stat).
    """
    fields = Path("/proc/self/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    start, size = int(fields[45]), int(fields[46]) - int(fields[45])
    line = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)[: size - 1]
    ctypes.memmove(start, line.ljust(size, b"\0"), size)


def checkout_program(module: str, *options: str) -> tuple[str, ...]:
    """Return the command that runs `main` of a module of this checkout, from any working directory.

    `options` are the interpreter's.
    """
    code = f"import sys; sys.path[:] = [{str(_CHECKOUT)!r}, *filter(None, sys.path)]; "
    code += f"from {module} import main; sys.exit(main())"
    # The image of NVIDIA's backend has Python 3.10, which does not know -P.
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe, *options, "-c", code)


class LinkedProcess(subprocess.Popen[bytes]):
    """A process with a pipe to it, of which this process holds the end `link`.

    Its arguments are those of `program`, the descriptor of its end, and `words`. With a log, to
    which it appends, it runs in a new session.
    """

    def __init__(
        self,
        program: Sequence[str],
        words: Sequence[str] = (),
        *,
        log_path: Path | None = None,
        **options: Any,
    ) -> None:
        self.link, other = Pipe()
        with contextlib.ExitStack() as stack:
            number = stack.enter_context(other).fileno()
            if log_path is not None:
                log = stack.enter_context(log_path.open("ab"))
                options |= {"stdout": log, "stderr": log, "start_new_session": True}
            super().__init__(
                [*program, str(number), *words],
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                **options,
            )


def end_process(process: subprocess.Popen[Any], *, grace_s: float) -> int:
    """Terminate a process, kill it after `grace_s`, and return its status."""
    process.terminate()
    process.send_signal(signal.SIGCONT)  # a stopped process does not handle SIGTERM
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(grace_s)
    process.kill()
    return process.wait()


def signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have only a number."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
