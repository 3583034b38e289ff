"""Processes of a server that are killed, stopped or hung: noticed in time, and nothing is left.

The promises and their times are the table of docs/reliability.md. The limits here are longer, for
slow machines, and shorter than the outcome of an unnoticed fault: nothing, or the client's own
timeout.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest

from inference.front.link import CanaryTimes
from inference.server.client import TritonClient
from inference.server.processes import STOPPED_LIMIT_S, descendants, model_of
from inference.server.segments import SHM_FOLDER, shared_memory_of, user_prefix
from inference.server.server import ModelServer
from inference.system.ports import pick_free_ports
from tests.conftest import ROOT
from tests.integration.triton_process import (
    DOUBLE,
    add_model,
    new_server,
    processes,
    segments,
    triton_of,
)
from tests.waiting import kill_all, lives, until

pytestmark = pytest.mark.triton

NOTICE_S = 30.0  # promised: 2 s, and 5 s of a process that is stopped
CLIENT_TIMEOUT_S = 60.0
START_S = 120.0
# Answers by a sender, as the engine's models do; inputs above 10 are never answered, and noted.
DEFERRED = """
import pathlib
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = request.inputs()[0].as_numpy() * 2
            if value.sum() <= 20:
                sender = request.get_response_sender()
                sender.send(
                    pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
            else:
                self.held = getattr(self, "held", []) + [request.get_response_sender()]
                pathlib.Path(HELD).touch()
"""
HANGING = DOUBLE.replace(
    "        return [",
    "        import os, time\n"
    "        while os.path.exists(HANG):\n"
    "            time.sleep(0.1)\n"
    "        return [",
)


# Answers with six responses, one each half second.
STREAMING = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, value = request.get_response_sender(), request.inputs()[0].as_numpy()
            for number in range(6):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", value + number)]))
                time.sleep(0.5)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENSEMBLE = """
name: "outer" platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_UINT32 dims: -1 }
output { name: "y" data_type: TYPE_UINT32 dims: -1 }
ensemble_scheduling { step [
  { model_name: "streaming" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } },
  { model_name: "double" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
] }
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ModelServer]:
    """Yields a ready server of two models."""
    script = DEFERRED.replace("HELD", repr(str(tmp_path / "held")))
    repository = add_model(tmp_path / "repository", "deferred", script)
    with new_server(add_model(repository, "double", DOUBLE), tmp_path) as started:
        started.start(timeout_s=START_S)
        yield started


