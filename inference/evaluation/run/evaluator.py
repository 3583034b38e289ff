"""Evaluate a served model from end to end: tasks, latency, gate, report."""

import secrets
import string
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain

from export_scripts.ft.config_ini import CONFIG_NAME, read_config
from export_scripts.ft.identity import checkpoint_hash
from foundations.files.replace import replace_file
from inference.evaluation.answered import forget_answered
from inference.evaluation.bounds import parse_bounds
from inference.evaluation.environment import describe_environment, folder_sha256
from inference.evaluation.gate import ADVISORY, CRITICAL, Measured, apply_gate
from inference.evaluation.options import OPENAI, Bound, EvaluationOptions
from inference.evaluation.paired import pairs_of
from inference.evaluation.record import LatencyPoint, Report, RunFacts, StageTiming
from inference.evaluation.report.files import (
    FILE_NAMES,
    JUNIT,
    REPORT_JSON,
    junit_text,
    write_report,
)
from inference.evaluation.run.baseline import Baseline, write_baseline
from inference.evaluation.run.checks import check_evaluation
from inference.evaluation.run.latency import measure_latency
from inference.evaluation.run.openai_model import open_model
from inference.evaluation.run.preparation import (
    check_bounds_of_groups,
    prepare_task,
    stored_baseline,
    within_abilities,
)
from inference.evaluation.run.served_model import connect
from inference.evaluation.run.task_run import (
    ProgressCallback,
    TaskRun,
    no_progress,
    run_task,
    with_load_effect,
)
from inference.evaluation.task import EvaluationError, Ids, TextGenerator
from inference.evaluation.tasks import known_tasks
from inference.evaluation.tasks.served_folder import served_architecture

_ANY_IDS = 32  # token ids that every vocabulary has


def evaluate(
    options: EvaluationOptions,
    facts: RunFacts,
    *,
    model: TextGenerator | None = None,
    progress: ProgressCallback = no_progress,
) -> Report:
    """Run the tasks against the server of `options.url`, write the report and return it.

    `facts` are stated by the caller, not measured. A `model`, such as an engine in this process,
    replaces the server. A breached gate is part of the report (`report.gate.exit_code`), not an
    error.

    Raises:
        ValueError: options or data cannot be used; lists all problems of the options.
        EvaluationError: the server did not answer every request.

    An error that is raised after the check of the options is also written to junit.xml, unless an
    earlier report exists.
    """
    if problems := [*check_evaluation(options)]:
        raise ValueError("\n".join(problems))
    output_dir = options.output_dir
    try:
        return _evaluate(options, facts, model, progress)
    except (EvaluationError, ValueError) as error:
        if not (output_dir / REPORT_JSON).exists():
            output_dir.mkdir(parents=True, exist_ok=True)
            replace_file(output_dir / JUNIT, junit_text("slipway", errors={"evaluate": str(error)}))
        raise


def _evaluate(
    options: EvaluationOptions,
    facts: RunFacts,
    model: TextGenerator | None,
    progress: ProgressCallback,
) -> Report:
    started_at, start = datetime.now(timezone.utc), time.perf_counter()
    if options.protocol == OPENAI and model is None:
        opened = open_model(options)
        options, model = within_abilities(options, opened.lacks), opened
    tasks = known_tasks(options)
    bounds, _ = parse_bounds(options.gate)
    prepared = [prepare_task(task) for task in tasks]
    if problems := [*check_bounds_of_groups(bounds, prepared)]:
        raise ValueError("\n".join(problems))
    baseline = stored_baseline(options, prepared)
    output_dir = options.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in FILE_NAMES:  # files of two reports must not be mixed
        (output_dir / name).unlink(missing_ok=True)
    progress("connect", 0, 1)
    with nullcontext(model) if model is not None else connect(options) as served:
        runs = [
            run_task(
                each,
                served,
                concurrency=options.concurrency,
                progress=progress,
                is_resumable=True,
            )
            for each in prepared
        ]
        runs = [with_load_effect(run, served, bounds) for run in runs]
        latency = _latency(options, served, runs, progress)
        served.check_unchanged()
    seconds = time.perf_counter() - start
    runs = [_completed(options, baseline, run) for run in runs]
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(3))
    report = Report(
        run_id=f"{facts.name}_{started_at:%Y-%m-%d_%H-%M-%S}_{letters}",
        run=_with_own_facts(facts, options, seconds),
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=seconds,
        tasks=tuple(run.report for run in runs),
        latency=latency,
        bounds=bounds,
        environment=describe_environment(),
    )
    report = _gated(report, options, baseline, runs)
    write_report(output_dir, report, [each for run in runs for each in run.predictions])
    forget_answered(output_dir)
    return report


