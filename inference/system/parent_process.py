"""A process and the one that started it: signals, their end, and that of what they leave."""

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


@contextlib.contextmanager
def uninterrupted(*signals: signal.Signals) -> Iterator[None]:
    """Ignore signals that ask for an end which has begun."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {each: signal.signal(each, signal.SIG_IGN) for each in signals if is_main}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def set_command_line(words: Sequence[str]) -> None:
    """Show other words in the list of processes, as far as there is room for them (proc(5), stat).

    The kernel reads them where it has put the arguments of this process.
    """
    fields = Path("/proc/self/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    start, size = int(fields[45]), int(fields[46]) - int(fields[45])
    line = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)[: size - 1]
    ctypes.memmove(start, line.ljust(size, b"\0"), size)


def checkout_program(module: str, *options: str) -> tuple[str, ...]:
    """Return the command of `main` of a module of this checkout, whatever the owner's folder is.

    `options` are the interpreter's.
    """
    code = f"import sys; sys.path[:] = [{str(_CHECKOUT)!r}, *filter(None, sys.path)]; "
    code += f"from {module} import main; sys.exit(main())"
    # The image of NVIDIA's backend has Python 3.10, which does not know -P.
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe, *options, "-c", code)


class LinkedProcess(subprocess.Popen[bytes]):
    """A program and the other end of its link.

    The arguments are the words of the program itself, the descriptor of its end, and `words`. With
    a log, to which it appends, it is in a session of its own.
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
