"""A start of a program that crashes, or that refuses its repository."""

import sys
from pathlib import Path
from typing import cast

import pytest

from inference.server.__main__ import main, serve_until_signal
from inference.server.log import ServerStartError
from inference.server.server import ModelServer
from inference.system.ports import FREE_PORTS
from tests.integration.triton_process import DOUBLE, add_model

THROWN = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"
ABORT = f'echo "{THROWN}"; kill -ABRT $$'
REFUSAL = 'echo "error: creating server: Internal - failed to stat file"; exit 1'
BLAMED = f'echo "[FT][ERROR] Assertion fail: a.cc:128"; {ABORT}'


class Starts:
    """A server whose program does something else."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._program = folder / "tritonserver"
        self._monkeypatch = monkeypatch
        self.server = ModelServer(
            add_model(folder / "repository", "double", DOUBLE),
            ports=FREE_PORTS,
            log_path=folder / "triton.log",
            has_triton=True,
            has_nvidia_backend=True,
        )

    def start(self, does: str) -> None:
        self._program.write_text(f"#!/bin/sh\nulimit -c 0\n{does}\n")
        self._program.chmod(0o755)
        self._monkeypatch.setenv("TRITON_SERVER", str(self._program))
        with self.server:
            self.server.start(timeout_s=60)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (ABORT, THROWN),
        (REFUSAL, "failed to stat file"),
        (BLAMED, "Assertion fail"),
    ],
)
def test_program_that_cannot_serve_fails_with_its_reason(does, reason, starts):
    with pytest.raises(ServerStartError) as caught:
        starts.start(does)
    assert any(reason in each for each in caught.value.reasons)


@pytest.mark.parametrize(("has_nvidia_backend", "count"), [(False, 2), (True, 1)])
def test_a_start_that_a_signal_ends_is_made_once_more(has_nvidia_backend, count, starts, tmp_path):
    starts.server.has_nvidia_backend = has_nvidia_backend
    with pytest.raises(ServerStartError):
        starts.start(f"echo start >> {tmp_path}/starts; {ABORT}")
    assert (tmp_path / "starts").read_text().split() == ["start"] * count


class _LongLog:
    """A server that logs a long table and cannot start."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path

    def start(self, *, timeout_s: float) -> None:
        assert timeout_s
        self.log_path.write_text("| a row |\n" * 1000)
        raise ServerStartError("it cannot serve", reasons=["no model"], log_path=self.log_path)

    def stop(self, *, drain_s: float) -> None:
        assert not drain_s


def test_the_reason_of_a_failed_start_is_said_after_its_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    server = cast("ModelServer", _LongLog(tmp_path / "triton.log"))
    assert serve_until_signal(server, ready_timeout_s=1, drain_s=1) == 1
    assert capfd.readouterr().out.endswith("| a row |\nit cannot serve\n  no model\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--model-repository="], "--model-repository= is not a folder"),
        (["--model-repository=/nowhere/x"], "--model-repository=/nowhere/x is not a folder"),
        (["--ready-timeout-s=nan"], "argument --ready-timeout-s: nan is not a time in seconds"),
        (["--drain-s=-1"], "argument --drain-s: -1 is not a time in seconds"),
    ],
)
def test_wrong_options_are_refused_by_name(words, problem, tmp_path, capsys):
    with pytest.raises(SystemExit) as refusal:
        main([f"--model-repository={tmp_path}", *words])
    assert refusal.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "8000"])
@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("203.0.113.7", "--host=203.0.113.7: ports cannot be opened on 203.0.113.7: "),
        ("a b", "--host=a b is neither an address nor the name of a host."),
        ("", "--host= is neither an address nor the name of a host."),
    ],
)
def test_host_of_another_machine_is_refused_by_name(host, problem, port, tmp_path, capsys):
    words = [f"--model-repository={tmp_path}", f"--host={host}", f"--http-port={port}"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("the server was not started:")
    assert problem in said


def test_nvidias_server_starts_without_mpirun_where_that_cannot_run(tmp_path, monkeypatch):
    """Open MPI's mpirun ends at once where there is no remote shell, as in many images."""
    for name in ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "NCCL_LAUNCH_MODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mpirun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    made: list[ModelServer] = []

    def serve(server: ModelServer, **_: float) -> int:
        made.append(server)
        return 0

    monkeypatch.setattr("inference.server.__main__.serve_until_signal", serve)
    assert main([f"--model-repository={tmp_path}", "--engine=fastertransformer"]) == 0
    assert made[0].prefix == ()
    assert made[0].env == {"NCCL_LAUNCH_MODE": "GROUP", "OMPI_MCA_ess_singleton_isolated": "1"}
