"""Checks against the Slurm cluster itself, before anything is submitted."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher_scripts.configuration.checks import nearest_that_exists
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.settings import is_dry_run
from launcher_scripts.launchers.slurm_options import images_of, problems_of_options
from stages.base import Stage
from stages.preflight import mpi_problem

# Local file systems; an ext4 or xfs disk may be exported to the nodes, these cannot be.
_OWN_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")
_ASK_S = 20.0
# Busy nodes may not answer in this time; the check is then skipped.
_PROBE_WAIT_S = 60
_UNSEEN = "unseen:"


def problems_of_cluster(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return why the stages cannot run, as far as this machine can reach the cluster."""
    problems = problems_of_options(config, stages)
    if is_dry_run(config):
        return problems
    if shutil.which("sbatch") is None:
        return [
            *problems,
            "cluster_type=bcm needs sbatch, which is not on PATH; run on a login node, or use "
            "cluster_type=local or dry_run=true.",
        ]
    problems += [*_problems_of_partition(config), *_problems_of_pyxis(config, stages)]
    nodes = max((stage.resources().nodes for stage in stages), default=1)
    if nodes > 1 and config.cluster.mpi is not None:
        with suppress(OSError, subprocess.TimeoutExpired):
            problems += filter(None, [mpi_problem(config.cluster.mpi, timeout_s=_ASK_S)])
    if config.cluster.probe and not problems:
        problems += _problems_seen_from_nodes(config, nodes)
    return problems


def _problems_seen_from_nodes(config: Config, nodes: int) -> list[str]:
    """Run one small step on as many nodes as the largest job gets."""
    there = nearest_that_exists(Path(config.base_results_dir))
    cluster = config.cluster
    chosen = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos}
    flags = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    with tempfile.NamedTemporaryFile(dir=there, prefix=".probe-") as file:
        wanted = {
            "base_results_dir": file.name,
            "launcher_scripts_path": str(Path(__file__).resolve()),
        }
        if Path(config.export.model.checkpoint_path).exists():
            wanted["export.model.checkpoint_path"] = config.export.model.checkpoint_path
        lines = [
            f"test -e {shlex.quote(path)} || echo {_UNSEEN}{key}" for key, path in wanted.items()
        ]
        lines.append(f"{shlex.quote(sys.executable)} -c 'import submitit' || echo {_UNSEEN}python")
        answer = _answer(
            ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", f"--immediate={_PROBE_WAIT_S}",
             "--time=2", "--job-name=probe", *flags, "bash", "-c", "; ".join(lines)],
            timeout_s=2.0 * _PROBE_WAIT_S,
        )  # fmt: skip
    unseen = sorted(
        {line.removeprefix(_UNSEEN) for line in (answer or "").splitlines() if _UNSEEN in line}
    )
    return [
        f"{key} is not visible on the nodes; put it on a file system that they share."
        if key != "python"
        else f"{sys.executable} cannot import submitit on the nodes; install the environment on a "
        "file system that they share."
        for key in unseen
    ]


def _problems_of_partition(config: Config) -> list[str]:
    partition = config.cluster.partition
    if partition is None:
        return []
    known = _answer(["sinfo", "-h", "-o", "%R"])
    names = sorted(set(known.split())) if known else []
    missing = [each for each in partition.split(",") if names and each not in names]
    return [
        f"cluster.partition={partition}: unknown partition {each}; known partitions: "
        f"{', '.join(names)}."
        for each in missing
    ]


def _problems_of_pyxis(config: Config, stages: Sequence[Stage]) -> list[str]:
    images = images_of(config, stages)
    described = _answer(["srun", "--help"]) if images else None
    if described is None or "--container-image" in described:
        return []
    return [
        f"{key}={image} needs pyxis, and this Slurm's srun has no --container-image; "
        f"install pyxis, or set {key}=null."
        for key, image in images.items()
    ]


def own_file_system(path: Path) -> str | None:
    """Return the kind of file system of `path`, if other machines cannot share it."""
    there = nearest_that_exists(path).resolve()
    kinds: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/mounts").read_bytes().splitlines():
            _, mounted, system, *_ = line.split()
            kinds[os.fsdecode(mounted)] = os.fsdecode(system)
    kind = next((kinds[str(each)] for each in (there, *there.parents) if str(each) in kinds), "")
    return kind if kind in _OWN_FILE_SYSTEMS else None


def _answer(command: list[str], *, timeout_s: float = _ASK_S) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
