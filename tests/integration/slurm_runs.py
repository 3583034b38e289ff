"""Runs of toy stages on the throw-away Slurm."""

import os
import subprocess
import time
from functools import cache
from pathlib import Path

from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.schema import Config
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.slurm import SlurmLauncher
from launcher_scripts.pipeline import PlannedStage
from launcher_scripts.run import Run
from stages.base import Stage
from stages.record import JobRecord, read_record
from tests.integration.slurm_cluster import SlurmCluster
from tests.waiting import until

CLUSTER = (
    "cluster=bcm",
    "cluster_type=bcm",
    "cluster.exclusive=false",
    "cluster.mem=null",
    "cluster.gpus_per_node=null",
)


@cache
def mpi(configuration: str | None) -> str:
    """Return an MPI that the Slurm of SLURM_CONF has: Debian builds new releases without PMIx."""
    del configuration
    done = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, check=False)
    return "pmix" if "pmix" in f"{done.stdout} {done.stderr}".split() else "pmi2"


def configure(*words: str) -> Config:
    given = [
        "export=gpt3/sample",
        *CLUSTER,
        f"cluster.mpi={mpi(os.environ.get('SLURM_CONF'))}",
        *words,
    ]
    config = compose_config(given).config
    assert config is not None
    return config


def make_run(*stages: Stage, words: tuple[str, ...] = ()) -> Run:
    config = configure("cluster.job_name_prefix=t-", "+env_vars.TOYS=1", *words)
    jobs = {stage.name: Job(stage, config) for stage in stages}
    planned = [PlannedStage(stage, stage.finding()) for stage in stages]
    return Run(SlurmLauncher(config), Console(), planned, jobs)


def restart_now(cluster: SlurmCluster, run: Run, stage: str) -> None:
    """Wait until a job is requeued, and let it start again: left alone it waits two minutes."""
    job_id = run.handles[stage].job_id

    def is_waiting() -> bool:
        return "PENDING" in cluster.run("squeue", "-h", "-o", "%T", "-j", job_id)

    def has_started() -> bool:
        state = cluster.run("squeue", "-h", "-o", "%T %r", "-j", job_id, check=False)
        if "BeginTime" in state:
            time.sleep(1.5)  # slurmd refuses a job that comes back within the second of its end
            cluster.run("scontrol", "update", f"jobid={job_id}", "StartTime=now", check=False)
        return "PENDING" not in state

    until(is_waiting, "the requeueing")
    assert run.handles[stage].poll() is None  # a job that waits again has not ended
    until(has_started, "the new start")


def wait_for_end(run: Run, stage: str) -> None:
    until(lambda: run.handles[stage].poll() is not None, f"the end of {stage}", limit_s=180)


def record(folder: Path, stage: str) -> JobRecord:
    found = read_record(folder / stage / "job.json")
    assert found is not None
    return found
