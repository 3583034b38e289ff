"""Preflight check of a job with several ranks: they start, have MPI, and reach each other.

It runs in the processes of the stage, before any weight is read.
"""

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from inference.launch_environment import LaunchEnvironment
from stages.base import StageError
from stages.job_process import log_line, node_name
from stages.progress import read_json, write_json

# A node may first have to fetch the container.
_START_S = 300.0
# Between processes that have started.
_CONNECT_S = 30.0
_ASK_S = 60.0
_ANSWER_S = 5.0
_LONGEST = 64  # bytes of a ping
_POLL_S = 0.1
PING_NAME = "ping.json"  # where the first rank leaves its address
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


def meet(place: LaunchEnvironment, folder: Path, *, ranks: int, mpi: str) -> None:
    """Check that a process is one of so many ranks, has the MPI, and reaches the first.

    All ranks call this at the same time, with a folder that they share.

    Raises:
        StageError: it does not, and no weight has been read.
    """
    name = f"rank {place.rank} on {node_name()}"
    variable = _MPI_VARIABLES.get(mpi)
    if place.world_size != ranks:
        raise StageError(f"{name} sees {place.world_size} ranks instead of {ranks}")
    if variable is not None and variable not in os.environ:
        raise StageError(
            f"{name} got no {variable}: cluster.mpi={mpi} does not reach it, so every rank would "
            "believe that it is alone; in a container, pyxis needs its PMI hook"
        )
    try:
        _answer(folder, ranks) if place.rank == 0 else _call(folder, place.rank)
    except OSError as error:
        raise StageError(
            f"the ranks do not reach each other, and no weight was read: {name}: {error}"
        ) from error
    log_line(f"{name} reaches the first")


def _answer(folder: Path, ranks: int) -> None:
    """Wait until every other rank has called; strangers do not count."""
    with socket.create_server(("", 0)) as server:
        hosts = list(dict.fromkeys((node_name(), socket.gethostname(), socket.getfqdn())))
        write_json(folder / PING_NAME, {"hosts": hosts, "port": server.getsockname()[1]})
        deadline = time.monotonic() + _START_S
        pings = {_ping(rank) for rank in range(1, ranks)}
        left = set(pings)
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
                if (said := connection.recv(_LONGEST)) in pings:
                    connection.sendall(b"pong")
                    left.discard(said)


def _ping(rank: int) -> bytes:
    return f"ping of rank {rank}".encode()


def _call(folder: Path, rank: int) -> None:
    """Reach the first rank under any of the names that it leaves in the folder."""
    first: Any = None
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        found = read_json(folder / PING_NAME)  # an earlier start may have left its file
        if first is None and found is not None:
            deadline = time.monotonic() + _CONNECT_S
        first = found or first
        for host in first["hosts"] if first else ():
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(first["port"])), _ANSWER_S) as connection,
            ):
                connection.sendall(_ping(rank))
                if connection.recv(4) == b"pong":
                    return
        time.sleep(_POLL_S)
    if first is None:
        raise OSError(
            f"{folder} holds no message of the first rank after {_START_S:g} s; all nodes "
            "must see the folder, and the first must start"
        )
    raise OSError(
        f"cannot connect to the first rank at {first['hosts']}, port {first['port']}, within "
        f"{_CONNECT_S:g} s; do firewalls let the nodes reach each other?"
    )
