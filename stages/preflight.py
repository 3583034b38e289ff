"""Preflight check of a job with several ranks: as many as expected start, and have MPI.

It runs in the processes of the stage, before any weight is read. That they reach each other is for
their rendezvous.
"""

import os

from inference.system.launch_environment import LaunchEnvironment
from stages.base import StageError
from stages.job_process import node_name

# Variables of a process whose launcher has started its MPI.
_MPI_VARIABLES = {"pmix": "PMIX_RANK", "pmi2": "PMI_RANK"}


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
