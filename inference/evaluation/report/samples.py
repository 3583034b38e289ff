"""The table of samples in a report: its frame, and the data that fill it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from inference.evaluation.record import Prediction, Report
from inference.evaluation.report.formatting import metric_title
from inference.evaluation.task import Metric


def samples_section(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the section with search, filter and an empty table; nothing without samples."""
    if not predictions:
        return ""
    metrics = _marked(report)
    options = ['<option value="all">all samples</option>']
    for index, metric in enumerate(metrics):
        words = escape(metric_title(metric.name).lower())
        options.append(f'<option value="right{index}">{words} right</option>')
        options.append(f'<option value="wrong{index}">{words} wrong</option>')
    if any(prediction.reference for prediction in predictions):
        options.append('<option value="differs">differs from the reference</option>')
    marks = "".join(
        f'<th class="mark">{escape(metric_title(metric.name).lower())}</th>' for metric in metrics
    )
    return (
        "<h2>Samples</h2>\n"
        '<p class="lead">Click a row to read it whole.</p>\n<div class="card">'
        '<div class="tools"><input id="search" type="search" placeholder="Search the samples" '
        f'aria-label="Search the samples"><select id="filter" aria-label="Which samples">'
        f'{"".join(options)}</select><span id="count"></span></div>'
        '<div class="scroll"><table id="samples"><thead><tr><th class="number">#</th>'
        f'<th>passage</th><th>expected</th><th>answer</th>{marks}<th class="number time">ms</th>'
        '</tr></thead><tbody id="rows"></tbody></table></div>'
        '<div class="pager"><span id="page"></span><button id="previous" type="button">Back'
        '</button><button id="next" type="button">Next</button></div>'
        "<noscript>The table needs JavaScript; predictions.jsonl holds the same rows.</noscript>"
        "</div>"
    )


def samples_data(report: Report, predictions: Sequence[Prediction]) -> Any:
    """Return what the page's script shows, as plain values; None without samples."""
    if not predictions:
        return None
    names = [metric.sample_value for metric in _marked(report)]
    rows = [
        {
            "index": each.index,
            "text": each.text,
            "target": each.target,
            "answer": each.answer.strip(),
            "marks": [_rounded(each.values.get(name)) for name in names],
            "reference": [_rounded(each.reference.get(name)) for name in names],
            "ms": round(each.seconds * 1000),
        }
        for each in predictions
    ]
    return {"metrics": names, "rows": rows}


def _rounded(value: float | None) -> float | None:
    """Return a value as the page shows and compares it; none where a task has no such quantity."""
    return None if value is None else round(value, 3)


def _marked(report: Report) -> list[Metric]:
    """Return the metrics with a fraction for each sample, one for each such quantity."""
    found = {
        metric.sample_value: metric
        for metric in reversed(report.metrics)
        if metric.unit == "fraction"
    }
    return list(reversed(found.values()))
