"""A real tritonserver with trivial models: start, readiness, failures, stop."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference.server.client import TritonClient
from inference.server.log import ServerStartError
from inference.server.server import ModelServer
from tests.integration.triton_process import (
    DOUBLE,
    add_model,
    new_server,
    processes,
    triton_of,
)
from tests.waiting import lives, until

pytestmark = pytest.mark.triton

FAILING = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("model.wte.bin is missing\\nmodel.wpe.bin has 3 bytes, expected 8")
"""
SLOW_START = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(60)
"""


def _ask(server: ModelServer, *, model: str = "double") -> list[list[int]]:
    with TritonClient(server.address("grpc")) as client:
        return client.infer(model, {"x": np.array([[1, 2]], np.uint32)})["y"].tolist()


def _listening_addresses(ports: set[int]) -> set[str]:
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        address, port = local.split(":")
        if state == "0A" and int(port, 16) in ports:
            found.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    return found


def test_server_of_a_folder_of_any_name_serves_on_chosen_ports_and_leaves_nothing_behind(
    tmp_path, monkeypatch
):
    folder = add_model(tmp_path / "M\u00fcller's $(models) & more", "double", DOUBLE)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    messages: list[str] = []
    with new_server(folder, tmp_path) as server:
        server.start(timeout_s=240, progress=messages.append)
        assert messages == [
            "loading double",
            "loaded double",
            "sending first requests",
            "ready",
        ]
        assert server.models == ("double",)
        assert len({*server.ports.values(), 0}) == 4
        assert _listening_addresses(set(server.ports.values())) == {"127.0.0.1"}
        assert _ask(server) == [[2, 4]]
        assert server.failure() is None
        running = processes(server)
        assert len(running) >= 3  # server, supervisor, tritonserver, stub
    assert server.poll() is not None
    assert not [pid for pid in running if lives(pid)]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert (folder / "double" / "1" / "model.py").exists()


def test_failing_model_stops_the_start_with_its_own_words(tmp_path):
    repository = add_model(tmp_path / "repo", "double", DOUBLE)
    server = new_server(add_model(repository, "bad", FAILING), tmp_path)
    with pytest.raises(ServerStartError) as caught:
        server.start(timeout_s=240)
    assert caught.value.reasons == (
        "model bad: Internal: ValueError: model.wte.bin is missing\n"
        "model.wpe.bin has 3 bytes, expected 8",
    )
    assert caught.value.log_tail
    assert server.poll() is not None


def test_start_that_takes_too_long_names_the_loading_models(tmp_path):
    server = new_server(add_model(tmp_path / "repo", "slow", SLOW_START), tmp_path)
    with pytest.raises(ServerStartError, match=r"not ready after 10 s:\n  still loading slow"):
        server.start(timeout_s=10)
    assert server.poll() is not None


def test_repository_without_models_is_refused(tmp_path):
    (tmp_path / "repo").mkdir()
    with pytest.raises(ServerStartError, match="holds no model"):
        new_server(tmp_path / "repo", tmp_path).start(timeout_s=60)


def test_ports_in_use_are_named_with_key_and_holder(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = ModelServer(
            tmp_path,
            ports={"http": port, "grpc": 0, "metrics": port},
            log_path=tmp_path / "log",
            has_triton=True,
            port_keys={"http": "deploy.http_port", "metrics": "deploy.metrics_port"},
        )
        with pytest.raises(ServerStartError) as caught:
            server.start(timeout_s=1)
    text = str(caught.value)
    assert f"deploy.http_port={port} is in use by process {os.getpid()}" in text
    assert f"deploy.metrics_port={port} is in use" in text
    assert "the ports must differ" in text


@pytest.fixture
def own_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts sockets where no server of another test is the next to start; their paths are short."""
    with tempfile.TemporaryDirectory(prefix="slk", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.mark.usefixtures("own_place")
def test_killed_owner_or_program_takes_the_whole_server_along(tmp_path):
    add_model(tmp_path / "repo", "double", DOUBLE)
    script = f"""
        import time
        from pathlib import Path
        from tests.integration.triton_process import new_server, processes, triton_of
        server = new_server(Path({str(tmp_path / "repo")!r}), Path({str(tmp_path)!r}))
        server.start(timeout_s=240)
        words = Path("/proc", str(triton_of(server)), "cmdline").read_text().split(chr(0))
        (grpc,) = [word for word in words if word.startswith("--grpc-address=unix:")]
        print(*processes(server), grpc.partition(":")[2].removesuffix("/grpc"), flush=True)
        time.sleep(60)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    *pids, sockets = owner.stdout.readline().split()
    running = [int(pid) for pid in pids]
    assert len(running) >= 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: not [pid for pid in running if lives(pid)])
    assert Path(sockets).is_dir()  # until the next start
    with new_server(tmp_path / "repo", tmp_path) as server:
        server.start(timeout_s=240)
        assert not Path(sockets).exists()
        running = processes(server)
        os.kill(triton_of(server), signal.SIGKILL)
        until(lambda: server.poll() is not None)
        assert server.failure() == "tritonserver ended with status 137"
        until(lambda: not [pid for pid in running if lives(pid)])


@pytest.mark.parametrize("module", ["inference.host.__main__", "inference.server.supervisor"])
def test_killed_parent_leaves_no_process_behind(tmp_path, module):
    server = new_server(add_model(tmp_path / "repo", "double", DOUBLE), tmp_path)
    server.start(timeout_s=240)
    running = processes(server)
    parent, *_ = [
        pid for pid in running if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(parent, signal.SIGKILL)
    until(lambda: not [pid for pid in running if lives(pid)])
    server.stop()
