"""report.html: the report as one file that needs nothing else, in light and dark.

All values come from the record; text of samples and configuration is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from inference.evaluation.gate import BREACHED, HELD
from inference.evaluation.record import Prediction, Report, RequestStatistics, TaskReport
from inference.evaluation.report.charts import (
    accuracy_chart,
    history_chart,
    latency_histogram,
    responsive,
    stages_chart,
    sweep_first_token_chart,
    sweep_latency_chart,
    sweep_per_token_chart,
    sweep_throughput_chart,
    throughput_chart,
)
from inference.evaluation.report.formatting import (
    SIDE_BY_SIDE_HEAD,
    difference_text,
    interval_text,
    metric_title,
    number_text,
    reference_text,
    seconds_text,
    side_by_side,
    value_text,
)
from inference.evaluation.report.markdown import (
    GATE_HEAD,
    LATENCY_HEAD,
    facts,
    gate_rows,
    latency_note,
    latency_row,
    verdict,
)
from inference.evaluation.report.page import facts_table, figure, page, table
from inference.evaluation.report.samples import samples_data, samples_section
from inference.evaluation.task import Metric


def render_html(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the report as one HTML page."""
    sections = [
        _cards(report),
        *(_task(report, task) for task in report.tasks),
        _latency(report),
        _stages(report),
        _gate(report),
        _history(report),
        samples_section(report, predictions),
        _run(report),
    ]
    footer = (
        f"{escape(report.run_id)} &middot; schema {report.schema_version} &middot; the same "
        "figures are in report.json and predictions.jsonl"
    )
    return page(
        f"{report.run.name}: evaluation",
        _header(report),
        sections,
        footer=footer,
        data=samples_data(report, predictions),
    )


def _header(report: Report) -> str:
    kind = "quiet" if not report.bounds else "good" if report.gate.passed else "bad"
    run = report.run
    parallelism = f"TP {run.tp_size} &times; PP {run.pp_size}"
    chips = [
        ("", f"<b>{escape(run.family)}</b>" if run.family else ""),
        ("", f"<b>{parallelism}</b>"),
        ("computed in", _bold(run.data_type)),
        ("weights", _bold(run.weight_data_type)),
        ("engine", _bold(run.engine)),
        ("started", _bold(report.started_at.replace("T", " ").replace("+00:00", " UTC"))),
        ("took", _bold(seconds_text(report.seconds))),
    ]
    items = "".join(f"<li>{name} {value}</li>" for name, value in chips if value)
    return (
        '<header><div><div class="brand">Slipway evaluation</div><div class="headline">'
        f'<h1>{escape(run.name)}</h1><span class="pill {kind}">{escape(verdict(report))}</span>'
        f'</div><ul class="chips">{items}</ul></div></header>\n'
    )


def _bold(value: str) -> str:
    return f"<b>{escape(value)}</b>" if value else ""


def _cards(report: Report) -> str:
    cards = [_card(task, metric) for task in report.tasks for metric in task.metrics]
    return f'<h2>Results</h2>\n<div class="cards">{"".join(cards)}</div>'


def _card(task: TaskReport, metric: Metric) -> str:
    lines = [f"95%: {interval_text(metric)}", _against(task, metric)]
    small = "".join(f'<div class="small">{each}</div>' for each in lines if each)
    title = f"{task.name} &middot; {escape(metric_title(metric.name).lower())}"
    return (
        f'<div class="card" title="{escape(metric.method)}"><div class="title">{title}</div>'
        f'<div class="big">{value_text(metric.value, metric.unit)}</div>{small}</div>'
    )


def _against(task: TaskReport, metric: Metric) -> str:
    """Return how a metric compares with its reference, in one line of HTML."""
    found = {} if task.reference is None else {each.metric: each for each in task.reference.metrics}
    if metric.name not in found:
        return ""
    each = found[metric.name]
    kind = "" if each.agreeing is None else "bad" if each.disagreeing else "good"
    return f'<span class="{kind}">{escape(reference_text(each, metric.unit))}</span>'


def _task(report: Report, task: TaskReport) -> str:
    data, requests = task.dataset, task.requests
    asked = f"{data.count:,} of {data.total:,}" if data.limit is not None else f"all {data.total:,}"
    lead = (
        f"Asked {asked} samples of {escape(data.name)}, {escape(task.through)}: "
        f"{requests.count:,} requests in {seconds_text(requests.seconds)}, up to "
        f"{requests.concurrency} in flight, {number_text(requests.tokens_per_s)} "
        "generated tokens/s."
    )
    note = f'<p class="note">{escape(task.note)}</p>\n' if task.note else ""
    return (
        f'<h2>{escape(task.name.capitalize())}</h2>\n<p class="lead">{lead}</p>\n{note}'
        + _accuracies(report, task)
        + _metric_table(task)
        + _side_by_side(task)
        + _load_charts(requests)
    )


def _load_charts(requests: RequestStatistics) -> str:
    if not requests.count:  # a task that sends its requests itself
        return ""
    return (
        '<div class="pair">'
        + figure("Latency under this load", latency_histogram(requests.latency))
        + figure("Throughput", throughput_chart(requests))
        + "</div>"
    )


