"""Base Command Platform: real processes through a stand-in for bcprun, and through mpirun."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.bcp import BcpLauncher
from launcher_scripts.main import main
from launcher_scripts.pipeline import PlannedStage
from launcher_scripts.run import Run
from stages.base import Resources, Stage
from stages.record import JobRecord, read_record
from tests.bcprun_stand_in import become_replica
from tests.unit.launcher_scripts.test_run import wait_for
from tests.unit.launcher_scripts.toy_stages import RanksStage, SleepStage, WriteStage, settings
from tests.waiting import lives, until

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(autouse=True)
def replica(tmp_path, monkeypatch) -> Path:
    """Make this process the first of two replicas; return the folder of bcprun."""
    return become_replica(tmp_path / "bin", monkeypatch)


def make_run(*stages: Stage) -> tuple[Run, io.StringIO]:
    words = [
        "export=gpt3/sample",
        "cluster_type=bcp",
        "+env_vars.NOTE=it's $5",
    ]
    config = compose_config(read_arguments(words).overrides).config
    assert config is not None
    shown = io.StringIO()
    jobs = {stage.name: Job(stage, config) for stage in stages}
    planned = [PlannedStage(stage, stage.finding()) for stage in stages]
    return Run(BcpLauncher(config), Console(shown), planned, jobs), shown


def record(folder: Path, stage: str) -> JobRecord:
    found = read_record(folder / stage / "job.json")
    assert found is not None
    return found


def test_first_rank_works_and_every_other_assists(tmp_path):
    job = settings(tmp_path, "ranks", resources=Resources(nodes=2, tasks_per_node=2))
    assert make_run(RanksStage(job))[0].run_all(wait=False) == 0
    assert record(tmp_path, "ranks").state == "completed"
    seen = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("rank-*")}
    assert sorted(seen) == ["rank-0", "rank-1", "rank-2", "rank-3"]
    assert [seen[f"rank-{each}"]["node"] for each in range(4)] == ["0", "0", "1", "1"]
    assert [seen[f"rank-{each}"]["did"] for each in range(4)] == ["run", *["assist"] * 3]
    assert {each["note"] for each in seen.values()} == {"it's $5"}


def test_rank_that_fails_ends_the_job_and_is_named(tmp_path):
    job = settings(tmp_path, "ranks", resources=Resources(nodes=2))
    run, shown = make_run(RanksStage(job, fails="rank 1"))
    assert run.run_all(wait=False) == 1
    assert record(tmp_path, "ranks").state == "failed"
    assert "rank 1 failed: no network here" in shown.getvalue()


def test_job_that_is_stopped_leaves_no_process_behind(tmp_path):
    run, _ = make_run(SleepStage(settings(tmp_path, "sleep")))
    handle = run.submit("sleep")
    wait_for(tmp_path / "out" / "target.pid")
    assert handle.poll() is None
    handle.stop(20)
    assert handle.poll() == "cancelled"
    assert not lives(int((tmp_path / "out" / "target.pid").read_text()))


def test_job_ends_when_the_command_is_killed(tmp_path):
    program = (
        "import sys; sys.path[:0] = sys.argv[1:2]\n"
        "from pathlib import Path\n"
        "from tests.unit.launcher_scripts.test_bcp import make_run\n"
        "from tests.unit.launcher_scripts.toy_stages import SleepStage, settings\n"
        "make_run(SleepStage(settings(Path(sys.argv[2]), 'sleep')))[0].run_all(wait=False)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", program, str(ROOT), str(tmp_path)])
    pid_file = tmp_path / "out" / "target.pid"
    wait_for(pid_file)
    command.kill()
    command.wait()
    until(lambda: record(tmp_path, "sleep").state == "cancelled")
    until(lambda: not lives(int(pid_file.read_text())))


def test_array_for_mpi_is_started_through_mpirun(tmp_path, monkeypatch):
    monkeypatch.setenv("NGC_ARRAY_TYPE", "MPIJob")
    run, _ = make_run(RanksStage(settings(tmp_path, "ranks", resources=Resources(nodes=2))))
    assert run.run_all(wait=False) == 0
    script = next((tmp_path / "ranks" / "submitit").rglob("submission.sh")).read_text()
    assert "--launcher 'mpirun --allow-run-as-root' -no_redirect" in script
    assert {path.name for path in (tmp_path / "out").glob("rank-*")} == {"rank-0", "rank-1"}


def test_further_arguments_of_bcprun_come_before_its_command(tmp_path, capsys):
    words = ["export=gpt3/sample", "cluster_type=bcp", f"base_results_dir={tmp_path}"]
    assert main([*words, "cluster.bcprun_args=[--binding,node]", "dry_run=true"]) == 0
    assert re.search(r"--binding node .*'?HF_TOKEN=\.\.\.'? .*--cmd ", capsys.readouterr().out)


def test_output_of_the_jobs_goes_to_their_log_and_to_the_commands_own(tmp_path, capsys):
    assert make_run(WriteStage(settings(tmp_path, "write")))[0].run_all(wait=False) == 0
    found = record(tmp_path, "write")
    assert Path(found.log).name == f"log-write_{found.job_id}.out"
    assert "working" in Path(found.log).read_text()
    assert "working" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_mpirun_takes_the_place_of_a_missing_bcprun(tmp_path, replica):
    (replica / "bcprun").unlink()
    job = settings(tmp_path, "ranks", resources=Resources(tasks_per_node=2))
    run, shown = make_run(RanksStage(job))
    assert run.run_all(wait=False) == 0, shown.getvalue()
    script = next((tmp_path / "ranks" / "submitit").rglob("submission.sh")).read_text()
    assert "mpirun --allow-run-as-root -np 2 -npernode 2" in script
    assert {path.name for path in (tmp_path / "out").glob("rank-*")} == {"rank-0", "rank-1"}


def test_secrets_reach_the_job_and_stand_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert make_run(RanksStage(settings(tmp_path, "ranks")))[0].run_all(wait=False) == 0
    assert json.loads((tmp_path / "out" / "rank-0").read_text())["secret"] == len("hf_very_secret")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hf_very_secret" in path.read_bytes() for path in written)


def test_more_nodes_than_replicas_are_refused(tmp_path):
    stage = RanksStage(settings(tmp_path, "ranks", resources=Resources(nodes=3)))
    (problem,) = make_run(stage)[0].launcher.check([stage])
    assert "needs 3 nodes, and this job has 2 (NGC_ARRAY_SIZE)" in problem


def test_same_command_on_another_replica_leaves_the_work_to_the_first(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("NGC_ARRAY_INDEX", "1")
    assert main(["export=gpt3/sample", "cluster_type=bcp", f"base_results_dir={tmp_path}/r"]) == 0
    assert "replica 1: the first replica of this job runs the stages" in capsys.readouterr().out
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "word", ["base_results_dir=/results/x", "export.run.results_dir=/results/x"]
)
def test_folders_that_other_replicas_do_not_see_are_refused(word, capsys):
    words = ["export=gpt3/sample", "cluster_type=bcp", "stages=[convert]", word, "dry_run=true"]
    assert main(words) == 2
    assert f"{word} is private to each replica" in capsys.readouterr().err
