"""Canaries: a small request to each model of a ready server, every few seconds.

A missing answer alone is not a failure: a model that finishes other work is busy, and one that uses
the CPU may be. A model that does neither hangs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from inference.front.link import CanaryTimes
from inference.front.rules import InferError
from inference.host.hosted import Hosted
from inference.host.models import HostedModel
from inference.server.processes import descendants, process_state

# The first timeout is this multiple of a model's slowest answer so far, for a machine that has
# become slower. It only decides readiness; the next canary gets the full timeout.
_TIMEOUT_FACTOR = 50.0
_MIN_TIMEOUT_S = 5.0
# A single error may be transient, such as a shortage of memory.
_FAILURES = 2
# Share of one core above which a process counts as computing; idle processes have polling threads.
_BUSY_CORE_SHARE = 0.05
# A text model's largest request keeps a core busy for some 20 s, and a step of a large model on a
# CPU may take a minute. A model that computes for longer without finishing anything hangs.
_MAX_SILENT_S = 300.0
# A model that computes but has not answered for this long is not ready.
_MAX_READY_SILENT_S = 30.0
# Errors that count as answers: the model is busy, or the canary exceeds the model's limits.
_ANSWERS = ("UNAVAILABLE", "INVALID_ARGUMENT")


@dataclass
class _Target:
    model: HostedModel
    slowest_s: float | None = None  # its slowest answer so far
    faults: list[str] = field(default_factory=list)  # since its last answer
    silent_since: float | None = None


class CpuTimes(dict[tuple[int, int], float]):
    """CPU time of processes so far, in seconds, by (process id, start time)."""

    def since(self, before: CpuTimes) -> float:
        """Return the CPU time in seconds that these processes have used since `before`."""
        return sum(max(cpu_s - before.get(key, 0.0), 0.0) for key, cpu_s in self.items())


def cpu_times_of(root: int) -> CpuTimes:
    """Return the CPU time of a process and of all its descendants."""
    states = {pid: process_state(pid) for pid in (root, *descendants(root))}
    return CpuTimes({(n, state.started): state.cpu_s for n, state in states.items() if state})


class Canaries:
    """Sends canaries to each model in a separate task; calls `on_failure` for one that fails."""

    def __init__(
        self,
        hosted: Hosted,
        times: CanaryTimes,
        *,
        on_failure: Callable[[str], None],
        computed: Callable[[], CpuTimes] = lambda: cpu_times_of(os.getpid()),
    ) -> None:
        """Start the tasks; `computed` returns the CPU time of this server's processes so far."""
        self._hosted, self._times, self._on_failure = hosted, times, on_failure
        self._computed = computed
        self._targets = [_Target(model) for model in hosted.models.values()]
        self._tasks = [asyncio.create_task(self._run(target)) for target in self._targets]

    async def close(self) -> None:
        """Stop sending canaries."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def is_ready(self) -> bool:
        """Return whether every model answers, or has only been busy for a short time."""
        latest = time.monotonic() - _MAX_READY_SILENT_S
        return not any(
            target.faults or (target.silent_since is not None and target.silent_since < latest)
            for target in self._targets
        )

    async def _run(self, target: _Target) -> None:
        while len(target.faults) < _FAILURES:
            await asyncio.sleep(self._times.interval_s)
            await self._ask(target)
        self._on_failure(f"model {target.model.name} {target.faults[-1]}")

    def _timeout_s(self, target: _Target) -> float:
        if target.slowest_s is None or target.silent_since is not None or target.faults:
            return self._times.timeout_s
        return min(self._times.timeout_s, max(_MIN_TIMEOUT_S, _TIMEOUT_FACTOR * target.slowest_s))

    async def _ask(self, target: _Target) -> None:
        began, finished = time.monotonic(), self._hosted.progress()
        patience_s = self._timeout_s(target)
        asked = asyncio.ensure_future(self._hosted.probe(target.model, is_canary=True))
        since, before = 0.0, CpuTimes()
        try:
            await asyncio.wait((asked,), timeout=patience_s / 2)
            if not asked.done():  # reading all of /proc is too expensive for every canary
                since, before = time.monotonic(), await asyncio.to_thread(self._computed)
            await asyncio.wait_for(asked, patience_s / 2)
        except TimeoutError:
            now = time.monotonic()
            if self._hosted.progress() != finished:
                target.faults, target.silent_since = [], None
                return
            target.silent_since = target.silent_since or began
            silent_s = now - target.silent_since
            if silent_s > _MAX_SILENT_S:
                words = f"has not finished anything for {silent_s:.0f} s"
                target.faults += [words] * _FAILURES
                return
            taken_s = (await asyncio.to_thread(self._computed)).since(before)
            if taken_s < _BUSY_CORE_SHARE * (now - since):
                target.faults.append(f"has not answered a canary for {now - began:.0f} s")
            return
        except Exception as error:  # of any kind: a client's request would get it too
            if not isinstance(error, InferError) or error.grpc_code not in _ANSWERS:
                target.silent_since = None
                target.faults.append(f"answers a canary with: {error}")
                return
        finally:
            asked.cancel()
        target.slowest_s = max(time.monotonic() - began, target.slowest_s or 0.0)
        target.faults, target.silent_since = [], None
