"""Canary requests: a token through each model that has been idle, so that ready means answering."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from inference.server.probe import (
    Config,
    ProbeTensor,
    RefusalError,
    ask_model,
    http_request,
    is_interactive,
    is_timeout,
    model_config,
    probe_tensors,
)
from inference.supervision import BUSY, CANARY_PARAMETER

INTERVAL_S = 5.0
TIMEOUT_S = 20.0
# An idle model answers in about the time that its last canaries took, on a machine that has become
# this much slower. What this short wait decides is readiness; a second canary waits for TIMEOUT_S.
_SLOWER = 50.0
_LEAST_TIMEOUT_S = 5.0
# One error may be that request's own, such as memory that was short for a moment.
_FAILURES = 2
_METRICS_TIMEOUT_S = 5.0
_ANSWERED = re.compile(
    r'^nv_inference_request_success\{model="(?P<model>[^"]+)"[^}]*\} (?P<count>\S+)$', re.MULTILINE
)


class Canary:
    """Sends a small request to each idle model of a server, in a thread.

    Models of sessions get none: a canary would wait behind the sessions that users keep open.
    """

    def __init__(
        self,
        address: str,
        metrics_address: str,
        models: Sequence[str],
        *,
        hidden: int | None = None,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        unready: Path | None = None,
    ) -> None:
        """Prepare; nothing is sent before `start`.

        Args:
            address: host:port of HTTP.
            metrics_address: host:port of the metrics, which show the idle models.
            models: Their names.
            hidden: Width of an encoder's hidden states, see `probe_tensors`.
            interval_s: Idle time of a model before a canary is sent.
            timeout_s: Longest wait for one answer. A model that has answered its last canary has
                less: 50 times the slowest answer so far, and at least 5 s.
            unready: A file that exists while a model has not answered its last canary.
        """
        self._address, self._metrics_address = address, metrics_address
        self._models, self._hidden = tuple(models), hidden
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._failures: dict[str, list[str]] = {}  # of each model, since its last answer
        self._answered: Mapping[str, float] = {}  # requests by model, at the last look
        self._unready = unready
        self._slowest_s: dict[str, float] = {}  # answer of each model
        self._idle: set[str] = set()  # models whose last canary was answered
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more; the thread ends with the answer it waits for."""
        self._stopping.set()

    def failure(self) -> str | None:
        """Return the models that do not answer and why, or None."""
        lost = {
            model: reasons[-1]
            for model, reasons in list(self._failures.items())
            if len(reasons) >= _FAILURES
        }
        return "; ".join(f"model {model} {reason}" for model, reason in lost.items()) or None

    def _run(self) -> None:
        requests: dict[str, tuple[Config, Sequence[ProbeTensor]]] = {}
        while not self._stopping.wait(self._interval_s):
            answered = self._counts()
            for model in self._models:
                if answered.get(model, 0.0) != self._answered.get(model, 0.0):
                    self._failures.pop(model, None)
                    self._idle.discard(model)
                elif not self._stopping.is_set():
                    self._ask(model, requests)
                self._mark()
            self._answered = self._counts()

    def _mark(self) -> None:
        """Make the server ready, or not."""
        if self._unready is not None:
            with contextlib.suppress(OSError):  # the folder goes with the server
                if self._failures:
                    self._unready.touch()
                else:
                    self._unready.unlink(missing_ok=True)

    def _patience_s(self, model: str) -> float:
        """Return how long to wait for a model's answer."""
        if model not in self._idle:
            return self._timeout_s
        return min(self._timeout_s, max(_LEAST_TIMEOUT_S, _SLOWER * self._slowest_s[model]))

    def _counts(self) -> Mapping[str, float]:
        """Return the number of requests each model has answered; empty without metrics."""
        try:
            url = f"http://{self._metrics_address}/metrics"
            text = http_request(url, timeout_s=_METRICS_TIMEOUT_S).decode(errors="replace")
        except (OSError, HTTPException, ValueError):
            return {}
        return {each["model"]: float(each["count"]) for each in _ANSWERED.finditer(text)}

    def _ask(self, model: str, requests: dict[str, tuple[Config, Sequence[ProbeTensor]]]) -> None:
        """Send one model a canary and record the outcome."""
        patience_s, began = self._patience_s(model), time.monotonic()
        self._idle.discard(model)  # the next one has all of the time
        try:
            if model not in requests:
                config = model_config(self._address, model)
                skipped = is_interactive(config)
                found = None if skipped else probe_tensors(config, hidden=self._hidden)
                requests[model] = config, found or []
            config, tensors = requests[model]
            if tensors:
                ask_model(
                    self._address,
                    model,
                    config,
                    tensors,
                    timeout_s=patience_s,
                    parameters={CANARY_PARAMETER: True},
                )
        except RefusalError as error:
            if _is_failure(error):
                self._failures.setdefault(model, []).append(f"answers a canary with: {error}")
                return
        except (OSError, HTTPException, ValueError) as error:
            silence = f"has not answered a canary for {patience_s:g} s"
            reason = silence if is_timeout(error) else f"does not answer a canary: {error}"
            self._failures.setdefault(model, []).append(reason)
            return
        else:
            took_s = time.monotonic() - began
            self._slowest_s[model] = max(took_s, self._slowest_s.get(model, 0.0))
            self._idle.add(model)
        self._failures.pop(model, None)


def _is_failure(error: RefusalError) -> bool:
    """Return whether a refusal is the model's fault, not the request's."""
    is_of_server = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return is_of_server and error.status != HTTPStatus.SERVICE_UNAVAILABLE and str(error) != BUSY
