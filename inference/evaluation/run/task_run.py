"""Evaluate all samples of a task concurrently, and compute its metrics.

A failed request is never dropped: the run fails and names the samples that could not be evaluated,
because a metric over the others would be another metric.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

from foundations.errors import first_names
from inference.evaluation.answered import SAMPLES_AGAIN, Answers, answer_journal
from inference.evaluation.gate import amount_text
from inference.evaluation.options import Bounds
from inference.evaluation.paired import pairs_of
from inference.evaluation.paired_tests import check_drop
from inference.evaluation.record import TaskReport
from inference.evaluation.retry import no_retries_after_interrupt
from inference.evaluation.run.preparation import Prepared
from inference.evaluation.run.timing import RequestTimer
from inference.evaluation.task import (
    EvaluationError,
    ImplausibleAnswerError,
    Metric,
    Prediction,
    RequestFailedError,
    Sample,
    Tally,
    Task,
    TextGenerator,
    sample_ids,
)

_MAX_FAILURES = 20  # failed samples after which the run stops, because the server seems gone
_SHOWN_SAMPLES = 5
_UPDATES = 200  # progress reports of a task
_REPEATED_SAMPLES = 16
_ROUNDING = 1e-3  # a perplexity may be so far below 1 by the rounding of log probabilities


# Called with the current phase, the finished samples (or latency points) and their total.
ProgressCallback = Callable[[str, int, int], None]


def no_progress(*_: object) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class TaskRun:
    """A finished task: its report and every prediction, in the order of the samples.

    Attributes:
        load_effect: metric -> its change over the samples that were repeated without load.
    """

    prepared: Prepared
    report: TaskReport
    predictions: tuple[Prediction, ...]
    load_effect: dict[str, float] = field(default_factory=dict)


def run_task(
    prepared: Prepared,
    model: TextGenerator,
    *,
    concurrency: int,
    progress: ProgressCallback = no_progress,
    is_resumable: bool = False,
) -> TaskRun:
    """Evaluate a task on its prepared data, with up to `concurrency` samples in flight.

    With `is_resumable`, answers are journaled next to the report, and those of an interrupted run
    are reused.

    Raises:
        EvaluationError: a sample could not be evaluated, or a metric has an impossible value.
    """
    task, samples = prepared.task, prepared.samples
    timer: Any = RequestTimer(model, retry_s=task.options.retry_s)
    task.start()
    answers = None
    if is_resumable and task.tally is None:
        journal = answer_journal(task, prepared.dataset, samples)
        answers = Answers(journal, ("values", "answer"), again=SAMPLES_AGAIN)

    def ask(sample: Sample) -> Prediction:
        if answers is None:
            return _ask(task, timer, sample)
        once = partial(_ask, task, timer, sample)
        return Prediction(**answers.reply(str(sample.index), lambda: asdict(once())))

    found = _ask_all(task.name, samples, ask, concurrency, progress)
    requests = timer.statistics(concurrency=concurrency)
    if task.tally is not None:
        requests = replace(requests, **{name: task.tally.counts()[name] for name in Tally.NAMES})
    predictions = tuple(
        replace(each, id=id_) for each, id_ in zip(found, sample_ids(samples), strict=True)
    )
    metrics = task.metrics(predictions)
    for metric in metrics:
        if problem := plausibility_problem(metric):
            raise ImplausibleAnswerError(f"{metric.name} = {metric.value:g}: {problem}")
    reused = task.reused or (answers.reused if answers else 0)
    noun = "requests" if task.reused else "samples"
    report = TaskReport(
        name=task.name,
        version=task.version,
        dataset=prepared.dataset,
        metrics=metrics,
        seconds=requests.seconds,
        requests=requests,
        note=f"{reused} {noun} were answered in an earlier run that ended" * bool(reused),
    )
    return TaskRun(prepared, report, predictions)


def _ask_all(
    task: str,
    samples: Sequence[Sample],
    ask: Callable[[Sample], Prediction],
    concurrency: int,
    progress: ProgressCallback,
) -> list[Prediction]:
    """Return the prediction of every sample, in order; few samples are submitted ahead.

    Raises:
        EvaluationError: a sample could not be evaluated.
    """
    answered = {}
    failures: list[tuple[int, RequestFailedError]] = []
    correct: dict[str, float] = defaultdict(float)
    progress(task, 0, len(samples))
    remaining = iter(samples)
    in_flight: dict[Future[Prediction], int] = {}
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="evaluate")
    with ExitStack() as stack:
        stack.callback(threads.shutdown, cancel_futures=True)
        stack.enter_context(no_retries_after_interrupt())
        while len(failures) < _MAX_FAILURES:
            for sample in islice(remaining, 2 * concurrency - len(in_flight)):
                in_flight[threads.submit(ask, sample)] = sample.index
            if not in_flight:
                break
            for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                index, error = in_flight.pop(future), future.exception()
                if isinstance(error, RequestFailedError):
                    failures.append((index, error))
                else:
                    answered[index] = future.result()
                    for name, value in answered[index].values.items():
                        if value in (0.0, 1.0):
                            correct[name] += value
                done = len(answered) + len(failures)
                # Accuracies are part of the phase, and each new phase is logged: report rarely.
                if done == len(samples) or done % max(1, len(samples) // _UPDATES) == 0:
                    shares = (
                        f" {name.removeprefix(f'{task}_')} {count / len(answered):.1%}"
                        for name, count in correct.items()
                    )
                    progress(task + "".join(shares), done, len(samples))
                if len(failures) == _MAX_FAILURES:
                    break
    if failures:
        raise EvaluationError(_failure_message(task, len(samples), len(answered), failures))
    return [answered[sample.index] for sample in samples]


def _ask(task: Task, model: TextGenerator, sample: Sample) -> Prediction:
    start = time.perf_counter()
    score = task.score(sample, model)
    for name, value in score.values.items():
        if not math.isfinite(value):
            raise ImplausibleAnswerError(
                f"{task.name}, sample {sample.index}: {name} is {value}: a score is a finite number"
            )
    return Prediction(
        task=task.name,
        index=sample.index,
        text=_without_surrogates(sample.text),
        target=_without_surrogates(sample.target),
        answer=_without_surrogates(score.answer),
        values=dict(score.values),
        seconds=time.perf_counter() - start,
        group=sample.group,
    )


def _without_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON can hold and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def plausibility_problem(metric: Metric) -> str:
    """Return why a metric's value is impossible; empty if it is possible."""
    value = metric.value
    if not math.isfinite(value):
        return "it is not a number"
    if metric.unit == "fraction" and not 0 <= value <= 1:
        return "a share lies between 0 and 1"
    if metric.unit == "perplexity" and value < 1 - _ROUNDING:
        return "a perplexity below 1 has probabilities above 1"
    return ""


