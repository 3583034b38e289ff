"""The front before another engine's server: who may ask what, and how both end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from inference.front.openai.proxy import front_command, with_own_names
from inference.system.ports import pick_free_ports
from tests.waiting import until

TOKEN = "t" * 24
# Answers with what it was asked; a stream has a second part once its FIFO is opened, and is broken
# off where the prompt says so.
ENGINE = r"""
import http.server, json, os, signal, sys, threading
port, fifo = int(sys.argv[1]), sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def send(self, status, data, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        if self.path == "/metrics":
            return self.send(200, b'vllm:num_requests_running{model_name="m"} 2.0\n', "text/plain")
        self.send(200, b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not body.get("stream"):
            key = self.headers["authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
            names = [name.lower() for name in self.headers]
            return self.send(200, json.dumps({"key": key, "names": names, "body": body}).encode())
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"9\r\ndata: 1\n\n\r\n")
        if body["prompt"] == "fails":
            self.close_connection = True
            return
        open(fifo).close()
        self.wfile.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
def leave(*_):
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, leave)
server.serve_forever()
print("ended in order", flush=True)
sys.exit(5)
"""


class Front:
    """A front that runs, with the log of it and of its engine."""

    def __init__(self, folder: Path) -> None:
        token_file, program = folder / "tokens", folder / "engine.py"
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        program.write_text(ENGINE)
        self.fifo = folder / "more"
        os.mkfifo(self.fifo)
        (self.port,) = pick_free_ports("127.0.0.1", 1)
        access = {"token_file": token_file, "max_request_mb": 1, "tls_cert": None}
        command = [sys.executable, str(program), "{port}", str(self.fifo)]
        words = front_command(command, access, host="{host}", port="{port}", logs=True)
        fields = {"{host}": "127.0.0.1", "{port}": str(self.port)}
        for field, value in fields.items():
            words = [word.replace(field, value) for word in words]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        until(self._is_healthy)

    def _is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.ask("GET", "/health", token=None)[0] == 200
        except ConnectionRefusedError:
            return False

    def open(
        self, method: str, path: str, body: object = None, *, token: str | None = TOKEN
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"x-request-id": "mine"} | ({"authorization": f"Bearer {token}"} if token else {})
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data, headers)
        return connection

    def ask(
        self, method: str, path: str, body: object = None, *, token: str | None = TOKEN
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with closing(self.open(method, path, body, token=token)) as connection:
            response = connection.getresponse()
            return response.status, response.headers, response.read()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    running = Front(tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def test_clients_pass_the_guard_and_are_answered_by_the_engine(front: Front) -> None:
    status, headers, data = front.ask("POST", "/v1/completions", {"prompt": "a"})
    answer = json.loads(data)
    assert (status, headers["x-request-id"], answer["body"]) == (200, "mine", {"prompt": "a"})
    assert answer["key"], "the engine has a token of its own"
    assert "x-request-id" in answer["names"]
    assert front.ask("POST", "/v1/completions", {}, token="u" * 24)[0] == 401
    assert front.ask("GET", "/v1/models", token=None)[0] == 401
    for method, path in (
        ("POST", "/v1/load_lora_adapter"), ("GET", "/v1/%6dodels"), ("DELETE", "/v1/models/m"),
    ):  # fmt: skip
        assert front.ask(method, path, {})[0] == 403
    status, _, data = front.ask("POST", "/v1/completions", b"x" * (1 << 20) + b"x")
    assert (status, json.loads(data)["error"]["type"]) == (413, "invalid_request_error")
    status, _, data = front.ask("GET", "/metrics")
    lines = data.decode().splitlines()
    assert 'vllm:num_requests_running{model_name="m"} 2.0' in lines
    assert 'slipway_running_sequences{model="m"} 2.0' in lines
    assert 'slipway_front_requests_total{code="403"} 3' in lines
    logged = [json.loads(line) for line in front.log.read_text().splitlines()]
    assert {"POST", 413, "mine"} <= {logged[-2][key] for key in ("method", "status", "request_id")}


def test_an_answer_that_the_engine_breaks_off_is_broken_off(front: Front) -> None:
    sent = {"prompt": "fails", "stream": True}
    with closing(front.open("POST", "/v1/completions", sent)) as connection:
        response = connection.getresponse()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()


def test_at_its_end_it_finishes_what_has_begun(front: Front) -> None:
    sent = {"prompt": "a", "stream": True}
    with closing(front.open("POST", "/v1/completions", sent)) as connection:
        response = connection.getresponse()
        assert response.readline() == b"data: 1\n"
        front.process.terminate()
        until(lambda: front.ask("GET", "/health")[0] == 503)
        status, headers, _ = front.ask("POST", "/v1/completions", {})
        assert (status, headers["retry-after"]) == (503, "1")
        front.fifo.write_bytes(b"")
        assert response.read() == b"\ndata: 2\n\n"
    assert front.process.wait(60) == 5, "the engine's status"
    assert front.log.read_text().splitlines()[-1] == "ended in order"


def engine_of(front: Front) -> int:
    number = front.process.pid
    (engine,) = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    return int(engine)


def test_a_front_that_is_killed_leaves_no_engine(front: Front) -> None:
    engine = Path(f"/proc/{engine_of(front)}")
    front.process.kill()
    until(lambda: not engine.exists(), "the engine's end")


def test_the_end_of_the_engine_ends_the_front(front: Front) -> None:
    os.kill(engine_of(front), signal.SIGKILL)
    assert front.process.wait(60) == 128 + signal.SIGKILL


def test_metrics_of_vllm_have_our_names() -> None:
    theirs = """# HELP vllm:prompt_tokens_total Tokens
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
vllm:e2e_request_latency_seconds_bucket{le="0.5",model_name="m"} 3.0
vllm:of_next_year{model_name="m"} 1.0
"""
    assert [*with_own_names(theirs)] == [
        "# HELP slipway_prompt_tokens_total Tokens",
        'slipway_prompt_tokens_total{engine="0",model="m"} 7.0',
        'slipway_request_duration_seconds_bucket{le="0.5",model="m"} 3.0',
    ]
