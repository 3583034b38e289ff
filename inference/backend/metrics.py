"""The metrics of a model in the server's `/metrics`, by Prometheus' conventions.

They are rows of the table next to this module: `field` is what EngineLoad or RequestTimes has for a
metric, `label` the values of its own label, `vllm` the name that vLLM 0.32 has for the same
(vllm/v1/metrics/loggers.py).

Triton's own durations of these models end when `execute` has taken a request over, long before its
answer (2.51, pb_metric_reporter.cc); a server in front of it counts its own.
"""

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from inference.backend.instances import Instance
from inference.engine.load import EngineLoad, RequestTimes
from inference.system.supervision import RESTARTS_VARIABLE

_INTERVAL_S = 0.5
_BUCKETS: dict[str, list[float]] = {
    "seconds": [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120],
    "step_seconds": [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1],
    "tokens": [1 << exponent for exponent in range(18)],
}


class MetricRow(NamedTuple):
    """A row of the table; "-" stands for nothing."""

    name: str
    kind: str  # constant of Triton's class MetricFamily
    field: str
    label: str  # `name=value,value,...`
    buckets: str
    vllm: str
    text: str


_, *_ROWS = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
METRICS = tuple(MetricRow(*row.split("\t")) for row in _ROWS)
# A line of /metrics, a comment included.
_LINE = re.compile(
    r"(?P<start># \w+ )?(?P<name>(slipway_|vllm:)\w+?)(?P<part>_bucket|_sum|_count)?"
    r"(?P<rest>[ {].*)"
)
_OF_REQUESTS = tuple(each for each in METRICS if each.kind == "HISTOGRAM")
_OF_LOAD = tuple(
    each for each in METRICS if each not in _OF_REQUESTS and hasattr(EngineLoad, each.field)
)


def renamed_metric(
    line: str, names: Mapping[str, str], *, label: str, new_label: str
) -> str | None:
    """Return a line of `/metrics` under a new name, with a new name of the model's label.

    None: `names` has no new name for it.
    """
    found = _LINE.fullmatch(line)
    if found is None or (name := names.get(found["name"])) is None:
        return None
    rest = found["rest"].replace(f'{label}="', f'{new_label}="', 1)
    return f"{found['start'] or ''}{name}{found['part'] or ''}{rest}"


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
        self._last = EngineLoad()
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        labels = {"model": model}
        if instance.count > 1:
            labels["engine"] = str(instance.index)
        self._families = []  # in Triton a metric lasts as long as its family
        self._metrics: dict[tuple[str, str], Any] = {}  # by name, and value of the own label
        for each in METRICS:
            if not hasattr(family, each.kind):  # HISTOGRAM is in releases from 2.51 on
                continue
            own = family(name=each.name, description=each.text, kind=getattr(family, each.kind))
            more = {"buckets": _BUCKETS[each.buckets]} if each.buckets in _BUCKETS else {}
            self._families.append(own)
            key, _, values = each.label.partition("=")
            for value in values.split(","):
                added = {key: value} if value else {}
                if each.name == "slipway_model_info":
                    added = dict(about)
                self._metrics[each.name, value] = own.Metric(labels=labels | added, **more)
        self._metrics["slipway_model_info", ""].set(1)
        restarts = float(os.environ.get(RESTARTS_VARIABLE) or 0)
        self._metrics["slipway_server_restarts_total", ""].increment(restarts)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Report no more."""
        self._stopping = True
        self._thread.join()

    def completed(self, seconds: float, times: RequestTimes | None) -> None:
        """Note a request that was answered, how long that took, and its moments in the engine."""
        self.ended("completed")
        for reason in getattr(times, "reasons", ()):
            self._count("slipway_sequences_finished_total", reason)
        for each in _OF_REQUESTS:
            value = seconds if each.field == "seconds" else getattr(times, each.field, None)
            if value is not None and (histogram := self._metrics.get((each.name, ""))) is not None:
                self._ended.put(partial(histogram.observe, value))

    def ended(self, outcome: str) -> None:
        """Note a request that ended: completed, cancelled, failed or refused."""
        self._count("slipway_requests_total", outcome)

    def refused(self, reason: str) -> None:
        """Note a request that was not taken: invalid, busy or unavailable."""
        self.ended("refused")
        self._count("slipway_requests_refused_total", reason)

    def _count(self, name: str, value: str) -> None:
        self._ended.put(partial(self._metrics[name, value].increment, 1))

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
        last, self._last = self._last, self._load()
        for each in _OF_LOAD:
            value, before = getattr(self._last, each.field), getattr(last, each.field)
            metric = self._metrics[each.name, ""]
            if each.kind == "GAUGE" and value != before:
                metric.set(value)
            elif value > before:
                metric.increment(value - before)
