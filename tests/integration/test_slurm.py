"""Jobs on a real Slurm of two nodes: chains, failures, cancelling, requeueing, the pipeline."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOYS = ROOT / "tests" / "unit" / "launcher_scripts"
sys.path[:0] = [str(HERE), str(TOYS)]

from slurm_cluster import SlurmCluster, missing_programs  # noqa: E402
from toy_stages import EnvironmentStage, SleepStage, TwiceStage, WriteStage, settings  # noqa: E402

from launcher_scripts.compose import compose_config  # noqa: E402
from launcher_scripts.config import Config  # noqa: E402
from launcher_scripts.console import Console  # noqa: E402
from launcher_scripts.launchers.base import Job, SubmissionError  # noqa: E402
from launcher_scripts.launchers.slurm import SlurmLauncher  # noqa: E402
from launcher_scripts.pipeline import PlannedStage  # noqa: E402
from launcher_scripts.run import Run  # noqa: E402
from stages.base import Stage  # noqa: E402
from stages.record import JobRecord, read_record  # noqa: E402

pytestmark = pytest.mark.slurm
CLUSTER = (
    "cluster=bcm",
    "cluster_type=bcm",
    "cluster.exclusive=false",
    "cluster.mem=null",
    "cluster.gpus_per_node=null",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
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


@pytest.fixture(autouse=True)
def _reachable(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])


def configure(*words: str) -> Config:
    config = compose_config(["export=gpt3/sample", *CLUSTER, *words]).config
    assert config is not None
    return config


def make_run(*stages: Stage, words: tuple[str, ...] = ()) -> Run:
    jobs = {
        stage.name: Job(stage=stage, prefix="t-", environment={"TOYS": "1"}) for stage in stages
    }
    words = (*words, f"cluster.setup=['export PYTHONPATH={TOYS}:$PYTHONPATH']")
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


def test_chain_runs_in_order_and_is_recorded(tmp_path: Path) -> None:
    first, second = (
        WriteStage(settings(tmp_path, "write")),
        EnvironmentStage(settings(tmp_path, "environment")),
    )
    assert make_run(first, second).run_all(wait=True) == 0
    one, two = record(tmp_path, "write"), record(tmp_path, "environment")
    assert two.dependency == f"afterok:{one.job_id}"
    assert (one.state, two.state) == ("completed", "completed")
    assert one.ended_at <= two.started_at
    assert one.host in ("n1", "n2")
    log = tmp_path / "write" / f"log-t-write_{one.job_id}.out"
    assert "working" in log.read_text()


def test_variables_of_an_enclosing_job_do_not_reach_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "nonsense")
    monkeypatch.setenv("PMIX_RANK", "5")
    assert make_run(EnvironmentStage(settings(tmp_path, "environment"))).run_all(wait=True) == 0
    seen = json.loads((tmp_path / "out" / "target.txt").read_text())
    assert seen["TOYS"] == "1"
    assert not {"SLURM_CPU_BIND", "PMIX_RANK"} & set(seen)


def test_failed_stage_cancels_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(
        WriteStage(settings(tmp_path, "write"), fails="error"),
        EnvironmentStage(settings(tmp_path, "environment")),
    )
    assert run.run_all(wait=True) == 1
    shown = capsys.readouterr().out
    assert "write failed: the disk is on fire; use water" in shown
    wait_until(
        lambda: run.handles["environment"].poll() == "cancelled", "the end of the dependent job"
    )
    assert not (tmp_path / "out" / "target.txt").exists()


def test_refused_job_is_explained_and_nothing_stays_queued(
    tmp_path: Path, cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(
        WriteStage(settings(tmp_path, "write")), words=("+cluster.additional_parameters.begin=x",)
    )
    assert run.run_all(wait=False) == 1
    assert "Invalid --begin specification" in capsys.readouterr().out
    with pytest.raises(SubmissionError, match="--begin"):
        run.launcher.submit(run.jobs["write"], ())
    assert cluster.run("squeue", "-h").strip() == ""


def test_cancelled_job_is_known_without_accounting(tmp_path: Path) -> None:
    run = make_run(SleepStage(settings(tmp_path, "sleep")))
    assert run.run_all(wait=False) == 0
    wait_until((tmp_path / "out" / "target.pid").exists, "the start of the job")
    run.handles["sleep"].stop(60)
    assert run.handles["sleep"].poll() == "cancelled"


def test_job_that_slurm_kills_is_not_waited_for_forever(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    run = make_run(WriteStage(settings(tmp_path, "write"), fails="killed"))
    assert run.run_all(wait=True) == 1
    assert record(tmp_path, "write").state in ("failed", "lost")


@pytest.mark.parametrize("how", ["requeue", "signal"])
def test_requeued_job_begins_again_and_ends_well(
    tmp_path: Path, cluster: SlurmCluster, how: str
) -> None:
    stage = TwiceStage(settings(tmp_path, "twice"))
    run = make_run(stage)
    assert run.run_all(wait=False) == 0
    job_id = run.handles["twice"].job_id
    wait_until(stage.first_path.exists, "the first start")
    if how == "requeue":
        cluster.run("scontrol", "requeue", job_id)
    else:
        cluster.run("scancel", "--batch", "--signal=USR2", job_id)

    def is_waiting() -> bool:
        return "PENDING" in cluster.run("squeue", "-h", "-o", "%T", "-j", job_id)

    wait_until(is_waiting, "the requeueing")
    # slurmd refuses a job that comes back within the second of its end; left alone it comes after
    # two minutes.
    time.sleep(2.5)
    cluster.run("scontrol", "update", f"jobid={job_id}", "StartTime=now", check=False)
    wait_until(lambda: run.handles["twice"].poll() is not None, "the end", 120)
    found = record(tmp_path, "twice")
    assert found.state == "completed", f"{found}\n{cluster.logs()}"
    assert stage.target.read_text() == "second"


@pytest.mark.triton
def test_pipeline_on_slurm_serves_measures_and_stops(tmp_path: Path, cluster: SlurmCluster) -> None:
    command = [
        sys.executable, "main.py", "export=gpt3/sample", f"base_results_dir={tmp_path}", *CLUSTER,
        "wait=true", "deploy.http_port=0", "deploy.grpc_port=0", "deploy.metrics_port=0",
        "evaluate.limit=4", "evaluate.latency.enabled=false",
        "evaluate.lambada.metrics=[lambada_last_token]",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (tmp_path / "gpt_books_5m").iterdir()
    assert {
        record(results, name).state for name in ("convert", "export", "deploy", "evaluate")
    } == {"completed"}
    assert (results / "results" / "evaluate" / "report.json").is_file()
    status = [sys.executable, "main.py", "action=status", f"base_results_dir={tmp_path}"]
    shown = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert shown.stdout.count("completed") == 4
    assert cluster.run("squeue", "-h").strip() == ""
