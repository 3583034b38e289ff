"""Canaries to a stand-in for a server: silence ends readiness, and slowness alone ends nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from inference.server import canary
from inference.server.canary import Canary
from tests.waiting import until

CONFIG = {"input": [{"name": "x", "data_type": "TYPE_UINT32", "dims": [1]}], "max_batch_size": 1}
LEAST_S = 0.3  # in place of 5 s
MOST_S = 3.0  # in place of 20 s


class Server(ThreadingHTTPServer):
    """One model, `m`, which answers while `answers` is set; `count` requests were answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = threading.Event()
        self.answers.set()
        self.count = 0
        self.canaries = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(
                f'nv_inference_request_success{{model="m",version="1"}} {self.server.count}\n'
            )
        else:
            self._answer(json.dumps(CONFIG))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.canaries += 1
        self.server.answers.wait(30)
        self.server.count += 1
        self._answer("{}")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(canary, "_LEAST_TIMEOUT_S", LEAST_S)
    monkeypatch.setattr(canary, "_SLOWER", 0.0)  # the least, however slow this machine is
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()


@pytest.fixture
def canary_of(server: Server, tmp_path: Path) -> Iterator[Canary]:
    sender = Canary(
        server.address,
        server.address,
        ["m"],
        interval_s=0.05,
        timeout_s=MOST_S,
        unready=tmp_path / "unready",
    )
    sender.start()
    yield sender
    sender.stop()


def test_silent_model_is_not_ready_first_and_a_failure_later(
    server: Server, canary_of: Canary, tmp_path: Path
) -> None:
    until(lambda: server.canaries > 1, "the first canaries")
    assert not (tmp_path / "unready").exists()
    server.answers.clear()
    until((tmp_path / "unready").exists, "the end of readiness")
    assert canary_of.failure() is None
    until(lambda: canary_of.failure() is not None, "the failure")
    assert canary_of.failure() == f"model m has not answered a canary for {MOST_S:g} s"
    server.answers.set()
    until(lambda: canary_of.failure() is None, "the answer")
    until(lambda: not (tmp_path / "unready").exists(), "readiness")


def test_model_that_answers_others_is_not_a_failure(server: Server, canary_of: Canary) -> None:
    over = threading.Event()

    def answer_others() -> None:
        while not over.wait(0.005):
            server.count += 1

    thread = threading.Thread(target=answer_others)
    thread.start()
    try:
        server.answers.clear()  # a canary would stay without an answer
        sent = server.canaries
        until(lambda: server.canaries > sent or server.count > 400, "many answers")
        assert canary_of.failure() is None
    finally:
        over.set()
        thread.join()


def test_wait_grows_with_the_slowest_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Canary(server.address, server.address, ["m"], timeout_s=MOST_S)
    assert sender._patience_s("m") == MOST_S  # it has not answered yet
    sender._ask("m", {})
    assert sender._patience_s("m") == LEAST_S
    monkeypatch.setattr(canary, "_SLOWER", 50.0)
    sender._slowest_s["m"] = 0.02
    assert sender._patience_s("m") == pytest.approx(1.0)
    sender._slowest_s["m"] = 60.0
    assert sender._patience_s("m") == MOST_S
