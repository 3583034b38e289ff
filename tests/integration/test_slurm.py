"""Jobs on a real Slurm of two nodes: chains, failures, cancelling, requeueing, the pipeline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.launchers.base import SubmissionError
from tests.conftest import ROOT
from tests.integration.command import FREE_PORTS
from tests.integration.slurm_runs import (
    CLUSTER,
    make_run,
    mpi,
    record,
    restart_now,
    wait_for_end,
)
from tests.unit.launcher_scripts.toy_stages import (
    EnvironmentStage,
    SleepStage,
    TwiceStage,
    WriteStage,
    settings,
)
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("reachable")]


def test_chain_runs_in_order_and_is_recorded(tmp_path):
    folder = tmp_path / 'it\'s 100%x "$HOME"'
    first, second = (
        WriteStage(settings(folder, "write")),
        EnvironmentStage(settings(folder, "environment")),
    )
    assert make_run(first, second).run_all(wait=True) == 0
    one, two = record(folder, "write"), record(folder, "environment")
    assert two.dependency == f"afterok:{one.job_id}"
    assert (one.state, two.state) == ("completed", "completed")
    assert one.ended_at <= two.started_at
    assert one.host in ("n1", "n2")
    log = folder / "write" / f"log-t-write_{one.job_id}.out"
    assert "working" in log.read_text()


def test_variables_of_an_enclosing_job_do_not_reach_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CPU_BIND", "nonsense")
    monkeypatch.setenv("PMIX_RANK", "5")
    job = settings(tmp_path, "environment")
    assert make_run(EnvironmentStage(job)).run_all(wait=True) == 0
    seen = json.loads((tmp_path / "out" / "target.txt").read_text())
    assert seen["TOYS"] == "1"
    assert not {"SLURM_CPU_BIND", "PMIX_RANK"} & set(seen)


def test_failed_stage_cancels_the_rest(tmp_path, capsys):
    run = make_run(
        WriteStage(settings(tmp_path, "write"), fails="error"),
        EnvironmentStage(settings(tmp_path, "environment")),
    )
    assert run.run_all(wait=True) == 1
    shown = capsys.readouterr().out
    assert "write failed: the disk is on fire; use water" in shown
    until(lambda: run.handles["environment"].poll() == "cancelled", "the end of the dependent job")
    waited_for = f"afterok:{run.handles['write'].job_id}"
    assert record(tmp_path, "environment").error in (
        f"never started: its dependency ({waited_for}) did not succeed",
        "cancelled before it started",  # by the command, which follows the chain
    )
    assert not (tmp_path / "out" / "target.txt").exists()


def test_refused_job_is_explained_and_nothing_stays_queued(tmp_path, slurm_cluster, capsys):
    run = make_run(
        WriteStage(settings(tmp_path, "write")), words=("+cluster.additional_parameters.begin=x",)
    )
    assert run.run_all(wait=False) == 1
    assert "Invalid --begin specification" in capsys.readouterr().out
    with pytest.raises(SubmissionError, match="--begin"):
        run.launcher.submit(run.jobs["write"])
    # A job of an earlier test may still be ending.
    until(lambda: not slurm_cluster.run("squeue", "-h").strip(), "an empty queue")


def test_cancelled_job_is_known_without_accounting(tmp_path):
    run = make_run(SleepStage(settings(tmp_path, "sleep")))
    assert run.run_all(wait=False) == 0
    until((tmp_path / "out" / "target.pid").exists, "the start of the job")
    run.handles["sleep"].stop(60)
    assert run.handles["sleep"].poll() == "cancelled"


def test_job_that_slurm_kills_is_not_waited_for_forever(tmp_path, slurm_cluster):
    run = make_run(WriteStage(settings(tmp_path, "write"), fails="killed"))
    assert run.run_all(wait=True) == 1
    assert record(tmp_path, "write").state in ("failed", "lost")


def test_job_that_is_warned_by_a_signal_requeues_itself_and_ends_well(tmp_path, slurm_cluster):
    stage = TwiceStage(settings(tmp_path, "twice"))
    run = make_run(stage)
    assert run.run_all(wait=False) == 0
    job_id = run.handles["twice"].job_id
    until(stage.first_path.exists, "the first start")
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    restart_now(slurm_cluster, run, "twice")
    wait_for_end(run, "twice")
    found = record(tmp_path, "twice")
    assert found.state == "completed", f"{found}\n{slurm_cluster.logs()}"
    assert stage.target.read_text() == "second"


@pytest.fixture(scope="module")
def results_of_pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second pipeline finds the shards that the first has converted."""
    return tmp_path_factory.mktemp("pipelines")


@pytest.mark.triton
@pytest.mark.parametrize(
    ("gpus_of_a_node", "nodes"), [("1", 2), pytest.param("null", 1, marks=pytest.mark.long)]
)
def test_pipeline_on_slurm_serves_measures_and_stops(
    results_of_pipelines, slurm_cluster, gpus_of_a_node, nodes
):
    base = results_of_pipelines
    command = [
        sys.executable, "main.py", "export=gpt3/sample", f"base_results_dir={base}", *CLUSTER,
        "wait=true", *FREE_PORTS,
        f"evaluate.limit={2 + nodes}", "evaluate.latency.enabled=false",
        "evaluate.lambada.metrics=[lambada_last_token]",
        f"cluster.gpus_per_node={gpus_of_a_node}",
        f"cluster.mpi={mpi(os.environ.get('SLURM_CONF'))}",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (base / "gpt_books_5m").iterdir()
    assert {
        record(results, name).state for name in ("convert", "export", "deploy", "evaluate")
    } == {"completed"}
    report = (results / "results" / "evaluate" / "report.json").read_text()
    assert f'"limit": {2 + nodes}' in report
    (script,) = (results / "deploy").glob("*_submission.sh")
    assert f"#SBATCH --nodes={nodes}\n" in script.read_text()
    status = [sys.executable, "main.py", "action=status", f"base_results_dir={base}"]
    shown = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert shown.stdout.count("completed") == 4
    assert slurm_cluster.run("squeue", "-h").strip() == ""
