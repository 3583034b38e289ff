"""The server of this project's own: faults, its end, another repository, and what it refuses."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from inference.front.access import OpenAIOptions
from inference.server.client import TritonClient
from inference.server.kinds import SLIPWAY
from inference.server.log import ServerStartError
from inference.server.process import kill
from inference.server.processes import descendants
from inference.server.server import ModelServer
from inference.system.ports import pick_free_ports
from tests.conftest import ROOT
from tests.integration.triton_process import DOUBLE, add_model, hosted, processes
from tests.waiting import lives, until

MODEL = "fastertransformer"
START_S = 120
LONG = 240  # tokens of a stream that is under way for some time
ASKED = {"INPUT_0": "It was", "INPUT_1": 4}


@pytest.fixture(scope="module")
def repository(sample_repository: Callable[..., Path]) -> Path:
    return sample_repository(tp_size=1, decoupled=True, parameters={"device": "cpu"})


@pytest.fixture(scope="module")
def lasting(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """Yields a server that each test leaves as it was."""
    with hosted(SLIPWAY, repository, tmp_path_factory.mktemp("lasting")) as running:
        running.start(timeout_s=START_S)
        yield running


def texts(port: int, count: int = 4, each: Callable[[], object] = lambda: None) -> list[str]:
    """Return the texts of a stream over HTTP; call `each` with every one."""
    body = json.dumps({**ASKED, "INPUT_1": count, "min_length": count}).encode()
    url = f"http://127.0.0.1:{port}/v2/models/ensemble/generate_stream"
    found = []
    with urllib.request.urlopen(url, data=body, timeout=240) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:])["OUTPUT_0"])
                each()
    return found


def held(port: int) -> float:
    """Return how many sequences the server runs or keeps waiting."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    names = ("slipway_running_sequences{", "slipway_waiting_sequences{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def engine_of(server: ModelServer) -> int:
    """Return the process of the engine."""
    (found,) = (
        pid
        for pid in processes(server)
        if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


def end_of(server: ModelServer, number: int) -> str:
    """Send a signal to the server's first process; return what is noticed, with nothing left."""
    everything = processes(server)
    os.kill(everything[0], number)
    until(lambda: server.failure() is not None, "the notice")
    said = server.failure() or ""
    server.stop(drain_s=0)
    # A process dies of its parent's end, which takes a moment on a busy machine.
    until(lambda: not any(map(lives, everything)), "the end of its processes")
    return said


def error_over_http(server: ModelServer, each: Callable[[], object]) -> str:
    """Return the error that a stream ends with; call `each` with every event."""
    body = json.dumps({**ASKED, "INPUT_1": 400, "min_length": 400}).encode()
    url = f"http://127.0.0.1:{server.ports['http']}/v2/models/ensemble/generate_stream"
    last = b""
    with urllib.request.urlopen(url, data=body, timeout=240) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                last = line[6:]
                each()
    return str(json.loads(last)["error"])


def error_over_grpc(server: ModelServer, each: Callable[[], object]) -> str:
    """Return the same over gRPC."""
    with TritonClient(server.address("grpc"), protocol="grpc", timeout_s=240) as client:
        pieces = client.stream_text("It was", output_len=400, options={"min_length": 400})
        with pytest.raises(InferenceServerException) as caught:
            deque((each() for _ in pieces), maxlen=0)
    return str(caught.value)


def error_over_openai(server: ModelServer, each: Callable[[], object]) -> str:
    """Return the same in OpenAI's protocol."""
    with openai.OpenAI(base_url=server.openai_url, api_key="-", max_retries=0) as client:
        events = client.completions.create(
            model=MODEL,
            prompt="It was",
            max_tokens=400,
            stream=True,
            extra_body={"min_tokens": 400},
        )
        with pytest.raises(openai.APIError) as caught:
            deque((each() for _ in events), maxlen=0)
    return str(caught.value)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_streams_that_lose_their_engine_end_with_an_error(repository, tmp_path, number):
    protocols = (error_over_http, error_over_grpc, error_over_openai)
    with (
        hosted(SLIPWAY, repository, tmp_path, openai=OpenAIOptions(port=0)) as server,
        ThreadPoolExecutor() as pool,
    ):
        server.start(timeout_s=START_S)
        everything = processes(server)
        begun = [threading.Event() for _ in protocols]
        errors = [
            pool.submit(ask, server, each.set) for ask, each in zip(protocols, begun, strict=True)
        ]
        assert all(each.wait(60) for each in begun)
        os.kill(engine_of(server), number)
        until(lambda: server.failure() is not None, "the notice")
        server.stop(drain_s=0)
        assert all("out of service" in each.result() for each in errors)
    assert not [pid for pid in everything if lives(pid)]


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("engine", signal.SIGSTOP),
        pytest.param("server", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("server", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("engine", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_standby_is_the_next_server_unless_it_has_ended_or_is_stopped(
    repository, tmp_path, part, number
):
    with hosted(SLIPWAY, repository, tmp_path) as server:
        server.start(timeout_s=START_S)
        expected = texts(server.ports["http"])
        standby = server.prepared({})
        assert not server.failure()  # it is not one of the server's processes
        assert "stopped for 1 s" in end_of(server, signal.SIGSTOP)
    with replace(server, standby=standby) as following:
        following.start(timeout_s=START_S)
        assert following.pid == standby.pid
        assert texts(following.ports["http"]) == expected
        assert [*following.log_path.parent.glob("*.log")] == [following.log_path]
        other = following.prepared({})
        until(lambda: bool(descendants(other.pid)), "the engine of the standby")
        os.kill(other.pid if part == "server" else descendants(other.pid)[0], number)
        assert "status -9" in end_of(following, signal.SIGKILL)
        try:
            with replace(following, standby=other) as last:
                last.start(timeout_s=START_S)
                assert last.pid != other.pid
                assert texts(last.ports["http"]) == expected
        finally:
            kill([*descendants(other.pid), other.pid])
            other.wait()


def test_a_repository_that_cannot_be_served_leaves_the_one_that_is(lasting, repository):
    port = lasting.ports["http"]
    expected = texts(port)
    table = repository / "preprocessing" / "1" / "vocab.json"
    kept = table.read_bytes()
    table.write_bytes(b"{")
    with pytest.raises(ValueError, match="preprocessing"):
        lasting.reload(timeout_s=START_S)
    assert texts(port) == expected
    table.write_bytes(kept)
    lasting.reload(timeout_s=START_S)
    assert texts(port) == expected
    assert lasting.failure() is None


def other_weights(repository: Path, folder: Path) -> Path:
    """Return a copy of a repository whose model answers otherwise."""
    copy = shutil.copytree(repository, folder)
    path = copy / MODEL / "1" / "1-gpu" / "model.final_layernorm.weight.bin"
    path.write_bytes((-np.fromfile(path, np.float32)).tobytes())
    return copy


def test_weights_are_exchanged_in_the_engine_that_is_there(lasting, repository, tmp_path):
    """The answers are a new server's, no process is another, and no request is lost."""
    other = other_weights(repository, tmp_path / "other")
    with hosted(SLIPWAY, other, tmp_path / "fresh") as fresh:
        fresh.start(timeout_s=START_S)
        expected = texts(fresh.ports["http"])
    port, everything = lasting.ports["http"], processes(lasting)
    before, long = texts(port), texts(port, 60)
    assert before != expected
    began = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(texts, port, 60, began.set)
        began.wait()
        lasting.reload(timeout_s=START_S, repository=other, exchanges=True)
        assert streaming.result() == long
    assert texts(port) == expected
    assert processes(lasting) == everything
    lasting.reload(timeout_s=START_S, repository=repository, exchanges=True)
    assert texts(port) == before
    assert lasting.failure() is None


def test_an_exchange_that_fails_ends_the_server_and_one_that_cannot_begin_does_not(
    lasting, repository, tmp_path
):
    """The last test of this server."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no model"):
        lasting.reload(timeout_s=START_S, repository=tmp_path / "empty", exchanges=True)
    assert texts(lasting.ports["http"])
    other = other_weights(repository, tmp_path / "other")
    path = other / MODEL / "1" / "1-gpu" / "model.final_layernorm.weight.bin"
    path.write_bytes(np.full(path.stat().st_size // 4, np.nan, np.float32).tobytes())
    with pytest.raises(ValueError, match="did not load"):
        lasting.reload(timeout_s=START_S, repository=other, exchanges=True)
    until(lambda: lasting.failure() is not None, "the end of the server")
    assert "not finite" in str(lasting.failure())


def test_programs_of_others_are_refused_before_anything_loads(repository, tmp_path):
    others = shutil.copytree(repository, tmp_path / "others")
    shutil.copytree(repository / MODEL, others / "torn")
    (others / "torn" / "config.pbtxt").write_text('name: "torn" backend: "onnxruntime"')
    server = hosted(SLIPWAY, add_model(others, "double", DOUBLE), tmp_path)
    with pytest.raises(ServerStartError) as caught:
        server.start(timeout_s=START_S)
    assert [each.split(":")[0] for each in caught.value.reasons] == ["model double", "model torn"]
    for reason in caught.value.reasons:
        assert "deploy.server=tritonserver" in reason
    assert server.poll() is not None


def codes_until_the_end(port: int) -> set[grpc.StatusCode]:
    """Return the codes of calls, 32 at a time, until nothing listens there."""
    codes, words = set[grpc.StatusCode](), ""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerMetadata.future
        while "failed to connect" not in words:
            calls = [ask(service_pb2.ServerMetadataRequest()) for _ in range(32)]
            codes |= {call.code() for call in calls}
            words = calls[-1].details()
            time.sleep(0.03)
    return codes


def test_at_its_end_it_answers_what_it_has_and_refuses_the_rest(
    sample_repository,
):
    # One after the other, so that the last is under way for long enough.
    one_slot = {"device": "cpu", "max_lanes": "1"}
    repository = sample_repository(tp_size=1, decoupled=True, parameters=one_slot)
    http_port, grpc_port, metrics = pick_free_ports("127.0.0.1", 3)
    words = [f"--model-repository={repository}", "--server=slipway", "--drain-s=600"]
    words += [f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics}"]
    command = subprocess.Popen([sys.executable, "-m", "inference.server", *words], cwd=ROOT)
    ready = f"http://127.0.0.1:{http_port}/v2/health/ready"

    def status(url: str = ready, data: bytes | None = None) -> tuple[int, Any]:
        try:
            answer = urllib.request.urlopen(url, data=data, timeout=10)
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get("Retry-After")
        except (OSError, http.client.HTTPException):
            return 0, None
        return answer.status, None

    try:
        until(lambda: status()[0] == HTTPStatus.OK, "the server")
        began, count = threading.Event(), 2
        with ThreadPoolExecutor(count + 1) as pool:
            streamed = [pool.submit(texts, http_port, LONG, began.set) for _ in range(count)]
            assert began.wait(START_S)
            until(lambda: held(metrics) + sum(each.done() for each in streamed) >= count)
            command.send_signal(signal.SIGTERM)
            until(lambda: status()[0] == HTTPStatus.SERVICE_UNAVAILABLE, "the end of readiness")
            url = f"http://127.0.0.1:{http_port}/v2/models/ensemble/generate_stream"
            refused = status(url, json.dumps(ASKED).encode())
            assert refused == (HTTPStatus.SERVICE_UNAVAILABLE, "1")
            calls = pool.submit(codes_until_the_end, grpc_port)
            assert [len(each.result()) for each in streamed] == [LONG] * count
        assert calls.result() == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}  # none cancelled
        assert command.wait(30) == 0  # promised: 1 s
    finally:
        command.kill()
        command.wait()
