"""The document of a report, drawn from the record: verdict, results, load, latency, history."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from inference.evaluation.gate import EXIT_INSUFFICIENT
from inference.evaluation.record import (
    Prediction,
    Report,
    TaskReport,
)
from inference.evaluation.report.document import (
    BAD,
    GOOD,
    QUIET,
    UNDECIDED,
    Chart,
    Document,
    Section,
    Table,
)
from inference.evaluation.report.formatting import (
    LATENCY_HEAD,
    METRIC_HEAD,
    compared,
    ends_text,
    latency_note,
    latency_row,
    metric_row,
    metric_title,
    milliseconds_text,
    number_text,
    seconds_text,
    time_text,
    verdict,
)

_MOST_CHANGED = 20
_MOST_TEXT = 120  # characters of a sample's end


def report_document(report: Report, predictions: Sequence[Prediction]) -> Document:
    """Return the whole report."""
    latency: list[Section] = []
    if report.latency:
        rows = [latency_row(each) for each in report.latency]
        table = Table(LATENCY_HEAD, rows, tuple(range(2, len(LATENCY_HEAD))))
        note = latency_note(report)
        charts = (Chart("sweep", report.latency),)
        latency = [Section("Latency and throughput", (note,), charts, (table,))]
    return Document(
        report.run.name,
        (
            *_gate_sections(report),
            Section("Results", charts=(Chart("cards", report.tasks),)),
            *(_task_section(report, task) for task in report.tasks),
            *_changed_sections(report, predictions),
            *latency,
            *_stages_sections(report),
            *_history_sections(report),
            *_origin_sections(report),
        ),
        verdict(report),
        status_of(report),
        _facts(report),
        _samples(report, predictions),
        f"{report.run_id} · schema {report.schema_version} · the same figures are in report.json "
        "and predictions.jsonl",
    )


def changes_document(report: Report, predictions: Sequence[Prediction]) -> Document:
    """Return a comment of a pull request: the gate's verdicts and the samples that changed."""
    sections = [*_gate_sections(report), *_changed_sections(report, predictions)]
    return Document(report.run.name, sections, verdict(report), status_of(report))


def status_of(report: Report) -> str:
    """Return the colour of the gate's outcome."""
    if not report.bounds:
        return QUIET
    if report.gate.passed:
        return GOOD
    return UNDECIDED if report.gate.exit_code == EXIT_INSUFFICIENT else BAD


def _gate_sections(report: Report) -> list[Section]:
    rows = [
        (each.metric, each.bound, each.tier, each.status, each.text)
        for each in report.gate.verdicts
    ]
    text = [f"Baseline: {report.baseline_source}."] * bool(report.baseline_source)
    table = Table(("metric", "bound", "tier", "verdict", "found"), rows, verdict=3)
    return [Section("Gate", text, tables=(table,))] * bool(rows)


def _changed_sections(report: Report, predictions: Sequence[Prediction]) -> list[Section]:
    changed = [each for each in predictions if each.changes]
    if not changed or not report.gate.verdicts:
        return []
    # Right and wrong first, then the largest differences.
    changed.sort(key=lambda each: -max(abs(new - old) for old, new in each.changes.values()))
    text = (
        f"{len(changed):,} of {len(predictions):,} samples score differently from the baseline"
        + ", the most changed first" * (len(changed) > 1)
    )
    head = ("#", "passage", "expected", "answered", "changed")
    table = Table(head, [_changed_row(each) for each in changed[:_MOST_CHANGED]], (0,))
    return [Section("Changed samples", (f"{text}.",), tables=(table,))]


def _changed_row(each: Prediction) -> tuple[str, ...]:
    changes = ", ".join(
        f"{metric_title(name).lower()} {old:.4g} to {new:.4g}"
        for name, (old, new) in each.changes.items()
    )
    end = each.text[-_MOST_TEXT:]
    text = end if end == each.text else f"...{end}"
    return str(each.index), text, each.target, each.answer, changes


