"""The machine-readable files of a report: JSON, metrics, predictions and JUnit.

Every file is replaced in one step. report.json is written last, so where it is, the rest is too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from export_scripts.files.replace import replace_file
from inference.evaluation.gate import BREACHED, CRITICAL, HELD
from inference.evaluation.record import Prediction, Report, TaskReport, to_json

REPORT_JSON = "report.json"
REPORT_MARKDOWN = "report.md"
REPORT_HTML = "report.html"
METRICS_JSON = "metrics.json"
PREDICTIONS = "predictions.jsonl"
JUNIT = "junit.xml"
CHANGES = "changes.md"
FILE_NAMES = (CHANGES, REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML, METRICS_JSON, PREDICTIONS, JUNIT)


def report_text(report: Report) -> str:
    """Return report.json."""
    return json.dumps(to_json(report), indent=1) + "\n"


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


def predictions_text(predictions: Iterable[Prediction]) -> str:
    """Return predictions.jsonl, one sample a line."""
    return "".join(json.dumps(to_json(prediction)) + "\n" for prediction in predictions)


def junit_text(report: Report) -> str:
    """Return junit.xml: a suite per task with its metrics, and one with the bounds of the gate."""
    root = ET.Element("testsuites", name=f"slipway {report.run.name}")
    for task in report.tasks:
        suite = _suite(root, task.name, count=len(task.metrics), seconds=task.seconds)
        for metric in task.metrics:
            case = ET.SubElement(
                suite, "testcase", classname=f"evaluate.{task.name}", name=metric.name, time="0"
            )
            ET.SubElement(case, "system-out").text = (
                f"{metric.name} = {metric.value:.6g} (95% {metric.low:.6g} to {metric.high:.6g}, "
                f"n = {metric.count})"
            )
    _gate_suite(root, report)
    return _xml(root)


def _gate_suite(root: ET.Element, report: Report) -> None:
    """Add a case for each bound; what an advisory one finds does not fail."""
    verdicts = report.gate.verdicts
    if not verdicts:
        return
    failed = [each for each in verdicts if each.status != HELD]
    critical = sum(each.tier == CRITICAL for each in failed)
    suite = _suite(root, "gate", count=len(verdicts), failures=critical)
    suite.set("skipped", str(len(failed) - critical))
    for each in verdicts:
        name = f"{each.metric}: {each.bound}"
        case = ET.SubElement(suite, "testcase", classname="evaluate.gate", name=name, time="0")
        if each.status == HELD:
            ET.SubElement(case, "system-out").text = str(each)
        elif each.tier == CRITICAL:
            kind = "GateBreached" if each.status == BREACHED else "Insufficient"
            ET.SubElement(case, "failure", message=str(each), type=kind).text = str(each)
        else:
            ET.SubElement(case, "skipped", message=str(each))


def junit_error_text(message: str) -> str:
    """Return junit.xml of an evaluation that could not be completed."""
    root = ET.Element("testsuites", name="slipway")
    suite = _suite(root, "evaluate", count=1, errors=1)
    case = ET.SubElement(suite, "testcase", classname="evaluate", name="completed", time="0")
    first_line = message.splitlines()[0] if message else ""
    ET.SubElement(case, "error", message=first_line, type="NotEvaluated").text = message
    return _xml(root)


def _suite(
    root: ET.Element,
    name: str,
    *,
    count: int,
    failures: int = 0,
    errors: int = 0,
    seconds: float = 0.0,
) -> ET.Element:
    return ET.SubElement(
        root,
        "testsuite",
        name=name,
        tests=str(count),
        failures=str(failures),
        errors=str(errors),
        time=f"{seconds:.3f}",
    )


def _xml(root: ET.Element) -> str:
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_files(
    output_dir: Path, report: Report, predictions: Sequence[Prediction], pages: dict[str, str]
) -> None:
    """Write every file of a report; `pages` are those for people, by file name."""
    texts = {
        PREDICTIONS: predictions_text(predictions),
        METRICS_JSON: metrics_text(report),
        JUNIT: junit_text(report),
        **pages,
        REPORT_JSON: report_text(report),
    }
    for name, text in texts.items():
        replace_file(output_dir / name, text)
