"""No job on Slurm is forgotten: repeated commands, lost records, copies, a lost controller."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.actions import jobs_in
from launcher_scripts.launchers.base import Job, QueueSlots
from launcher_scripts.launchers.slurm import SlurmLauncher
from launcher_scripts.launchers.slurm_state import queue_now
from launcher_scripts.main import main
from launcher_scripts.rows import queue_problems, run_rows
from tests.integration.command import FREE_PORTS
from tests.integration.slurm_cluster import SlurmCluster
from tests.integration.slurm_runs import (
    CLUSTER,
    make_run,
    restart_now,
)
from tests.unit.launcher_scripts.toy_stages import SleepStage, WriteStage, settings
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("reachable")]
LATER = "+cluster.begin=now+1hour"


@pytest.fixture(autouse=True)
def no_job_goes_on(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    slurm_cluster.run("scancel", "--me")
    until(lambda: not queued(slurm_cluster), "the end of every job")


def queued(cluster: SlurmCluster) -> list[str]:
    return cluster.run("squeue", "-h", "-r", "-o", "%i", "-S", "i").split()


def submit(results: Path, *stages: str, more: tuple[str, ...] = ()) -> int:
    words = ["export=gpt3/sample", *CLUSTER, *FREE_PORTS, f"stages=[{','.join(stages)}]", LATER]
    return main([*words, *more, f"export.run.results_dir={results}"])


def state(cluster: SlurmCluster, job_id: str) -> str:
    return cluster.run("scontrol", "show", "job", "-o", job_id).partition("JobState=")[2].split()[0]


def test_same_command_again_starts_no_second_server_and_forgets_no_first(
    tmp_path, slurm_cluster, capsys
):
    results = tmp_path / "results"
    assert submit(results, "convert", "export", "deploy") == 0
    hint = capsys.readouterr().out
    assert f"run_dir={results}" in hint
    jobs = queued(slurm_cluster)
    record = results / "deploy" / "job.json"
    for more in ((), ("dry_run=true",), ("cluster=local", "cluster_type=local")):
        before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
        assert submit(results, "deploy", more=more) == 2
        assert f"deploy: job {jobs[2]}" in capsys.readouterr().err
        assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before
    record.unlink()
    assert submit(results, "deploy") == 2
    assert f"deploy: job {jobs[2]}" in capsys.readouterr().err
    record.write_text("{")
    copy = tmp_path / "copy"
    shutil.copytree(results, copy)
    (copy / "deploy" / "job.json").write_text((copy / "export" / "job.json").read_text())
    assert main(["action=cancel", f"run_dir={copy}"]) == 0
    assert queued(slurm_cluster) == jobs
    for path in results.glob("*/job.json"):
        path.unlink()
    assert main(["action=cancel", f"run_dir={results}"]) == 0
    assert queued(slurm_cluster) == []
    assert [state(slurm_cluster, each) for each in jobs] == ["CANCELLED"] * 3


def waits_for(job_id: str) -> str:
    found = queue_now(job_id).state(job_id)
    assert found is not None
    return found.waits_for


def test_a_job_that_is_held_suspended_and_requeued_says_so_and_ends_when_asked(
    tmp_path, slurm_cluster
):
    run = make_run(SleepStage(settings(tmp_path, "sleep")))
    slurm_cluster.run("scontrol", "update", "partitionname=batch", "state=down")
    assert run.submit_all() == 0
    handle = run.handles["sleep"]
    slurm_cluster.run("scontrol", "hold", handle.job_id)
    assert waits_for(handle.job_id).startswith("JobHeld")
    slurm_cluster.run("scontrol", "update", "partitionname=batch", "state=up")
    slurm_cluster.run("scontrol", "release", handle.job_id)
    until(lambda: (tmp_path / "out" / "target.pid").exists(), "the start")
    slurm_cluster.run("scontrol", "suspend", handle.job_id)
    assert waits_for(handle.job_id) == "SUSPENDED"
    assert handle.poll() is None
    slurm_cluster.run("scontrol", "resume", handle.job_id)
    until(lambda: waits_for(handle.job_id) == "", "the job to continue")
    slurm_cluster.run("scontrol", "requeue", handle.job_id)
    restart_now(slurm_cluster, run, "sleep")
    until(lambda: waits_for(handle.job_id) == "", "the second start")
    handle.stop(20)
    assert handle.poll() == "cancelled"


def test_evaluation_does_not_start_after_a_chain_that_failed(tmp_path, slurm_cluster):
    assert submit(tmp_path, "convert", "export", "deploy", "evaluate") == 0
    convert, *_, evaluate = queued(slurm_cluster)
    slurm_cluster.run("scancel", convert)
    slurm_cluster.run("scontrol", "update", f"JobId={evaluate}", "StartTime=now")
    until(lambda: not queued(slurm_cluster), "the end of the chain")
    assert state(slurm_cluster, evaluate) == "CANCELLED"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of results with a repository."""
    results = tmp_path_factory.mktemp("exported")
    words = ("export=gpt3/sample", "stages=[export]", f"export.run.results_dir={results}")
    assert main(words) == 0
    return results


