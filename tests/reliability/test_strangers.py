"""Attacks on a server by whoever reaches its ports, each of which must be refused.

The server is one that `deploy` starts by default, on loopback, where other users of the node reach
it, and web pages in a browser on it.
"""

import base64
import contextlib
import gzip
import json
import os
import re
import resource
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import brotli
import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from inference.decoding.rows import SessionTurn
from inference.front.access import Access, Credentials
from inference.server.client import TritonClient
from inference.server.server import ModelServer
from inference.system.ports import FREE_PORTS
from tests.integration.triton_process import (
    DOUBLE,
    add_model,
    processes,
    segments,
    triton_of,
)

pytestmark = pytest.mark.triton

LIMIT_MB = 4
FEW_FILES = 512  # that a process may open unless it asks for more
CALLS = "/inference.GRPCInferenceService/"
# Every endpoint of tritonserver's HTTP (docs/protocol of its repository) that a stranger has no
# business with.
CLOSED = [
    ("POST", "/v2/repository/models/double/load"),
    ("POST", "/v2/repository/models/double/unload"),
    ("POST", "/v2/repository/other/models/double/load"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/systemsharedmemory/region/a/status"),
    ("POST", "/v2/systemsharedmemory/region/a/register"),
    ("POST", "/v2/systemsharedmemory/region/a/unregister"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/region/a/register"),
    ("POST", "/v2/cudasharedmemory/unregister"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("GET", "/v2/models/double/trace/setting"),
    ("POST", "/v2/models/double/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    # Other spellings of the same.
    ("POST", "//v2/repository/models/double/unload"),
    ("POST", "/v2/models/../repository/models/double/unload"),
    ("POST", "/v2/models/double%2f..%2f..%2frepository/infer"),
    ("POST", "/v2%2frepository/models/double/unload"),
    ("POST", "/v2/repository/models/double/unload?x=/v2/models/double/infer"),
    ("PUT", "/v2/repository/models/double/unload"),
    ("GET", "/metrics"),
]
OPEN = [
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/double"),
    ("GET", "/v2/models/double/ready"),
    ("GET", "/v2/models/double/versions/1/ready"),
    ("GET", "/v2/models/double/config"),
    ("GET", "/v2/models/double/stats"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/repository/index"),
]
OPEN_CALLS = {
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"),
    *("ModelStatistics", "RepositoryIndex", "ModelInfer", "ModelStreamInfer"),
}
INFER = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "UINT32", "data": [[1, 2]]}]}
CLASSES = {"name": "y", "parameters": {"classification": 1}}
# As the Python backend says it of a request that is larger than the memory for it.
TALKATIVE = 404
NAMING = DOUBLE.replace(
    "        return [",
    f"        if any({TALKATIVE} in request.inputs()[0].as_numpy() for request in requests):\n"
    "            raise MemoryError('no room in slipway-0-5f2e-region_1, "
    "/triton_python_backend_shm_region_7')\n"
    "        return [",
)
# Adds up the values of each session.
SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        session = request.correlation_id()
        values = {each.name(): each.as_numpy() for each in request.inputs()}
        # The batcher fills places with requests of no session.
        begun = 0 if not session or values["START"].any() else self.sums[session]
        self.sums[session] = begun + int(values["x"].sum())
        y = np.array([[self.sums[session]]], np.uint32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
"""
SESSIONS = """
sequence_batching { control_input {
  name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }
} }
"""
# A model folder that a stranger wants to have run.
INTRUDER = """
from pathlib import Path
Path({marker!r}).touch()

class TritonPythonModel:
    pass
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("strangers")
    repository = add_model(folder / "repo", "double", NAMING)
    with _server(repository, folder, Access(max_request_mb=LIMIT_MB)) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
        try:
            server.start(timeout_s=240)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield server


def _server(repository: Path, folder: Path, access: Access) -> ModelServer:
    return ModelServer(
        repository,
        ports=FREE_PORTS,
        log_path=folder / "triton.log",
        access=access,
        has_triton=True,
    )


def _http(
    server: ModelServer,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    connection = HTTPConnection(server.address("http"), timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _call(channel: grpc.Channel, name: str, request: Any = b"") -> bytes:
    data = request if isinstance(request, bytes) else request.SerializeToString()
    reply: bytes = channel.unary_unary(name)(data, timeout=30)
    return reply


def _code(channel: grpc.Channel, name: str) -> grpc.StatusCode:
    try:
        _call(channel, name)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _connected(server: ModelServer, timeout_s: float | None = 30) -> socket.socket:
    host, port = server.address("http").split(":")
    return socket.create_connection((host, int(port)), timeout_s)


def _still_answers(server: ModelServer) -> bool:
    status, body = _http(server, "POST", "/v2/models/double/infer", json.dumps(INFER))
    return status == 200 and json.loads(body)["outputs"][0]["data"] == [2, 4]


def _log_is_quiet(server: ModelServer) -> bool:
    """Return whether the server has logged no traceback of a client's error."""
    log = server.log_path.read_text()
    return "Error handling request" not in log and "Unhandled exception" not in log


def _intrusion(marker: Path) -> dict[str, bytes]:
    tensor = {"data_type": "TYPE_UINT32", "dims": [1]}
    config = json.dumps(
        {
            "backend": "python",
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "y", **tensor}],
            "instance_group": [{"kind": "KIND_CPU"}],
        }
    )
    script = INTRUDER.format(marker=str(marker))
    return {"config": config.encode(), "file:1/model.py": script.encode()}


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_nobody_loads_a_model_of_its_own_over_http(server, tmp_path, content_type):
    marker = tmp_path / "ran"
    parameters = {
        name: value.decode() if name == "config" else base64.b64encode(value).decode()
        for name, value in _intrusion(marker).items()
    }
    status, _ = _http(
        server,
        "POST",
        "/v2/repository/models/intruder/load",
        json.dumps({"parameters": parameters}),
        {"Content-Type": content_type, "Origin": "http://a.page"},
    )
    assert status == 403
    assert not marker.exists()


def test_nobody_loads_a_model_of_its_own_over_grpc(server, tmp_path):
    marker = tmp_path / "ran"
    request = service_pb2.RepositoryModelLoadRequest(model_name="intruder")
    for name, value in _intrusion(marker).items():
        if name == "config":
            request.parameters[name].string_param = value.decode()
        else:
            request.parameters[name].bytes_param = value
    with (
        grpc.insecure_channel(server.address("grpc")) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        _call(channel, f"{CALLS}RepositoryModelLoad", request)
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert not marker.exists()


def test_the_whole_of_http_as_a_stranger_sees_it(server):
    def statuses(requests: list[tuple[str, str]]) -> set[int]:
        bodies = {"GET": None, "POST": "{}", "PUT": "{}"}
        return {_http(server, each, path, bodies[each])[0] for each, path in requests}

    assert statuses(OPEN) == {200}
    assert statuses(CLOSED) == {403}
    assert _still_answers(server)


def test_the_whole_of_grpc_as_a_stranger_sees_it(server):
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert set(methods) > OPEN_CALLS
    with grpc.insecure_channel(server.address("grpc")) as channel:
        codes = {name: _code(channel, CALLS + name) for name in methods}
    denied = {name for name, code in codes.items() if code == grpc.StatusCode.PERMISSION_DENIED}
    assert denied == set(methods) - OPEN_CALLS
    assert _still_answers(server)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://a.page", "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.a.page:8000"},
        {"Host": "127.0.0.1.a.page"},
        {"Host": ""},
    ],
)
def test_web_pages_are_refused(server, headers):
    body = json.dumps(INFER)
    assert _http(server, "POST", "/v2/models/double/infer", body, headers)[0] == 403
    assert _http(server, "GET", "/v2/models/double/config", None, headers)[0] == 403


def _taken_memory(server: ModelServer) -> int:
    """Return the shared memory of the server's own processes."""
    maps = [Path(f"/proc/{pid}/maps") for pid in processes(server)]
    words = {line.split()[-1] for each in maps for line in each.read_text().splitlines()}
    files = [Path(word) for word in words if word.startswith("/dev/shm/")]
    return sum(each.stat().st_blocks * 512 for each in files if each.exists())


def _too_large_json() -> bytes:
    numbers = b",".join([b"1"] * (LIMIT_MB << 19))
    return b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"UINT32","data":[' + numbers + b"]}]}"


@pytest.mark.parametrize("form", ["declared", "chunked", "compressed", "never sent"])
def test_bodies_beyond_the_limit_are_refused_unread(server, form):
    path, body = "/v2/models/double/infer", _too_large_json() + b" " * (LIMIT_MB << 20)
    before = _taken_memory(server)
    assert before
    if form == "declared":
        status, answer = _http(server, "POST", path, body)
    elif form == "chunked":
        parts = (body[start : start + 65536] for start in range(0, len(body), 65536))
        try:
            status, answer = _http(server, "POST", path, parts)
        except (BrokenPipeError, ConnectionResetError):
            status, answer = 413, b"MiB"  # it closes the connection while more is sent
    elif form == "compressed":
        headers = {"Content-Encoding": "gzip"}
        status, answer = _http(server, "POST", path, gzip.compress(body), headers)
    else:
        status, answer = _http(server, "POST", path, None, {"Content-Length": str(1 << 40)})
    assert status == 413
    assert b"MiB" in answer
    assert _taken_memory(server) - before < LIMIT_MB << 20
    assert _still_answers(server)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_messages_beyond_the_limit_are_refused(server, compression):
    request = _double_request(content=bytes(2 * LIMIT_MB << 20))
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.address("grpc"), options=unlimited) as channel:
        for name in ("ModelInfer", "ModelStreamInfer"):
            call = channel.stream_stream(CALLS + name)
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([request.SerializeToString()]), timeout=30, compression=compression))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _still_answers(server)