def infer(server: ModelServer, model: str, value: int) -> int:
    """Return the status of a request over HTTP. Raises OSError for a lost connection."""
    x = {"name": "x", "datatype": "UINT32", "shape": [1, 1], "data": [value]}
    url = f"http://{server.address('http')}/v2/models/{model}/infer"
    request = urllib.request.Request(url, data=json.dumps({"inputs": [x]}).encode())
    try:
        with urllib.request.urlopen(request, timeout=CLIENT_TIMEOUT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def is_ready(url: str) -> bool:
    address = f"http://{url}/v2/health/ready"
    try:
        return bool(urllib.request.urlopen(address, timeout=CLIENT_TIMEOUT_S).status == 200)
    except (OSError, ValueError):
        return False


def process_of(server: ModelServer, model: str) -> int:
    """Return the process that runs a model."""
    found = [pid for pid in processes(server) if model_of(pid) == model]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("model", [pytest.param("deferred", marks=pytest.mark.long), "double"])
def test_killed_model_process_ends_the_server_and_its_requests(server, model, tmp_path):
    assert infer(server, model, 1) == 200
    everything, shared = processes(server), segments(server)
    assert shared
    with ThreadPoolExecutor(1) as pool:
        held: Future[int] = pool.submit(infer, server, "deferred", 100)
        until((tmp_path / "held").exists, "the request that is held")
        killed_at = time.monotonic()
        os.kill(process_of(server, model), signal.SIGKILL)
        until(
            lambda: not is_ready(server.address("http")), "the end of readiness", limit_s=NOTICE_S
        )
        assert held.result(NOTICE_S) == HTTPStatus.SERVICE_UNAVAILABLE
    assert time.monotonic() - killed_at < NOTICE_S
    until(lambda: server.poll() is not None, "the end of the server")
    failure = server.failure() or ""
    assert f"of model {model} was ended by SIGKILL" in failure
    until(lambda: not [pid for pid in everything if lives(pid)], "the end of its processes")
    assert not [path for path in shared if path.exists()]


def test_stream_of_an_ensemble_comes_to_its_end_when_the_server_is_asked_to_end(
    tmp_path,
):
    repository = add_model(tmp_path / "repository", "double", DOUBLE)
    add_model(repository, "streaming", STREAMING)
    config = repository / "streaming" / "config.pbtxt"
    config.write_text(config.read_text() + "model_transaction_policy { decoupled: true }\n")
    (repository / "outer" / "1").mkdir(parents=True)
    (repository / "outer" / "config.pbtxt").write_text(ENSEMBLE)
    with new_server(repository, tmp_path) as server:
        server.start(timeout_s=START_S)
        with (
            TritonClient(server.address("grpc"), timeout_s=CLIENT_TIMEOUT_S) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            frames = client.stream("outer", {"x": np.array([[1]], np.uint32)})
            answers = [next(frames)["y"].item()]
            ending = pool.submit(server.stop, drain_s=CLIENT_TIMEOUT_S)
            answers += [frame["y"].item() for frame in frames]
            ending.result()
        assert answers == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    "which",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("the server", "deferred")),
        "tritonserver",
    ],
)
def test_stopped_process_is_a_failure_and_one_that_is_stopped_for_a_moment_is_none(server, which):
    other = process_of(server, "double")
    os.kill(other, signal.SIGSTOP)
    time.sleep(STOPPED_LIMIT_S / 3)
    os.kill(other, signal.SIGCONT)
    time.sleep(STOPPED_LIMIT_S)
    assert server.failure() is None
    assert infer(server, "double", 1) == 200
    if which == "tritonserver":
        pid = triton_of(server)
    else:
        pid = process_of(server, which) if which == "deferred" else processes(server)[0]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: server.failure() is not None, "the notice", limit_s=NOTICE_S)
    assert f"process {pid}" in (server.failure() or "")
    assert "has been stopped" in (server.failure() or "")
    everything = processes(server)
    server.stop(drain_s=0)
    assert not [each for each in everything if lives(each)]


def test_model_that_hangs_while_it_is_idle_is_noticed_by_its_canary(tmp_path):
    hang = tmp_path / "hang"
    script = HANGING.replace("HANG", repr(str(hang)))
    times = CanaryTimes(interval_s=0.2, timeout_s=5.0)
    repository = add_model(tmp_path / "repository", "hanging", script)
    with new_server(repository, tmp_path, canaries=times) as server:
        server.start(timeout_s=START_S)
        time.sleep(2)  # for its first canaries
        assert server.failure() is None
        assert is_ready(server.address("http"))
        hang.touch()
        until(lambda: not is_ready(server.address("http")), "the end of readiness")
        with TritonClient(server.address("grpc"), timeout_s=10) as client:
            assert not client.is_ready()
        until(lambda: server.failure() is not None, "the canary's notice")
        words = r"model hanging has not answered a canary for \d+ s"
        assert re.fullmatch(words, server.failure() or "")


# Each request computes for a time that the input gives, in tenths of a second.
COMPUTING = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = request.inputs()[0].as_numpy()
            end = time.monotonic() + value.sum() / 10
            while time.monotonic() < end:
                pass
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]))
        return responses
