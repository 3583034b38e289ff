"""report.html: the report as one file that needs nothing else, in light and dark.

All values come from the record; the template escapes text of samples and configuration.
"""

from collections.abc import Sequence
from typing import Any

from inference.evaluation.record import Prediction, Report
from inference.evaluation.report import charts
from inference.evaluation.report.formatting import compared
from inference.evaluation.report.page import render_page
from inference.evaluation.task import Metric


def render_html(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return the report as one HTML page."""
    return render_page(
        "report.html",
        title=f"{report.run.name}: evaluation",
        data=_samples_data(report, predictions),
        report=report,
        compared=compared,
        charts=charts,
        marked=_marked(report),
        has_reference=any(prediction.reference for prediction in predictions),
    )


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
