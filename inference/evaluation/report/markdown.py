"""report.md: the report as a page for terminals, pull requests and chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference.evaluation.gate import INSUFFICIENT
from inference.evaluation.record import LatencyPoint, Prediction, Report, TaskReport
from inference.evaluation.report.formatting import (
    SIDE_BY_SIDE_HEAD,
    difference_text,
    interval_text,
    load_text,
    metric_title,
    milliseconds_text,
    number_text,
    seconds_text,
    shape_text,
    side_by_side,
    value_text,
)

GATE_HEAD = ("metric", "bound", "tier", "verdict", "found")
_MOST_CHANGED = 20
_MOST_TEXT = 120  # characters of a sample's end


def render_changes(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the gate's verdicts and the samples that changed, as a comment of a pull request."""
    gate = _gate(report, predictions)
    return f"# {report.run.name}: {verdict(report)}\n" + (f"\n{gate}\n" if gate else "")


def render_markdown(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the report as Markdown."""
    sections = [
        _head(report),
        *(_task(task) for task in report.tasks),
        _latency(report),
        _stages(report),
        _gate(report, predictions),
        _environment(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def verdict(report: Report) -> str:
    """Return the outcome of the gate in a few words."""
    if not report.bounds:
        return "no gate set"
    gate = report.gate
    if breaches := len(gate.breaches):
        return f"gate breached ({breaches} of {gate.checked} bounds)"
    if unknown := len(gate.of(INSUFFICIENT)):
        return f"gate undecided ({unknown} of {gate.checked} bounds need more samples)"
    return f"gate passed ({gate.checked} of {gate.checked} bounds hold)"


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what was served, as names and values, without those that are not known."""
    run = report.run
    listed = [
        ("run", report.run_id),
        ("started", report.started_at),
        ("took", seconds_text(report.seconds)),
        ("checkpoint", run.checkpoint),
        ("family", run.family),
        ("engine", run.engine),
        ("parallelism", f"TP {run.tp_size} x PP {run.pp_size}"),
        ("weights", run.weight_data_type),
        ("computed in", run.data_type),
        ("int8 mode", str(run.int8_mode) if run.int8_mode else ""),
        ("batch limit", str(run.max_batch_size or "")),
        ("model SHA-256", run.model_sha256),
        ("cluster", run.cluster),
        ("git revision", run.git_revision),
    ]
    return [(name, value) for name, value in listed if value]


def _head(report: Report) -> str:
    rows = [(name, f"`{value}`") for name, value in facts(report)]
    return f"# {report.run.name}: {verdict(report)}\n\n" + _table(("", ""), rows)


def _task(task: TaskReport) -> str:
    data = task.dataset
    asked = f"{data.count:,} of {data.total:,} samples of `{data.name}`"
    if data.limit is not None:
        asked += f" (limit {data.limit}, seed {data.seed})"
    rows = [
        (
            f"`{metric.name}`",
            f"**{value_text(metric.value, metric.unit)}**",
            interval_text(metric),
            f"{metric.count:,}",
        )
        for metric in task.metrics
    ]
    requests = task.requests
    parts = [
        f"## {task.name}",
        _table(("metric", "value", "95% interval", "n"), rows),
        f"{asked}; {requests.count:,} requests in {seconds_text(requests.seconds)} "
        f"({requests.per_s:.1f}/s, {requests.concurrency} in flight, p50 "
        f"{milliseconds_text(requests.latency.p50_ms)}, p99 "
        f"{milliseconds_text(requests.latency.p99_ms)}, "
        f"{number_text(requests.tokens_per_s)} generated tokens/s), "
        f"{task.through}.",
        task.note,
        _reference(task),
    ]
    return "\n\n".join(part for part in parts if part)


def _reference(task: TaskReport) -> str:
    if task.reference is None:
        return ""
    units = {metric.name: metric.unit for metric in task.metrics}
    rows = []
    for each in task.reference.metrics:
        unit = units[each.metric]
        agreement = "" if each.agreeing is None else f"{each.agreeing:,} of "
        if each.agreeing is not None and each.disagreeing is not None:
            agreement += f"{each.agreeing + each.disagreeing:,}"
        rows.append(
            (
                f"`{each.metric}`",
                value_text(each.reference, unit),
                difference_text(each.difference, unit),
                agreement,
            )
        )
    table = _table(("metric", "reference", "difference", "samples that agree"), rows)
    text = f"Against {task.reference.source}:\n\n{table}"
    if sides := side_by_side(task):
        text += f"\n\n{_table(SIDE_BY_SIDE_HEAD, sides)}"
    return text


LATENCY_HEAD = (
    "tokens in + out", "load", "requests", "mean", "p50", "p95", "p99", "first token",
    "each further", "tokens/s",
)  # fmt: skip


def latency_row(point: LatencyPoint) -> tuple[str, ...]:
    """Return a point of the latency sweep as text, under LATENCY_HEAD."""
    first, further = (
        "" if each is None else milliseconds_text(each)
        for each in (point.first_token_ms, point.per_token_ms)
    )
    return (
        shape_text(point),
        load_text(point),
        str(point.requests),
        milliseconds_text(point.latency.mean_ms),
        milliseconds_text(point.latency.p50_ms),
        milliseconds_text(point.latency.p95_ms),
        milliseconds_text(point.latency.p99_ms),
        first,
        further,
        number_text(point.tokens_per_s),
    )


def latency_note(report: Report) -> str:
    """Return how the sweep was measured."""
    if not any(point.output_len for point in report.latency):
        tokens = "The model is an encoder: tokens per second are those of the requests."
    elif all(point.streamed for point in report.latency):
        tokens = "The model streams: each token was timed on arrival."
    else:
        tokens = (
            "The model returns whole answers: the time to the first token is that of a request for "
            "one token, and the time of each further token is the rest of the median latency, "
            "divided evenly."
        )
    return f"Each request was sent when the one before it was answered. {tokens}"


def _latency(report: Report) -> str:
    if not report.latency:
        return ""
    table = _table(LATENCY_HEAD, map(latency_row, report.latency))
    return f"## Latency\n\n{latency_note(report)}\n\n{table}"


def _stages(report: Report) -> str:
    if not report.run.stages:
        return ""
    rows = [(each.name, each.state, seconds_text(each.seconds)) for each in report.run.stages]
    return "## Stages\n\n" + _table(("stage", "state", "took"), rows)


def gate_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the bounds and what was found, under GATE_HEAD."""
    return [
        (each.metric, each.bound, each.tier, each.status, each.text)
        for each in report.gate.verdicts
    ]


def _gate(report: Report, predictions: Sequence[Prediction]) -> str:
    if not report.gate.verdicts:
        return ""
    parts = ["## Gate", _table(GATE_HEAD, gate_rows(report))]
    if report.baseline_source:
        parts.append(f"Baseline: {report.baseline_source}.")
    changed = [each for each in predictions if each.changes]
    # Right and wrong first, then the largest differences.
    changed.sort(key=lambda each: -max(abs(new - old) for old, new in each.changes.values()))
    if changed:
        rows = [_changed_row(each) for each in changed[:_MOST_CHANGED]]
        parts += [
            f"{len(changed):,} of {len(predictions):,} samples score differently from the "
            f"baseline{', the most changed first' if len(changed) > 1 else ''}:",
            _table(("#", "passage", "expected", "answered", "changed"), rows),
        ]
    return "\n\n".join(parts)


def _changed_row(each: Prediction) -> tuple[str, ...]:
    changes = ", ".join(
        f"{metric_title(name).lower()} {old:.4g} -> {new:.4g}"
        for name, (old, new) in each.changes.items()
    )
    end = each.text[-_MOST_TEXT:]
    text = end if end == each.text else f"...{end}"
    return str(each.index), *map(_one_line, (text, each.target, each.answer)), changes


def _one_line(text: str) -> str:
    """Return data as a cell that cannot end the table or hold markup."""
    for character in "\\`*_[]<>&@#":
        text = text.replace(character, f"\\{character}" if character != "@" else "&#64;")
    return " ".join(text.split())


def _environment(report: Report) -> str:
    rows = [(name, value) for name, value in report.environment.items()]
    command = f"```\n{report.run.command}\n```\n\n" if report.run.command else ""
    return "## Environment\n\n" + command + _table(("", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