def _peak_mb(server: ModelServer) -> float:
    """Return the most memory that the server has had since the last call."""
    process = Path(f"/proc/{server.pid}")
    status = (process / "status").read_text()
    (process / "clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def test_a_compressed_message_takes_no_more_memory_than_a_plain_one(server):
    """gRPC itself would expand 48 KiB to 48 MiB before it looks at the size."""
    _peak_mb(server)
    usual = _peak_mb(server)
    plain = _double_request().SerializeToString()
    with grpc.insecure_channel(
        server.address("grpc"), options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        for name, compression in (
            ("ModelInfer", grpc.Compression.Gzip),
            ("ModelStreamInfer", grpc.Compression.Deflate),
            ("ModelConfig", grpc.Compression.Gzip),
        ):
            call = channel.stream_stream(CALLS + name)
            if name != "ModelConfig":
                assert list(call(iter([plain]), timeout=30, compression=compression))
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([bytes(48 << 20)]), timeout=30, compression=compression))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _peak_mb(server) - usual < 8 * LIMIT_MB
    assert _still_answers(server)


def test_an_error_that_quotes_a_long_name_reaches_its_client(server):
    request = service_pb2.ModelConfigRequest(name="ä" * 100_000)
    with (
        grpc.insecure_channel(server.address("grpc")) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        _call(channel, f"{CALLS}ModelConfig", request)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert caught.value.details().startswith("Request for unknown model: 'ää")
    assert len(caught.value.details()) < 3000


def _double_request(shape: tuple[int, ...] = (1, 2), content: bytes = bytes(8)) -> Any:
    message = service_pb2.ModelInferRequest(model_name="double")
    message.inputs.add(name="x", datatype="UINT32", shape=shape)
    message.raw_input_contents.append(content)
    return message


def _cpu_s(server: ModelServer) -> float:
    """Return the seconds that the server has computed."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _expanding(coding: str) -> bytes:
    """Return a body of some kilobytes that expands to as many megabytes as the coding allows."""
    zeros = bytes(1 << 20)
    if coding == "br":
        press = brotli.Compressor(quality=5)
        return b"".join(press.process(zeros) for _ in range(512)) + press.finish()
    body = gzip.compress(zeros * 16)
    return gzip.compress(body) if coding == "gzip, gzip" else body


@pytest.mark.parametrize("coding", ["br", "gzip", "gzip, gzip", "gzip, br"])
def test_who_has_no_token_makes_nobody_decompress(guarded, coding):
    """16 kB of them stopped every port for seconds, expanded before the token was read."""
    server, body = guarded[0], _expanding(coding)
    assert len(body) < 20_000
    headers = {"Content-Encoding": coding}
    before = _cpu_s(server)
    for _ in range(4):
        assert _https(guarded, "POST", "/v2/models/double/infer", body, headers)[0] == 401
    assert _cpu_s(server) - before < 0.2


def test_who_has_no_token_makes_nobody_read_a_message(guarded):
    server, folder = guarded
    trust = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
    zeros = bytes(64 << 20)
    options = [("grpc.max_send_message_length", -1)]
    with grpc.secure_channel(
        f"localhost:{server.ports['grpc']}", trust, options=options
    ) as channel:
        before = _cpu_s(server)
        for name in ("ServerLive", "ServerReady"):  # which need none
            call = channel.unary_unary(CALLS + name)
            assert call(zeros, timeout=30, compression=grpc.Compression.Gzip) == b"\x08\x01"
        call = channel.unary_unary(f"{CALLS}ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(zeros, timeout=30, compression=grpc.Compression.Gzip)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert _cpu_s(server) - before < 0.2


def test_a_refused_body_costs_no_more_than_its_bytes(server):
    path, before = "/v2/models/double/infer", _cpu_s(server)
    for coding, status in (("br", 415), ("gzip, gzip", 415), ("gzip", 413), ("deflate", 400)):
        body = _expanding(coding)
        answer = _http(server, "POST", path, body, {"Content-Encoding": coding})
        assert answer[0] == status, answer
    assert _cpu_s(server) - before < 0.3


def _https(
    guarded: tuple[ModelServer, Path],
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes]:
    server, folder = guarded
    trust = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    connection = HTTPSConnection("localhost", server.ports["http"], timeout=30, context=trust)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


def _turn(session_id: int | str, value: int, **flags: bool) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "UINT32", "data": [value]}
    return {"inputs": [tensor], "parameters": {"sequence_id": session_id, **flags}}


@pytest.mark.parametrize("session_id", [1, 2**63 - 5])
def test_a_session_is_nobody_elses(guarded, session_id):
    """The sum of a session's values is its owner's, whoever guesses its number."""

    def ask(token: str, value: int, **flags: bool) -> Any:
        body = json.dumps(_turn(session_id, value, **flags))
        headers = {"Authorization": f"Bearer {token}"}
        answer = json.loads(_https(guarded, "POST", "/v2/models/sums/infer", body, headers)[1])
        assert "outputs" in answer or not flags, answer
        return answer

    other = "0" * 40
    assert ask(TOKEN, 5, sequence_start=True)["outputs"][0]["data"] == [5]
    refusal = ask(other, 100)["error"]
    assert "START" in refusal
    assert "for this sequence to model" in refusal
    assert ask(other, 7, sequence_start=True)["outputs"][0]["data"] == [7]
    assert ask(TOKEN, 6)["outputs"][0]["data"] == [11]  # over a connection of its own
    (inputs,) = [np.array([[3]], np.uint32)]
    with _client(guarded, "grpc", "token", "cert.pem") as client:
        turn = SessionTurn(session_id, ends=True)
        assert client.infer("sums", {"x": inputs}, turn=turn)["y"] == [[14]]
    assert ask(other, 1, sequence_end=True)["outputs"][0]["data"] == [8]


def _shaped(*shape: int, name: str = "x") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": "UINT32", "data": [1, 2]}


def test_no_form_of_a_request_ends_the_server(server):
    pid, infer = triton_of(server), "/v2/models/double/infer"
    deep = b'{"x":' + b"[" * 40 + b"]" * 40 + b"}"
    requests: list[tuple[str, bytes, dict[str, str]]] = [
        (infer, deep, {}),
        ("/v2/models/double/generate", deep, {}),
        ("/v2/models/double/generate_stream", deep, {}),
        ("/v2/repository/index", deep, {}),
        (infer, json.dumps({"inputs": [_shaped(2**40)]}).encode(), {}),
        (infer, json.dumps({"inputs": [_shaped(1, 2)] * 300}).encode(), {}),
        (infer, json.dumps({"parameters": {str(key): 1 for key in range(300)}}).encode(), {}),
        # The refusal quotes 500 kB, in which names of the server's own are looked for.
        (infer, json.dumps({**INFER, "outputs": [{"name": "unix:" * 100_000}]}).encode(), {}),
        (infer, json.dumps({**INFER, "outputs": [CLASSES]}).encode(), {}),
    ]
    for path, body, headers in requests:
        status, answer = _http(server, "POST", path, body, headers)
        assert (status, b"error" in answer) == (400, True), (body[:60], answer)
    for coding, refusal in (("gzip", 400), ("deflate", 400), ("br", 415), ("gzip, gzip", 415)):
        headers = {"Content-Encoding": coding}
        assert _http(server, "POST", infer, json.dumps(INFER), headers)[0] == refusal
    headers = {"Accept-Encoding": "deflate;q=nan,gzip;q=1e999"}
    assert _http(server, "POST", infer, json.dumps(INFER), headers)[0] == 200
    assert triton_of(server) == pid
    assert _still_answers(server)
    assert _log_is_quiet(server)


def test_no_form_of_a_message_ends_the_server(server):
    pid = triton_of(server)
    shapes = ((2**63 - 1,), (1, 2**61), (1, 2**62 + 2), (2**62, 4), (0, 0), (-1, -2))
    messages = [b"\xff" * 1000, *(_double_request(each).SerializeToString() for each in shapes)]
    message = _double_request()
    message.outputs.add(name="y").parameters["classification"].int64_param = 1
    messages.append(message.SerializeToString())
    with grpc.insecure_channel(server.address("grpc")) as channel:
        for message in messages:
            call = channel.unary_unary(f"{CALLS}ModelInfer")
            with pytest.raises(grpc.RpcError) as caught:
                call(message, timeout=30)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            stream = channel.stream_stream(
                f"{CALLS}ModelStreamInfer",
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            if message == messages[0]:
                with pytest.raises(grpc.RpcError):
                    list(stream(iter([message]), timeout=30))
            else:
                (answer,) = stream(iter([message]), timeout=30)
                assert answer.error_message
    assert triton_of(server) == pid
    assert _still_answers(server)


def test_clients_that_leave_at_any_moment_do_no_harm(server):
    pid = triton_of(server)
    requests = [_double_request().SerializeToString()] * 20
    with grpc.insecure_channel(server.address("grpc")) as channel:
        for turn in range(60):
            call = channel.stream_stream(f"{CALLS}ModelStreamInfer")
            stream = call(iter(requests), timeout=30)
            time.sleep(turn % 5 / 1000)
            stream.cancel()
    body = json.dumps(INFER).encode()
    head = b"POST /v2/models/double/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    for turn in range(60):
        with _connected(server, None) as client:
            client.sendall(head % len(body) + body[: len(body) // (turn % 3 + 1)])
            time.sleep(turn % 5 / 1000)
    assert triton_of(server) == pid
    assert _still_answers(server)
    assert _log_is_quiet(server)


def test_connections_that_never_send_a_whole_request_keep_nobody_out(
    server,
):
    with contextlib.ExitStack() as idle:
        for _ in range(FEW_FILES + 100):
            client = _connected(server)
            idle.enter_context(client).sendall(b"POST /v2/models/double/infer HTTP/1.1\r\nHos")
        assert _still_answers(server)
        assert server.failure() is None


def test_other_users_cannot_read_the_servers_memory(server):
    shared = segments(server)
    assert len(shared) > 1
    assert not [path for path in shared if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_errors_do_not_name_the_servers_memory(server):
    naming = {**INFER, "inputs": [{**INFER["inputs"][0], "data": [TALKATIVE, 0]}]}
    errors = [_http(server, "POST", "/v2/models/double/infer", json.dumps(naming))[1].decode()]
    content = np.array([TALKATIVE, 0], np.uint32).tobytes()
    data = _double_request(content=content).SerializeToString()
    with grpc.insecure_channel(server.address("grpc")) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            _call(channel, f"{CALLS}ModelInfer", data)
        errors.append(caught.value.details())
        stream = channel.stream_stream(f"{CALLS}ModelStreamInfer")(iter([data]), timeout=30)
        (reply,) = stream
        errors.append(service_pb2.ModelStreamInferResponse.FromString(reply).error_message)
    for error in errors:
        assert "no room in (internal), (internal)" in error


def test_a_request_has_one_length(server):
    smuggled = b"POST /v2/repository/models/double/unload HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /v2/models/double/infer HTTP/1.1\r\nHost: localhost\r\n"
    for lengths in (
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 4\r\nContent-Length: 0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    ):
        with _connected(server) as attacker:
            attacker.sendall(head + lengths + smuggled)
            answer = b"".join(iter(lambda: attacker.recv(65536), b""))
        assert re.findall(rb"HTTP/1\.. (\d+)", answer) == [b"400"], lengths
    assert _log_is_quiet(server)
    assert _still_answers(server)


@pytest.mark.parametrize(("version", "interim"), [("1.0", []), ("1.1", [b"100"])])
def test_a_client_of_http_1_0_gets_one_answer(server, version, interim):
    """It knows no interim ones (RFC 9110, 10.1.1)."""
    body = json.dumps(INFER)
    head = (
        f"POST /v2/models/double/infer HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    )
    head += f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    with _connected(server) as client:
        client.sendall((head + body).encode())
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert re.findall(rb"HTTP/1\.. (\d+)", answer) == [*interim, b"200"]


def test_only_the_owner_enters_the_servers_sockets(server):
    listening = subprocess.run(
        ["ss", "-Hltnp"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert not [line for line in listening if f"pid={triton_of(server)}," in line]
    arguments = Path(f"/proc/{triton_of(server)}/cmdline").read_text()
    folder = re.search(r"--grpc-address=unix:([^\0]+)/grpc", arguments)
    assert folder is not None
    assert stat.S_IMODE(Path(folder[1]).stat().st_mode) == 0o700


def test_the_list_of_models_says_nothing_of_the_servers_inside(server):
    with TritonClient(server.address("grpc")) as client:
        assert client.models() == [{"name": "double", "state": "READY"}]
    with TritonClient(server.address("http"), protocol="http") as client:
        assert client.models() == [{"name": "double", "state": "READY"}]


# With keys: TLS and tokens.

TOKEN = "6f1c6b0a8d2e4f7390ab12cd34ef56789a0b1c2d"
PROTOCOLS = ["grpc", "http"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModelServer, Path]]:
    """Return a server that asks for a token over TLS, and the folder of its keys."""
    folder = tmp_path_factory.mktemp("guarded")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / "tokens").write_text(f"{'0' * 40}\n{TOKEN}\n")
    (folder / "token").write_text(TOKEN)
    (folder / "wrong").write_text(TOKEN[::-1])
    for name in ("key.pem", "tokens", "token", "wrong"):
        (folder / name).chmod(0o600)
    access = Access(
        tls_cert=folder / "cert.pem",
        tls_key=folder / "key.pem",
        token_file=folder / "tokens",
    )
    repository = add_model(folder / "repo", "double", DOUBLE)
    config = add_model(repository, "sums", SUMS) / "sums" / "config.pbtxt"
    config.write_text(config.read_text() + SESSIONS)
    with _server(repository, folder, access) as server:
        server.start(timeout_s=240)
        yield server, folder


def _client(
    guarded: tuple[ModelServer, Path], protocol: str, token: str | None, ca: str | None
) -> TritonClient:
    server, folder = guarded
    port = server.ports["grpc"] if protocol == "grpc" else server.ports["http"]
    credentials = Credentials(
        uses_tls=ca is not None,
        ca=None if ca is None else folder / ca,
        token_file=None if token is None else folder / token,
    )
    return TritonClient(
        f"localhost:{port}", protocol=protocol, timeout_s=10, credentials=credentials
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_with_certificate_and_token_is_served(guarded, protocol):
    x = np.array([[3]], np.uint32)
    with _client(guarded, protocol, "token", "cert.pem") as client:
        assert client.infer("double", {"x": x})["y"] == [[6]]
        assert client.infer_async("double", {"x": x}).result(10)["y"] == [[6]]
        if protocol == "grpc":
            assert [frame["y"] for frame in client.stream("double", {"x": x})] == [[[6]]]


@pytest.mark.parametrize("token", [None, TOKEN[::-1], TOKEN])
def test_https_asks_for_the_token(guarded, token):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for path, is_open in (("/v2/health/ready", True), ("/v2/models/double", token == TOKEN)):
        status, _ = _https(guarded, "GET", path, headers=headers)
        assert status == (200 if is_open else 401)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_the_token_only_health_is_seen(guarded, protocol, token):
    from tritonclient.utils import InferenceServerException

    with _client(guarded, protocol, token, "cert.pem") as client:
        assert client.is_ready()
        for ask in (client.models, lambda: client.input_types("double")):
            with pytest.raises(InferenceServerException, match=r"Bearer <token>"):
                ask()


def test_no_process_shows_a_secret(guarded):
    server, folder = guarded
    secrets = [TOKEN.encode(), (folder / "key.pem").read_bytes().splitlines()[1]]
    for pid in processes(server):
        for name in ("cmdline", "environ"):
            shown = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not [each for each in secrets if each in shown]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_nothing_is_served_in_the_clear(guarded, protocol):
    with _client(guarded, protocol, "token", None) as client:
        assert not client.is_ready()


def test_the_command_of_clients_takes_ca_and_token(guarded, capsys):
    from inference.client import main

    server, folder = guarded
    keys = ["--ca", str(folder / "cert.pem"), "--token-file", str(folder / "token")]
    ports = {"grpcs": server.ports["grpc"], "https": server.ports["http"]}
    urls = [f"{scheme}://localhost:{port}" for scheme, port in ports.items()][: len(PROTOCOLS)]
    for url in urls:
        assert main(["health", "--url", url, *keys]) == 0
    assert capsys.readouterr().out.count("double: READY") == len(urls)
    (folder / "open").write_text(TOKEN)
    (folder / "open").chmod(0o644)
    assert main(["health", *keys[:2], "--token-file", str(folder / "open")]) == 1
    assert "chmod 600" in capsys.readouterr().err
