"""A stand-in for Base Command's bcprun: one local process for each task of each replica.

Like the original it starts the command with nothing but the variables it is given, plus those of
the replica and of the rank, and ends every task when one fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

REPLICA = ("NGC_JOB_ID", "NGC_ARRAY_SIZE", "NGC_GPUS_PER_NODE", "NGC_ARRAY_TYPE")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bcprun", allow_abbrev=False)
    size = int(os.environ["NGC_ARRAY_SIZE"])
    parser.add_argument("-n", "--nnodes", type=int, default=size)
    parser.add_argument(
        "-p", "--npernode", type=int, default=int(os.environ.get("NGC_GPUS_PER_NODE", "8"))
    )
    parser.add_argument("-e", "--env", action="append", default=[])
    parser.add_argument("-w", "--workdir", default=None)
    parser.add_argument("-l", "--launcher", default=None)
    parser.add_argument("-no_redirect", action="store_true")
    parser.add_argument("-c", "--cmd", required=True)
    arguments = parser.parse_args()
    if arguments.nnodes > size:
        parser.error(f"{arguments.nnodes} nodes of {size}")
    return arguments


def by_torch(rank: int, node: int, local: int, arguments: argparse.Namespace) -> dict[str, str]:
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
        "RANK": str(rank),
        "WORLD_SIZE": str(arguments.nnodes * arguments.npernode),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(arguments.npernode),
        "GROUP_RANK": str(node),
    }


def by_mpirun(rank: int, node: int, local: int, arguments: argparse.Namespace) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(arguments.nnodes * arguments.npernode),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(arguments.npernode),
    }


def main() -> int:
    arguments = read_arguments()
    tasks = []
    given = dict(each.split("=", 1) for each in arguments.env)
    for rank in range(arguments.nnodes * arguments.npernode):
        node, local = divmod(rank, arguments.npernode)
        environment = {name: os.environ[name] for name in REPLICA if name in os.environ}
        environment |= {
            "NGC_ARRAY_INDEX": str(node),
            "NGC_MASTER_ADDR": "localhost",
            **(by_mpirun if arguments.launcher else by_torch)(rank, node, local, arguments),
        }
        line = ["bash", "-c", arguments.cmd]
        environment |= given
        tasks.append(subprocess.Popen(line, env=environment, cwd=arguments.workdir))

    def forward(signum: int, frame: FrameType | None) -> None:
        for task in tasks:
            if task.poll() is None:
                task.send_signal(signum)

    signal.signal(signal.SIGTERM, forward)
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            forward(signal.SIGTERM, None)
            break
        time.sleep(0.05)
    return max(abs(task.wait()) for task in tasks)


def become_replica(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put this file as bcprun into `folder` and on PATH, as on the first of two replicas."""
    folder.mkdir()
    program = folder / "bcprun"
    command = shlex.join([sys.executable, __file__])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "7", "ARRAY_SIZE": "2", "ARRAY_INDEX": "0"}.items():
        monkeypatch.setenv(f"NGC_{name}", value)
    return folder


if __name__ == "__main__":
    sys.exit(main())