"""


def test_model_that_is_busy_for_longer_than_a_canary_waits_is_left_alone(tmp_path):
    count, tenths = 2, 30
    repository = add_model(tmp_path / "repository", "computing", COMPUTING)
    times = CanaryTimes(interval_s=0.2, timeout_s=2.0)
    with (
        new_server(repository, tmp_path, canaries=times) as server,
        ThreadPoolExecutor(count) as pool,
    ):
        server.start(timeout_s=START_S)
        time.sleep(1)
        answers = [pool.submit(infer, server, "computing", tenths) for _ in range(count)]
        while not all(each.done() for each in answers):
            assert server.failure() is None
            # A loaded machine may be late for one canary, and in time for the next.
            until(lambda: is_ready(server.address("http")), "readiness", limit_s=3)
            time.sleep(0.2)
        assert [each.result() for each in answers] == [200] * count


def test_segments_of_a_killed_server_are_removed_by_the_next_start(tmp_path):
    repository = add_model(tmp_path / "repository", "double", DOUBLE)
    server = new_server(repository, tmp_path)
    server.start(timeout_s=START_S)
    left = segments(server)
    assert len(left) > 1
    # No process is left to clean up after everything is killed at once: the next start does, which
    # may be that of another test.
    kill_all(processes(server))
    until(lambda: server.poll() is not None, "the end of the server")
    other = SHM_FOLDER / f"slipway-{os.getuid() + 1}-of-another-user.lock"
    other.touch()
    try:
        with new_server(repository, tmp_path) as alive:
            alive.start(timeout_s=START_S)
            assert not [path for path in left if path.exists()]
            # A third start leaves what a live server and another user own.
            with shared_memory_of(f"{user_prefix()}third-"):
                assert len(segments(alive)) > 1
            assert infer(alive, "double", 1) == 200
            assert other.exists()
            shared = segments(alive)
    finally:
        other.unlink()
    server.stop()
    assert not [path for path in shared if path.exists()]


def served_alone(
    repository: Path, *options: str
) -> tuple[subprocess.Popen[str], ModelServer, list[str]]:
    """Start `python -m inference.server`; return it, its address and the lines of its log."""
    ports = pick_free_ports("127.0.0.1", 3)
    names = ("http", "grpc", "metrics")
    words = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    words = ["-m", "inference.server", f"--model-repository={repository}", *words, *options]
    words.append("--server=tritonserver")  # for models that are programs of their own
    command = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert command.stdout is not None
    threading.Thread(target=lines.extend, args=(command.stdout,), daemon=True).start()
    address = ModelServer(repository, ports={"http": ports[0]}, log_path=Path(os.devnull))
    try:
        until(lambda: is_ready(address.address("http")) or command.poll() is not None, "the server")
        assert command.poll() is None, "".join(lines)
    except BaseException:
        command.kill()
        raise
    return command, address, lines


def test_server_without_a_stage_never_gets_ready_again_once_a_model_is_lost(
    tmp_path,
):
    repository = add_model(tmp_path / "repository", "double", DOUBLE)
    command, address, lines = served_alone(add_model(repository, "other", DOUBLE))
    try:
        assert infer(address, "other", 1) == 200
        running = [command.pid, *descendants(command.pid)]
        (stub,) = [pid for pid in running if model_of(pid) == "double"]
        os.kill(stub, signal.SIGKILL)
        until(
            lambda: not is_ready(address.address("http")), "the end of readiness", limit_s=NOTICE_S
        )
        # A server that took the model out of its list was ready again 3 s later.
        deadline = time.monotonic() + NOTICE_S
        while command.poll() is None and time.monotonic() < deadline:
            assert not is_ready(address.address("http"))
            time.sleep(0.1)
        assert command.poll() == 1
        until(lambda: not any(map(lives, running)), "the end of what it has started")
        assert not is_ready(address.address("http"))
    finally:
        command.kill()
        command.wait()
    until(lambda: any("the server failed: process" in line for line in lines), "the reason")


@pytest.mark.long  # our own server does in tests/integration/test_own_server.py
def test_server_without_a_stage_ends_in_order_at_a_signal(tmp_path):
    repository = add_model(tmp_path / "repository", "double", DOUBLE)
    command, address, lines = served_alone(repository)
    try:
        assert infer(address, "double", 1) == 200
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0
        until(lambda: any("successfully loaded 'double'" in line for line in lines), "the log")
    finally:
        command.kill()
        command.wait()
