"""Worker processes: the ranks other than 0 on this node.

They are forked from a process that has imported torch, has no thread yet and has not touched a GPU.
Elsewhere they are started before it imports torch, so that all import it at once.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import signal
import subprocess
import sys
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from inference.system.control_groups import usable_cores
from inference.system.parent_process import set_command_line, signal_name
from inference.system.process_memory import memory_variables

if TYPE_CHECKING:
    from inference.ranks.settings import RankSettings

_TAIL_BYTES = 4000
# The folder that holds the package, so that workers import the same code.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_MODULE = "inference.ranks.worker"
_DRIVER = "/libcuda.so"

_waiting: dict[tuple[str, int], Worker] = {}  # by weights and rank, without settings


def start_worker(settings: RankSettings) -> Worker:
    """Return the worker of a rank: one that waits for its settings, or else a new one.

    Start them from a long-lived thread: the kernel ends them when their parent thread ends.
    """
    waiting = _waiting.pop((settings.ft_dir, settings.rank), None)
    worker = waiting or Worker(settings.ft_dir, settings.rank, threads=settings.threads)
    worker.send(settings)
    return worker


def fork_workers(ft_dir: Path, world_size: int) -> None:
    """Fork the workers of a model from this process; `start_worker` takes them over.

    They have imported what it has, and end with it. There are none where this process has loaded
    CUDA's driver: a fork cannot use what it has begun.
    """
    has_driver = _DRIVER in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for rank in range(1, 1 if has_driver else world_size):
        _waiting[str(ft_dir), rank] = Worker(str(ft_dir), rank, threads=None)


def start_workers(ft_dir: Path, world_size: int) -> None:
    """Start the workers of a model, unless this process has torch; `start_worker` takes them over.

    With more ranks than cores none is started: they would only delay each other.
    """
    if "torch" not in sys.modules and world_size <= usable_cores():
        threads = threads_per_rank(world_size)
        for rank in range(1, world_size):
            _waiting[str(ft_dir), rank] = Worker(str(ft_dir), rank, threads=threads)


def threads_per_rank(local_ranks: int) -> int:
    """Return the number of CPU threads of each of a node's ranks."""
    cores = usable_cores()
    text = os.environ.get("OMP_NUM_THREADS", "")
    total = int(text) if text.isdigit() and int(text) > 0 else cores
    return max(1, min(total, cores) // local_ranks)


class Worker:
    """A process that runs one rank; the kernel ends it when the thread ends that has started it.

    It is forked where the number of its `threads` is left to its settings.
    """

    def __init__(self, ft_dir: str, rank: int, *, threads: int | None) -> None:
        self._log = TemporaryFile()  # noqa: SIM115 - read for as long as the worker lives
        read, write = os.pipe()
        self._orders = os.fdopen(write, "wb", buffering=0)
        words = [f"--rank={rank}", f"--ft-dir={ft_dir}"]
        try:
            self.process = (
                _forked(words, read, self._log.fileno())
                if threads is None
                else _started(words, read, self._log.fileno(), threads)
            )
        finally:
            os.close(read)

    def send(self, settings: RankSettings) -> None:
        """Send the settings, with which the worker begins; one that has ended is found later."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(settings.to_json().encode() + b"\n")

    def ended(self) -> str | None:
        """Return how it ended, None if it runs."""
        status = self.process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was ended by {signal_name(-status)}"
        return f"ended with status {status}"

    def last_line(self) -> str:
        """Return the last line that it wrote."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        *_, line = self._log.read().decode(errors="replace").strip().splitlines() or ["no output"]
        return line

    def kill(self) -> None:
        """End it, and wait for that."""
        assert self.process.pid is not None
        self.process.kill()  # it may not be the leader of its group yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        self._orders.close()


class _Fork(ForkProcess):
    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()


def _forked(words: list[str], orders: int, log: int) -> _Fork:
    process = _Fork(target=_run, args=(words, orders, log), daemon=True)
    process.start()
    return process


def _run(words: list[str], orders: int, log: int) -> None:
    """Run a rank in a process that was forked for it."""
    os.setsid()
    for number, copy in ((orders, 0), (log, 1), (log, 2)):
        os.dup2(number, copy)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.argv = [_MODULE, *words]
    set_command_line([sys.executable, "-m", *sys.argv])
    sys.exit(pkgutil.resolve_name(f"{_MODULE}:main")())


def _started(words: list[str], orders: int, log: int, threads: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    environment |= memory_variables()
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(_PACKAGE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, *words],
        stdin=orders,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
