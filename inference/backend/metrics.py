"""The metrics of a model in the server's `/metrics`, by Prometheus' conventions.

Triton's own durations of these models end when `execute` has taken a request over, long before its
answer (2.51, pb_metric_reporter.cc); a server in front of it counts its own.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from inference.backend.instances import Instance
from inference.engine.load import EngineLoad, RequestTimes
from inference.system.supervision import RESTARTS_VARIABLE

_INTERVAL_S = 0.5
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_TOKEN_COUNTS = tuple(float(1 << exponent) for exponent in range(18))
# Name, text, field of EngineLoad.
GAUGES = {
    "slipway_waiting_sequences": ("Sequences that wait for a slot", "waiting"),
    "slipway_running_sequences": ("Sequences that hold a slot of the cache", "running"),
    "slipway_slots": ("Sequences that can run at once", "slots"),
    "slipway_cache_blocks": ("Blocks of the cache; 0 where each slot has its own", "blocks"),
    "slipway_cache_blocks_used": ("Blocks of the cache that sequences hold", "blocks_used"),
    "slipway_cache_used_ratio": ("Share of the cache that sequences hold, 0 to 1", "cache_share"),
}
TOKENS = {
    "slipway_prompt_tokens_total": ("Tokens of the prompts that were begun", "prompt_tokens"),
    "slipway_shared_prompt_tokens_total": (
        "Tokens of these whose keys and values were in the cache", "shared_tokens"),
    "slipway_generated_tokens_total": (
        "Tokens generated, a token of each beam counted", "generated_tokens"),
}  # fmt: skip
_REQUESTS = "slipway_requests_total"
_REFUSED = "slipway_requests_refused_total"
_FINISHED = "slipway_sequences_finished_total"
_RESTARTS = "slipway_server_restarts_total"
COUNTERS = {
    _REQUESTS: ("Requests by outcome: completed, cancelled (the client left), failed, refused",),
    _REFUSED: ("Requests refused by reason: invalid, busy (the queue is full), unavailable",),
    _FINISHED: (
        "Sequences that have ended by reason: end (an end token), stop (a stop word, or the form "
        "of the answer), length",
    ),
    _RESTARTS: ("Starts of this server after a failure, since the deploy stage began",),
}
_DURATION = "slipway_request_duration_seconds"
# Name, text, buckets, field of RequestTimes.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], str]] = {
    _DURATION: ("Time from a request's arrival to its last response", _SECONDS, ""),
    "slipway_request_queue_seconds": (
        "Time a request waited for its first slot", _SECONDS, "queued_s"),
    "slipway_time_to_first_token_seconds": (
        "Time to a request's first token", _SECONDS, "first_token_s"),
    "slipway_time_between_tokens_seconds": (
        "Mean time between two tokens of a request, once for each request",
        _STEP_SECONDS, "between_tokens_s"),
    "slipway_request_prefill_seconds": (
        "Time from a request's first slot to its first token", _SECONDS, "prefill_s"),
    "slipway_request_decode_seconds": (
        "Time from a request's first token to its last", _SECONDS, "decode_s"),
    "slipway_request_prompt_tokens": (
        "Tokens of a request's prompts", _TOKEN_COUNTS, "prompt_tokens"),
    "slipway_request_generated_tokens": (
        "Tokens of a request's answers", _TOKEN_COUNTS, "generated_tokens"),
}  # fmt: skip
# Always 1: its labels say what is served.
INFO = {"slipway_model_info": ("The checkpoint, types and version of a served model",)}
_FINISH_REASONS = ("end", "stop", "length")
_REASONS = ("invalid", "busy", "unavailable")
_OUTCOMES = ("completed", "cancelled", "failed", "refused")


class ModelMetrics:
    """Keeps the metrics of one model up to date, from a thread of its own.

    A change of a metric goes through the server's process. The load is therefore read twice a
    second, and requests are noted here to be reported later.
    """

    def __init__(
        self,
        family: Any,
        model: str,
        instance: Instance,
        load: Callable[[], EngineLoad],
        about: Mapping[str, str],
    ) -> None:
        """Declare the metrics with a MetricFamily and begin to report; the thread calls `load`.

        `about` says what is served. The metrics of one of several instances have its number as the
        label `engine`.
        """
        self._load = load
        self._labels = {"model": model}
        if instance.count > 1:
            self._labels["engine"] = str(instance.index)
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._last = dict.fromkeys((*GAUGES, *TOKENS), 0.0)
        kinds: dict[str, Mapping[str, tuple[Any, ...]]] = {
            "GAUGE": {**GAUGES, **INFO}, "COUNTER": {**TOKENS, **COUNTERS}, "HISTOGRAM": HISTOGRAMS
        }  # fmt: skip
        self._families = {
            name: family(name=name, description=text, kind=getattr(family, kind))
            for kind, table in kinds.items()
            if hasattr(family, kind)  # HISTOGRAM is in releases from 2.51 on
            for name, (text, *_) in table.items()
        }
        self._plain = {
            name: self._families[name].Metric(labels=self._labels)
            for name in (*GAUGES, *TOKENS, _RESTARTS)
        }
        self._requests = self._labelled(_REQUESTS, "outcome", _OUTCOMES)
        self._finished = self._labelled(_FINISHED, "reason", _FINISH_REASONS)
        for name in INFO:
            self._families[name].Metric(labels={**self._labels, **about}).set(1)
        self._refused = self._labelled(_REFUSED, "reason", _REASONS)
        self._histograms = {
            name: self._families[name].Metric(labels=self._labels, buckets=list(buckets))
            for name, (_, buckets, _) in HISTOGRAMS.items()
            if name in self._families
        }
        self._plain[_RESTARTS].increment(float(os.environ.get(RESTARTS_VARIABLE) or 0))
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Report no more."""
        self._stopping = True
        self._thread.join()

    def completed(self, seconds: float, times: RequestTimes | None) -> None:
        """Note a request that was answered, how long that took, and its moments in the engine."""

        def report() -> None:
            self._requests["completed"].increment(1)
            for reason in getattr(times, "reasons", ()):
                self._finished[reason].increment(1)
            for name, histogram in self._histograms.items():
                field = HISTOGRAMS[name][2]
                value = getattr(times, field, None) if field else seconds
                if value is not None:
                    histogram.observe(value)

        self._ended.put(report)

    def ended(self, outcome: str) -> None:
        """Note a request that ended without its whole answer: cancelled or failed."""
        self._ended.put(lambda: self._requests[outcome].increment(1))

    def refused(self, reason: str) -> None:
        """Note a request that was not taken: invalid, busy or unavailable."""

        def report() -> None:
            self._requests["refused"].increment(1)
            self._refused[reason].increment(1)

        self._ended.put(report)

    def _labelled(self, name: str, label: str, values: tuple[str, ...]) -> Mapping[str, Any]:
        family = self._families[name]
        return {value: family.Metric(labels={**self._labels, label: value}) for value in values}

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            if (left_s := due - time.monotonic()) <= 0:
                self._report_load()
                due = time.monotonic() + _INTERVAL_S
                continue
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=left_s)()

    def _report_load(self) -> None:
        load = self._load()
        for name, (_, field) in (*GAUGES.items(), *TOKENS.items()):
            change = float(getattr(load, field)) - self._last[name]
            self._last[name] += change
            if name in GAUGES and change:
                self._plain[name].set(self._last[name])
            elif change > 0:
                self._plain[name].increment(change)
