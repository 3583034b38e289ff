"""The metrics of a model in the server's `/metrics`, in Prometheus' format.

The table next to this module defines them: `field` is the attribute of EngineLoad or RequestTimes,
`label` an additional label and its values, `vllm` the name of the same metric in vLLM 0.32
(vllm/v1/metrics/loggers.py).

Triton's own durations of these models end when `execute` has accepted a request, long before its
answer (2.51, pb_metric_reporter.cc); the host in front of it measures its own.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from inference.backend.instances import Instance
from inference.engine.load import EngineLoad, RequestTimes
from inference.system.supervision import RESTARTS_VARIABLE

HISTOGRAM = "HISTOGRAM"
# Suffix of the name, labels, and value.
Sample: TypeAlias = tuple[str, Mapping[str, str], object]
_BUCKETS: dict[str, list[float]] = {
    "seconds": [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120],
    "step_seconds": [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1],
    "tokens": [1 << exponent for exponent in range(18)],
}


class MetricRow(NamedTuple):
    """A row of the table; "-" is an empty cell."""

    name: str
    kind: str  # a constant of Triton's class MetricFamily
    field: str
    label: str  # `name=value,value,...`
    buckets: str
    vllm: str
    text: str

    @property
    def bounds(self) -> list[float]:
        """The upper bounds of a histogram's buckets, without infinity."""
        return _BUCKETS.get(self.buckets, [])


_, *_ROWS = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
METRICS = tuple(MetricRow(*row.split("\t")) for row in _ROWS)
_VLLM_NAMES = {row.name: row.vllm for row in METRICS if row.vllm != "-"}
# A line of /metrics, also a comment.
_LINE = re.compile(
    r"(?P<start># \w+ )?(?P<name>slipway_\w+?)(?P<part>_bucket|_sum|_count)?"
    r"(?P<rest>[ {].*)"
)


def vllm_line(line: str) -> str:
    """Return a line of `/metrics` with vLLM's metric name and model label.

    Lines of metrics that vLLM does not have stay as they are.
    """
    found = _LINE.fullmatch(line)
    if found is None or (name := _VLLM_NAMES.get(found["name"])) is None:
        return line
    rest = found["rest"].replace('model="', 'model_name="', 1)
    return f"{found['start'] or ''}{name}{found['part'] or ''}{rest}"


@dataclass
class ModelMetric:
    """One metric with its labels.

    Attributes:
        value: for a histogram, the sum of the observed values.
        counts: for a histogram, the number of values up to each bound and up to infinity.
        unreported: values observed since another thread last took them; None without such a thread.
    """

    row: MetricRow
    labels: Mapping[str, str]
    value: float = 0.0
    counts: list[int] = field(default_factory=list)
    unreported: list[float] | None = None

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self.value += value
        bounds = (*self.row.bounds, math.inf)
        before = self.counts or [0] * len(bounds)
        self.counts = [n + (value <= bound) for n, bound in zip(before, bounds, strict=True)]
        if self.unreported is not None:
            self.unreported.append(value)

    def samples(self) -> Iterator[Sample]:
        """Yield suffix, labels and value of each line."""
        value = f"{self.value:.17g}"
        if self.row.kind != HISTOGRAM:
            yield "", self.labels, value
            return
        bounds = [*(f"{bound:g}" for bound in self.row.bounds), "+Inf"]
        counts = self.counts or [0] * len(bounds)
        yield "_count", self.labels, counts[-1]
        yield "_sum", self.labels, value
        for bound, count in zip(bounds, counts, strict=True):
            yield "_bucket", {**self.labels, "le": bound}, count


class ModelMetrics:
    """The metrics of one model, changed by the thread that answers its requests."""

    def __init__(
        self,
        model: str,
        instance: Instance,
        load: Callable[[], EngineLoad],
        about: Mapping[str, str],
    ) -> None:
        """`load` is called when metrics are read; `about` are labels that name the checkpoint.

        If there are several instances, the label `engine` has the index of the instance.
        """
        self._load = load
        labels = {"model": model}
        if instance.count > 1:
            labels["engine"] = str(instance.index)
        self._metrics: dict[tuple[str, str], ModelMetric] = {}  # by name and additional label
        for row in METRICS:
            key, _, values = row.label.partition("=")
            for value in values.split(","):
                self._metrics[row.name, value] = ModelMetric(
                    row, labels | ({key: value} if value else {})
                )
        info = self._metrics["slipway_model_info", ""]
        info.labels, info.value = {**labels, **about}, 1
        restarts = float(os.environ.get(RESTARTS_VARIABLE) or 0)
        self._metrics["slipway_server_restarts_total", ""].value = restarts

    def completed(self, seconds: float, times: RequestTimes | None) -> None:
        """Count an answered request, with its duration and its times in the engine."""
        self.ended("completed")
        for reason in getattr(times, "reasons", ()):
            self._metrics["slipway_sequences_finished_total", reason].value += 1
        for metric in self._metrics.values():
            if metric.row.kind == HISTOGRAM:
                name = metric.row.field
                value = seconds if name == "seconds" else getattr(times, name, None)
                if value is not None:
                    metric.observe(value)

    def ended(self, outcome: str) -> None:
        """Count a request by outcome: completed, cancelled, failed or refused."""
        self._metrics["slipway_requests_total", outcome].value += 1

    def refused(self, reason: str) -> None:
        """Count a refused request by reason: invalid, busy or unavailable."""
        self.ended("refused")
        self._metrics["slipway_requests_refused_total", reason].value += 1

    def read(self) -> Iterable[ModelMetric]:
        """Return the current metrics in the order of the table."""
        load = self._load()
        for metric in self._metrics.values():
            if metric.row.kind != HISTOGRAM and hasattr(load, metric.row.field):
                metric.value = getattr(load, metric.row.field)
        return self._metrics.values()


def exposition(metrics: Sequence[ModelMetric]) -> Iterator[str]:
    """Yield the lines of `/metrics` for the metrics of several models."""
    for row in METRICS if metrics else ():
        samples = (sample for metric in metrics if metric.row == row for sample in metric.samples())
        yield from family_lines(row.name, row.text, row.kind.lower(), samples)


def family_lines(name: str, text: str, kind: str, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the lines of one metric family."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for suffix, labels, value in samples:
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{suffix}{{{pairs}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
