"""A server's log: its last lines, and what NVIDIA's backend says there alone."""

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
_MOST = 300  # characters of a line worth showing
_NOISE = re.compile(r"\+-|\| |\s+<frozen importlib")
# The Python backend appends where in the model file the exception came from.
_TRACE = re.compile(r"\n\s*At:\n.*", re.DOTALL)
# Lines of NVIDIA's C++ backend, after some of which it goes on with uninitialised weights, and what
# to do.
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
    """The server did not become ready. `reasons` say why, `log_tail` holds its last lines."""

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
    """Return the last `count` lines of a log, long ones cut; none if it does not exist.

    The server's tables and the frames of Python's import system are left out.
    """
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip() for line in text.splitlines()]
    shown = [line for line in lines if line and not _NOISE.match(line)]
    return [line if len(line) <= _MOST else line[:_MOST] + " ..." for line in shown[-count:]]


def put_aside(log_path: Path) -> Path:
    """Rename the log of an earlier start to the first free number; return where it is now."""
    if not log_path.exists():
        return log_path
    names = (f"{log_path.stem}.{number}{log_path.suffix}" for number in itertools.count(1))
    free = next(path for path in map(log_path.with_name, names) if not path.exists())
    return log_path.rename(free)


def short_reason(text: str) -> str:
    """Return a model's failure without quoting and without the trace of the model file."""
    plain = text.strip().strip('"').replace("\\n", "\n").replace('\\"', '"')
    return _TRACE.sub("", plain).strip()


def fatal_lines(text: str) -> list[str]:
    """Return the lines of a log after which NVIDIA's backend cannot use the model, and a remedy."""
    return [
        f"{line.strip()[:_MOST]} ({remedy})" if remedy else line.strip()[:_MOST]
        for line in text.splitlines()
        for pattern, remedy in _FATAL.items()
        if re.search(pattern, line)
    ]


@contextlib.contextmanager
def forwarded_log(path: Path) -> Iterator[None]:
    """Copy a growing log to standard output for the duration of a block."""
    ended = threading.Event()

    def forward() -> None:
        position, is_last = 0, False
        while not is_last:
            is_last = ended.wait(_FORWARD_S)
            # There is none before a start, and for a moment none before the next.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(position if position <= size else 0)  # 0 after another start
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
