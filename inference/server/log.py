"""A server's log: its last lines, and errors that NVIDIA's backend reports only there."""

import contextlib
import itertools
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_FORWARD_S = 0.25
_MAX_LINE = 300  # characters of a line to show
_NOISE = re.compile(r"\+-|\| |\s+<frozen importlib")
# The Python backend appends the exception's place in the model file.
_TRACE = re.compile(r"\n\s*At:\n.*", re.DOTALL)
# Errors of NVIDIA's C++ backend, after some of which it serves uninitialized weights, and a remedy.
_FATAL = {
    r"cannot be opened, loading model fails!": "convert the model again",
    r"only has \d+, but request \d+, loading model fails!": "it is not complete, or was made for "
    "another tensor-parallel size or data type; convert the model again",
    r"Can't load '[^']*config\.ini'": "convert the model again",
    r"world_size \(\d+\) should equal to|Number of visible GPUs must be evenly": "set "
    "CUDA_VISIBLE_DEVICES to exactly TP x PP GPUs",
    r"Assertion (?:fail|`.*failed)|CUDA out of memory|NCCL[^\n]*\berror\b|MPI_ABORT"
    r"|Multi-Node Inference only": "",
}


class ServerStartError(RuntimeError):
    """The server did not become ready. `log_tail` holds the last lines of its log."""

    def __init__(self, summary: str, *, reasons: Sequence[str], log_path: Path) -> None:
        self.summary = summary
        self.reasons = tuple(reasons)
        self.log_path = log_path
        self.log_tail = tuple(last_lines(log_path))
        parts = [summary, *(f"  {reason}" for reason in reasons)]
        if self.log_tail:
            parts.append(f"last lines of {log_path}:")
            parts += [f"  | {line}" for line in self.log_tail]
        super().__init__("\n".join(parts))


def last_lines(path: Path, count: int = _TAIL_LINES) -> list[str]:
    """Return the last `count` lines of a log, truncated; empty if it does not exist.

    It leaves out the server's tables and the frames of Python's import system.
    """
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip() for line in text.splitlines()]
    shown = [line for line in lines if line and not _NOISE.match(line)]
    return [
        line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + " ..." for line in shown[-count:]
    ]


def rotated_log(log_path: Path) -> Path:
    """Rename the log of an earlier start to the first free number; return its new path."""
    if not log_path.exists():
        return log_path
    names = (f"{log_path.stem}.{number}{log_path.suffix}" for number in itertools.count(1))
    free = next(path for path in map(log_path.with_name, names) if not path.exists())
    return log_path.rename(free)


def short_reason(text: str) -> str:
    """Return a model's error without quotes and without the trace of the model file."""
    plain = text.strip().strip('"').replace("\\n", "\n").replace('\\"', '"')
    return _TRACE.sub("", plain).strip()


def fatal_lines(text: str) -> list[str]:
    """Return the lines of a log with fatal errors of NVIDIA's backend, each with its remedy."""
    return [
        f"{line.strip()[:_MAX_LINE]} ({remedy})" if remedy else line.strip()[:_MAX_LINE]
        for line in text.splitlines()
        for pattern, remedy in _FATAL.items()
        if re.search(pattern, line)
    ]


@contextlib.contextmanager
def forwarded_log(path: Path) -> Iterator[None]:
    """Copy a growing log to standard output while the block runs."""
    ended = threading.Event()

    def forward() -> None:
        position, is_last = 0, False
        while not is_last:
            is_last = ended.wait(_FORWARD_S)
            # The log does not exist before a start, and for a moment between two starts.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(position if position <= size else 0)  # a new start has a new log
                sys.stdout.buffer.write(log.read())
                sys.stdout.flush()
                position = log.tell()

    thread = threading.Thread(target=forward, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