def _accuracies(report: Report, task: TaskReport) -> str:
    shown = [metric for metric in task.metrics if metric.unit == "fraction"]
    if not shown:
        return ""
    found = () if task.reference is None else task.reference.metrics
    references = {each.metric: each.reference for each in found}
    baselines = {name: metric.value for name, metric in report.baseline.items()}
    names = {metric.name for metric in shown}
    keys = [
        ("value", "measured, with 95% interval", True),
        ("reference", f"reference: {task.reference.source}" if task.reference else "", True),
        ("baseline", f"baseline: {report.baseline_source}", bool(names & set(baselines))),
        ("bound", "lower bound of the gate", bool(names & set(report.bounds))),
    ]
    items = "".join(
        f'<li><i class="k-{kind}"></i>{escape(words)}</li>'
        for kind, words, present in keys
        if words and present
    )
    chart = responsive(
        lambda width: accuracy_chart(
            shown, references=references, baselines=baselines, bounds=report.bounds, width=width
        )
    )
    return f'<div class="card">{chart}<ul class="key">{items}</ul></div>'


def _metric_table(task: TaskReport) -> str:
    found = {} if task.reference is None else {each.metric: each for each in task.reference.metrics}
    rows = []
    for metric in task.metrics:
        each = found.get(metric.name)
        agreement = ""
        if each is not None and each.agreeing is not None:
            agreement = f"{each.agreeing:,} of {each.agreeing + (each.disagreeing or 0):,}"
        elif each is not None and each.largest_difference is not None:
            agreement = f"to {number_text(each.largest_difference)}"
        rows.append(
            (
                f"<code>{escape(metric.name)}</code><br>"
                f'<span class="soft">{escape(metric.method)}</span>',
                value_text(metric.value, metric.unit),
                interval_text(metric),
                f"{metric.count:,}",
                "" if each is None else value_text(each.reference, metric.unit),
                "" if each is None else difference_text(each.difference, metric.unit),
                agreement,
            )
        )
    head = ("metric", "value", "95% interval", "n", "reference", "difference", "samples agree")
    return f'<div class="card scroll">{table(head, rows)}</div>'


def _side_by_side(task: TaskReport) -> str:
    """Return the times of the served model next to those of its reference."""
    rows = [tuple(map(escape, row)) for row in side_by_side(task)]
    return f'<div class="card scroll">{table(SIDE_BY_SIDE_HEAD, rows)}</div>' if rows else ""


def _latency(report: Report) -> str:
    if not report.latency:
        return ""
    points = report.latency
    rows = [tuple(map(escape, latency_row(point))) for point in points]
    charts = [
        figure("Latency of a request", sweep_latency_chart(points)),
        figure("Throughput", sweep_throughput_chart(points)),
    ]
    if any(point.first_token_ms is not None for point in points):
        charts.append(figure("Time to the first token", sweep_first_token_chart(points)))
    if any(point.per_token_ms is not None for point in points):
        charts.append(figure("Each further token", sweep_per_token_chart(points)))
    return (
        f'<h2>Latency and throughput</h2>\n<p class="lead">{escape(latency_note(report))}</p>\n'
        f'<div class="pair">{"".join(charts)}</div>'
        f'<div class="card scroll">{table(LATENCY_HEAD, rows)}</div>'
    )


def _stages(report: Report) -> str:
    if not report.run.stages:
        return ""
    total = seconds_text(sum(stage.seconds for stage in report.run.stages))
    chart = responsive(lambda width: stages_chart(report.run.stages, width=width))
    return (
        f'<h2>Stages</h2>\n<p class="lead">{total} of work in all.</p>\n'
        f'<div class="card">{chart}</div>'
    )


def _gate(report: Report) -> str:
    if not report.gate.verdicts:
        return ""
    kinds = {HELD: "good", BREACHED: "bad"}
    rows = []
    for *cells, status, found in gate_rows(report):
        metric, *others = map(escape, cells)
        word = f'<b class="{kinds.get(status, "soft")}">{status}</b>'
        rows.append((f"<code>{metric}</code>", *others, word, escape(found)))
    source = f'<p class="lead">Baseline: {escape(report.baseline_source)}.</p>\n'
    return (
        "<h2>Gate</h2>\n"
        + (source if report.baseline_source else "")
        + f'<div class="card scroll">{table(GATE_HEAD, rows, numbers=())}</div>'
    )


def _history(report: Report) -> str:
    if len(report.history) < 2:
        return ""
    charts = "".join(
        figure(metric_title(metric.name), history_chart(report.history, metric.name))
        for metric in report.metrics
    )
    return (
        f'<h2>History</h2>\n<p class="lead">The last {len(report.history)} runs of this name over '
        f'the same samples; this one is the last.</p>\n<div class="pair">{charts}</div>'
    )


def _run(report: Report) -> str:
    rows = [(escape(name), escape(value)) for name, value in facts(report)]
    environment = [(escape(name), escape(value)) for name, value in report.environment.items()]
    data = [
        (f"data of {escape(task.name)}", f"{escape(task.dataset.path)}<br>{task.dataset.sha256}")
        for task in report.tasks
    ]
    command = ""
    if report.run.command:
        command = f'<div class="card"><h3>Command</h3><pre>{escape(report.run.command)}</pre></div>'
    return (
        f'<h2>How it was run</h2>\n{command}<div class="pair">'
        f'<div class="card"><h3>Model and run</h3>{facts_table([*rows, *data])}</div>'
        f'<div class="card"><h3>Environment</h3>{facts_table(environment)}</div></div>'
    )
