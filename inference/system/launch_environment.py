"""The rank of a process in a launch, and its GPUs, from environment variables.

mpirun, torchrun, srun and other PMI launchers are recognised by the variables they set.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Selects a row of the table below when the variables of several launchers are set.
LAUNCHER_VARIABLE = "SLIPWAY_LAUNCHER"
DEFAULT_PORT = 29500  # also the default of torch's launchers
# `host:port` of the rendezvous of ranks that a launcher started, on the first node.
RENDEZVOUS_VARIABLE = "SLIPWAY_RENDEZVOUS"
# The file, visible to all nodes, into which rank 0 writes the key of the launch.
KEY_FILE_VARIABLE = "SLIPWAY_RENDEZVOUS_KEY_FILE"

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class LaunchEnvironment:
    """One process of a launch."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes on this node
    local_size: int = 1  # number of processes on this node
    launcher: str = "none"  # "none" for a process without a launcher
    job: str = ""  # identifier of this launch; may be empty
    head: str | None = None  # host of rank 0, if the launcher's variables name it


Environment = Mapping[str, str]


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; the first one of each tuple that is set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # the other variables count only if one of these is set
    # Parsers of the launcher's lists for the local size and the host of rank 0.
    read_local_size: Callable[[Environment], int | None] = lambda _: None
    read_head: Callable[[Environment], str | None] = lambda _: None


def _slurm_count(environment: Environment) -> int | None:
    """Return the number of tasks on this node from a list such as 2(x3),1."""
    counts = []
    for text in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, ("SLURM_NODEID",)) or 0
    return counts[node] if node < len(counts) else None


def _slurm_head(environment: Environment) -> str | None:
    """Return the first host of a list such as n[03-07,9],m1."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else None


_TORCH: dict[str, Any] = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_size": ("LOCAL_WORLD_SIZE",),
}
# Inner launchers come first: mpirun passes on the variables of an allocation, and torchrun those of
# a step. A plain RANK may be left over in a user's shell, so it comes after Slurm's variables,
# which count only within a step.
_LAUNCHERS = (
    _Launcher(
        "mpirun",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher("torchrun", **_TORCH, job=("TORCHELASTIC_RUN_ID",), needs=("TORCHELASTIC_RUN_ID",)),
    _Launcher(
        "slurm",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        needs=("SLURM_STEP_ID", "SLURM_STEPID"),
        read_local_size=_slurm_count,
        read_head=_slurm_head,
    ),
    _Launcher("torch", **_TORCH, job=("NGC_JOB_ID",)),
    _Launcher(
        "pmi",
        rank=("PMI_RANK", "PMIX_RANK"),
        world_size=("PMI_SIZE", "WORLD_SIZE"),
        local_rank=("MPI_LOCALRANKID", "LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"),
        job=("PMIX_NAMESPACE", "PMI_JOBID"),
    ),
)


def read_launch_environment(environment: Environment) -> LaunchEnvironment:
    """Return the rank of a process with these variables; rank 0 of 1 without any.

    Raises ValueError if the variables contradict each other or are not numbers.
    """
    selected = environment.get(LAUNCHER_VARIABLE)
    names = [launcher.name for launcher in _LAUNCHERS]
    if selected is not None and selected not in names:
        raise ValueError(f"{LAUNCHER_VARIABLE}={selected} is unknown; use {', '.join(names)}")
    for launcher in _LAUNCHERS:
        has_rank = any(name in environment for name in launcher.rank)
        counts = not launcher.needs or any(name in environment for name in launcher.needs)
        if selected == launcher.name or (selected is None and has_rank and counts):
            return _place(launcher, environment)
    return LaunchEnvironment()


def _place(launcher: _Launcher, environment: Environment) -> LaunchEnvironment:
    rank = _number(environment, launcher.rank)
    world_size = _number(environment, launcher.world_size)
    if rank is None or world_size is None:
        missing = " or ".join(launcher.rank if rank is None else launcher.world_size)
        raise ValueError(
            f"{launcher.name} seems to have started this process, but {missing} is not set; use "
            f"mpirun or srun, or name another launcher in {LAUNCHER_VARIABLE}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{launcher.name} sets rank {rank} of {world_size} processes; the variables of several "
            f"launchers are mixed: unset them, or name the right one in {LAUNCHER_VARIABLE}"
        )
    local_rank = _number(environment, launcher.local_rank)
    local_size = _number(environment, launcher.local_size) or launcher.read_local_size(environment)
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        # A launcher that counts no local processes runs all of them on one node.
        local_size=local_size or world_size,
        launcher=launcher.name,
        job=".".join(environment[name] for name in launcher.job if name in environment),
        head=launcher.read_head(environment),
    )


def _number(environment: Environment, names: tuple[str, ...]) -> int | None:
    for name in names:
        if name in environment:
            text = environment[name]
            if not text.isdigit():
                raise ValueError(f"{name}={text!r} is not a number")
            return int(text)
    return None


def rendezvous_address(
    place: LaunchEnvironment, environment: Environment, *, host: str | None, port: int | None
) -> tuple[str, int]:
    """Return host and port of the rendezvous: arguments first, then variables, then loopback.

    Raises ValueError if no variable names the host of rank 0 of several nodes, or for a wrong port.
    """
    head = host or environment.get("MASTER_ADDR") or environment.get("NGC_MASTER_ADDR")
    if head is None and place.local_size < place.world_size:  # there are other nodes
        head = place.head
        if head is None:
            raise ValueError(
                f"only {place.local_size} of {place.world_size} processes run on this node, and no "
                "variable names the host of rank 0; set MASTER_ADDR to it on every node "
                "(mpirun -x MASTER_ADDR=HOST), or give --master-addr HOST"
            )
    if port is None:
        port = _number(environment, ("MASTER_PORT",)) or DEFAULT_PORT
    if not 0 < port < 65536:
        raise ValueError(f"the rendezvous port is {port}; it must be between 1 and 65535")
    return head or "127.0.0.1", port


def visible_gpus() -> list[str]:
    """Return the names of the visible GPUs, as CUDA_VISIBLE_DEVICES spells them.

    This does not initialise CUDA, after which the visible GPUs could not change.
    """
    if (text := os.environ.get(VISIBLE_VARIABLE)) is not None:
        return [name.strip() for name in text.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
