"""Every problem of evaluation options that is visible before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from inference.evaluation.gate import check_bounds
from inference.evaluation.options import (
    REFERENCES,
    TRACKERS,
    EvaluationOptions,
    LatencyOptions,
    TextTaskOptions,
    parse_shape,
)
from inference.evaluation.tasks import TASKS
from inference.gateway.credentials import PLAIN


def check_evaluation(options: EvaluationOptions) -> list[str]:
    """Return every problem of the options that can be seen without a server, or an empty list.

    The messages use the configuration's names (`evaluate.concurrency`).
    """
    problems = [
        f"unknown task {name!r} in evaluate.tasks; known tasks: {', '.join(sorted(TASKS))}."
        for name in options.tasks
        if name not in TASKS
    ]
    if not options.tasks:
        problems.append("evaluate.tasks is empty; name at least one task, such as [lambada].")
    problems += _check_numbers(options)
    problems += options.credentials.problems(prefix="evaluate.", joiner="_")
    if options.credentials != PLAIN and options.latency.load_generator == "perf_analyzer":
        problems.append(
            "evaluate.latency.load_generator=perf_analyzer takes neither evaluate.ca nor "
            "evaluate.token_file; use client."
        )
    entries = {name: TASKS[name] for name in options.tasks if name in TASKS}
    for entry in entries.values():
        problems += entry.check(options)
    problems += [
        f"evaluate.tasks has {name}, which only a server can do; set evaluate.reference=none."
        for name, entry in entries.items()
        if entry.only_served and options.reference == "huggingface"
    ]
    problems += _check_latency(options.latency)
    known = known_metrics(options)
    grouped = tuple(
        f"{metric}_"
        for entry in entries.values()
        if entry.grouped
        for metric in entry.metrics(options)
    )
    # Which groups there are is seen in the data, so their bounds are checked when that was read.
    whole = {name: each for name, each in options.gate.items() if not name.startswith(grouped)}
    problems += check_bounds(whole, known=known)
    problems += _check_baseline(options)
    problems += _check_trackers(options.trackers)
    problems += _check_reference(options)
    return problems


def known_metrics(
    options: EvaluationOptions, groups: Mapping[str, Sequence[str]] | None = None
) -> tuple[str, ...]:
    """Return the names of all metrics that will be measured; `groups` are those of each task."""
    found: list[str] = []
    for name in options.tasks:
        own = TASKS[name].metrics(options) if name in TASKS else ()
        found += own
        found += [f"{metric}_{group}" for metric in own for group in (groups or {}).get(name, ())]
    return tuple(found)


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
    sent, widest = latency.requests + latency.warmup, max(latency.concurrencies, default=0)
    if latency.load_generator == "perf_analyzer" and sent < widest:
        problems.append(
            f"evaluate.latency.requests={latency.requests} and warmup={latency.warmup} are fewer "
            f"than the {widest} requests in flight of evaluate.latency.concurrencies, which "
            "perf_analyzer refuses; raise requests."
        )
    return problems


def _shape_problem(text: str) -> str:
    try:
        parse_shape(text)
    except ValueError as error:
        return str(error)
    return ""


def _check_reference(options: EvaluationOptions) -> list[str]:
    if options.reference != "huggingface":
        if options.reference in REFERENCES or Path(options.reference).is_file():
            return []
        return [
            f"evaluate.reference={options.reference} is no file; use none, huggingface, or the "
            "path of a past report.json or of recorded figures."
        ]
    source = options.source_path
    problems = [
        f"evaluate.reference=huggingface and evaluate.{name}.prompt exclude each other: virtual "
        "tokens are not part of the source checkpoint."
        for name in options.tasks
        if options.text_tasks.get(name, TextTaskOptions()).prompt.length > 0
    ]
    problems += [
        f"evaluate.reference=huggingface and evaluate.{name}.reference_path exclude each other; "
        "set one of them to none or null."
        for name in options.tasks
        if options.reference_path(name) is not None
    ]
    if source is None or not (source / "config.json").is_file():
        problems.append(
            "evaluate.reference=huggingface needs a source checkpoint that transformers can read, "
            f"a folder with config.json; export.model.checkpoint_path={source} is none. Set "
            "evaluate.reference=none."
        )
    return problems


def _check_trackers(trackers: Sequence[str]) -> list[str]:
    problems = [
        f"unknown tracker {name!r} in evaluate.trackers; known: {', '.join(TRACKERS)}."
        for name in trackers
        if name not in TRACKERS
    ]
    problems += [
        f"evaluate.trackers has {name}, which is not installed; install slipway[{name}]."
        for name in trackers
        if name in TRACKERS and find_spec(name) is None
    ]
    return problems


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
