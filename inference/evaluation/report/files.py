"""The machine-readable files of a report: JSON, metrics, predictions and JUnit.

Every file is replaced in one step. report.json is written last, so where it is, the rest is too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from export_scripts.files.replace import replace_file
from inference.evaluation.gate import CRITICAL, HELD
from inference.evaluation.record import (
    Prediction,
    Report,
    TaskReport,
    read_predictions,
    read_report,
)
from inference.evaluation.report.html_page import render_html
from inference.evaluation.report.markdown import render_changes, render_markdown
from inference.evaluation.report.page import render_text

REPORT_JSON = "report.json"
REPORT_MARKDOWN = "report.md"
REPORT_HTML = "report.html"
METRICS_JSON = "metrics.json"
PREDICTIONS = "predictions.jsonl"
JUNIT = "junit.xml"
CHANGES = "changes.md"
FILE_NAMES = (CHANGES, REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML, METRICS_JSON, PREDICTIONS, JUNIT)


def metrics_text(report: Report) -> str:
    """Return metrics.json: per task the short metric names, in fractions, and what they mean.

    The names `acc`, `acc_stderr`, `ppl`, `ppl_stderr` are those of the common evaluation harness.
    """
    return json.dumps({task.name: _task_metrics(report, task) for task in report.tasks}, indent=1)


def _task_metrics(report: Report, task: TaskReport) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for metric in task.metrics:
        values[metric.key] = metric.value
        values[f"{metric.key}_stderr"] = metric.stderr
    return {
        **values,
        "n": task.dataset.count,
        "limit": task.dataset.limit,
        "seed": task.dataset.seed,
        "metric": {metric.key: metric.name for metric in task.metrics},
        "method": {metric.key: metric.method for metric in task.metrics},
        "through": task.through,
        "task_version": task.version,
        "dtype": report.run.data_type,
        "tp": report.run.tp_size,
        "pp": report.run.pp_size,
        "model_sha256": report.run.model_sha256,
        "dataset_sha256": task.dataset.sha256,
    }


def junit_text(report: Report) -> str:
    """Return junit.xml: a suite per task with its metrics, and one with the bounds of the gate.

    What an advisory bound finds does not fail.
    """
    verdicts = report.gate.verdicts
    return render_text(
        "junit.xml",
        name=f"slipway {report.run.name}",
        tasks=report.tasks,
        verdicts=verdicts,
        failed=[each for each in verdicts if each.status != HELD and each.tier == CRITICAL],
        skipped=[each for each in verdicts if each.status != HELD and each.tier != CRITICAL],
    )


def junit_error_text(message: str) -> str:
    """Return junit.xml of an evaluation that could not be completed."""
    return render_text("junit.xml", name="slipway", tasks=(), verdicts=(), error=message)


def read_run(path: Path) -> tuple[Report, list[Prediction]]:
    """Read a report.json, and the predictions next to it where there are any.

    Raises:
        ValueError: one of the files is damaged, or of a schema that this version does not read.
    """
    predictions = path.with_name(PREDICTIONS)
    return read_report(path), read_predictions(predictions) if predictions.is_file() else []


def write_report(output_dir: Path, report: Report, predictions: Sequence[Prediction]) -> None:
    """Write every file of a report."""
    texts = {
        PREDICTIONS: "".join(json.dumps(asdict(each)) + "\n" for each in predictions),
        METRICS_JSON: metrics_text(report),
        JUNIT: junit_text(report),
        REPORT_MARKDOWN: render_markdown(report, predictions),
        CHANGES: render_changes(report, predictions),
        REPORT_HTML: render_html(report, predictions),
        REPORT_JSON: json.dumps(asdict(report), indent=1) + "\n",
    }
    for name, text in texts.items():
        replace_file(output_dir / name, text)
