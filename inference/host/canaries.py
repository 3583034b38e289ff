"""Whether the models of a ready server still answer: a small request to each, every few seconds.

Silence alone ends nothing. What is silent and advances is busy; what is silent and computes may be
busy; what does neither hangs.
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

# A model answers in about the time that it took before, on a machine that has become this much
# slower. What this short wait decides is readiness; a second request waits for the whole time.
_SLOWER = 50.0
_LEAST_TIMEOUT_S = 5.0
# One error may be that request's own, such as memory that was short for a moment.
_FAILURES = 2
# Share of one core from which on a process computes; idle ones have threads that look around.
_COMPUTES = 0.05
# The largest request that a text model takes keeps a core busy for some 20 s, and a step of a large
# model on a CPU may take a minute. What computes for longer without an end never comes to one.
_LONGEST_S = 300.0
# A model that computes but has not answered for so long would not answer a request now.
_LONGEST_READY_S = 30.0
# Answers of a model that is busy, or whose own limits such a request exceeds.
_ANSWERS = ("UNAVAILABLE", "INVALID_ARGUMENT")


@dataclass
class _Target:
    model: HostedModel
    slowest_s: float | None = None  # answer so far
    faults: list[str] = field(default_factory=list)  # since its last answer
    silent_since: float | None = None


class Computed(dict[tuple[int, int], float]):
    """Processor time of processes so far, in seconds, by their ids and starts."""

    def since(self, before: Computed) -> float:
        """Return the time that processes of this list have taken since an earlier one."""
        return sum(max(cpu_s - before.get(key, 0.0), 0.0) for key, cpu_s in self.items())


def computed_by(root: int) -> Computed:
    """Return the processor time of a process and of all below it."""
    states = {pid: process_state(pid) for pid in (root, *descendants(root))}
    return Computed({(n, state.started): state.cpu_s for n, state in states.items() if state})


class Canaries:
    """Asks each model in a task of its own; calls `leave` with what does not answer and why."""

    def __init__(
        self,
        hosted: Hosted,
        times: CanaryTimes,
        *,
        leave: Callable[[str], None],
        computed: Callable[[], Computed] = lambda: computed_by(os.getpid()),
    ) -> None:
        """Start to ask; `computed` returns the processor time so far of this server's processes."""
        self._hosted, self._times, self._leave = hosted, times, leave
        self._computed = computed
        self._targets = [_Target(model) for model in hosted.models.values()]
        self._tasks = [asyncio.create_task(self._run(each)) for each in self._targets]

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def is_ready(self) -> bool:
        """Return whether a request would be answered."""
        latest = time.monotonic() - _LONGEST_READY_S
        return not any(
            each.faults or (each.silent_since is not None and each.silent_since < latest)
            for each in self._targets
        )

    async def _run(self, target: _Target) -> None:
        while len(target.faults) < _FAILURES:
            await asyncio.sleep(self._times.interval_s)
            await self._ask(target)
        self._leave(f"model {target.model.name} {target.faults[-1]}")

    def _patience_s(self, target: _Target) -> float:
        if target.slowest_s is None or target.silent_since is not None or target.faults:
            return self._times.timeout_s
        return min(self._times.timeout_s, max(_LEAST_TIMEOUT_S, _SLOWER * target.slowest_s))

    async def _ask(self, target: _Target) -> None:
        began, finished = time.monotonic(), self._hosted.advanced()
        patience_s = self._patience_s(target)
        asked = asyncio.ensure_future(self._hosted.ask(target.model, is_canary=True))
        since, before = 0.0, Computed()
        try:
            await asyncio.wait((asked,), timeout=patience_s / 2)
            if not asked.done():  # only then: it reads all of /proc, next to the server's work
                since, before = time.monotonic(), await asyncio.to_thread(self._computed)
            await asyncio.wait_for(asked, patience_s / 2)
        except TimeoutError:
            now = time.monotonic()
            if self._hosted.advanced() != finished:
                target.faults, target.silent_since = [], None
                return
            target.silent_since = target.silent_since or began
            silent_s = now - target.silent_since
            if silent_s > _LONGEST_S:
                words = f"has not finished anything for {silent_s:.0f} s"
                target.faults += [words] * _FAILURES
                return
            taken_s = (await asyncio.to_thread(self._computed)).since(before)
            if taken_s < _COMPUTES * (now - since):
                target.faults.append(f"has not answered a canary for {now - began:.0f} s")
            return
        except Exception as error:  # whatever it is, requests of clients would get it too
            if not isinstance(error, InferError) or error.grpc_code not in _ANSWERS:
                target.silent_since = None
                target.faults.append(f"answers a canary with: {error}")
                return
        finally:
            asked.cancel()
        target.slowest_s = max(time.monotonic() - began, target.slowest_s or 0.0)
        target.faults, target.silent_since = [], None
