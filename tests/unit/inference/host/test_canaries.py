"""Canaries to stand-ins: what hangs is found, and what advances or computes is left alone."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inference.front.link import CanaryTimes
from inference.front.rules import InferError
from inference.host import canaries
from inference.host.canaries import Canaries, CpuTimes, cpu_times_of
from inference.server.processes import process_state
from tests.waiting import until

TIMES = CanaryTimes(interval_s=0.01, timeout_s=0.5)
MAX_READY_SILENT_S, MAX_SILENT_S = 0.3, 2.0  # in place of 30 and 300 s


class Served:
    """One model, which answers while `answers` is set, and counts what others asked it for."""

    def __init__(self) -> None:
        self.models: Any = {"m": SimpleNamespace(name="m")}
        self.answers = asyncio.Event()
        self.answers.set()
        self.finished = self.asked = 0
        self.share = 0.0  # of a core that it computes on
        self.error: Exception | None = None
        self.lost: list[str] = []
        self.watch = Canaries(
            self,  # type: ignore[arg-type]
            TIMES,
            on_failure=self.lost.append,
            computed=lambda: CpuTimes({(1, 1): self.share * time.monotonic()}),
        )

    async def probe(self, model: Any, *, is_canary: bool) -> None:
        assert (model.name, is_canary) == ("m", True)
        self.asked += 1
        if self.error is not None:
            raise self.error
        await self.answers.wait()

    def progress(self) -> int:
        return self.finished

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            await asyncio.sleep(0.01)


def watched(check: Callable[[Served], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a model that has answered its first canaries."""
    monkeypatch.setattr(canaries, "_MIN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(canaries, "_TIMEOUT_FACTOR", 0.0)  # the least, however slow this machine is
    monkeypatch.setattr(canaries, "_MAX_READY_SILENT_S", MAX_READY_SILENT_S)
    monkeypatch.setattr(canaries, "_MAX_SILENT_S", MAX_SILENT_S)

    async def run() -> None:
        served = Served()
        await served.until(lambda: served.asked > 1)
        assert served.watch.is_ready()
        await check(served)
        await served.watch.close()

    asyncio.run(asyncio.wait_for(run(), timeout=30))


def test_a_silent_model_is_not_ready_first_and_lost_later(monkeypatch):
    async def check(served: Served) -> None:
        served.answers.clear()
        await served.until(lambda: not served.watch.is_ready())
        await served.until(lambda: served.lost)
        assert served.lost[0].startswith("model m has not answered a canary for ")

    watched(check, monkeypatch)


def test_an_answer_after_silence_is_readiness(monkeypatch):
    async def check(served: Served) -> None:
        served.answers.clear()
        await served.until(lambda: not served.watch.is_ready())
        served.answers.set()
        await served.until(served.watch.is_ready)
        assert not served.lost

    watched(check, monkeypatch)


def test_a_model_that_finishes_others_requests_is_busy(monkeypatch):
    async def check(served: Served) -> None:
        served.answers.clear()
        asked = served.asked
        end = time.monotonic() + 1.5 * MAX_SILENT_S
        while time.monotonic() < end:
            served.finished += 1
            await asyncio.sleep(0.01)
            assert served.watch.is_ready()
        assert served.asked > asked + 2
        assert not served.lost

    watched(check, monkeypatch)


def test_a_model_that_computes_is_left_alone_for_a_while(monkeypatch):
    async def check(served: Served) -> None:
        served.share = 0.5
        served.answers.clear()
        began = time.monotonic()
        await served.until(lambda: not served.watch.is_ready())
        assert time.monotonic() - began >= MAX_READY_SILENT_S
        await served.until(lambda: served.lost)
        assert time.monotonic() - began >= MAX_SILENT_S
        assert "has not finished anything for" in served.lost[0]

    watched(check, monkeypatch)


@pytest.mark.parametrize("error", [InferError("out of memory", "INTERNAL"), KeyError("gone")])
def test_two_errors_in_a_row_are_a_loss(error, monkeypatch):
    async def check(served: Served) -> None:
        served.error = error
        await served.until(lambda: served.lost)
        assert served.lost == [f"model m answers a canary with: {error}"]

    watched(check, monkeypatch)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INVALID_ARGUMENT"])
def test_a_refused_canary_is_an_answer(code, monkeypatch):
    async def check(served: Served) -> None:
        served.error, asked = InferError("busy", code), served.asked
        await served.until(lambda: served.asked > asked + 3)
        assert served.watch.is_ready()
        assert not served.lost

    watched(check, monkeypatch)


def test_the_wait_grows_with_the_slowest_answer():
    async def check() -> None:
        watch = Served().watch
        (target,) = watch._targets
        assert watch._timeout_s(target) == TIMES.timeout_s  # it has not answered yet
        target.slowest_s = 0.01
        watch._times = CanaryTimes(timeout_s=20.0)
        assert watch._timeout_s(target) == 5.0
        target.slowest_s = 0.2
        assert watch._timeout_s(target) == pytest.approx(10.0)
        target.silent_since = 1.0
        assert watch._timeout_s(target) == 20.0
        await watch.close()

    asyncio.run(check())


def test_a_process_that_ends_takes_no_time_away():
    busy = "import time; any(time.process_time() > 0.5 for _ in iter(int, 1)); input()"
    process = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE)
    until(lambda: (state := process_state(process.pid)) is not None and state.cpu_s > 0.3)
    before = cpu_times_of(os.getpid())
    assert before.since(CpuTimes()) > 0.3
    process.communicate(b"\n")
    assert cpu_times_of(os.getpid()).since(before) >= 0
