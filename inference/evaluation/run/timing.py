"""Time the requests of a model that several threads use."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from inference.evaluation.record import Distribution, RequestStatistics
from inference.evaluation.retry import with_retries
from inference.evaluation.task import (
    ImplausibleAnswerError,
    RequestFailedError,
    Tally,
    TextGenerator,
)

_MAX_LOG_PROB = 1e-2  # of a text: above 0 by the rounding of two sums


# Request of a TextGenerator -> function that counts the tokens of its answer.
_REQUESTS: Mapping[str, Callable[[Any], int]] = {
    "complete_text": lambda completion: completion.generated,
    "complete_ids": len,
    "complete_rows": lambda answers: sum(map(len, answers)),
    "context_log_prob": lambda _: 0,
    "infer": lambda _: 0,
}


class RequestTimer:
    """A proxy of a TextGenerator that times and retries its requests.

    Encoding and decoding are not requests to the model and are not timed. A retryable request is
    repeated for up to `retry_s` seconds, and only the answered attempt is timed.
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

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = request(*args, **kwargs)
            duration_s = time.perf_counter() - start
            if isinstance(answer, float) and not answer <= _MAX_LOG_PROB:
                raise ImplausibleAnswerError(f"the server gave {answer} as a log probability")
            with self._lock:
                self._durations_s.append(duration_s)
                self._generated += _REQUESTS[name](answer)
            return answer

        def retried(*args: Any, **kwargs: Any) -> Any:
            once = partial(timed, *args, **kwargs)
            try:
                return with_retries(once, within_s=self._retry_s, tally=self._tally)
            except RequestFailedError:
                self._tally.count("failed")
                raise

        return retried

    def counts(self) -> dict[str, int]:
        """Return the outcomes of requests since this timer was created."""
        counts = self._tally.counts() - self._before
        return {name: counts[name] for name in Tally.NAMES}

    def statistics(self, *, concurrency: int) -> RequestStatistics:
        """Return the statistics of the requests since this timer was created."""
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
    """Return the mean and percentiles of durations in seconds."""
    import numpy as np

    if not durations_s:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    values = 1000 * np.array(durations_s)
    percentiles = np.percentile(values, (0, 50, 95, 99, 100)).tolist()
    return Distribution(len(values), float(values.mean()), *percentiles)
