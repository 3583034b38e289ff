"""The script of a Base Command job, as text: the start of its tasks, and their variables."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.launch_environment import LAUNCHER_VARIABLE
from launcher_scripts.configuration.settings import CHECKOUT

ID_VARIABLE = "SUBMITIT_BCP_JOB_ID"
MPIRUN = "mpirun"
_AS_ROOT = ("--allow-run-as-root",)
# Between SIGTERM and SIGKILL.
_KILL_AFTER_S = 90
# Variables that a process of bcprun does not inherit. Secrets are listed by name only: no script
# contains their values.
_PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "SUBMITIT_EXECUTOR",
    ID_VARIABLE, "HF_TOKEN", "NGC_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
)  # fmt: skip


def runner(bcprun: str = "bcprun", environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the program that starts processes on the replicas, or None."""
    path = environment.get("PATH", "")
    return next((each for each in (bcprun, MPIRUN) if shutil.which(each, path=path)), None)


@dataclass(frozen=True)
class Tasks:
    """The start of a job's tasks.

    Attributes:
        runner: bcprun or mpirun.
        timeout_min: minutes after which the runner gets SIGTERM; None for no limit.
        no_redirect: bcprun leaves their output in the job's log.
        arguments: further arguments of bcprun.
        is_mpi_array: whether the replicas are an MPI array, which bcprun starts through mpirun.
    """

    runner: str
    nodes: int = 1
    per_node: int = 1
    timeout_min: int | None = None
    no_redirect: bool = True
    arguments: tuple[str, ...] = ()
    is_mpi_array: bool = False

    @property
    def by_mpirun(self) -> bool:
        """Return whether mpirun takes the place of bcprun."""
        return Path(self.runner).name == MPIRUN

    def limit(self) -> Iterator[str]:
        """Yield the words in front of the runner that end it in time; its status is then 124.

        The signal goes only to the runner (`--foreground`), which passes it on to the tasks.
        """
        if self.timeout_min is not None:
            yield from ("timeout", "--foreground", f"--kill-after={_KILL_AFTER_S}")
            yield f"{self.timeout_min}m"

    def start(self) -> Iterator[str]:
        """Yield the words that start the tasks."""
        yield self.runner
        if self.by_mpirun:
            yield from (*_AS_ROOT, "-np", str(self.nodes * self.per_node))
            yield from ("-npernode", str(self.per_node), "-x", f"{LAUNCHER_VARIABLE}=mpirun")
            return
        yield from ("--nnodes", str(self.nodes), "--npernode", str(self.per_node))
        if self.is_mpi_array:
            yield from ("--launcher", shlex.join([MPIRUN, *_AS_ROOT]))
        if self.no_redirect:
            yield "-no_redirect"
        yield from ("--workdir", str(CHECKOUT), *self.arguments)


def is_mpi_array(environment: Mapping[str, str]) -> bool:
    """Return whether the replicas of this Base Command job were started as an MPI array."""
    return environment.get("NGC_ARRAY_TYPE", "").upper().startswith("MPI")


def job_script(
    command: str,
    tasks: Tasks,
    *,
    job_id: str,
    exports: Mapping[str, str],
    setup: Sequence[str] = (),
    first: str | None = None,
) -> str:
    """Return the script of a job; bash is replaced by the runner, whose status is the job's.

    `command` is the shell line of one task, `exports` are variables of every task, and `setup` are
    shell lines that run before. `first` runs in every task before `command`, and has to succeed.
    """
    lines = [
        "#!/bin/bash",
        "",
        "# setup",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        f"export {ID_VARIABLE}={shlex.quote(job_id)}",
        "export SUBMITIT_EXECUTOR=bcp",
        f"export PYTHONPATH={shlex.quote(str(CHECKOUT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *setup,
        "",
        "# Tasks inherit nothing: what they need is handed on.",
        "hand_on=()",
        *_hand_on([*_PASSED_ON, *exports], by_name=tasks.by_mpirun),
        "",
        "# command",
    ]
    start = f'{shlex.join(tasks.start())} "${{hand_on[@]}}"'
    tail = ["bash", "-c"] if tasks.by_mpirun else ["--cmd"]
    if first is not None:
        lines.append(f"{start} {shlex.join([*tail, first])}")
    lines.append(shlex.join(["exec", *tasks.limit()]) + f" {start} {shlex.join([*tail, command])}")
    return "\n".join(lines) + "\n"


def _hand_on(names: Sequence[str], *, by_name: bool) -> Iterator[str]:
    words = " ".join(dict.fromkeys(names))
    flag = '-x "$name"' if by_name else '--env "$name=${!name}"'
    yield f"for name in {words}; do"
    yield f'  if [ -n "${{!name:-}}" ]; then hand_on+=({flag}); fi'
    yield "done"
