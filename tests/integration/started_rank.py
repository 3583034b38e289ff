"""Ranks as a launcher starts them, each in a process of its own.

They are forked from a process that has loaded torch and does nothing else, so that the many of them
do not load it again.
"""

import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from inference.system.launch_environment import LaunchEnvironment

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["inference.ranks.worker"])


class StartedRank:
    """The process of a rank of a job, which writes its log to a file."""

    def __init__(self, place: LaunchEnvironment, port: int, key_file: Path, log: Path) -> None:
        self._log = log
        self._process = _CONTEXT.Process(target=_serve, args=(place, port, key_file, log))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, limit_s: float) -> int | None:
        """Return the exit status; None if the process has not ended in time."""
        self._process.join(limit_s)
        return self._process.exitcode

    def words(self, limit_s: float) -> str:
        """Return what it has logged until its end."""
        self.wait(limit_s)
        return self._log.read_text()


def _serve(place: LaunchEnvironment, port: int, key_file: Path, log: Path) -> None:
    from inference.ranks.worker import serve_launched_rank

    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, force=True)
    sys.exit(serve_launched_rank(place, "127.0.0.1", port, key_file=key_file, timeout_s=5))
