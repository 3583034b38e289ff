"""The start of an engine's process, perhaps before it is known what it will serve.

Light to import: the process of the first engine starts, and imports torch, while the server's own
process still imports its protocols.
"""

import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

_PROGRAM = (
    *(sys.executable, "-c"),
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
    "from inference.host.engine_process import main; main()",
)
StartedEngine = tuple[subprocess.Popen[bytes], Connection]
_early: list[StartedEngine] = []


def start_early(folder: str) -> None:
    """Start the process that `started_engine` will return first."""
    _early.append(_started(folder))


def started_engine(folder: str) -> StartedEngine:
    """Return a process and the connection to it; it ends with the thread that has started it.

    `folder`, that of the models, is for the list of processes alone.
    """
    return _early.pop() if _early else _started(folder)


def end_early() -> None:
    """End a process that no engine has taken."""
    while _early:
        process, link = _early.pop()
        link.close()
        process.kill()
        process.wait()


def _started(folder: str) -> StartedEngine:
    link, other = Pipe()
    with other:
        words = [*_PROGRAM, str(other.fileno()), folder]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()])
    return process, link