def _failure_message(
    task: str, total: int, answered: int, failures: Sequence[tuple[int, RequestFailedError]]
) -> str:
    """Return the message about failed samples, with each reason once."""
    reasons: dict[str, list[str]] = {}
    for index, error in sorted(failures, key=itemgetter(0)):
        reasons.setdefault(str(error), []).append(str(index))
    lines = [
        f"{task}: {len(failures)} of {total} samples could not be evaluated, {answered} were "
        "answered; no metric is reported, because it would not be over the whole data set."
    ]
    for reason, indices in reasons.items():
        shown = first_names(indices, _SHOWN_SAMPLES)
        lines.append(f"  sample{'s' * (len(indices) > 1)} {shown}: {reason}")
    lines.append(
        "The server's log has more. Raise evaluate.request_timeout_s or evaluate.retry_s, or lower "
        "evaluate.concurrency, if the server is overloaded. The same command resumes with the "
        "remaining samples."
    )
    return "\n".join(lines)


def with_load_effect(run: TaskRun, model: TextGenerator, bounds: Bounds) -> TaskRun:
    """Repeat some samples one at a time, and return the run with the effect of the server's load.

    Only if a bound compares a mean over samples; a few samples say nothing about scores 0 and 1.
    """
    compared = {name for name, bound in bounds.items() if bound.is_relative}
    report, task, samples = run.report, run.prepared.task, run.prepared.samples
    if not any(metric.scale and metric.name in compared for metric in report.metrics):
        return run
    stride = max(1, len(samples) // _REPEATED_SAMPLES)
    chosen = range(0, len(samples), stride)[:_REPEATED_SAMPLES]
    both = [(run.predictions[index], task.score(samples[index], model).values) for index in chosen]
    changed = sum(first.values != again for first, again in both)
    load_effect, note = {}, "gave the same digits"
    if changed:
        pairs = {metric: pairs_of(metric, both) for metric in report.metrics}
        drops = {
            metric: abs(check_drop(found, 0.0, confidence=0.95).drop)
            for metric, found in pairs.items()
            if found is not None and not found.is_binary
        }
        load_effect = {metric.name: drop for metric, drop in drops.items()}
        figures = ", ".join(
            f"{metric.name} by {amount_text(drop, metric.unit)}" for metric, drop in drops.items()
        )
        note = (
            f"gave other digits for {changed}"
            + f", which moves {figures}" * bool(figures)
            + "; evaluate.concurrency=1 gives the same each time"
        )
    note = f"{len(both)} samples asked again, one at a time, {note}"
    note = "; ".join(filter(None, (report.note, note)))
    return replace(run, load_effect=load_effect, report=replace(report, note=note))