def _task_section(report: Report, task: TaskReport) -> Section:
    data, requests = task.dataset, task.requests
    drawn = f" (limit {data.limit}, seed {data.seed})" if data.limit is not None else ""
    text = [
        f"{data.count:,} of {data.total:,} samples of {data.name}{drawn}; {requests.count:,} "
        f"requests in {seconds_text(requests.seconds)} ({requests.per_s:.1f}/s, "
        f"{requests.concurrency} in flight, p50 {milliseconds_text(requests.latency.p50_ms)}, p99 "
        f"{milliseconds_text(requests.latency.p99_ms)}, {number_text(requests.tokens_per_s)} "
        f"generated tokens/s), {task.through}."
    ]
    if ends := ends_text(requests):
        text.append(f"Ends of answers: {ends}.")
    text += [task.note] * bool(task.note)
    columns = METRIC_HEAD.index("against")
    if task.reference is not None:
        columns = len(METRIC_HEAD)
        took = task.reference.requests
        text.append(f"Reference: {task.reference.source}{f', {time_text(took)}' if took else ''}.")
    found = compared(task)
    rows = [metric_row(each, found.get(each.name))[:columns] for each in task.metrics]
    methods = [(each.name, each.method) for each in task.metrics if each.method]
    tables = [Table(METRIC_HEAD[:columns], rows, tuple(range(1, columns)))]
    tables += [Table(("metric", "how it was measured"), methods)] * bool(methods)
    known = {"task": task, "baseline": report.baseline, "bounds": report.bounds}
    charts = [Chart("accuracies", known | {"baseline_source": report.baseline_source})]
    charts += [Chart("load", requests)] * bool(requests.count)
    return Section(task.name.capitalize(), text, charts, tables)


def _stages_sections(report: Report) -> list[Section]:
    stages = report.run.stages
    if not stages:
        return []
    rows = [(each.name, each.state, seconds_text(each.seconds)) for each in stages]
    text = f"{seconds_text(sum(each.seconds for each in stages))} of work in all."
    table = Table(("stage", "state", "took"), rows, (2,))
    return [Section("Stages", (text,), (Chart("stages", stages),), (table,))]


def _history_sections(report: Report) -> list[Section]:
    if len(report.history) < 2:
        return []
    text = (
        f"The last {len(report.history)} runs of this name over the same samples; this one is the "
        "last."
    )
    return [Section("History", (text,), (Chart("history", report.history),))]


def _facts(report: Report) -> list[tuple[str, str]]:
    """Return what was served, as names and values, without those that are not known."""
    run = report.run
    known = {each.name: str(getattr(run, each.name) or "") for each in fields(run)}
    for name in ("name", "command", "stages", "tp_size", "pp_size", "int8_mode"):
        del known[name]
    known |= {"weight_data_type": run.weights, "parallelism": run.parallelism}
    known |= {"run": report.run_id, "started": report.started_at}
    known["took"] = seconds_text(report.seconds)
    return [(name.replace("_", " "), value) for name, value in known.items() if value]


def _origin_sections(report: Report) -> list[Section]:
    data = [
        (f"data of {each.name}", f"{each.dataset.path}, SHA-256 {each.dataset.sha256}")
        for each in report.tasks
    ]
    tables = [Table(("", ""), rows) for rows in (data, [*report.environment.items()]) if rows]
    return [Section("How it was run", code=report.run.command, tables=tables)]


def _samples(report: Report, predictions: Sequence[Prediction]) -> dict[str, Any] | None:
    """Return the samples with a mark for each quantity that a fraction is made of."""
    if not predictions:
        return None
    fractions = [each for each in reversed(report.metrics) if each.unit == "fraction"]
    marked = list({each.sample_value: each for each in fractions}.values())[::-1]
    names = [each.sample_value for each in marked]
    return {
        "metrics": names,
        "titles": [metric_title(each.name).lower() for each in marked],
        "rows": [
            {
                "index": each.index,
                "text": each.text,
                "target": each.target,
                "answer": each.answer.strip(),
                "marks": [each.values.get(name) for name in names],
                "reference": [each.reference.get(name) for name in names],
                "ms": round(each.seconds * 1000),
            }
            for each in predictions
        ],
    }
