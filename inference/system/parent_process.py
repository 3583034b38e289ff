"""A process and the one that started it: signals, their end, and that of what they leave."""

import contextlib
import ctypes
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType
from typing import Any

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class StopRequested(KeyboardInterrupt):
    """A signal asks the job to end; raised in the main thread, whose context managers clean up."""


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, by)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def stop_signals(*signals: signal.Signals) -> Iterator[threading.Event]:
    """Raise StopRequested on one of the signals in the main thread; further ones are ignored.

    The event is set once a signal has arrived.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        del frame
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        came.set()
        raise StopRequested(signal.Signals(signum).name)

    previous = {each: signal.signal(each, stop) for each in signals}
    try:
        yield came
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class LinkedProcess(subprocess.Popen[bytes]):
    """A program that appends to a log, in a session of its own, and the other end of its link.

    The arguments are the words of the program itself, the descriptor of its end, and `words`.
    """

    def __init__(
        self, program: Sequence[str], words: Sequence[str] = (), *, log_path: Path, **options: Any
    ) -> None:
        self.link, other = Pipe()
        with other, log_path.open("ab") as log:
            super().__init__(
                [*program, str(other.fileno()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[other.fileno()],
                start_new_session=True,
                **options,
            )


def end_process(process: subprocess.Popen[Any], *, grace_s: float) -> int:
    """Ask a process to end, kill it after `grace_s`, and return its status."""
    process.terminate()
    process.send_signal(signal.SIGCONT)  # a stopped process does not see the other signal
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(grace_s)
    process.kill()
    return process.wait()


def signal_name(number: int) -> str:
    """Return the name of a signal; most of those for applications have a number alone."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
