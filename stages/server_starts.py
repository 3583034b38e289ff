"""Starts of a server on several nodes, announced to its processes in a small file.

The first process writes the file next to the server's address before each start. The others, one
per rank or per node, join that start and wait for the next. Like all results, the file is on a
shared file system.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from foundations.files.replace import replace_file
from inference.system.launch_environment import (
    KEY_FILE_VARIABLE,
    RENDEZVOUS_VARIABLE,
    read_launch_environment,
)
from inference.system.parent_process import end_process, signal_name
from inference.system.ports import host_and_port, pick_free_ports
from stages.base import StageError
from stages.engines import HEAD_FIELD, HEAD_PORT_FIELD
from stages.job_process import node_address, node_name
from stages.progress import read_as, write_json

# Files of one job (a chain has several in one folder) since it was last requeued.
_START_NAME = ".server-start-{job}-{life}.json"
_KEY_NAME = ".rendezvous-{job}-{life}-{number}.key"
_LOSS_NAME = "lost-{job}-{life}-{number}-rank{rank}.txt"
_POLL_S = 0.2
# Time in which the first process must notice a failure; it polls its server twice a second.
_NOTICE_S = 30.0
_GRACE_S = 10.0


def _path(folder: Path, name: str, job_id: str, **fields: object) -> Path:
    life = os.environ.get("SLURM_RESTART_COUNT", "0")
    return folder / name.format(job=job_id, life=life, **fields)


@dataclass(frozen=True)
class ServerStart:
    """One start of the server.

    Attributes:
        number: number of the start within the job, from 1; 0: no start follows, the other processes
            end.
        address: rendezvous address `host:port` of the ranks, on the first node.
        is_over: whether the first process knows that the start failed; the others then need not
            report.
    """

    job_id: str
    number: int
    address: str = ""
    is_over: bool = False

    def announce(self, folder: Path) -> None:
        """Announce the start, its failure, or that no start follows, to the other processes."""
        write_json(_path(folder, _START_NAME, self.job_id), self)

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the environment variables of the rendezvous and its key file."""
        key_file = _path(folder.absolute(), _KEY_NAME, self.job_id, number=self.number)
        return {RENDEZVOUS_VARIABLE: self.address, KEY_FILE_VARIABLE: str(key_file)}

    def fill_command(self, command: Sequence[str]) -> list[str]:
        """Return the command of another engine with the rendezvous address filled in."""
        host, _, port = self.address.rpartition(":")
        values = {HEAD_FIELD: host.strip("[]"), HEAD_PORT_FIELD: port}
        return [values.get(word, word) for word in command]


def announce_start(folder: Path, job_id: str, number: int) -> ServerStart:
    """Choose a rendezvous address on this node, and announce and return the start."""
    host = node_address() or "127.0.0.1"
    (port,) = pick_free_ports(host, 1)
    start = ServerStart(job_id, number, host_and_port(host, port))
    start.announce(folder)
    return start


def read_start(folder: Path, job_id: str) -> ServerStart | None:
    """Return a job's latest announcement since it was last requeued; None before the first."""
    return read_as(_path(folder, _START_NAME, job_id), ServerStart, "the announcement of a server")


def run_for_each_start(
    folder: Path,
    job_id: str,
    *,
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run `command` for every start of the server until no start follows.

    If a signal ends the command, a file reports that to the first process. The command's output
    goes to `log_path`, or to this process's own output. `check` is called repeatedly and raises an
    error to give up.

    Raises:
        StageError: the command failed, and the first process did not notice.
    """
    rank = read_launch_environment(os.environ).rank
    name = f"rank {rank} on {node_name()}"
    number, ended_at = 0, None
    process = None
    try:
        while (start := read_start(folder, job_id)) is None or start.number != 0:
            if start is not None and start.number != number and not start.is_over:
                _end(process)
                number, ended_at = start.number, None
                variables = {**environment, **start.variables(folder)}
                with log_path.open("wb") if log_path else nullcontext() as log:
                    process = subprocess.Popen(
                        start.fill_command(command),
                        env={**os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT if log else None,
                    )
            if process is not None and start is not None and process.poll() not in (None, 0):
                if ended_at is None:
                    ended_at = time.monotonic()
                    if process.returncode < 0:  # otherwise the process logged its reason
                        lost = f"{name} was ended by {signal_name(-process.returncode)}"
                        path = _path(folder, _LOSS_NAME, job_id, number=number, rank=rank)
                        replace_file(path, lost)
                if not start.is_over and time.monotonic() - ended_at > _NOTICE_S:
                    raise StageError(
                        f"{name} ended with status {process.returncode}, and the first process "
                        "did not notice; see the job's log"
                    )
            check()
            time.sleep(_POLL_S)
    finally:
        _end(process)


def lost_processes(folder: Path, job_id: str, number: int, *, wait_s: float) -> list[str]:
    """Return reports of processes that a signal ended; wait at most `wait_s` for the first."""
    deadline = time.monotonic() + wait_s
    pattern = _path(folder, _LOSS_NAME, job_id, number=number, rank="*").name
    while not (paths := sorted(folder.glob(pattern))) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [path.read_text(encoding="utf-8") for path in paths]


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """End a process, unless there is none; one that is just ending gets a moment to do so."""
    if process is None:
        return
    with suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_S)
    end_process(process, grace_s=_GRACE_S)
