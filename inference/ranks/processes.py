"""Worker processes: the ranks other than 0 on this node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import IO

from inference.huge_pages import huge_page_variables
from inference.ranks.settings import RankSettings

_TAIL_BYTES = 4000
_POLL_S = 0.02
# The folder that holds the package, so that workers import the same code.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class RankProcesses:
    """Worker processes of this node.

    Start them from a long-lived thread: the kernel ends them when their parent thread ends.
    """

    def __init__(self, settings: Sequence[RankSettings]) -> None:
        self._workers = {each.rank: _Worker(each) for each in settings}

    def ended(self) -> dict[int, str]:
        """Return the exit of each worker that is no longer running."""
        return {
            rank: how
            for rank, worker in self._workers.items()
            if (how := worker.ended()) is not None
        }

    def output(self, rank: int) -> str:
        """Return the last lines a worker wrote."""
        return self._workers[rank].output()

    def pids(self) -> list[int]:
        """Return the process ids, in order of rank."""
        return [worker.process.pid for worker in self._workers.values()]

    def stop(self, *, grace_s: float) -> None:
        """Wait for the workers to exit, then kill those that remain."""
        deadline = monotonic() + grace_s
        for worker in self._workers.values():
            worker.close_lifeline_at(deadline)
        for worker in self._workers.values():
            worker.kill()


class _Worker:
    def __init__(self, settings: RankSettings) -> None:
        self._log: IO[bytes] = TemporaryFile()  # noqa: SIM115 - read for as long as the worker lives
        environment = dict(os.environ, OMP_NUM_THREADS=str(settings.threads))
        environment |= huge_page_variables()
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_PACKAGE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        command = [sys.executable, "-m", "inference.ranks.worker", "--lifeline"]
        self.process = subprocess.Popen(
            [*command, "--settings", settings.to_json()],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def ended(self) -> str | None:
        status = self.process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def output(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def close_lifeline_at(self, deadline: float) -> None:
        while self.process.poll() is None and monotonic() < deadline:
            sleep(_POLL_S)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
