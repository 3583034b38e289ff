"""Runs of toy stages on the throw-away Slurm, and the cluster as a fixture."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.compose import compose_config
from launcher_scripts.config import Config
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.slurm import SlurmLauncher
from launcher_scripts.pipeline import PlannedStage
from launcher_scripts.run import Run
from stages.base import Stage
from stages.record import JobRecord, read_record
from tests.integration.slurm_cluster import SlurmCluster, missing_programs

CLUSTER = (
    "cluster=bcm",
    "cluster_type=bcm",
    "cluster.exclusive=false",
    "cluster.mem=null",
    "cluster.gpus_per_node=null",
)


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)}); on Debian and Ubuntu: "
            "apt-get install slurm-wlm libpmix-dev openmpi-bin"
        )
    # Unix sockets below it limit the length of its name.
    folder = Path(tempfile.mkdtemp(prefix="slt", dir="/tmp"))
    made = SlurmCluster(folder, base_port=random.randrange(20000, 29000, 200))
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def reachable(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm_cluster.environment[name])


def configure(*words: str) -> Config:
    config = compose_config(["export=gpt3/sample", *CLUSTER, *words]).config
    assert config is not None
    return config


def make_run(*stages: Stage, words: tuple[str, ...] = ()) -> Run:
    jobs = {
        stage.name: Job(stage=stage, prefix="t-", environment={"TOYS": "1"}) for stage in stages
    }
    planned = [PlannedStage(stage, stage.finding()) for stage in stages]
    return Run(SlurmLauncher(configure(*words)), Console(), planned, jobs)


def record(folder: Path, stage: str) -> JobRecord:
    found = read_record(folder / stage / "job.json")
    assert found is not None
    return found


def wait_until(condition: Any, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.1)
