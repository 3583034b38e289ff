"""The files of a report: JSON, metrics, predictions, JUnit, Markdown and the page.

Every file is replaced atomically. report.json is written last: if it exists, all files do.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foundations.files.json_content import Fields
from foundations.files.replace import replace_file
from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_INSUFFICIENT, HELD
from inference.evaluation.record import Report, read_predictions, read_report
from inference.evaluation.report.document import (
    BAD,
    GOOD,
    QUIET,
    UNDECIDED,
    Page,
    markdown,
    render,
)
from inference.evaluation.statistics import is_mean_of
from inference.evaluation.task import Prediction

REPORT_JSON = "report.json"
REPORT_MARKDOWN = "report.md"
REPORT_HTML = "report.html"
METRICS_JSON = "metrics.json"
PREDICTIONS = "predictions.jsonl"
JUNIT = "junit.xml"
CHANGES = "changes.md"
FILE_NAMES = (CHANGES, REPORT_JSON, REPORT_MARKDOWN, REPORT_HTML, METRICS_JSON, PREDICTIONS, JUNIT)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def metrics_text(report: Report) -> str:
    """Return metrics.json: for each task, values by short metric names, and their meaning.

    The names `acc`, `acc_stderr`, `ppl`, `ppl_stderr` are those of lm-evaluation-harness.
    """
    found: dict[str, Fields] = {}
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


def junit_text(name: str, **suites: Any) -> str:
    """Return junit.xml, without characters that XML cannot hold, such as in a server's message.

    Args:
        name: The name of all suites.
        suites: `tasks`, each with its metrics; `gates`, the verdicts by name, of which an advisory
            one never fails; `errors`, the message by name.
    """
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", render("junit.xml", name=name, **suites))


def report_page(report: Report, predictions: Sequence[Prediction]) -> Page:
    """Return the page of a report."""
    verdict, status = verdict_of(report)
    return Page(
        report.run.name,
        _markdown("report", report, predictions),
        {"report": report, "samples": predictions},
        verdict,
        status,
        f"{report.run_id} · schema {report.schema_version} · the same data is in report.json and "
        "predictions.jsonl",
    )


def _markdown(template: str, report: Report, predictions: Sequence[Prediction]) -> str:
    changed = [each for each in predictions if each.changes]
    # Largest changes first: those between right and wrong are 1.
    changed.sort(key=lambda each: -max(abs(new - old) for old, new in each.changes.values()))
    verdict, _ = verdict_of(report)
    return markdown(
        template, report=report, verdict=verdict, changed=changed, total=len(predictions)
    )


def verdict_of(report: Report) -> tuple[str, str]:
    """Return the outcome of the gate in a few words, and its colour."""
    if not report.bounds:
        return "no gate set", QUIET
    gate, held, checked = report.gate, len(report.gate.of(HELD)), len(report.gate.verdicts)
    decided = f"{len(gate.deciding)} of {checked} bounds"
    if gate.exit_code == EXIT_GATE_BREACHED:
        return f"gate breached ({decided})", BAD
    if gate.exit_code == EXIT_INSUFFICIENT:
        return f"gate undecided ({decided} need more samples)", UNDECIDED
    others = ", the others are advisory" * (held < checked)
    return f"gate passed ({held} of {checked} bounds hold{others})", GOOD


def read_run(path: Path) -> tuple[Report, list[Prediction]]:
    """Read a report.json, and the predictions in it or next to it, if there are any.

    Raises:
        ValueError: a file is damaged, or has a schema that this version does not read.
    """
    report, samples_path = read_report(path), path.with_name(PREDICTIONS)
    predictions = [*report.predictions]
    if predictions:
        samples_path = path
    elif not samples_path.is_file():
        return report, []
    else:
        predictions = read_predictions(samples_path)
    for task in report.tasks:
        found = [each for each in predictions if each.task == task.name]
        for metric in task.metrics:
            if metric.scale and not is_mean_of(metric, found):
                raise ValueError(
                    f"{samples_path}: {metric.name} of {metric.count} samples does not follow from "
                    f"the {len(found)} samples here: the file is damaged, or of another run; "
                    "evaluate again"
                )
    return report, predictions


def write_report(output_dir: Path, report: Report, predictions: Sequence[Prediction]) -> None:
    """Write every file of a report."""
    page = report_page(report, predictions)
    texts = {
        PREDICTIONS: "".join(json.dumps(asdict(each)) + "\n" for each in predictions),
        METRICS_JSON: metrics_text(report),
        JUNIT: junit_text(
            f"slipway {report.run.name}", tasks=report.tasks, gates={"gate": report.gate.verdicts}
        ),
        REPORT_MARKDOWN: page.text,
        CHANGES: _markdown("changes", report, predictions),
        REPORT_HTML: page.html(),
        REPORT_JSON: json.dumps(asdict(report), indent=1) + "\n",
    }
    for name, text in texts.items():
        replace_file(output_dir / name, text)