def test_evaluation_ends_with_a_server_that_is_cancelled_before_it_starts(exported, slurm_cluster):
    """Slurm starts it then: `after` is satisfied."""
    more = ("deploy.ready_timeout_s=3000",)
    assert submit(exported, "deploy", "evaluate", more=more) == 0
    deploy, evaluate = queued(slurm_cluster)
    slurm_cluster.run("scontrol", "update", f"JobId={evaluate}", "StartTime=now")
    slurm_cluster.run("scancel", deploy)
    until(lambda: not queued(slurm_cluster), "the end of the evaluation")
    (found,) = [each for each in jobs_in(exported) if each.stage == "evaluate"]
    assert found.exit_code == 4
    assert deploy in found.error


def test_server_ends_with_an_evaluation_that_is_cancelled_before_it_starts(exported, slurm_cluster):
    assert submit(exported, "deploy", "evaluate") == 0
    deploy, evaluate = queued(slurm_cluster)
    slurm_cluster.run("scontrol", "update", f"JobId={deploy}", "StartTime=now")
    until((exported / "deploy" / "endpoint.json").exists, "the server")
    slurm_cluster.run("scancel", evaluate)
    until(lambda: not queued(slurm_cluster), "the end of the server")
    states = {each.stage: each.state for each in jobs_in(exported)}
    assert states["deploy"] == "completed"
    assert states["evaluate"] == "cancelled"


def test_chain_is_submitted_although_the_controller_restarts(
    tmp_path,
    slurm_cluster,
    monkeypatch,
    capsys,
):
    """It is away while the second job is submitted, and later while all are cancelled."""

    def stop() -> None:
        pid = int((slurm_cluster.folder / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        until(lambda: not (slurm_cluster.folder / "slurmctld.pid").exists(), "its end")

    def start() -> None:
        time.sleep(12)  # clients give up after some 9 s
        slurm_cluster.run("slurmctld", "-f", str(slurm_cluster.folder / "slurm.conf"))

    original = SlurmLauncher.submit

    def submit_one(self: SlurmLauncher, job: Job, *arguments: Any, **more: Any) -> Any:
        if job.stage.name == "export":
            stop()
            threading.Thread(target=start).start()
        return original(self, job, *arguments, **more)

    monkeypatch.setattr(SlurmLauncher, "submit", submit_one)
    assert submit(tmp_path, "convert", "export", "deploy") == 0
    assert len(queued(slurm_cluster)) == 3
    stop()
    capsys.readouterr()
    assert main(["action=status", f"run_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Slurm does not answer") == 3
    thread = threading.Thread(target=start)
    thread.start()
    assert main(["action=cancel", f"run_dir={tmp_path}"]) == 0
    thread.join()
    assert queued(slurm_cluster) == []


def test_rows_that_exceed_the_queue_run_in_waves(tmp_path, slurm_cluster, monkeypatch):
    """Slurm's limit of jobs needs a database; here the launcher has one of its own."""
    most: list[int] = []

    def queue_slots(_: SlurmLauncher) -> QueueSlots:
        most.append(len(queued(slurm_cluster)))
        return QueueSlots(free=2 - most[-1], limit=2, owner="account a")

    monkeypatch.setattr(SlurmLauncher, "queue_slots", queue_slots)
    folders = [tmp_path / name for name in ("a", "b", "c")]
    rows = [make_run(WriteStage(settings(each, "write"))) for each in folders]
    (problem,) = queue_problems(rows)
    assert "3 jobs" in problem
    assert run_rows(rows, rows[0].console, wait=True) == 0
    assert most[-1] < 2  # jobs that have ended leave the queue a moment later
    for each in rows:
        found = each.records()["write"]
        assert found is not None
        assert found.state == "completed"
