"""Counts of a server's models, by the names of Triton's statistics and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from inference.backend.metrics import METRICS, renamed_metric

_PHASES = ("compute_input", "compute_infer", "compute_output")
_REASONS = ("BACKEND", "CANCELED", "OTHER", "REJECTED")
# Name without its prefix, text, and the field of ModelStatistics that it shows, "" for 0.
_METRICS = (
    ("request_success", "Number of successful inference requests, all batch sizes", "successes"),
    ("request_failure", "Number of failed inference requests, all batch sizes", "failures"),
    ("count", "Number of inferences performed (does not include cached requests)", "rows"),
    ("exec_count", "Number of model executions performed (does not include cached requests)",
     "successes"),
    ("request_duration_us", "Cumulative inference request duration in microseconds", "success_ns"),
    ("queue_duration_us", "Cumulative inference queuing duration in microseconds", "queue_ns"),
    ("compute_input_duration_us", "Cumulative compute input duration in microseconds", ""),
    ("compute_infer_duration_us", "Cumulative compute inference duration in microseconds",
     "infer_ns"),
    ("compute_output_duration_us", "Cumulative inference compute output duration in microseconds",
     ""),
    ("pending_request_count",
     "Instantaneous number of pending requests awaiting execution per-model.", "pending"),
)  # fmt: skip


@dataclass
class ModelStatistics:
    """Requests to one model, answered and failed, and how long they took."""

    name: str
    version: str
    successes: int = 0
    rows: int = 0
    success_ns: int = 0
    infer_ns: int = 0
    queue_ns: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))
    fail_ns: int = 0
    last_ms: int = 0
    pending: int = 0
    batches: dict[int, list[int]] = field(default_factory=dict)  # size to count and nanoseconds

    def succeeded(self, rows: int, taken_ns: int) -> None:
        """Note a request that was answered."""
        self.successes += 1
        self.rows += rows
        self.success_ns += taken_ns
        self.infer_ns += taken_ns
        self.last_ms = time.time_ns() // 1_000_000
        batch = self.batches.setdefault(rows, [0, 0])
        batch[0] += 1
        batch[1] += taken_ns

    def queued(self, taken_ns: int) -> None:
        """Note that a part of the time of a request was spent in the queue."""
        self.queue_ns += taken_ns
        self.infer_ns -= taken_ns

    def failed(self, reason: str, taken_ns: int) -> None:
        """Note a request that was not, for one of the reasons that Triton counts."""
        self.failures[reason] += 1
        self.fail_ns += taken_ns

    def as_json(self) -> dict[str, Any]:
        """Return them in the form of Triton's extension for statistics."""

        def duration(count: int, nanoseconds: int) -> dict[str, int]:
            return {"count": count, "ns": nanoseconds}

        def phases(count: int, infer_ns: int) -> dict[str, Any]:
            each = (0, infer_ns, 0)
            return {n: duration(count, ns) for n, ns in zip(_PHASES, each, strict=True)}

        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_ms,
            "inference_count": self.rows,
            "execution_count": self.successes,
            "inference_stats": {
                "success": duration(self.successes, self.success_ns),
                "fail": duration(sum(self.failures.values()), self.fail_ns),
                "queue": duration(self.successes, self.queue_ns),
                **phases(self.successes, self.infer_ns),
                "cache_hit": duration(0, 0),
                "cache_miss": duration(0, 0),
            },
            "response_stats": {},
            "batch_stats": [
                {"batch_size": rows, **phases(*batch)}
                for rows, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


_VLLM_NAMES = {each.name: each.vllm for each in METRICS if each.vllm != "-"}


def with_vllm_names(metrics: str) -> str:
    """Return the text of `/metrics` with vLLM's names, and its label for the model.

    Those that vLLM does not have keep their names.
    """
    lines = metrics.split("\n")
    return "\n".join(
        renamed_metric(line, _VLLM_NAMES, label="model", new_label="model_name") or line
        for line in lines
    )


# The end of a name, labels, and the value.
_Sample: TypeAlias = tuple[str, Mapping[str, str], object]


def triton_metrics(models: Sequence[ModelStatistics]) -> Iterator[str]:
    """Yield the lines of the metrics that Triton has of each model, under its names."""
    for name, text, count in _METRICS:
        samples: list[_Sample] = []
        for model in models:
            value = getattr(model, count, 0)
            each = value if isinstance(value, dict) else {"": value}
            for reason, number in each.items():
                more = {"reason": reason} if reason else {}
                labels = {"model": model.name, **more, "version": model.version}
                samples.append(("", labels, number // 1000 if count.endswith("_ns") else number))
        kind = "gauge" if count == "pending" else "counter"
        yield from _family(f"nv_inference_{name}", text, kind, samples)


def _family(name: str, text: str, kind: str, samples: Iterable[_Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for end, labels, value in samples:
        yield f"{name}{end}{{{_labels(labels)}}} {value}"


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())


class LabelledMetric:
    """One metric with its labels, of any kind, which one thread changes."""

    def __init__(self, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._labels, self._buckets = dict(labels), tuple(buckets)
        self._value = 0.0
        self._counts = [0] * len(buckets)
        self._observed = 0

    def increment(self, change: float) -> None:
        """Add to a counter or a gauge."""
        self._value += change

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._value = value

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._value += value
        self._observed += 1
        for number, bound in enumerate(self._buckets):
            self._counts[number] += value <= bound

    def samples(self) -> Iterator[_Sample]:
        """Yield the values: of a histogram, if there are buckets."""
        value = f"{self._value:.17g}"
        if not self._buckets:
            yield "", self._labels, value
            return
        yield "_count", self._labels, self._observed
        yield "_sum", self._labels, value
        for bound, count in zip(self._buckets, self._counts, strict=True):
            yield "_bucket", {**self._labels, "le": f"{bound:g}"}, count
        yield "_bucket", {**self._labels, "le": "+Inf"}, self._observed


class MetricFamily:
    """Metrics of one name, which differ in their labels."""

    def __init__(self, name: str, text: str, kind: str) -> None:
        self._name, self._text, self._kind = name, text, kind
        self._metrics: list[LabelledMetric] = []

    def Metric(self, labels: Mapping[str, str], buckets: Sequence[float] = ()) -> LabelledMetric:  # noqa: N802 - as Triton
        """Return a new metric of this family."""
        self._metrics.append(LabelledMetric(labels, buckets))
        return self._metrics[-1]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the exposition."""
        samples = (sample for metric in self._metrics for sample in metric.samples())
        yield from _family(self._name, self._text, self._kind, samples)


class MetricRegistry:
    """The metrics that models declare; it is called as Triton's class MetricFamily is."""

    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

    def __init__(self) -> None:
        self._families: dict[str, MetricFamily] = {}

    def __call__(self, *, name: str, description: str, kind: str) -> MetricFamily:
        """Return the family of a name, which several engines may share."""
        return self._families.setdefault(name, MetricFamily(name, description, kind))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the exposition."""
        for family in self._families.values():
            yield from family.lines()
