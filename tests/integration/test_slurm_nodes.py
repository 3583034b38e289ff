"""Several ranks, containers, nodes that die and jobs that are preempted, on a real Slurm."""

import hashlib
import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.configuration.evaluation_config import Context
from launcher_scripts.console import Console
from launcher_scripts.launchers.slurm import SlurmLauncher
from launcher_scripts.rows import run_rows
from launcher_scripts.stage_table import build_stage
from stages.base import Resources, StageError
from stages.convert import ConvertStage
from stages.step import JobStep, run_in_step
from tests.integration.slurm_runs import (
    configure,
    make_run,
    record,
    restart_now,
    wait_for_end,
)
from tests.unit.launcher_scripts.toy_stages import (
    EnvironmentStage,
    RanksStage,
    StuckStage,
    WriteStage,
    settings,
)
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("reachable")]
TWO_NODES = Resources(nodes=2, tasks_per_node=2)


def notes(tmp_path: Path) -> dict[str, dict[str, Any]]:
    paths = sorted((tmp_path / "out").glob("rank-*"))
    return {path.name: json.loads(path.read_text()) for path in paths}


def test_of_ranks_on_two_nodes_only_the_first_works(tmp_path):
    run = make_run(RanksStage(settings(tmp_path, "ranks", resources=TWO_NODES)))
    assert run.run_all(wait=True) == 0, run.handles["ranks"].log_path.read_text()
    seen = notes(tmp_path)
    assert [each["did"] for each in seen.values()] == ["run", "assist", "assist", "assist"]
    assert [each["node"] for each in seen.values()] == ["n1", "n1", "n2", "n2"]


def test_every_rank_is_inside_the_container(tmp_path, slurm_cluster, monkeypatch):
    if not slurm_cluster.has_pyxis:
        pytest.skip("the stand-in for pyxis needs gcc and libslurm-dev")
    image = tmp_path / "image.sqsh"
    image.touch()
    words = (f"container={image}", f"cluster.container_python={sys.executable}")
    stage = RanksStage(settings(tmp_path, "ranks", resources=Resources(nodes=2)))
    run = make_run(stage, words=words)
    assert run.launcher.check([stage]) == []
    assert run.run_all(wait=True) == 0, run.handles["ranks"].log_path.read_text()
    assert {each["image"] for each in notes(tmp_path).values()} == {str(image)}


def test_rank_that_dies_ends_the_step_and_is_shown_with_its_node_and_last_words(tmp_path, capsys):
    run = make_run(RanksStage(settings(tmp_path, "ranks", resources=TWO_NODES), fails="rank 3"))
    started = time.monotonic()
    assert run.run_all(wait=True) == 1
    assert time.monotonic() - started < 200  # the first rank would have gone on for 300 s
    shown = capsys.readouterr().out
    assert "rank 3 on n2 ended: Exited with exit code 1; its last lines:" in shown
    assert "  | looking for the network" in shown


def test_rank_without_the_mpi_of_the_cluster_names_it(tmp_path):
    prefix = ["srun", "--label", "--nodes=2", "--ntasks=2", "--mpi=none", "--kill-on-bad-exit=1"]
    step = JobStep(tuple(prefix), sys.executable, ranks=2, mpi="pmix")
    stage = RanksStage(settings(tmp_path, "ranks", resources=Resources(nodes=2)))
    with pytest.raises(StageError, match=r"has no PMIX_RANK: cluster\.mpi=pmix does not reach it"):
        run_in_step(stage, step, folder=tmp_path)
    assert not notes(tmp_path)


def test_what_slurm_would_refuse_is_reported_before_the_job(tmp_path):
    def reported(resources: Resources, *words: str) -> str:
        stage = RanksStage(settings(tmp_path, "ranks", resources=resources))
        return "\n".join(SlurmLauncher(configure(*words)).check([stage]))

    found = reported(TWO_NODES, "cluster.mpi=pmi9", "container=/nowhere.sqsh")
    assert "cluster.mpi=pmi9: this Slurm does not have it" in found
    assert "container=/nowhere.sqsh is not a file" in found
    assert "invalid partition specified: bach" in reported(TWO_NODES, "cluster.partition=bach")
    assert "unrecognized option '--bagin=x'" in reported(
        TWO_NODES, "+cluster.additional_parameters.bagin=x"
    )
    assert "node configuration is not available" in reported(Resources(gpus_per_node=9))
    assert "ranks: sbatch refuses --nodes=3: " in reported(Resources(nodes=3))
    assert reported(TWO_NODES) == ""


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_conversion_that_is_requeued_preempted_and_loses_its_node_ends_with_the_same_bytes(
    tmp_path, slurm_cluster, sample_weights
):
    words = (f"base_results_dir={tmp_path}", "export.model.weight_data_type=fp32")
    found = build_stage("convert", configure(*words), Context())
    assert isinstance(found, ConvertStage)
    stage = StuckStage(replace(found.job, resources=Resources()), found.request)
    results = stage.job.folder.parent
    run = make_run(stage)
    assert run.run_all(wait=False) == 0
    job_id = run.handles["convert"].job_id
    until(stage.stuck_path(1).exists, "the first quarter")
    slurm_cluster.run("scontrol", "requeue", job_id)
    restart_now(slurm_cluster, run, "convert")
    until(stage.stuck_path(2).exists, "the second quarter")
    node = record(results, "convert").host
    slurm_cluster.run(
        "sbatch", "--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null",
        "--wrap=sleep 1",
    )  # fmt: skip
    restart_now(slurm_cluster, run, "convert")
    until(stage.stuck_path(3).exists, "the third quarter")
    node = record(results, "convert").host
    assert not stage.request.folder.exists()
    slurm_cluster.kill_node(node)
    restart_now(slurm_cluster, run, "convert")
    wait_for_end(run, "convert")
    slurm_cluster.start_node(node)
    last = record(results, "convert")
    assert last.state == "completed", f"{last}\n{slurm_cluster.logs()}"
    assert last.host != node
    assert digests(stage.request.folder) == digests(sample_weights(2))
    until(
        lambda: slurm_cluster.run("sinfo", "-h", "-o", "%T").split() == ["idle"], "an idle cluster"
    )


def test_one_failure_of_a_row_stops_only_its_own_chain(tmp_path):
    rows = []
    for name, fails in (("1", "error"), ("2", "")):
        folder = tmp_path / name
        run = make_run(
            WriteStage(settings(folder, "write"), fails=fails),
            EnvironmentStage(settings(folder, "environment")),
        )
        run.name = name
        rows.append(run)
    assert run_rows(rows, Console(io.StringIO()), wait=True) == 1
    assert [each.status for each in rows] == [1, 0]
    assert record(tmp_path / "1", "write").state == "failed"
    assert record(tmp_path / "2", "environment").state == "completed"
    waiting = rows[0]
    until(
        lambda: waiting.handles["environment"].poll() == "cancelled", "the end of the dependent job"
    )
    assert record(tmp_path / "2", "environment").dependency.startswith("afterok:")
