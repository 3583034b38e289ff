"""The script of a Base Command job, as text: the start of its tasks, and their variables."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def job_script(
    command: str,
    job_id: str,
    parameters: Mapping[str, Any],
    *,
    program: str,
    environment: Mapping[str, str],
) -> str:
    """Return the script of a job; bash is replaced by the runner, whose status is the job's.

    Args:
        command: Shell line of one task.
        job_id: Id of the job.
        parameters: Those of the executor. `exports` are variables of every task, `setup` shell
            lines that run before, `arguments` further ones of bcprun; `first` runs in every task
            before `command`, and has to succeed.
        program: The runner, bcprun or mpirun.
        environment: Variables of the Base Command job.
    """
    exports, by_mpirun = parameters.get("exports", {}), Path(program).name == MPIRUN
    lines = [
        "#!/bin/bash",
        "",
        "# setup",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        f"export {ID_VARIABLE}={shlex.quote(job_id)}",
        "export SUBMITIT_EXECUTOR=bcp",
        f"export PYTHONPATH={shlex.quote(str(CHECKOUT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *parameters.get("setup", ()),
        "",
        "# Tasks inherit nothing: what they need is handed on.",
        "hand_on=()",
        *_hand_on([*_PASSED_ON, *exports], by_name=by_mpirun),
        "",
        "# command",
    ]
    words = (_mpirun if by_mpirun else _bcprun)(parameters, environment)
    start = f'{shlex.join([program, *words])} "${{hand_on[@]}}"'
    tail = ["bash", "-c"] if by_mpirun else ["--cmd"]
    if (first := parameters.get("first")) is not None:
        lines.append(f"{start} {shlex.join([*tail, first])}")
    limit = []
    if (minutes := parameters.get("timeout_min")) is not None:
        # `--foreground`: the signal goes to the runner alone, which passes it on to the tasks.
        limit = ["timeout", "--foreground", f"--kill-after={_KILL_AFTER_S}", f"{minutes}m"]
    lines.append(shlex.join(["exec", *limit]) + f" {start} {shlex.join([*tail, command])}")
    return "\n".join(lines) + "\n"


def _mpirun(parameters: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    del environment
    per_node = parameters.get("tasks_per_node", 1)
    yield from (*_AS_ROOT, "-np", str(parameters.get("nodes", 1) * per_node))
    yield from ("-npernode", str(per_node), "-x", f"{LAUNCHER_VARIABLE}=mpirun")


def _bcprun(parameters: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    yield from ("--nnodes", str(parameters.get("nodes", 1)))
    yield from ("--npernode", str(parameters.get("tasks_per_node", 1)))
    if environment.get("NGC_ARRAY_TYPE", "").upper().startswith("MPI"):
        yield from ("--launcher", shlex.join([MPIRUN, *_AS_ROOT]))
    if parameters.get("no_redirect", True):
        yield "-no_redirect"
    yield from ("--workdir", str(CHECKOUT), *parameters.get("arguments", ()))


def _hand_on(names: Sequence[str], *, by_name: bool) -> Iterator[str]:
    words = " ".join(dict.fromkeys(names))
    flag = '-x "$name"' if by_name else '--env "$name=${!name}"'
    yield f"for name in {words}; do"
    yield f'  if [ -n "${{!name:-}}" ]; then hand_on+=({flag}); fi'
    yield "done"
