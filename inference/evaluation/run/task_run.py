"""Ask a model every sample of a task, many at a time, and sum the scores up.

A request that fails is never dropped: the samples that could not be evaluated are named, and the
run fails, since a figure over the rest would be another figure.
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
    ImpossibleFigureError,
    Metric,
    Prediction,
    RequestFailedError,
    Sample,
    Tally,
    Task,
    TextGenerator,
    sample_ids,
)

_MAX_FAILURES = 20  # failed samples after which the server counts as gone
_SHOWN_SAMPLES = 5
_UPDATES = 200  # of the progress of a task
_ASKED_AGAIN = 16
_ROUNDING = 1e-3  # of a perplexity of 1, which a sum of log probabilities may leave


# Called with what is being done, and how many samples (or latency points) are done, of how many.
ProgressCallback = Callable[[str, int, int], None]


def no_progress(*_: object) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class TaskRun:
    """A finished task: its report and every prediction, in the order of the samples.

    Attributes:
        moved: the change of each metric over samples that were asked again.
    """

    prepared: Prepared
    report: TaskReport
    predictions: tuple[Prediction, ...]
    moved: dict[str, float] = field(default_factory=dict)


def run_task(
    prepared: Prepared,
    model: TextGenerator,
    *,
    concurrency: int,
    progress: ProgressCallback = no_progress,
    is_kept: bool = False,
) -> TaskRun:
    """Evaluate a task on its prepared data, keeping up to `concurrency` samples in flight.

    Answers that `is_kept` keeps next to the report, and those that an earlier run has left, are not
    asked for again.

    Raises:
        EvaluationError: at least one sample could not be evaluated, or a figure cannot be.
    """
    task, samples = prepared.task, prepared.samples
    task.start()
    timer: Any = RequestTimer(model, retry_s=task.options.retry_s)
    answers = None
    if is_kept and task.tally is None:
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
        replace(each, id=own_id) for each, own_id in zip(found, sample_ids(samples), strict=True)
    )
    metrics = task.metrics(predictions)
    for metric in metrics:
        if problem := impossible(metric):
            raise ImpossibleFigureError(f"{metric.name} = {metric.value:g}: {problem}")
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
    """Return every sample as answered, in their order; few samples are submitted ahead.

    Raises:
        EvaluationError: a sample could not be evaluated.
    """
    answered: dict[int, Prediction] = {}
    failures: list[tuple[int, RequestFailedError]] = []
    right: dict[str, float] = defaultdict(float)
    progress(task, 0, len(samples))
    waiting = iter(samples)
    asked: dict[Future[Prediction], int] = {}
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="evaluate")
    with ExitStack() as stack:
        stack.callback(threads.shutdown, cancel_futures=True)
        stack.enter_context(no_retries_after_interrupt())
        while len(failures) < _MAX_FAILURES:
            for sample in islice(waiting, 2 * concurrency - len(asked)):
                asked[threads.submit(ask, sample)] = sample.index
            if not asked:
                break
            for future in wait(asked, return_when=FIRST_COMPLETED).done:
                index, error = asked.pop(future), future.exception()
                if isinstance(error, RequestFailedError):
                    failures.append((index, error))
                else:
                    answered[index] = future.result()
                    for name, value in answered[index].values.items():
                        if value in (0.0, 1.0):
                            right[name] += value
                done = len(answered) + len(failures)
                # The accuracies so far make a phase, and every new phase is written.
                if done == len(samples) or done % max(1, len(samples) // _UPDATES) == 0:
                    shares = (
                        f" {name.removeprefix(f'{task}_')} {each / len(answered):.1%}"
                        for name, each in right.items()
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
            raise ImpossibleFigureError(
                f"{task.name}, sample {sample.index}: {name} is {value}: a score is a finite number"
            )
    return Prediction(
        task=task.name,
        index=sample.index,
        text=_whole(sample.text),
        target=_whole(sample.target),
        answer=_whole(score.answer),
        values=dict(score.values),
        seconds=time.perf_counter() - start,
        group=sample.group,
    )


def _whole(text: str) -> str:
    """Return text without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def impossible(metric: Metric) -> str:
    """Return why no model can have such a figure; empty where one can."""
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
    """Return what failed, each reason once with the samples it concerns."""
    reasons: dict[str, list[int]] = {}
    for index, error in sorted(failures, key=itemgetter(0)):
        reasons.setdefault(str(error), []).append(index)
    lines = [
        f"{task}: {len(failures)} of {total} samples could not be evaluated, {answered} were "
        "answered; no figure is reported, since it would not be over the whole data set."
    ]
    for reason, indices in reasons.items():
        shown = ", ".join(map(str, indices[:_SHOWN_SAMPLES]))
        more = f" and {len(indices) - _SHOWN_SAMPLES} more" * (len(indices) > _SHOWN_SAMPLES)
        lines.append(f"  sample{'s' * (len(indices) > 1)} {shown}{more}: {reason}")
    lines.append(
        "The server's log has more; evaluate.request_timeout_s, evaluate.retry_s and "
        "evaluate.concurrency set how patient and how busy the client is. The same command goes on "
        "with the samples that are left."
    )
    return "\n".join(lines)


def asked_again(run: TaskRun, model: TextGenerator, bounds: Bounds) -> TaskRun:
    """Return a run with what the load moves, where a bound compares a mean over its samples.

    Only metrics of other scores than 0 and 1 are known so well by a few samples.
    """
    compared = {name for name, bound in bounds.items() if bound.is_relative}
    report, task, samples = run.report, run.prepared.task, run.prepared.samples
    if not any(metric.scale and metric.name in compared for metric in report.metrics):
        return run
    chosen = range(0, len(samples), max(1, len(samples) // _ASKED_AGAIN))[:_ASKED_AGAIN]
    both = [(run.predictions[index], task.score(samples[index], model).values) for index in chosen]
    changed = sum(first.values != again for first, again in both)
    moved, note = {}, "gave the same digits"
    if changed:
        pairs = {metric: pairs_of(metric, both) for metric in report.metrics}
        drops = {
            metric: abs(check_drop(own, 0.0, confidence=0.95).drop)
            for metric, own in pairs.items()
            if own is not None and not own.is_binary
        }
        moved = {metric.name: drop for metric, drop in drops.items()}
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
    return replace(run, moved=moved, report=replace(report, note=note))
