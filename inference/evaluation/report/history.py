"""The run store: every report that was made, each in a folder of its own.

<history_dir>/<run id>/report.json, predictions.jsonl
"""

import shutil
import tempfile
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from inference.evaluation.record import HistoryPoint, Report, read_report
from inference.evaluation.report.files import PREDICTIONS, REPORT_JSON

_MAX_POINTS = 40


def append_run(history_dir: Path, report: Report, output_dir: Path) -> None:
    """Add a finished report to the store, by one rename."""
    history_dir.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=history_dir))
    try:
        for name in (REPORT_JSON, PREDICTIONS):
            shutil.copyfile(output_dir / name, partial / name)
        partial.chmod(0o755)
        partial.rename(history_dir / report.run_id)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def history_point(report: Report) -> HistoryPoint:
    """Return what a history shows of a report."""
    return HistoryPoint(
        run_id=report.run_id,
        name=report.run.name,
        started_at=report.started_at,
        samples={
            task.name: f"{task.name}/{task.version}/{task.dataset.sha256}/{task.dataset.limit}/"
            f"{task.dataset.seed}"
            for task in report.tasks
        },
        metrics={metric.name: metric for metric in report.metrics},
    )


def read_history(history_dir: Path) -> list[HistoryPoint]:
    """Return all runs of the store, the oldest first; none where there is no store.

    Raises:
        ValueError: a report is damaged.
    """
    found = []
    for path in history_dir.glob(f"[!.]*/{REPORT_JSON}"):
        point = history_point(read_report(path))
        found.append((point.started_at, path.stat().st_mtime_ns, point))
    return [point for *_, point in sorted(found, key=itemgetter(0, 1))]


def comparable_history(points: Sequence[HistoryPoint], report: Report) -> tuple[HistoryPoint, ...]:
    """Return earlier runs of the same name over the same samples, oldest first, and this one."""
    own = history_point(report)
    earlier = [
        point
        for point in points
        if point.name == own.name and point.samples == own.samples and point.run_id != own.run_id
    ]
    return (*earlier[1 - _MAX_POINTS :], own)


def find_run(run: str, *, history_dir: Path | None) -> Path:
    """Return the report.json that `run` names.

    It is a path (of the file or its folder), a run id or its beginning, `latest`, or `latest~1`
    for the run before it.

    Raises:
        ValueError: there is no such run, or several; the message lists those there are.
    """
    path = Path(run)
    for candidate in (path, path / REPORT_JSON):
        if candidate.is_file():
            return candidate
    if history_dir is None:
        raise ValueError(f"there is no report at {run}; name a report.json or its folder.")
    points = read_history(history_dir)
    ids = [point.run_id for point in points]
    found = [run] if run in ids else [each for each in ids if each.startswith(run)]
    if run.startswith("latest"):
        back = run.removeprefix("latest").removeprefix("~") or "0"
        found = ids[::-1][int(back) :][:1] if back.isdecimal() else []
    if len(found) == 1:
        return history_dir / found[0] / REPORT_JSON
    known = "".join(f"\n  {each}" for each in (found or ids)[-10:]) or " none"
    what = "several runs begin with" if found else "there is no run"
    raise ValueError(f"{what} {run!r} in {history_dir}; the last ones are:{known}")
