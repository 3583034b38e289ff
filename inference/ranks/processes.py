"""Worker processes: the ranks other than 0 on this node.

Without torch: a model starts them before it imports torch, so that all ranks import it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import IO, TYPE_CHECKING

from inference.control_groups import usable_cores
from inference.parent_process import signal_name
from inference.process_memory import memory_variables

if TYPE_CHECKING:
    from inference.ranks.settings import RankSettings

_TAIL_BYTES = 4000
_POLL_S = 0.02
# The folder that holds the package, so that workers import the same code.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


_early: dict[tuple[str, int], _Worker] = {}  # by weights and rank: started, without settings


class RankProcesses:
    """Worker processes of this node.

    Start them from a long-lived thread: the kernel ends them when their parent thread ends.
    """

    def __init__(self, settings: Sequence[RankSettings]) -> None:
        self._workers: dict[int, _Worker] = {}
        for each in settings:
            early = _early.pop((each.ft_dir, each.rank), None)
            self._workers[each.rank] = early or _Worker(each.ft_dir, each.rank, each.threads)
        for each in settings:
            self._workers[each.rank].send(each)

    def ended(self) -> dict[int, str]:
        """Return the exit of each worker that is no longer running."""
        return {rank: how for rank, worker in self._workers.items() if (how := worker.ended())}

    def output(self, rank: int) -> str:
        """Return the last lines a worker wrote."""
        return self._workers[rank].output()

    def stop(self, *, grace_s: float) -> None:
        """Wait for the workers to exit, then kill those that remain."""
        deadline = monotonic() + grace_s
        for worker in self._workers.values():
            while worker.ended() is None and monotonic() < deadline:
                sleep(_POLL_S)
            worker.close_lifeline()
        for worker in self._workers.values():
            worker.kill()


@contextlib.contextmanager
def early_workers(ft_dir: Path, world_size: int, threads: int | None) -> Iterator[None]:
    """Start the workers of a model; a `RankProcesses` made within the block takes them over.

    They import torch meanwhile, then wait for their settings. Workers that are not taken over end
    with the block. With more ranks than cores none is started: they would only delay each other.
    """
    ranks = range(1, world_size if world_size <= usable_cores() else 1)
    threads = threads or threads_per_rank(world_size)
    try:
        for rank in ranks:
            _early[str(ft_dir), rank] = _Worker(str(ft_dir), rank, threads)
        yield
    finally:
        for rank in ranks:
            if (unused := _early.pop((str(ft_dir), rank), None)) is not None:
                unused.kill()


def threads_per_rank(local_ranks: int) -> int:
    """Return the number of CPU threads of each of a node's ranks."""
    cores = usable_cores()
    text = os.environ.get("OMP_NUM_THREADS", "")
    total = int(text) if text.isdigit() and int(text) > 0 else cores
    return max(1, min(total, cores) // local_ranks)


class _Worker:
    def __init__(self, ft_dir: str, rank: int, threads: int) -> None:
        self._log: IO[bytes] = TemporaryFile()  # noqa: SIM115 - read for as long as the worker lives
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        environment |= memory_variables()
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_PACKAGE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        command = [sys.executable, "-m", "inference.ranks.worker"]
        self.process = subprocess.Popen(
            [*command, f"--rank={rank}", f"--ft-dir={ft_dir}"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def send(self, settings: RankSettings) -> None:
        """Send the settings, with which the worker begins; one that has ended is found later."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(settings.to_json().encode() + b"\n")
            self.process.stdin.flush()

    def ended(self) -> str | None:
        status = self.process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was ended by {signal_name(-status)}"
        return f"ended with status {status}"

    def output(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def close_lifeline(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
