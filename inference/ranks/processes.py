"""Worker processes: the ranks other than 0 on this node.

Some parents fork them, after importing torch but before they start threads or use a GPU. Others
start them as new processes before they import torch, so that all import it in parallel.
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

from inference.ranks.settings import RankSettings
from inference.system.control_groups import usable_cores
from inference.system.parent_process import set_command_line, signal_name
from inference.system.process_memory import memory_variables

_TAIL_BYTES = 4000
# The folder that holds the package, so that workers import the same code.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_MODULE = "inference.ranks.worker"
_DRIVER = "/libcuda.so"

_idle: dict[tuple[str, int], Worker] = {}  # by FT folder and rank, waiting for settings


def start_worker(settings: RankSettings) -> Worker:
    """Return the worker of a rank: an idle one, or else a new one.

    Call it from a long-lived thread: the kernel kills a worker when its parent thread ends.
    """
    idle = _idle.pop((settings.ft_dir, settings.rank), None)
    worker = idle or Worker(settings.ft_dir, settings.rank, threads=settings.threads)
    worker.send(settings)
    return worker


def fork_workers(ft_dir: Path, world_size: int) -> None:
    """Fork the workers of a model from this process; `start_worker` takes them over.

    They share its imported modules, and end with it. None are forked if this process has loaded
    the CUDA driver, which does not work in a fork.
    """
    has_driver = _DRIVER in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for rank in range(1, 1 if has_driver else world_size):
        _idle[str(ft_dir), rank] = Worker(str(ft_dir), rank, threads=None)


def start_workers(ft_dir: Path, world_size: int) -> None:
    """Start the workers of a model early, for `start_worker`, unless torch is imported already.

    With more ranks than cores none is started, as they would only delay each other.
    """
    if "torch" not in sys.modules and world_size <= usable_cores():
        threads = threads_per_rank(world_size)
        for rank in range(1, world_size):
            _idle[str(ft_dir), rank] = Worker(str(ft_dir), rank, threads=threads)


def threads_per_rank(local_ranks: int) -> int:
    """Return the number of CPU threads of each rank of a node."""
    cores = usable_cores()
    text = os.environ.get("OMP_NUM_THREADS", "")
    total = int(text) if text.isdigit() and int(text) > 0 else cores
    return max(1, min(total, cores) // local_ranks)


class Worker:
    """A process that runs one rank; the kernel kills it when the thread that started it ends.

    It is forked if `threads` is None, and takes the number of threads from its settings.
    """

    def __init__(self, ft_dir: str, rank: int, *, threads: int | None) -> None:
        self._log = TemporaryFile()  # noqa: SIM115 - read for as long as the worker lives
        read, write = os.pipe()
        self._stdin = os.fdopen(write, "wb", buffering=0)
        arguments = [f"--rank={rank}", f"--ft-dir={ft_dir}"]
        try:
            self.process = (
                _forked(arguments, read, self._log.fileno())
                if threads is None
                else _started(arguments, read, self._log.fileno(), threads)
            )
        finally:
            os.close(read)

    def send(self, settings: RankSettings) -> None:
        """Send the settings that the worker waits for; `ended` reports one that has exited."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(settings.to_json().encode() + b"\n")

    def ended(self) -> str | None:
        """Return how it ended, None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was ended by {signal_name(-status)}"
        return f"ended with status {status}"

    def last_line(self) -> str:
        """Return the last line of its output."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        *_, line = self._log.read().decode(errors="replace").strip().splitlines() or ["no output"]
        return line

    def kill(self) -> None:
        """Kill it and its process group, and wait for its end."""
        assert self.process.pid is not None
        self.process.kill()  # it may not be the leader of its group yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        self._stdin.close()


class _Fork(ForkProcess):
    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()


def _forked(arguments: list[str], stdin: int, log: int) -> _Fork:
    process = _Fork(target=_run, args=(arguments, stdin, log), daemon=True)
    process.start()
    return process


def _run(arguments: list[str], stdin: int, log: int) -> None:
    """Run a rank in this forked process."""
    os.setsid()
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.argv = [_MODULE, *arguments]
    set_command_line([sys.executable, "-m", *sys.argv])
    sys.exit(pkgutil.resolve_name(f"{_MODULE}:main")())


def _started(arguments: list[str], stdin: int, log: int, threads: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    environment |= memory_variables()
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(_PACKAGE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, *arguments],
        stdin=stdin,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
