"""The page of a report, and the comment of a pull request, from the record."""

from collections.abc import Sequence
from dataclasses import asdict

from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_INSUFFICIENT, HELD
from inference.evaluation.record import Report
from inference.evaluation.report.document import BAD, GOOD, QUIET, UNDECIDED, Page, markdown
from inference.evaluation.task import Prediction


def report_page(report: Report, predictions: Sequence[Prediction]) -> Page:
    """Return the whole report."""
    verdict, status = verdict_of(report)
    return Page(
        report.run.name,
        _markdown("report", report, predictions),
        {"report": asdict(report), "samples": [asdict(each) for each in predictions]},
        verdict,
        status,
        f"{report.run_id} · schema {report.schema_version} · the same figures are in report.json "
        "and predictions.jsonl",
    )


def changes_text(report: Report, predictions: Sequence[Prediction]) -> str:
    """Return a comment of a pull request: the gate's verdicts and the samples that changed."""
    return _markdown("changes", report, predictions)


def _markdown(template: str, report: Report, predictions: Sequence[Prediction]) -> str:
    changed = [each for each in predictions if each.changes]
    # Right and wrong first, then the largest differences.
    changed.sort(key=lambda each: -max(abs(new - old) for old, new in each.changes.values()))
    return markdown(
        template,
        report=report,
        verdict=verdict_of(report)[0],
        changed=changed,
        total=len(predictions),
        latency_note=_latency_note(report),
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


def _latency_note(report: Report) -> str:
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
