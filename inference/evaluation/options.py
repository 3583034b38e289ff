"""The options of an evaluation, as plain data; importing this costs nothing.

The configuration group `evaluate` has these fields; `check_evaluation` answers with every
problem that is visible before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inference.evaluation.gate import Bound, check_bounds

LAMBADA_METRICS = ("lambada_last_word", "lambada_last_token", "lambada_perplexity")
# OpenAI's preprocessing of the LAMBADA test set (CC BY 4.0): 5,153 lines {"text": ...}.
LAMBADA_URL = "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"
LAMBADA_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"


@dataclass(frozen=True)
class LambadaOptions:
    """Data and metrics of the task `lambada`.

    Attributes:
        data_path: JSON Lines with one `text` a line; null: `<data_dir>/lambada_test.jsonl`,
            downloaded from `url` when it is missing.
        sha256: checksum the downloaded file must have.
        metrics: which of LAMBADA_METRICS to measure; the perplexity doubles the requests.
        reference_path: figures recorded elsewhere for the same passages, to compare with.
    """

    data_path: Path | None = None
    url: str = LAMBADA_URL
    sha256: str = LAMBADA_SHA256
    metrics: tuple[str, ...] = LAMBADA_METRICS
    reference_path: Path | None = None


@dataclass(frozen=True)
class LatencyOptions:
    """A measurement of latency and throughput, one point per shape, batch size and concurrency.

    Attributes:
        shapes: tokens in and out, such as `60+20`, or names in USE_CASES.
        batch_sizes: rows of a request.
        concurrencies: requests in flight at once.
        requests: timed requests of a point, after `warmup` that are not counted.
        max_point_s: a point ends after this many seconds, with the requests done by then.
        load_generator: `client` (ours) or `perf_analyzer` (NVIDIA's, which does not end early).
    """

    enabled: bool = True
    shapes: tuple[str, ...] = ("32+8", "32+32")
    batch_sizes: tuple[int, ...] = (1,)
    concurrencies: tuple[int, ...] = (1, 4)
    requests: int = 16
    warmup: int = 2
    max_point_s: float = 3.0
    load_generator: str = "client"


@dataclass(frozen=True)
class Shape:
    """Tokens of a prompt and of its answer."""

    input_len: int
    output_len: int


# The use cases that NVIDIA's deployment guide measures with.
USE_CASES = {
    "question_answering": Shape(60, 20),
    "intent_classification": Shape(225, 20),
    "translation": Shape(200, 200),
}


def parse_shape(text: str) -> Shape:
    """Return the shape that `text` writes or names.

    Raises:
        ValueError: it is neither a known name nor two positive numbers around a plus.
    """
    if text in USE_CASES:
        return USE_CASES[text]
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if found is None:
        raise ValueError(
            f"evaluate.latency.shapes has {text!r}; write tokens in and out such as 60+20, or one "
            f"of {', '.join(USE_CASES)}."
        )
    return Shape(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class EvaluationOptions:
    """Everything `evaluate` needs to know besides the address of the server.

    Attributes:
        output_dir: where the report goes; files of an earlier report there are replaced.
        data_dir: where downloaded data sets are kept.
        tasks: names in the table of tasks, run in this order.
        url: host and port of the server; `protocol` is grpc or http.
        model_name, ensemble_name: Triton models for token ids and for text; without an ensemble
            (null) text is encoded and decoded here and the model is asked.
        tokenizer_dir: folder with the served tokenizer's files; null asks the server's own
            preprocessing and postprocessing models, at the price of more requests.
        weights_dir: the served folder of shards; family and hash of the weights are added to the
            report from its manifest.
        concurrency: requests kept in flight.
        limit: ask only this many samples, drawn with `seed`; null asks all, in file order.
        request_timeout_s: a request that takes longer has failed.
        gate: bounds per metric name; a breach is reported and decides the exit code.
        baseline: `none`, `compare` (gate against `baseline_path`) or `update` (record it).
        history_dir: run store that the report is added to; null keeps no history.
    """

    output_dir: Path
    data_dir: Path
    tasks: tuple[str, ...] = ("lambada",)
    url: str = "127.0.0.1:8001"
    protocol: str = "grpc"
    model_name: str = "fastertransformer"
    ensemble_name: str | None = "ensemble"
    tokenizer_dir: Path | None = None
    weights_dir: Path | None = None
    concurrency: int = 32
    limit: int | None = None
    seed: int = 1234
    request_timeout_s: float = 120.0
    lambada: LambadaOptions = field(default_factory=LambadaOptions)
    latency: LatencyOptions = field(default_factory=LatencyOptions)
    gate: Mapping[str, Bound] = field(default_factory=dict)
    baseline: str = "none"
    baseline_path: Path | None = None
    history_dir: Path | None = None


def check_evaluation(options: EvaluationOptions) -> list[str]:
    """Return every problem of the options that can be seen without a server, or an empty list.

    The messages use the configuration's names (`evaluate.concurrency`).
    """
    from inference.evaluation import TASKS

    problems = [
        f"unknown task {name!r} in evaluate.tasks; known tasks: {', '.join(sorted(TASKS))}."
        for name in options.tasks
        if name not in TASKS
    ]
    if not options.tasks:
        problems.append("evaluate.tasks is empty; name at least one task, such as [lambada].")
    problems += _check_numbers(options)
    problems += _check_lambada(options.lambada)
    problems += _check_latency(options.latency)
    problems += check_bounds(options.gate, known=_known_metrics(options))
    problems += _check_baseline(options)
    return problems


def _known_metrics(options: EvaluationOptions) -> tuple[str, ...]:
    return tuple(options.lambada.metrics) if "lambada" in options.tasks else ()


def _check_numbers(options: EvaluationOptions) -> list[str]:
    problems = []
    if options.protocol not in ("grpc", "http"):
        problems.append(f"evaluate.protocol={options.protocol!r} is unknown; use grpc or http.")
    if options.concurrency < 1:
        problems.append(f"evaluate.concurrency={options.concurrency} must be at least 1.")
    if options.limit is not None and options.limit < 1:
        problems.append(
            f"evaluate.limit={options.limit} must be at least 1, or null for all samples."
        )
    if options.request_timeout_s <= 0:
        problems.append(
            f"evaluate.request_timeout_s={options.request_timeout_s} must be positive (seconds)."
        )
    return problems


def _check_lambada(lambada: LambadaOptions) -> list[str]:
    problems = [
        f"unknown metric {name!r} in evaluate.lambada.metrics; known: {', '.join(LAMBADA_METRICS)}."
        for name in lambada.metrics
        if name not in LAMBADA_METRICS
    ]
    if not lambada.metrics:
        problems.append(
            f"evaluate.lambada.metrics is empty; choose from {', '.join(LAMBADA_METRICS)}."
        )
    for key, path in (
        ("data_path", lambada.data_path),
        ("reference_path", lambada.reference_path),
    ):
        if path is not None and not path.is_file():
            problems.append(
                f"evaluate.lambada.{key}={path} is not a file; give an existing file, or null."
            )
    return problems


def _check_latency(latency: LatencyOptions) -> list[str]:
    if not latency.enabled:
        return []
    numbers = {
        "batch_sizes": latency.batch_sizes,
        "concurrencies": latency.concurrencies,
        "requests": (latency.requests,),
    }
    problems = [
        f"evaluate.latency.{key}={', '.join(map(str, values)) or '[]'} must be positive integers."
        for key, values in numbers.items()
        if not values or min(values) < 1
    ]
    if not latency.shapes:
        problems.append("evaluate.latency.shapes is empty; name at least one, such as 60+20.")
    problems += [told for text in latency.shapes if (told := _shape_problem(text))]
    if latency.warmup < 0:
        problems.append(f"evaluate.latency.warmup={latency.warmup} must not be negative.")
    if latency.max_point_s <= 0:
        problems.append(
            f"evaluate.latency.max_point_s={latency.max_point_s} must be positive (seconds)."
        )
    if latency.load_generator not in ("client", "perf_analyzer"):
        problems.append(
            f"evaluate.latency.load_generator={latency.load_generator!r} is unknown; use client or "
            "perf_analyzer."
        )
    return problems


def _shape_problem(text: str) -> str:
    try:
        parse_shape(text)
    except ValueError as error:
        return str(error)
    return ""


def _check_baseline(options: EvaluationOptions) -> list[str]:
    if options.baseline not in ("none", "compare", "update"):
        return [f"evaluate.baseline={options.baseline!r} is unknown; use none, compare or update."]
    if options.baseline == "none":
        relative = [name for name, bound in options.gate.items() if bound.is_relative]
        return [
            f"evaluate.gate.{name} is relative to a baseline, but evaluate.baseline=none; set "
            "evaluate.baseline=compare and evaluate.baseline_path."
            for name in relative
        ]
    if options.baseline_path is None:
        return [f"evaluate.baseline={options.baseline} needs evaluate.baseline_path."]
    if options.baseline == "compare" and not options.baseline_path.is_file():
        return [
            f"evaluate.baseline_path={options.baseline_path} does not exist; record a baseline "
            "first with evaluate.baseline=update."
        ]
    return []
