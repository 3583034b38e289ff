"""The whole way on this machine: the command as users type it, with the bundled model."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FREE_PORTS = ("deploy.http_port=0", "deploy.grpc_port=0", "deploy.metrics_port=0")
SMALL = (
    "evaluate.limit=4",
    "evaluate.latency.enabled=false",
    "evaluate.lambada.metrics=[lambada_last_token]",
)


def start(results: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "main.py", "export=gpt3/sample", f"base_results_dir={results}", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(results: Path, *words: str, timeout_s: float = 240) -> tuple[int, str]:
    command = start(results, *words)
    try:
        text, _ = command.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGINT)
        text, _ = command.communicate(timeout=60)
        pytest.fail(f"the command did not end within {timeout_s} s:\n{text}")
    return command.returncode, text


def export_dir(results: Path, summary: str = "tp2_pp1_fp16_fp32") -> Path:
    return results / "gpt_books_5m" / f"export_{summary}"


def weights(results: Path) -> Path:
    return export_dir(results) / "model_repo" / "fastertransformer" / "1" / "2-gpu"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def processes_of(results: Path) -> list[str]:
    """Command lines of processes that work below a results folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(results) in command and int(entry.name) != os.getpid():
            found.append(command)
    return found


def wait_for(path: Path, command: subprocess.Popen[str], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert command.poll() is None, command.stdout.read() if command.stdout else ""
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_export_alone_builds_a_complete_repository(tmp_path: Path) -> None:
    status, text = run(tmp_path, "stages=[export]", "export.model.tensor_model_parallel_size=1")
    assert status == 0, text
    repository = export_dir(tmp_path, "tp1_pp1_fp16_fp32") / "model_repo"
    assert "convert runs first" in text
    assert {path.parent.name for path in repository.glob("*/config.pbtxt")} == {
        "ensemble",
        "fastertransformer",
        "postprocessing",
        "preprocessing",
    }
    assert (repository / "fastertransformer" / "1" / "1-gpu" / "config.ini").is_file()


def test_job_folder_has_everything_that_users_of_the_launcher_expect(tmp_path: Path) -> None:
    status, text = run(tmp_path, "stages=[convert]", "+env_vars.NOTE=a b")
    assert status == 0, text
    results = export_dir(tmp_path)
    assert (results / "results").is_dir()
    assert "stages=[convert]" in (results / "launcher_cmd.log").read_text()
    folder = results / "convert"
    section = yaml.safe_load((folder / "export_gpt_books_5m_hydra.yaml").read_text())
    assert section["run"]["results_dir"] == str(results)
    assert section["model"]["tensor_model_parallel_size"] == 2
    assert "export NOTE='a b'" in (folder / "export_gpt_books_5m_submission.sh").read_text()
    record = json.loads((folder / "job.json").read_text())
    assert (record["state"], record["stage"], record["exit_code"]) == ("completed", "convert", 0)
    assert Path(record["log"]).name == f"log-export_gpt_books_5m_{record['job_id']}.out"
    assert Path(record["log"]).is_file()
    assert record["job_id"] in (folder / "launcher.log").read_text()


def test_saved_configuration_repeats_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "stages=[convert]")[0] == 0
    before = digests(weights(tmp_path))
    script = export_dir(tmp_path) / "convert" / "export_gpt_books_5m_submission.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=120)
    assert "finished at" in done.stdout, done.stderr
    assert digests(weights(tmp_path)) == before


def test_conversion_killed_halfway_and_run_again_gives_the_same_bytes(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", "stages=[convert]")[0] == 0
    command = start(tmp_path / "killed", "stages=[convert]")
    partial = weights(tmp_path / "killed").with_name(".2-gpu.partial")
    wait_for(partial, command)
    command.kill()
    command.communicate()
    deadline = time.monotonic() + 30
    while processes_of(tmp_path / "killed"):
        assert time.monotonic() < deadline, processes_of(tmp_path / "killed")
        time.sleep(0.1)
    status, text = run(tmp_path / "killed", "stages=[convert]")
    assert status == 0, text
    assert digests(weights(tmp_path / "killed")) == digests(weights(tmp_path / "whole"))


def test_impossible_configuration_is_refused_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    status, text = run(tmp_path, "stages=[export]", "export.model.tensor_model_parallel_size=3")
    assert status == 2
    assert "export.model.tensor_model_parallel_size=3 does not divide head_num=8" in text
    assert "use 1, 2, 4 or 8" in text
    assert "Traceback" not in text
    assert not any(tmp_path.iterdir())
    assert time.monotonic() - started < 10  # two seconds on a quiet machine


@pytest.mark.triton
def test_pipeline_serves_measures_and_stops(tmp_path: Path) -> None:
    status, text = run(tmp_path, *FREE_PORTS, *SMALL)
    assert status == 0, text
    results = export_dir(tmp_path)
    report = json.loads((results / "results" / "evaluate" / "report.json").read_text())
    assert report
    assert "lambada_last_token" in text
    assert str(results / "results" / "evaluate" / "report.html") in text
    for stage in ("convert", "export", "deploy", "evaluate"):
        record = json.loads((results / stage / "job.json").read_text())
        assert record["state"] == "completed", text
    assert not (results / "deploy" / "endpoint.json").exists()
    assert not processes_of(tmp_path)
    status, text = run(tmp_path, *FREE_PORTS, *SMALL, timeout_s=60)
    assert status == 0
    assert text.count("finished at") >= 3
    assert "nothing is left to ask the server" in text


@pytest.mark.triton
def test_server_alone_serves_until_ctrl_c_and_leaves_no_process(tmp_path: Path) -> None:
    command = start(tmp_path, "stages=[deploy]", *FREE_PORTS)
    endpoint_path = export_dir(tmp_path) / "deploy" / "endpoint.json"
    wait_for(endpoint_path, command)
    endpoint = json.loads(endpoint_path.read_text())
    assert endpoint["host"] == "127.0.0.1"
    assert (endpoint["tp"], endpoint["model"], endpoint["ensemble"]) == (
        2,
        "fastertransformer",
        "ensemble",
    )
    command.send_signal(signal.SIGINT)
    text, _ = command.communicate(timeout=90)
    assert command.returncode == 0, text
    assert not endpoint_path.exists()
    assert not processes_of(tmp_path)


@pytest.mark.triton
def test_breached_bound_fails_the_command_with_its_own_status(tmp_path: Path) -> None:
    status, text = run(
        tmp_path, "stages=[evaluate]", *FREE_PORTS, *SMALL,
        "evaluate.gate.lambada_last_token.min=1.01",
    )  # fmt: skip
    assert status == 3, text
    assert "lambada_last_token" in text
    assert "breaches min 1.01" in text
    assert (export_dir(tmp_path) / "results" / "evaluate" / "report.json").is_file()
