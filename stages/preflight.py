"""Preflight check of a job with several ranks: they start, have MPI, and reach each other.

Runs where the step will run, in the same container and allocation, before any weight is read.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.launch_environment import read_launch_environment
from stages.base import StageError
from stages.job_process import log_line, node_name
from stages.progress import read_json, write_json

# A node may first have to fetch the container.
_START_S = 300.0
# Between processes that have started.
_CONNECT_S = 30.0
_WHOLE_S = _START_S + 2 * _CONNECT_S
_ASK_S = 60.0
_ANSWER_S = 5.0
_LONGEST = 64  # bytes of a ping
_POLL_S = 0.1
_TAIL_LINES = 12
# Variables of a process whose launcher has started its MPI.
_MPI_VARIABLES = {"pmix": "PMIX_RANK", "pmi2": "PMI_RANK"}


def check_mpi(kind: str | None) -> None:
    """Raise StageError if this cluster's srun lacks the MPI."""
    try:
        problem = None if kind is None else mpi_problem(kind, timeout_s=_ASK_S)
    except subprocess.TimeoutExpired as error:
        raise StageError(f"srun --mpi=list did not answer within {_ASK_S:g} s") from error
    if problem is not None:
        raise StageError(problem)


def mpi_problem(kind: str, *, timeout_s: float) -> str | None:
    """Return a problem if this cluster's srun lacks the MPI.

    Raises:
        OSError: srun is not installed.
        subprocess.TimeoutExpired: it does not answer.
    """
    done = subprocess.run(
        ["srun", "--mpi=list"], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    listed = (done.stdout + done.stderr).split()
    if done.returncode != 0 or kind in listed:
        return None
    known = [each for each in listed if each in ("none", *_MPI_VARIABLES)]
    return (
        f"cluster.mpi={kind}: this Slurm does not have it, and without it every rank believes it "
        f"is alone; it has {', '.join(known) or 'none'}."
    )


def ping(prefix: Sequence[str], python: str, *, ranks: int, mpi: str | None, folder: Path) -> None:
    """Start every rank once and let each reach the first.

    Raises:
        StageError: a rank did not start, or did not reach the first.
    """
    (folder / "ping.json").unlink(missing_ok=True)
    arguments = [str(folder), str(ranks), mpi or "none"]
    command = [*prefix, python, "-u", "-m", __name__, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_WHOLE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StageError(
            f"{ranks} ranks did not start within {_WHOLE_S:g} s: {shlex.join(command)}"
        ) from error
    output = done.stdout + done.stderr
    sys.stdout.write(output)
    if done.returncode != 0:
        lines = "\n".join(f"  | {line}" for line in output.splitlines()[-_TAIL_LINES:])
        raise StageError(f"the ranks do not reach each other; no weight was read:\n{lines}")


def main(folder: Path, ranks: int, mpi: str) -> int:
    """Run one rank of a ping and return its exit status."""
    place = read_launch_environment(os.environ)
    name = f"rank {place.rank} on {node_name()}"
    variable = _MPI_VARIABLES.get(mpi)
    if place.world_size != ranks:
        log_line(f"{name} sees {place.world_size} ranks instead of {ranks}")
        return 1
    if variable is not None and variable not in os.environ:
        log_line(
            f"{name} got no {variable}: cluster.mpi={mpi} does not reach it, so every rank would "
            "believe that it is alone; in a container, pyxis needs its PMI hook"
        )
        return 1
    try:
        _answer(folder, ranks) if place.rank == 0 else _call(folder, place.rank)
    except OSError as error:
        log_line(f"{name}: {error}")
        return 1
    sys.stdout.write(f"{name} reaches the first\n")
    return 0


def _answer(folder: Path, ranks: int) -> None:
    """Wait until every other rank has called; strangers do not count."""
    with socket.create_server(("", 0)) as server:
        hosts = list(dict.fromkeys((node_name(), socket.gethostname(), socket.getfqdn())))
        write_json(folder / "ping.json", {"hosts": hosts, "port": server.getsockname()[1]})
        deadline = time.monotonic() + _START_S
        left = set(range(1, ranks))
        while left:
            try:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                server.settimeout(left_s)
                connection, _ = server.accept()
            except TimeoutError:
                raise OSError(
                    f"{len(left)} of {ranks} ranks did not call within {_START_S:g} s"
                ) from None
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ANSWER_S)
                said = connection.recv(_LONGEST)
                if called := {rank for rank in range(1, ranks) if said == _ping(rank)}:
                    connection.sendall(b"pong")
                    left -= called


def _ping(rank: int) -> bytes:
    return f"ping of rank {rank}".encode()


def _call(folder: Path, rank: int) -> None:
    """Reach the first rank under any of its names."""
    first = _wait_for_first(folder)
    deadline = time.monotonic() + _CONNECT_S
    while time.monotonic() < deadline:
        for host in first["hosts"]:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(first["port"])), _ANSWER_S) as connection,
            ):
                connection.sendall(_ping(rank))
                if connection.recv(4) == b"pong":
                    return
        time.sleep(_POLL_S)
        first = _wait_for_first(folder)  # an earlier start may have left its file
    raise OSError(
        f"cannot connect to the first rank at {first['hosts']}, port {first['port']}, within "
        f"{_CONNECT_S:g} s; do firewalls let the nodes reach each other?"
    )


def _wait_for_first(folder: Path) -> dict[str, Any]:
    """Return the names and port that the first rank has written."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if (first := read_json(folder / "ping.json")) is not None:
            return dict(first)
        time.sleep(_POLL_S)
    raise OSError(
        f"{folder} holds no message of the first rank after {_START_S:g} s; all nodes "
        "must see the folder, and the first must start"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
