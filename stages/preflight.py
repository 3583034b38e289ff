"""Preflight check of a job with several ranks: as many as expected start, and have MPI.

It runs in the processes of the stage, before any weight is read. That they reach each other is for
their rendezvous.
"""

import os
import subprocess

from inference.system.launch_environment import LaunchEnvironment
from stages.base import StageError
from stages.job_process import node_name

_ASK_S = 60.0
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


def check_place(place: LaunchEnvironment, *, ranks: int, mpi: str) -> None:
    """Check that a process is one of so many ranks, and has the MPI.

    Raises:
        StageError: it is not, or has not; it would believe that it is alone.
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