def _latency(
    options: EvaluationOptions,
    model: TextGenerator,
    runs: Sequence[TaskRun],
    progress: ProgressCallback,
) -> tuple[LatencyPoint, ...]:
    if not options.latency.enabled:
        return ()
    rows: Iterator[Ids] = (
        model.encode(sample.text) for run in runs for sample in run.prepared.samples
    )
    if not runs:  # for example an encoder, which may have no tokenizer
        rows = iter([range(getattr(served_architecture(options), "vocab_size", _ANY_IDS))])
    return measure_latency(model, rows, options, progress=progress)


def _completed(options: EvaluationOptions, baseline: Baseline, run: TaskRun) -> TaskRun:
    """Return a run with the protocol of its requests and the baseline's values."""
    text_model = options.ensemble_name or options.model_name
    protocol = "gRPC" if options.protocol == "grpc" else "HTTP"
    through = f"text through {text_model}, token ids through {options.model_name}, over {protocol}"
    if options.protocol == OPENAI:
        kind = "chats with" if options.openai.chat else "completions of"
        through = f"{kind} {options.model or 'the only model'}, over OpenAI's protocol"
    if run.prepared.task.tally is not None:
        through = f"the task's own requests, to {options.openai_url}"
    report = replace(
        run.report,
        through=through,
        note="; ".join(filter(None, (*options.left_out, run.report.note))),
    )
    predictions = tuple(replace(each, baseline=baseline.values(each)) for each in run.predictions)
    return replace(run, report=report, predictions=predictions)


def _gated(
    report: Report, options: EvaluationOptions, baseline: Baseline, runs: Sequence[TaskRun]
) -> Report:
    """Return the report with the gate applied.

    baseline=update records the baseline only if every absolute bound holds; relative bounds apply
    to later runs.
    """
    updated = options.baseline_path if options.baseline == "update" else None
    bounds = report.bounds
    if updated is not None:
        bounds = {name: Bound(min=each.min, max=each.max) for name, each in bounds.items()}
    gate = apply_gate(chain(*(_measured(options, baseline, run) for run in runs)), bounds)
    source = baseline.source
    if updated is not None and gate.passed:
        baseline = write_baseline(updated, report, [*chain(*(run.predictions for run in runs))])
        source = f"this run, recorded in {updated}"
    return replace(report, gate=gate, baseline=baseline.metrics, baseline_source=source)


def _measured(options: EvaluationOptions, baseline: Baseline, run: TaskRun) -> list[Measured]:
    both = [(each, each.baseline) for each in run.predictions]
    return [
        Measured(
            metric,
            baseline=baseline.metrics.get(metric.name),
            pairs=pairs_of(metric, both),
            load_effect=run.load_effect.get(metric.name, 0.0),
            tier=ADVISORY if run.report.name in options.advisory else CRITICAL,
        )
        for metric in run.report.metrics
    ]


def _with_own_facts(facts: RunFacts, options: EvaluationOptions, seconds: float) -> RunFacts:
    """Return the facts, completed from the served folder and with the timing of this stage."""
    if options.served_dirs:
        facts = replace(facts, model_sha256=folder_sha256(*options.served_dirs))
    if (folder := options.weights_dir) is not None and (folder / CONFIG_NAME).is_file():
        facts = replace(
            facts,
            family=facts.family or read_config(folder)[0].name,
            model_sha256=facts.model_sha256 or checkpoint_hash(folder),
        )
    if not facts.stages or any(stage.name == "evaluate" for stage in facts.stages):
        return facts
    this_stage = StageTiming("evaluate", "running", seconds)
    return replace(facts, stages=(*facts.stages, this_stage))
