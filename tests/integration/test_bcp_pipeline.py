"""Whole pipelines on Base Command Platform, with a stand-in for bcprun."""

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from stages.record import JobRecord, read_record
from tests.bcprun_stand_in import become_replica
from tests.conftest import ROOT
from tests.integration.command import FREE_PORTS

SAMPLE = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"


@pytest.fixture(autouse=True)
def _replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become_replica(tmp_path / "bin", monkeypatch)


def record(folder: Path, stage: str) -> JobRecord:
    found = read_record(folder / stage / "job.json")
    assert found is not None
    return found


@pytest.mark.parametrize("nodes", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_command_of_the_guide(tmp_path, monkeypatch, nodes):
    monkeypatch.setenv("NGC_ARRAY_SIZE", nodes)
    base, log = tmp_path / "mount", tmp_path / "export_gpt3_log.txt"
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(base / "gpt3_126m" / "checkpoints", filter="data")
    launcher = shlex.quote(f"{ROOT}/launcher_scripts")
    line = (
        f"python3 {launcher}/main.py stages=[export] cluster_type=bcp "
        f"launcher_scripts_path={launcher} data_dir={tmp_path}/the_pile_gpt3 "
        f"base_results_dir={base} export.run.model_train_name=gpt3_126m "
        "export.model.tensor_model_parallel_size=2 "
        "export.triton_deployment.pipeline_model_parallel_size=1 "
        f">> {log} 2>&1"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=300
    )
    assert done.returncode == 0, log.read_text()
    results = base / "gpt3_126m" / "export_tp2_pp1_fp16_fp16"
    assert {record(results, name).state for name in ("convert", "export")} == {"completed"}
    assert (results / "model_repo/gpt3_126m/1/2-gpu/config.ini").is_file()
    assert "Job completed successfully" in log.read_text()
    (script,) = (results / "export" / "submitit").rglob("submission.sh")
    assert "bcprun --nnodes 1 --npernode 1 -no_redirect" in script.read_text()


@pytest.mark.long  # two nodes serve in test_multi_node and test_kubernetes_pods
@pytest.mark.triton
def test_a_model_over_two_replicas_is_served_and_measured(tmp_path):
    command = [
        sys.executable, "main.py", "export=gpt3/sample", "cluster_type=bcp",
        f"base_results_dir={tmp_path}/r", "cluster.gpus_per_node=1",
        *FREE_PORTS,
        "evaluate.limit=4", "evaluate.latency.enabled=false",
        "evaluate.lambada.metrics=[lambada_last_token]",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (tmp_path / "r" / "gpt_books_5m").iterdir()
    names = ("convert", "export", "deploy", "evaluate")
    assert {record(results, name).state for name in names} == {"completed"}
    (script,) = (results / "deploy" / "submitit").rglob("submission.sh")
    assert "bcprun --nnodes 2 --npernode 1" in script.read_text()
