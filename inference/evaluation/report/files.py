"""The files of a report: JSON, metrics, predictions, JUnit, Markdown and HTML.

Every file is replaced in one step. report.json is written last, so where it is, the rest is too.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from export_scripts.files.replace import replace_file
from inference.evaluation.record import (
    Prediction,
    Report,
    TaskReport,
    read_predictions,
    read_report,
)
from inference.evaluation.report import charts
from inference.evaluation.report.formatting import METRIC_HEAD, compared, metric_rows, metric_title
from inference.evaluation.report.page import render_page, render_text

REPORT_JSON = "report.json"
REPORT_MARKDOWN = "report.md"
REPORT_HTML = "report.html"
METRICS_JSON = "metrics.json"
PREDICTIONS = "predictions.jsonl"
JUNIT = "junit.xml"
CHANGES = "changes.md"
FILE_NAMES = (CHANGES, REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML, METRICS_JSON, PREDICTIONS, JUNIT)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MOST_CHANGED = 20
_MOST_TEXT = 120  # characters of a sample's end


def metrics_text(report: Report) -> str:
    """Return metrics.json: per task the short metric names, in fractions, and what they mean.

    The names `acc`, `acc_stderr`, `ppl`, `ppl_stderr` are those of the common evaluation harness.
    """
    found: dict[str, dict[str, Any]] = {}
    for task in report.tasks:
        values = found[task.name] = {}
        for metric in task.metrics:
            values |= {metric.key: metric.value, f"{metric.key}_stderr": metric.stderr}
        values |= {
            "n": task.dataset.count,
            "limit": task.dataset.limit,
            "seed": task.dataset.seed,
            "metric": {metric.key: metric.name for metric in task.metrics},
            "method": {metric.key: metric.method for metric in task.metrics},
            "through": task.through,
            "task_version": task.version,
            "dtype": report.run.data_type,
            "weights": report.run.weights,
            "tp": report.run.tp_size or None,
            "pp": report.run.pp_size or None,
            "model_sha256": report.run.model_sha256,
            "dataset_sha256": task.dataset.sha256,
        }
    return json.dumps(found, indent=1)


def junit_text(report: Report) -> str:
    """Return junit.xml: a suite per task with its metrics, and one with the bounds of the gate.

    What an advisory bound finds does not fail.
    """
    return render_text(
        "junit.xml",
        name=f"slipway {report.run.name}",
        tasks=report.tasks,
        verdicts=report.gate.verdicts,
    )


def junit_error_text(message: str) -> str:
    """Return junit.xml of an evaluation that could not be completed."""
    # A server's own words may hold what XML cannot.
    error = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", message)
    return render_text("junit.xml", name="slipway", tasks=(), verdicts=(), error=error)


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
        REPORT_MARKDOWN: render_markdown(REPORT_MARKDOWN, report, predictions),
        CHANGES: render_markdown(CHANGES, report, predictions),
        REPORT_HTML: render_html(report, predictions),
        REPORT_JSON: json.dumps(asdict(report), indent=1) + "\n",
    }
    for name, text in texts.items():
        replace_file(output_dir / name, text)


def render_markdown(template: str, report: Report, predictions: Sequence[Prediction]) -> str:
    """Return a report as Markdown, by the template report.md or changes.md.

    changes.md is a comment of a pull request: the gate's verdicts and the samples that changed.
    """
    changed = [each for each in predictions if each.changes]
    # Right and wrong first, then the largest differences.
    changed.sort(key=lambda each: -max(abs(new - old) for old, new in each.changes.values()))
    text = render_text(
        template,
        report=report,
        metric_table=_metric_table,
        changed=changed,
        changed_rows=[_changed_row(each) for each in changed[:_MOST_CHANGED]],
        samples=len(predictions),
    )
    return text.rstrip("\n") + "\n"


def _metric_table(task: TaskReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = len(METRIC_HEAD) if task.reference else METRIC_HEAD.index("reference")
    rows = [(f"`{name}`", f"**{value}**", *rest) for name, value, *rest in metric_rows(task)]
    return METRIC_HEAD[:columns], [row[:columns] for row in rows]


def _changed_row(each: Prediction) -> tuple[str, ...]:
    changes = ", ".join(
        f"{metric_title(name).lower()} {old:.4g} -> {new:.4g}"
        for name, (old, new) in each.changes.items()
    )
    end = each.text[-_MOST_TEXT:]
    text = end if end == each.text else f"...{end}"
    return str(each.index), *map(_one_line, (text, each.target, each.answer)), changes


def _one_line(text: str) -> str:
    """Return data as a cell that cannot hold markup."""
    for character in "\\`*_[]<>&@#":
        text = text.replace(character, f"\\{character}" if character != "@" else "&#64;")
    return " ".join(text.split())


def render_html(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the report as one HTML page that needs nothing else, in light and dark.

    All values come from the record; the template escapes text of samples and configuration.
    """
    # The metrics with a fraction for each sample, one for each such quantity.
    fractions = [metric for metric in report.metrics if metric.unit == "fraction"]
    marked = list({metric.sample_value: metric for metric in reversed(fractions)}.values())[::-1]
    return render_page(
        "report.html",
        title=f"{report.run.name}: evaluation",
        data=_samples_data([metric.sample_value for metric in marked], predictions),
        report=report,
        compared=compared,
        charts=charts,
        marked=marked,
        has_reference=any(prediction.reference for prediction in predictions),
    )


def _samples_data(names: Sequence[str], predictions: Sequence[Prediction]) -> Any:
    """Return what the page's script shows, as plain values; None without samples."""
    if not predictions:
        return None
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
