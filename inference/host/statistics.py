"""Request counts and times of the served models, under Triton's names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.backend.metrics import family_lines

_PHASES = ("compute_input", "compute_infer", "compute_output")
_REASONS = ("BACKEND", "CANCELED", "OTHER", "REJECTED")
# Name without its prefix, description, and the field of ModelStatistics, "" for a constant 0.
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
    """Counts and times of one model's requests."""

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
        """Count an answered request."""
        self.successes += 1
        self.rows += rows
        self.success_ns += taken_ns
        self.infer_ns += taken_ns
        self.last_ms = time.time_ns() // 1_000_000
        if (batch := self.batches.get(rows)) is None:
            batch = self.batches[rows] = [0, 0]
        batch[0] += 1
        batch[1] += taken_ns

    def queued(self, seconds: float) -> None:
        """Move a part of a request's time from inference to the queue."""
        taken_ns = round(seconds * 1e9)
        self.queue_ns += taken_ns
        self.infer_ns -= taken_ns

    def failed(self, reason: str, taken_ns: int) -> None:
        """Count a failed request under one of Triton's reasons."""
        self.failures[reason] += 1
        self.fail_ns += taken_ns

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of Triton's statistics extension."""

        def duration(count: int, nanoseconds: int) -> dict[str, int]:
            return {"count": count, "ns": nanoseconds}

        def phases(count: int, infer_ns: int) -> dict[str, Any]:
            times = (0, infer_ns, 0)
            return {n: duration(count, ns) for n, ns in zip(_PHASES, times, strict=True)}

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


def triton_metrics(models: Sequence[ModelStatistics]) -> Iterator[str]:
    """Yield the lines of Triton's per-model metrics."""
    for name, text, count in _METRICS:
        samples = []
        for model in models:
            value = getattr(model, count, 0)
            by_reason = value if isinstance(value, dict) else {"": value}
            for reason, number in by_reason.items():
                more = {"reason": reason} if reason else {}
                labels = {"model": model.name, **more, "version": model.version}
                samples.append(("", labels, number // 1000 if count.endswith("_ns") else number))
        kind = "gauge" if count == "pending" else "counter"
        yield from family_lines(f"nv_inference_{name}", text, kind, samples)
