"""NVIDIA's engine at deploy: what its server is started with, and what its log leads to.

The server itself needs NVIDIA's image and GPUs; a program of the same name stands in for it, which
takes only the options of old releases and says what the real one says.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.integration.command import FREE_PORTS, endpoint_of, finish, served, start

HERE = Path(__file__).parent
RESULTS = Path("gpt_books_5m", "export_tp2_pp1_fp16_fp32")
MISSING = "[FT][WARNING] file /w/1/2-gpu/model.wte.bin cannot be opened, loading model fails! "


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of results with the sample model's repository for NVIDIA's backend."""
    folder = tmp_path_factory.mktemp("results")
    command = start(*words(folder, "stages=[export]"))
    text = finish(command)
    assert command.returncode == 0, text
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables with which `tritonserver` is the stand-in, and MPI's starter is absent."""
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    script = HERE / "fake_fastertransformer.py"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    # A launcher that says what it was asked to start, and starts it.
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nprintf "%s " "$@" >{tmp_path}/mpirun\nshift 3\nexec "$@"\n')
    mpirun.chmod(0o755)
    # Open MPI's launcher needs one to be there.
    (tmp_path / "bin" / "ssh").touch(0o755)
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "FAKE_SERVER_TOLD": str(tmp_path / "reported"),
    }


def words(results: Path, *more: str) -> list[str]:
    return [
        "export=gpt3/sample",
        f"base_results_dir={results}",
        "deploy.engine=fastertransformer",
        *FREE_PORTS,
        *more,
    ]


def test_server_is_started_as_its_guide_says(
    tmp_path: Path, results: Path, environment: dict[str, str]
) -> None:
    command = words(results, "stages=[deploy]")
    with served(results / RESULTS, *command, environment=environment) as endpoint:
        reported = json.loads((tmp_path / "reported").read_text())
    assert endpoint["model"] == "fastertransformer"
    assert reported["options"]["model-repository"] == str(results / RESULTS / "model_repo")
    assert reported["options"]["grpc-address"].startswith("unix:/")
    assert reported["environment"]["NCCL_LAUNCH_MODE"] == "GROUP"
    assert (tmp_path / "mpirun").read_text().startswith("-n 1 --allow-run-as-root ")
    config = (results / RESULTS / "model_repo/fastertransformer/config.pbtxt").read_text()
    assert 'backend: "fastertransformer"' in config


def test_file_that_asks_for_the_end_ends_the_server_in_order(
    results: Path, environment: dict[str, str]
) -> None:
    folder = results / RESULTS / "deploy"
    command = start(*words(results, "stages=[deploy]", "deploy.keep=true"), environment=environment)
    endpoint_of(folder / "endpoint.json", command)
    (folder / "stop_requested").touch()
    text = finish(command)
    assert command.returncode == 0, text
    record = json.loads((folder / "job.json").read_text())
    assert record["summary"]["ended"] == "no longer needed"
    assert not (folder / "endpoint.json").exists()


def test_weights_that_the_backend_lacks_fail_the_stage(
    results: Path, environment: dict[str, str]
) -> None:
    command = start(
        *words(results, "stages=[deploy]"), environment={**environment, "FAKE_SERVER_SAYS": MISSING}
    )
    text = finish(command)
    assert command.returncode == 1, text
    assert "file /w/1/2-gpu/model.wte.bin cannot be opened" in text
    assert not (results / RESULTS / "deploy" / "endpoint.json").exists()


def test_server_that_does_not_answer_a_first_request_is_not_published(
    results: Path, environment: dict[str, str]
) -> None:
    said = "FasterTransformer execute failure: out of memory"
    command = start(
        *words(results, "stages=[deploy]"),
        environment={**environment, "FAKE_SERVER_ANSWERS": said},
    )
    text = finish(command)
    assert command.returncode == 1, text
    assert "the server cannot serve this repository:" in text
    assert f"model fastertransformer did not answer a first small request: {said}" in text
    assert not (results / RESULTS / "deploy" / "endpoint.json").exists()


def test_dry_run_shows_the_command_and_starts_nothing(
    tmp_path: Path, results: Path, environment: dict[str, str]
) -> None:
    command = start(
        *words(
            results,
            "stages=[deploy]",
            "dry_run=true",
            "deploy.http_port=8000",
            "deploy.grpc_port=8001",
            "deploy.metrics_port=8002",
        ),
        environment=environment,
    )
    text = finish(command)
    assert command.returncode == 0, text
    expected = [
        "NCCL_LAUNCH_MODE=GROUP",
        *("mpirun", "-n", "1", "--allow-run-as-root", "tritonserver"),
        f"--model-repository={results / RESULTS / 'model_repo'}",
    ]
    assert shlex.join(expected) in text
    assert not (tmp_path / "reported").exists()
