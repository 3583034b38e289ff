"""A start of a program that crashes, once or always, or that refuses its repository."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inference.front.sockets import ServerSockets
from inference.ports import FREE_PORTS
from inference.server.__main__ import main, serve_until_signal
from inference.server.admin import Admin
from inference.server.server import TritonServer
from inference.server.server_log import ServerLog, ServerStartError
from tests.conftest import ROOT
from tests.integration.triton_process import DOUBLE, add_model, new_server

STAND_IN = ROOT / "tests" / "integration" / "fake_fastertransformer.py"
THROWN = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"
ABORT = f'echo "{THROWN}"; kill -ABRT $$'
# The handler of crashes may never come to its end.
HANG = 'echo "Signal (11) received."; exec sleep 600'
REFUSAL = 'echo "error: creating server: Internal - failed to stat file"; exit 1'
BLAMED = f'echo "[FT][ERROR] Assertion fail: a.cc:128"; {ABORT}'


class Starts:
    """Counts the starts of a server whose program does something else at its first ones."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counted = folder / "starts"
        self._program = folder / "tritonserver"
        self._monkeypatch = monkeypatch
        self.server = TritonServer(
            add_model(folder / "repository", "double", DOUBLE),
            ports=FREE_PORTS,
            log_path=folder / "triton.log",
            is_old=True,
            env={"FAKE_SERVER_TOLD": str(folder / "reported"), "PYTHONPATH": str(ROOT)},
        )

    def start(self, does: str, *, times: int, crash_retries: int = 1) -> None:
        self._program.write_text(
            f'#!/bin/sh\nserve="{sys.executable} {STAND_IN}"\n'
            '[ "$1" = --help ] && exec $serve "$@"\n'
            f"echo >>{self._counted}\nulimit -c 0\n"
            f"[ $(wc -l <{self._counted}) -le {times} ] && {{ {does}; }}\n"
            'exec $serve "$@"\n'
        )
        self._program.chmod(0o755)
        self._monkeypatch.setenv("TRITON_SERVER", str(self._program))
        self._monkeypatch.setenv("PYTHONPATH", str(ROOT))
        with self.server:
            self.server.start(timeout_s=60, crash_retries=crash_retries)
            assert self.server.failure() is None

    @property
    def count(self) -> int:
        return len(self._counted.read_text().splitlines())


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(tmp_path, monkeypatch)


@pytest.mark.parametrize(("does", "name"), [(ABORT, "SIGABRT"), (HANG, "SIGSEGV")])
def test_program_that_crashes_once_is_started_again(
    does: str, name: str, starts: Starts, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    starts.start(does, times=1)
    assert starts.count == 2
    said = capfd.readouterr().err
    assert f"tritonserver has crashed with {name} before it was ready: starting it again" in said
    kept = tmp_path / "triton.1.log"
    assert str(kept) in said
    assert kept.read_text().startswith(does.split('"')[1])


@pytest.mark.parametrize(
    ("does", "retries", "count", "reason"),
    [
        (ABORT, 1, 2, THROWN),  # twice is not by chance
        (ABORT, 0, 1, THROWN),
        (REFUSAL, 1, 1, "failed to stat file"),
        (BLAMED, 1, 1, "Assertion fail"),
    ],
)
def test_program_that_cannot_serve_fails_with_its_reason(
    does: str, retries: int, count: int, reason: str, starts: Starts
) -> None:
    with pytest.raises(ServerStartError) as caught:
        starts.start(does, times=9, crash_retries=retries)
    assert starts.count == count
    assert any(reason in each for each in caught.value.reasons)
    assert caught.value.is_crash == (does == ABORT)


class _ReadyByGrpc:
    """Says of every model that it is ready, as gRPC does before HTTP listens."""

    def statuses(self) -> list[Any]:
        return [SimpleNamespace(name="double", state="READY", reason="")]

    def is_ready(self) -> bool:
        return True


def test_a_server_is_not_ready_before_all_its_protocols_listen(tmp_path: Path) -> None:
    server = new_server(add_model(tmp_path / "repository", "double", DOUBLE), tmp_path)
    server._sockets = sockets = ServerSockets(tmp_path)
    server._admin = cast("Admin", _ReadyByGrpc())
    log = ServerLog(server.log_path, ["double"])
    with contextlib.ExitStack() as stack:
        for path in (sockets.http, sockets.metrics):
            assert not server._is_ready(log)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen()
        assert server._is_ready(log)


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


def test_the_reason_of_a_failed_start_is_said_after_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    server = cast("TritonServer", _LongLog(tmp_path / "triton.log"))
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
def test_wrong_options_are_refused_by_name(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_host_of_another_machine_is_refused_by_name(
    host: str, problem: str, port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--model-repository={tmp_path}", f"--host={host}", f"--http-port={port}"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("the server was not started:")
    assert problem in said


def test_nvidias_server_starts_without_mpirun_where_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI's mpirun ends at once where there is no remote shell, as in many images."""
    for name in ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "NCCL_LAUNCH_MODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mpirun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    made: list[TritonServer] = []

    def serve(server: TritonServer, **_: float) -> int:
        made.append(server)
        return 0

    monkeypatch.setattr("inference.server.__main__.serve_until_signal", serve)
    assert main([f"--model-repository={tmp_path}", "--engine=fastertransformer"]) == 0
    assert made[0].prefix == ()
    assert made[0].env == {"NCCL_LAUNCH_MODE": "GROUP", "OMPI_MCA_ess_singleton_isolated": "1"}
