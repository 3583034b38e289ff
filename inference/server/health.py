"""Whether a ready server still answers: small requests to each model, and to the server itself.

Silence alone ends nothing. What is silent and advances is busy; what is silent and computes may be
busy; what does neither hangs.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inference.server.processes import process_state

INTERVAL_S = 5.0
TIMEOUT_S = 20.0
# A target answers in about the time that it took before, on a machine that has become this much
# slower. What this short wait decides is readiness; a second request waits for TIMEOUT_S.
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


class RefusalError(ValueError):
    """A model answered with an error that is its own."""


@dataclass
class Target:
    """Something that has to answer.

    Attributes:
        name: As it is reported.
        ask: Sends a small request with a timeout in seconds. Raises OSError for silence,
            RefusalError for an answer that shows a fault.
        advanced: Returns a number that grows with what it has finished.
        processes: Returns the ids of the processes that do its work.
        longest_s: How long it may compute without finishing anything.
    """

    name: str
    ask: Callable[[float], object]
    advanced: Callable[[], float]
    processes: Callable[[], Sequence[int]]
    longest_s: float = _LONGEST_S
    slowest_s: float | None = None  # answer so far
    faults: list[str] = field(default_factory=list)  # since its last answer
    silent_since: float | None = None


class Health:
    """Asks each target in a thread of its own, every few seconds.

    `failure` reports what hangs.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        tell: Callable[[bool], None],
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Start to ask.

        `tell` is called from any thread, when that changes, with whether a request is answered. An
        answer may take `timeout_s`; a target that has answered the last time has less: 50 times its
        slowest answer so far, and at least 5 s.
        """
        self.targets = tuple(targets)
        self._tell, self._is_ready = tell, True
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._stopping = threading.Event()
        self._marking = threading.Lock()
        for each in self.targets:
            name = f"health {each.name}"
            threading.Thread(target=self._run, args=(each,), name=name, daemon=True).start()

    def stop(self) -> None:
        """Ask no more; a thread ends with the answer that it waits for."""
        self._stopping.set()

    def failure(self) -> str | None:
        """Return what does not answer and why, or None."""
        lost = [each for each in self.targets if len(each.faults) >= _FAILURES]
        return "; ".join(f"{each.name} {each.faults[-1]}" for each in lost) or None

    def _run(self, target: Target) -> None:
        while not self._stopping.wait(self._interval_s):
            self._ask(target)
            self._mark()

    def _mark(self) -> None:
        """Say whether the server is ready, if that has changed."""
        now = time.monotonic()
        with self._marking:
            is_ready = not any(
                each.faults
                or (each.silent_since is not None and now - each.silent_since > _LONGEST_READY_S)
                for each in self.targets
            )
            if is_ready != self._is_ready:
                self._is_ready = is_ready
                self._tell(is_ready)

    def _patience_s(self, target: Target) -> float:
        if target.slowest_s is None or target.silent_since is not None or target.faults:
            return self._timeout_s
        return min(self._timeout_s, max(_LEAST_TIMEOUT_S, _SLOWER * target.slowest_s))

    def _ask(self, target: Target) -> None:
        patience_s, began = self._patience_s(target), time.monotonic()
        before, computed_s = _advanced(target), _computed_s(target)
        try:
            target.ask(patience_s)
        except RefusalError as error:
            target.silent_since = None
            target.faults.append(f"answers a canary with: {error}")
        except OSError:
            self._be_silent(target, began, before, computed_s)
        else:
            took_s = time.monotonic() - began
            target.slowest_s = max(took_s, target.slowest_s or 0.0)
            target.faults, target.silent_since = [], None

    def _be_silent(
        self, target: Target, began: float, before: float | None, computed_s: float
    ) -> None:
        now, after = time.monotonic(), _advanced(target)
        if before is not None and after is not None and after != before:
            target.faults, target.silent_since = [], None
            return
        if target.silent_since is None:
            target.silent_since = began
        silent_s = now - target.silent_since
        if silent_s > target.longest_s:
            words = f"has not finished anything for {silent_s:.0f} s"
            target.faults += [words] * _FAILURES
        elif _computed_s(target) - computed_s < _COMPUTES * (now - began):
            target.faults.append(f"has not answered a canary for {now - began:.0f} s")


def _advanced(target: Target) -> float | None:
    """Return what a target has finished, None where the server does not say."""
    with contextlib.suppress(OSError, RefusalError):
        return target.advanced()
    return None


def _computed_s(target: Target) -> float:
    states = map(process_state, target.processes())
    return sum(state.cpu_s for state in states if state is not None)
