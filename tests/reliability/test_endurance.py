"""A server under many clients and arbitrary requests: right answers, flat memory, no restart.

The model is trivial: what is tried is tritonserver, its front and the clients.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tritonclient.grpc import service_pb2

from inference.server.client import TritonClient
from inference.server.server import ModelServer
from tests.integration.triton_process import (
    DOUBLE,
    add_model,
    new_server,
    processes,
    segments,
)

pytestmark = pytest.mark.triton

CLIENTS = 64
SECONDS = 1.5  # 600 in `make soak`
EXAMPLES = 2  # times 100 in `make soak`
# Allocators keep this much; one lost request of a kilobyte in a hundred would soon be more.
GROWTH_BYTES = 64 << 20
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("endurance")
    with new_server(add_model(folder / "repository", "double", DOUBLE), folder) as started:
        started.start(timeout_s=120)
        yield started


def resident_bytes(server: ModelServer) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes(server)]
    return sum(pages) * 4096


def segment_bytes(server: ModelServer) -> int:
    return sum(path.stat().st_size for path in segments(server))


@pytest.mark.soak
def test_memory_stays_flat_under_many_clients(server, soak):
    counts = [0] * CLIENTS

    def ask(number: int, until: float) -> None:
        protocol = "grpc" if number % 2 else "http"
        url = server.address("grpc") if protocol == "grpc" else server.address("http")
        with TritonClient(url, protocol=protocol, timeout_s=60) as client:
            while not counts[number] or time.monotonic() < until:
                value = np.full((1, 256), number * 1000 + counts[number] % 1000, np.uint32)
                if number % 4 == 1:
                    (answer,) = [frame["y"] for frame in client.stream("double", {"x": value})]
                else:
                    answer = client.infer("double", {"x": value})["y"]
                np.testing.assert_array_equal(answer, value * 2)
                counts[number] += 1

    def ask_for(seconds: float) -> None:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(ask, range(CLIENTS), [until] * CLIENTS))

    ask_for(SECONDS)  # allocators and pools reach their size
    running, memory, shared = processes(server), resident_bytes(server), segment_bytes(server)
    ask_for(SECONDS if soak == 1 else 6.0 * soak)
    assert processes(server) == running
    assert resident_bytes(server) - memory < GROWTH_BYTES
    assert segment_bytes(server) - shared < GROWTH_BYTES / 8


class Stranger(RuleBasedStateMachine):
    """A client that sends anything, keeps streams open and leaves; others are not affected."""

    server: ModelServer

    def __init__(self) -> None:
        super().__init__()
        self.channel = grpc.insecure_channel(self.server.address("grpc"))
        self.streams: list[tuple[Any, threading.Event]] = []
        self.running = processes(self.server)

    @rule(
        endpoint=st.sampled_from(["infer", "generate", "generate_stream"]),
        changes=st.dictionaries(
            st.sampled_from(["name", "shape", "datatype", "data", "parameters"]),
            st.none()
            | st.integers(-1, 2**64)
            | st.text(max_size=5)
            | st.lists(st.integers(-1, 2**63), max_size=4)
            | st.dictionaries(st.sampled_from(["binary_data_size", "a"]), st.integers(-1, 2**64)),
        ),
        length=st.none() | st.integers(-1, 300),
    )
    def asks_over_http(self, endpoint: str, changes: dict[str, Any], length: int | None) -> None:
        x = {"name": "x", "shape": [1, 2], "datatype": "UINT32", "data": [1, 2], **changes}
        body = json.dumps({"inputs": [x]} if endpoint == "infer" else {"x": x.get("data")})
        headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
        connection = HTTPConnection(self.server.address("http"), timeout=30)
        with contextlib.closing(connection), contextlib.suppress(HTTPException):
            connection.request("POST", f"/v2/models/double/{endpoint}", body, headers)
            assert connection.getresponse().status in (200, 400, 500)

    @rule(
        shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=4),
        datatype=st.sampled_from(["UINT32", "BYTES", "BOOL", "", "X"]),
        raw=st.lists(st.binary(max_size=40), max_size=2),
        key=st.sampled_from(["sequence_id", "priority", "timeout", "binary_data_size"]),
        value=st.integers(-(2**63), 2**63 - 1) | st.text(max_size=3) | st.booleans(),
    )
    def opens_a_stream(
        self, shape: list[int], datatype: str, raw: list[bytes], key: str, value: int | str | bool
    ) -> None:
        message = service_pb2.ModelInferRequest(model_name="double", raw_input_contents=raw)
        message.inputs.add(name="x", shape=shape, datatype=datatype)
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
        if key != "timeout" or not isinstance(value, int):  # an answer may then never be due
            setattr(message.parameters[key], kinds[type(value)], value)
        left = threading.Event()

        def requests() -> Iterator[bytes]:
            yield message.SerializeToString()
            left.wait(30)

        self.streams.append((self.channel.stream_stream(STREAM)(requests(), timeout=30), left))

    @rule(data=st.binary(max_size=60))
    def sends_anything_over_grpc(self, data: bytes) -> None:
        call = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(data, timeout=30)
        assert caught.value.code() in (
            *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND),
            *(grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED),
        )

    @rule()
    def leaves_a_stream(self) -> None:
        if self.streams:
            stream, left = self.streams.pop()
            stream.cancel()
            left.set()

    @invariant()
    def others_are_answered(self) -> None:
        x = np.array([[3, 4]], np.uint32)
        with TritonClient(self.server.address("grpc"), timeout_s=60) as client:
            assert client.infer("double", {"x": x})["y"].tolist() == [[6, 8]]
        assert processes(self.server) == self.running

    def teardown(self) -> None:
        while self.streams:
            self.leaves_a_stream()
        self.channel.close()


@pytest.mark.soak
def test_no_sequence_of_requests_affects_others(server, soak):
    class OfServer(Stranger):
        pass

    OfServer.server = server
    run_state_machine_as_test(
        OfServer,
        settings=settings(
            max_examples=EXAMPLES * soak,
            stateful_step_count=15,
            deadline=None,
            derandomize=soak == 1,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
