"""Servers that are replaced one after another, under load, behind a simple balancer."""

import http.client
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from inference.system.ports import pick_free_ports
from tests.conftest import ROOT
from tests.waiting import until

PAUSE_S = 0.1  # of a client, which leaves the processors to the server that starts
BODY = json.dumps({"INPUT_0": "It was", "INPUT_1": 12, "min_length": 12})


class Replica:
    """A server on ports of its own, which can be ended and started again."""

    def __init__(self, repository: Path, log: Path) -> None:
        ports = pick_free_ports("127.0.0.1", 3)
        self.port = ports[0]
        names = ("http", "grpc", "metrics")
        options = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
        self.command = [sys.executable, "-m", "inference.server",
                        f"--model-repository={repository}", "--server=slipway", "--drain-s=20",
                        *options]  # fmt: skip
        self.log = log

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)
        until(self.is_ready, "a ready server", limit_s=120)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()

    def is_ready(self) -> bool:
        try:
            return self.ask("GET", "/v2/health/ready")[0] == HTTPStatus.OK
        except OSError:
            return False

    def ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def load(replicas: list[Replica], seen: list[str]) -> Iterator[None]:
    """Ask in three threads, as a balancer passes requests on: to the next after 503 or refusal."""
    turns, over = itertools.count(), threading.Event()

    def client() -> None:
        while not over.wait(PAUSE_S):
            seen.append(balanced(replicas, next(turns)))

    threads = [threading.Thread(target=client) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join(60)


def balanced(replicas: list[Replica], turn: int) -> str:
    """Return the text of an answer, or why there is none."""
    for number in range(len(replicas)):
        replica = replicas[(turn + number) % len(replicas)]
        try:
            status, answer = replica.ask("POST", "/v2/models/ensemble/generate", BODY)
        except ConnectionRefusedError:
            continue
        except (OSError, http.client.HTTPException) as error:
            return f"lost: {error!r}"
        if status == HTTPStatus.OK:
            return str(json.loads(answer)["OUTPUT_0"])
        if status != HTTPStatus.SERVICE_UNAVAILABLE:
            return f"lost: {status} {answer!r}"
    return "lost: no replica takes it"


@pytest.mark.long  # the end of one server is tested in test_own_server
def test_a_rolling_restart_loses_no_request(sample_repository, tmp_path):
    repository = sample_repository(tp_size=1, parameters={"device": "cpu"})
    replicas = [Replica(repository, tmp_path / f"{number}.log") for number in range(2)]
    seen: list[str] = []
    try:
        for each in replicas:
            each.start()
        with load(replicas, seen):
            for each in replicas:
                count = len(seen)
                until(lambda count=count: len(seen) > count + 6)  # type: ignore[misc]
                each.end()
                each.start()
            count = len(seen)
            until(lambda: len(seen) > count + 6)
    finally:
        for each in replicas:
            each.process.kill()
    assert len(set(seen)) == 1, set(seen)
    assert not seen[0].startswith("lost")
