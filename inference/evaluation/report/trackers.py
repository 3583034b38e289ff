"""Send a finished report to experiment trackers, through their own libraries.

MLflow reads its destination from its own environment variables (MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME). TensorBoard's files lie in the run store, one folder for each name of runs,
in which every evaluation is the next step.
"""

import logging
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from pathlib import Path

from export_scripts.tables import markdown_table
from inference.evaluation.options import TRACKERS
from inference.evaluation.record import Report, RunFacts
from inference.evaluation.report.files import FILE_NAMES, REPORT_MARKDOWN

logger = logging.getLogger(__name__)

_NOT_PARAMETERS = ("stages", "command")


def track(name: str, report: Report, output_dir: Path, *, folder: Path) -> None:
    """Send the report whose files lie in `output_dir` to a tracker.

    A tracker that refuses the report only logs a warning: the report is complete without it.

    `name` is one of TRACKERS; one that keeps files has them in `folder`.
    """
    try:
        _SENDERS[name](report, output_dir, folder)
    except (OSError, RuntimeError) as error:
        logger.warning("%s did not take the report %s: %s", name, report.run_id, error)


def parameters(report: Report) -> dict[str, str | int]:
    """Return what was evaluated, and on which samples, by name."""
    run = {each.name: getattr(report.run, each.name) for each in fields(RunFacts)}
    found = {name: value for name, value in run.items() if name not in _NOT_PARAMETERS and value}
    for task in report.tasks:
        found[f"{task.name}_samples"] = task.dataset.count
        found[f"{task.name}_data_sha256"] = task.dataset.sha256
    return found


def figures(report: Report) -> dict[str, float]:
    """Return every metric, and of the latency sweep what each point came to, by name."""
    found = {metric.name: metric.value for metric in report.metrics}
    for point in report.latency:
        place = (
            f"latency/in{point.input_len}_out{point.output_len}_batch{point.batch_size}"
            f"_inflight{point.concurrency}"
        )
        found[f"{place}/p50_ms"] = point.latency.p50_ms
        found[f"{place}/p95_ms"] = point.latency.p95_ms
        if point.first_token_ms is not None:
            found[f"{place}/first_token_ms"] = point.first_token_ms
        found[f"{place}/tokens_per_s"] = point.tokens_per_s
    return found


def _to_mlflow(report: Report, output_dir: Path, folder: Path) -> None:
    del folder
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        with mlflow.start_run(run_name=report.run_id):
            mlflow.log_params(parameters(report))
            mlflow.log_metrics(figures(report))
            for name in FILE_NAMES:
                mlflow.log_artifact(str(output_dir / name))
    except MlflowException as error:
        raise RuntimeError(str(error)) from error


def _to_tensorboard(report: Report, output_dir: Path, folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    logdir = folder / "tensorboard" / report.run.name
    step = len(list(logdir.glob("events.out.tfevents.*")))
    started = datetime.fromisoformat(report.started_at).timestamp()
    rows = [(name, str(value)) for name, value in parameters(report).items()]
    with SummaryWriter(str(logdir), filename_suffix=f".{report.run_id}") as writer:
        for name, value in figures(report).items():
            writer.add_scalar(name, value, step, started, new_style=True)
        writer.add_text("parameters", markdown_table(("", ""), rows), step, started)
        markdown = (output_dir / REPORT_MARKDOWN).read_text(encoding="utf-8")
        writer.add_text("report", markdown, step, started)


_SENDERS: dict[str, Callable[[Report, Path, Path], None]] = {
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}
assert set(_SENDERS) == set(TRACKERS)
