"""NVIDIA's engine at deploy: what its server is started with, and what its log leads to.

The server itself needs NVIDIA's image and GPUs; a program of the same name stands in for it, which
takes only the options of old releases and says what the real one says.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest

from inference.system.ports import TRITON_PORTS
from tests.integration.command import FREE_PORTS, endpoint_of, finish, run, start
from tests.integration.conftest import SampleRepository

HERE = Path(__file__).parent
RESULTS = Path("gpt_books_5m", "export_tp2_pp1_fp16_fp32")
MISSING = "[FT][WARNING] file /w/1/2-gpu/model.wte.bin cannot be opened, loading model fails! "


@pytest.fixture(scope="module")
def repository(sample_repository: SampleRepository) -> Path:
    """Return the sample model's repository for NVIDIA's backend."""
    return sample_repository(tp_size=2, engine="fastertransformer")


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tritonserver` be the stand-in; MPI's starter is absent."""
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    script = HERE / "fake_fastertransformer.py"
    command = shlex.join([sys.executable, str(script)])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    # A launcher that says what it was asked to start, and starts it.
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nprintf "%s " "$@" >{tmp_path}/mpirun\nshift 3\nexec "$@"\n')
    mpirun.chmod(0o755)
    # Open MPI's launcher needs one to be there.
    (tmp_path / "bin" / "ssh").touch(0o755)
    monkeypatch.delenv("TRITON_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("FAKE_SERVER_TOLD", str(tmp_path / "reported"))


@pytest.fixture
def words(tmp_path: Path, repository: Path) -> list[str]:
    return [
        "export=gpt3/sample",
        "stages=[deploy]",
        f"base_results_dir={tmp_path}",
        f"deploy.repository={repository}",
        "deploy.engine=fastertransformer",
        *FREE_PORTS,
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / RESULTS / "deploy"


def test_server_is_started_as_its_guide_says_and_ends_in_order_when_a_file_asks_for_that(
    tmp_path, repository, words, folder
):
    command = start(*words, "deploy.keep=true")
    endpoint = endpoint_of(folder / "endpoint.json", command)
    reported = json.loads((tmp_path / "reported").read_text())
    assert endpoint["model"] == "fastertransformer"
    assert reported["options"]["model-repository"] == str(repository)
    assert reported["options"]["grpc-address"].startswith("unix:/")
    assert reported["environment"]["NCCL_LAUNCH_MODE"] == "GROUP"
    assert (tmp_path / "mpirun").read_text().startswith("-n 1 --allow-run-as-root ")
    config = (repository / "fastertransformer/config.pbtxt").read_text()
    assert 'backend: "fastertransformer"' in config
    (folder / "stop_requested").touch()
    text = finish(command)
    assert command.returncode == 0, text
    record = json.loads((folder / "job.json").read_text())
    assert record["summary"]["ended"] == "no longer needed"
    assert not (folder / "endpoint.json").exists()


NO_ANSWER = "FasterTransformer execute failure: out of memory"


@pytest.mark.parametrize(
    ("variable", "said", "reported"),
    [
        ("FAKE_SERVER_SAYS", MISSING, ["file /w/1/2-gpu/model.wte.bin cannot be opened"]),
        (
            "FAKE_SERVER_ANSWERS",
            NO_ANSWER,
            [
                "the server cannot serve this repository:",
                f"model fastertransformer did not answer a first small request: {NO_ANSWER}",
            ],
        ),
    ],
    ids=["lacks weights", "does not answer"],
)
def test_server_that_cannot_serve_fails_the_stage(
    words,
    folder,
    variable,
    said,
    reported,
    monkeypatch,
):
    monkeypatch.setenv(variable, said)
    status, text = run(*words)
    assert status == 1, text
    assert all(each in text for each in reported), text
    assert not (folder / "endpoint.json").exists()


def test_dry_run_shows_the_command_and_starts_nothing(tmp_path, repository, words):
    ports = [f"deploy.{name}_port={port}" for name, port in TRITON_PORTS.items()]
    status, text = run(*words, "dry_run=true", *ports)
    assert status == 0, text
    expected = [
        "NCCL_LAUNCH_MODE=GROUP",
        *("mpirun", "-n", "1", "--allow-run-as-root", "tritonserver"),
        f"--model-repository={repository}",
    ]
    assert shlex.join(expected) in text
    assert not (tmp_path / "reported").exists()
