"""Time the requests of a model while several threads use it, and sum the times up."""

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

_MOST_LOG_PROB = 1e-2  # of a text, as a difference of two sums that rounding explains


# The requests of a TextGenerator, and the tokens of an answer to each.
_REQUESTS: Mapping[str, Callable[[Any], int]] = {
    "complete_text": lambda completion: completion.generated,
    "complete_ids": len,
    "complete_rows": lambda answers: sum(map(len, answers)),
    "context_log_prob": lambda _: 0,
    "infer": lambda _: 0,
}


class RequestTimer:
    """A model in all but its type, which notes how long each request took.

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
        self._durations_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._model, name)
        if name not in _REQUESTS:
            return request

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            answer = request(*given, **named)
            duration_s = time.perf_counter() - start
            if isinstance(answer, float) and not answer <= _MOST_LOG_PROB:
                raise ImpossibleFigureError(f"the server gave {answer} as a log probability")
            with self._lock:
                self._durations_s.append(duration_s)
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
        return RequestStatistics(
            count=len(self._durations_s),
            concurrency=concurrency,
            seconds=seconds,
            per_s=len(self._durations_s) / seconds if seconds > 0 else 0.0,
            latency=distribution(self._durations_s),
            generated=self._generated,
            **self.counts(),
        )


def distribution(durations_s: Sequence[float]) -> Distribution:
    """Return the mean and percentiles of durations given in seconds."""
    import numpy as np

    if not durations_s:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    values = 1000 * np.array(durations_s)
    percentiles = np.percentile(values, (0, 50, 95, 99, 100)).tolist()
    return Distribution(len(values), float(values.mean()), *percentiles)
