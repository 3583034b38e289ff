"""Canaries to stand-ins: what hangs is found, and what advances or computes is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from inference.server import health
from inference.server.health import Health, RefusalError, Target
from tests.waiting import until

INTERVAL_S = 0.05
LEAST_S = 0.5  # in place of 5 s; a process that computes gets some of it on a busy machine
MOST_S = 0.8  # in place of 20 s
LONGEST_READY_S = 1.0  # in place of 30 s
LONGEST_S = 3.0  # in place of 300 s
SLEEPS = "import time; time.sleep(600)"
COMPUTES = "while True: pass"


class Model:
    """Answers while `answers` is set; while it `is_busy` it finishes what others asked it for."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.finished = 0
        self.is_busy = False
        self.error: str | None = None
        self.asked = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.reported: list[bool] = []

    @property
    def is_ready(self) -> bool:
        return not self.reported or self.reported[-1]

    def ask(self, timeout_s: float) -> None:
        self.asked += 1
        if self.error is not None:
            raise RefusalError(self.error)
        if not self.answers.wait(timeout_s):
            raise ConnectionError

    def advanced(self) -> int:
        self.finished += self.is_busy
        return self.finished

    def run(self, script: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", script])

    def target(self) -> Target:
        return Target(
            "model m",
            self.ask,
            advanced=self.advanced,
            processes=lambda: [self.process.pid] if self.process else [],
            longest_s=LONGEST_S,
        )


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(health, "_LEAST_TIMEOUT_S", LEAST_S)
    monkeypatch.setattr(health, "_SLOWER", 0.0)  # the least, however slow this machine is
    monkeypatch.setattr(health, "_LONGEST_READY_S", LONGEST_READY_S)
    made = Model()
    yield made
    made.answers.set()
    if made.process is not None:
        made.process.kill()
        made.process.wait()


@pytest.fixture
def watched(model: Model) -> Iterator[Health]:
    watch = Health(
        [model.target()], tell=model.reported.append, interval_s=INTERVAL_S, timeout_s=MOST_S
    )
    until(lambda: model.asked > 1, "the first canaries")
    yield watch
    watch.stop()


@pytest.mark.parametrize("script", [None, SLEEPS])
def test_silent_model_is_not_ready_first_and_a_failure_later(
    model: Model, watched: Health, script: str | None
) -> None:
    if script:
        model.run(script)
        time.sleep(1)  # it has started, and computes no more
    assert model.is_ready
    model.answers.clear()
    until(lambda: not model.is_ready, "the end of readiness")
    until(lambda: watched.failure() is not None, "the failure")
    assert (watched.failure() or "").startswith("model m has not answered a canary for ")
    model.answers.set()
    until(lambda: watched.failure() is None, "the answer")
    until(lambda: model.is_ready, "readiness")


def test_stopped_process_does_not_compute(model: Model, watched: Health) -> None:
    model.run(COMPUTES)
    assert model.process is not None
    model.process.send_signal(signal.SIGSTOP)
    model.answers.clear()
    until(lambda: watched.failure() is not None, "the failure")
    assert "has not answered a canary" in (watched.failure() or "")


def test_model_that_finishes_others_requests_is_busy(model: Model, watched: Health) -> None:
    model.is_busy = True
    model.answers.clear()
    end = time.monotonic() + 1.5 * LONGEST_S
    asked = model.asked
    while time.monotonic() < end or model.asked <= asked + 2:
        time.sleep(0.05)
        assert watched.failure() is None
        assert model.is_ready


def test_model_that_computes_is_left_alone_for_a_while_only(model: Model, watched: Health) -> None:
    model.run(COMPUTES)
    model.answers.clear()
    began = time.monotonic()
    until(lambda: not model.is_ready, "the end of readiness")
    assert time.monotonic() - began > LONGEST_READY_S
    until(lambda: watched.failure() is not None, "the failure")
    assert time.monotonic() - began > LONGEST_S
    assert "has not finished anything for" in (watched.failure() or "")


def test_two_errors_in_a_row_are_a_failure(model: Model, watched: Health) -> None:
    model.error = "out of memory"
    until(lambda: watched.failure() is not None, "the failure")
    assert watched.failure() == "model m answers a canary with: out of memory"
    model.error = None
    until(lambda: watched.failure() is None, "the answer")


def test_wait_grows_with_the_slowest_answer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    target = model.target()
    watch = Health([target], tell=model.reported.append, timeout_s=MOST_S)
    assert watch._patience_s(target) == MOST_S  # it has not answered yet
    watch._ask(target)
    assert watch._patience_s(target) == LEAST_S
    monkeypatch.setattr(health, "_SLOWER", 50.0)
    target.slowest_s = 0.01
    assert watch._patience_s(target) == pytest.approx(0.5)
    target.slowest_s = 60.0
    assert watch._patience_s(target) == MOST_S
    watch.stop()


def test_target_is_asked_also_where_the_server_does_not_say_what_it_finished(model: Model) -> None:
    def mute() -> float:
        raise ConnectionError

    target = model.target()
    target.advanced = mute
    watch = Health([], tell=model.reported.append, timeout_s=MOST_S)
    watch._ask(target)
    assert (model.asked, target.silent_since, target.faults) == (1, None, [])
    model.answers.clear()
    watch._ask(target)
    assert len(target.faults) == 1
