"""The record of an evaluation, from which every report is written.

report.json is this record as JSON; `read_report` reads it back. Times are UTC in ISO 8601,
durations are in seconds unless the name ends in `_ms`, rates are fractions of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foundations.files.json_content import json_object, record_in
from inference.evaluation.gate import GateResult
from inference.evaluation.options import Bounds
from inference.evaluation.task import Dataset, Metric, Metrics, Prediction

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StageTiming:
    """A stage of the pipeline up to the evaluation.

    Attributes:
        seconds: its duration; for a stage that still runs, the time until it was ready.
    """

    name: str
    state: str
    seconds: float


@dataclass(frozen=True)
class RunFacts:
    """The served model and the command, as far as the caller of the evaluation knows them.

    Attributes:
        name: the run's name, such as `gpt3_5b`.
        server: address of a server that the caller did not start; its other facts are unknown.
        checkpoint: the source checkpoint, as configured.
        model_sha256: hash of the weights.
        tp_size, pp_size, max_batch_size: 0 if unknown.
    """

    name: str
    family: str = ""
    checkpoint: str = ""
    model_sha256: str = ""
    engine: str = ""
    server: str = ""
    tp_size: int = 0
    pp_size: int = 0
    weight_data_type: str = ""
    data_type: str = ""
    int8_mode: int = 0
    max_batch_size: int = 0
    cluster: str = ""
    command: str = ""
    git_revision: str = ""
    stages: tuple[StageTiming, ...] = ()

    @property
    def parallelism(self) -> str:
        """Tensor and pipeline parallelism in words; empty if unknown."""
        if not self.tp_size:
            return ""
        return f"TP {self.tp_size} x PP {self.pp_size or 1}"

    @property
    def weights(self) -> str:
        """The type of the served weights, in words; empty if unknown."""
        if self.int8_mode:
            return f"int8, rounded from {self.weight_data_type or 'an unknown type'}"
        return self.weight_data_type


@dataclass(frozen=True)
class Distribution:
    """Durations in milliseconds: their number, mean and percentiles."""

    count: int
    mean_ms: float
    min_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True)
class RequestStatistics:
    """The requests of one task.

    Attributes:
        latency: durations of all requests, under the load of the run.
        generated: tokens of all answers.
        stop, length: answers that the model ended, and answers of the full requested length.
        failed: requests without an answer.
        retried: requests sent again because the server was busy or the connection lost.
    """

    count: int
    concurrency: int
    seconds: float
    per_s: float
    latency: Distribution
    generated: int = 0
    stop: int = 0
    length: int = 0
    failed: int = 0
    retried: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the run."""
        return self.generated / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Comparison:
    """One metric against another run's, the reference.

    Attributes:
        difference: value minus reference over the samples of both, in the metric's unit.
        low, high: its 95% interval over paired samples (paired_tests.py); null without pairs.
        p_value: probability of such a difference if there were none, from the same test.
        same: number of the `count` paired samples that have equal values.
        largest_change: the largest of a paired sample, in the unit of the per-sample quantity.
    """

    reference: float
    difference: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    same: int = 0
    count: int = 0
    largest_change: float = 0.0


@dataclass(frozen=True)
class TaskReport:
    """The results of one task.

    Attributes:
        through: the models and the protocol of its requests.
        note: limitations of the figures.
    """

    name: str
    version: int
    dataset: Dataset
    metrics: Metrics
    seconds: float
    requests: RequestStatistics
    through: str = ""
    note: str = ""


@dataclass(frozen=True)
class LatencyPoint:
    """One point of the latency sweep.

    Attributes:
        output_len: 0 for an encoder, whose requests return hidden states.
        generated: tokens of all answers; fewer than requested if an end token came first.
        tokens_per_s: generated tokens, or an encoder's input tokens, per second of the point.
        first_token_ms, first_token_p95_ms: median and 95th percentile of the time to the first
            token; null for an encoder.
        per_token_ms: median time between two tokens; null for one token, or if noise exceeds it.
        streamed: whether these times come from a stream. If not, the first token's time is that of
            the same request for one token, and each further token's its share of the rest.
    """

    batch_size: int
    input_len: int
    output_len: int
    concurrency: int
    requests: int
    generated: int
    latency: Distribution
    tokens_per_s: float
    first_token_ms: float | None = None
    per_token_ms: float | None = None
    first_token_p95_ms: float | None = None
    streamed: bool = False

    @property
    def shape(self) -> str:
        """The tokens in and out; for an encoder, only those in."""
        return f"{self.input_len} + {self.output_len}" if self.output_len else str(self.input_len)

    @property
    def load(self) -> str:
        """The requests in flight, after the batch size if that is above 1."""
        batch = f"batch {self.batch_size}, " if self.batch_size > 1 else ""
        return f"{batch}{self.concurrency} in flight"

    @property
    def place(self) -> tuple[str, str]:
        """The point's place in the sweep."""
        return self.shape, self.load


@dataclass(frozen=True)
class Report:
    """One evaluation.

    Attributes:
        predictions: only in a baseline's file; those of a report.json are in predictions.jsonl.
    """

    run_id: str
    run: RunFacts
    started_at: str
    seconds: float
    tasks: tuple[TaskReport, ...]
    latency: tuple[LatencyPoint, ...] = ()
    bounds: Bounds = field(default_factory=dict)
    gate: GateResult = field(default_factory=GateResult)
    baseline: Mapping[str, Metric] = field(default_factory=dict)
    baseline_source: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    predictions: tuple[Prediction, ...] = ()

    @property
    def metrics(self) -> Metrics:
        """All metrics of all tasks."""
        return tuple(metric for task in self.tasks for metric in task.metrics)


def read_report(path: Path) -> Report:
    """Read a report.json.

    Raises:
        ValueError: the file is not a report, or has a schema that this version does not read.
    """
    content = path.read_bytes()
    if (version := json_object(content, path).get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema_version {version}; this version reads {SCHEMA_VERSION}."
        )
    try:
        return record_in(Report, content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_predictions(path: Path) -> list[Prediction]:
    """Read a predictions.jsonl. Raises ValueError if it is damaged."""
    try:
        with path.open("rb") as file:
            return [record_in(Prediction, line) for line in file]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
