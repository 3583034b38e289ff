"""Time the requests of a model while several threads use it, and sum the times up."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from inference.evaluation.record import Distribution, RequestStatistics
from inference.evaluation.retry import patiently
from inference.evaluation.task import (
    ImpossibleFigureError,
    RequestFailedError,
    Tally,
    TextGenerator,
)

_MAX_INTERVALS = 120
_EVENTS_PER_INTERVAL = 8
_HISTOGRAM_BINS = 40
_MOST_LOG_PROB = 1e-2  # of a text, as a difference of two sums that rounding explains


# The requests of a TextGenerator, and the tokens of an answer to each.
_REQUESTS: Mapping[str, Callable[[Any], int]] = {
    "complete_text": lambda completion: completion.generated,
    "complete_in_steps": lambda answer: len(answer[0]),
    "complete_ids": len,
    "complete_rows": lambda answers: sum(map(len, answers)),
    "context_log_prob": lambda _: 0,
    "infer": lambda _: 0,
}


class RequestTimer:
    """A model in all but its type, which notes when each request began and how long it took.

    Encoding and decoding are not requests to the model and are not timed. What the server puts off
    is asked again within `retry_s`, and only the attempt that is answered is timed.
    """

    def __init__(self, model: TextGenerator, *, retry_s: float = 0.0) -> None:
        self._model, self._retry_s = model, retry_s
        self._tally: Tally = getattr(model, "tally", None) or Tally()
        self._before = self._tally.counts()
        self._start = time.perf_counter()
        self._lock = threading.Lock()
        self._generated = 0
        self._spans: list[tuple[float, float]] = []  # end and duration of each request, seconds

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._model, name)
        if name not in _REQUESTS:
            return request

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            answer = request(*given, **named)
            end = time.perf_counter()
            log_prob = getattr(answer, "context_log_prob", answer)
            if isinstance(log_prob, float) and not log_prob <= _MOST_LOG_PROB:
                raise ImpossibleFigureError(f"the server gave {log_prob} as a log probability")
            with self._lock:
                self._spans.append((end, end - start))
                self._generated += _REQUESTS[name](answer)
            return answer

        def asked(*given: Any, **named: Any) -> Any:
            once = partial(timed, *given, **named)
            try:
                return patiently(once, within_s=self._retry_s, tally=self._tally)
            except RequestFailedError:
                self._tally.count("failed")
                raise

        return asked

    def counts(self) -> dict[str, int]:
        """Return how requests have ended since the making of this timer."""
        counts = self._tally.counts() - self._before
        return {name: counts[name] for name in Tally.NAMES}

    def statistics(self, *, concurrency: int) -> RequestStatistics:
        """Sum up the requests of a run, from the making of this timer until now."""
        seconds = time.perf_counter() - self._start
        interval_s = interval_for(seconds, count=len(self._spans))
        completed = [0] * max(1, math.ceil(seconds / interval_s))
        for end, _ in self._spans:
            completed[min(int((end - self._start) / interval_s), len(completed) - 1)] += 1
        return RequestStatistics(
            count=len(self._spans),
            concurrency=concurrency,
            seconds=seconds,
            per_s=len(self._spans) / seconds if seconds > 0 else 0.0,
            latency=distribution([duration for _, duration in self._spans]),
            interval_s=interval_s,
            completed=tuple(completed),
            generated=self._generated,
            **self.counts(),
        )


def interval_for(seconds: float, *, count: int) -> float:
    """Return a round interval with several of `count` events in each part of `seconds`."""
    parts = max(1, min(_MAX_INTERVALS, count // _EVENTS_PER_INTERVAL))
    for interval in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0):
        if seconds <= interval * parts:
            return interval
    return max(seconds, 0.1) / parts


def distribution(durations_s: Sequence[float]) -> Distribution:
    """Return percentiles and a histogram of durations given in seconds.

    The histogram reaches to the 99th percentile; its last bin holds everything above.
    """
    import numpy as np

    if not durations_s:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    values = 1000 * np.array(durations_s)
    low, p50, p95, p99, high = np.percentile(values, (0, 50, 95, 99, 100)).tolist()
    bins = min(_HISTOGRAM_BINS, math.ceil(math.sqrt(len(values)))) if p99 > low else 1
    counts, edges = np.histogram(np.minimum(values, p99), bins, (low, p99))
    return Distribution(
        count=len(values),
        mean_ms=float(values.mean()),
        min_ms=low,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        max_ms=high,
        edges_ms=tuple(edges.tolist()) if p99 > low else (low, p99),
        counts=tuple(counts.tolist()),
    )
