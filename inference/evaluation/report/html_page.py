"""report.html: the report as one file that needs nothing else, in light and dark.

All values come from the record; the template escapes text of samples and configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from inference.evaluation.record import Prediction, Report, TaskReport
from inference.evaluation.report import charts
from inference.evaluation.report.formatting import compared, metric_rows
from inference.evaluation.report.page import render_page
from inference.evaluation.report.row_charts import accuracy_chart, responsive, stages_chart
from inference.evaluation.task import Metric


def render_html(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the report as one HTML page."""
    stages = report.run.stages
    return render_page(
        "report.html",
        title=f"{report.run.name}: evaluation",
        data=_samples_data(report, predictions),
        report=report,
        compared=compared,
        accuracies=lambda task: _accuracies(report, task),
        named_rows=_metric_rows,
        charts=charts,
        stages=stages and responsive(stages_chart, stages),
        marked=_marked(report),
        has_reference=any(prediction.reference for prediction in predictions),
        data_facts=[
            (
                f"data of {task.name}",
                Markup("{}<br>{}").format(task.dataset.path, task.dataset.sha256),
            )
            for task in report.tasks
        ],
    )


def _accuracies(report: Report, task: TaskReport) -> tuple[Markup | None, list[tuple[str, str]]]:
    """Return the chart of a task's fractions, if it has any, and what its marks mean."""
    shown = [metric for metric in task.metrics if metric.unit == "fraction"]
    if not shown:
        return None, []
    references = {name: each.reference for name, each in compared(task).items()}
    baselines = {name: metric.value for name, metric in report.baseline.items()}
    names = {metric.name for metric in shown}
    keys = [("value", "measured, with 95% interval")]
    if task.reference is not None:
        keys.append(("reference", f"reference: {task.reference.source}"))
    if names & set(baselines):
        keys.append(("baseline", f"baseline: {report.baseline_source}"))
    if names & set(report.bounds):
        keys.append(("bound", "lower bound of the gate"))
    marks = {"references": references, "baselines": baselines, "bounds": report.bounds}
    return responsive(accuracy_chart, shown, **marks), keys


def _metric_rows(task: TaskReport) -> list[tuple[str, ...]]:
    names = [
        Markup('<code>{}</code><br><span class="soft">{}</span>').format(each.name, each.method)
        for each in task.metrics
    ]
    return [(name, *row[1:]) for name, row in zip(names, metric_rows(task), strict=True)]


def _samples_data(report: Report, predictions: Sequence[Prediction]) -> Any:
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
    return None if value is None else round(value, 3)


def _marked(report: Report) -> list[Metric]:
    """Return the metrics with a fraction for each sample, one for each such quantity."""
    fractions = [metric for metric in report.metrics if metric.unit == "fraction"]
    return list({metric.sample_value: metric for metric in reversed(fractions)}.values())[::-1]
