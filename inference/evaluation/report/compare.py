"""Runs next to the first one: metrics, samples by their content, latency, and verdicts of a gate.

Differences are a run's figure minus the first's. The same page serves two runs side by side and an
upgrade with several rows, whose bounds are tested together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product

from inference.evaluation.gate import EXIT_GATE_BREACHED, GateResult, Measured, apply_gates
from inference.evaluation.options import Bound
from inference.evaluation.paired import compare_metric, pairs_of
from inference.evaluation.record import Comparison, LatencyPoint, Prediction, Report, TaskReport
from inference.evaluation.report.document import BAD, GOOD, QUIET, UNDECIDED, Page, markdown
from inference.evaluation.task import Metric, Tally

ON_PAGE, IN_TERMINAL = 500, 14  # changed samples that are listed

Run = tuple[Report, Sequence[Prediction]]
Pair = tuple[Prediction, Prediction]  # the same sample in the first run and in another


@dataclass(frozen=True)
class ChangedSample:
    """A sample that two runs scored differently; `words` say how, by metric."""

    first: Prediction
    second: Prediction
    words: Mapping[str, str]


@dataclass(frozen=True)
class SharedMetric:
    """A metric of the first run and of another one."""

    first: Metric
    metric: Metric
    comparison: Comparison


@dataclass(frozen=True)
class ComparedRun:
    """A run next to the first one.

    Attributes:
        shared: the metrics that both have.
        samples: rows of the table of samples, the first run's before this one's.
        changed: samples of both that a fraction scores differently.
        latency: points measured in both.
        notes: why figures may not be comparable.
        gate: the verdicts of bounds, if there are any.
        is_paired: whether both have the same samples of each task that both have.
    """

    name: str
    report: Report
    shared: tuple[SharedMetric, ...]
    samples: tuple[tuple[str, ...], ...]
    changed: tuple[ChangedSample, ...]
    latency: tuple[tuple[LatencyPoint, LatencyPoint], ...]
    notes: tuple[str, ...]
    pairs: tuple[Pair, ...] = ()
    gate: GateResult = field(default_factory=GateResult)
    is_paired: bool = True


def compare_runs(first_run: Run, second_run: Run, *, name: str = "") -> ComparedRun:
    """Compare a run with the first one.

    Raises:
        ValueError: they have no metric in common.
    """
    (first, olds), (second, news) = first_run, second_run
    before = {metric.name: metric for metric in first.metrics}
    shared = [(before[new.name], new) for new in second.metrics if new.name in before]
    if not shared:
        raise ValueError(
            f"{first.run_id} and {second.run_id} have no metric in common: the first has "
            f"{', '.join(before) or 'none'}, the second "
            f"{', '.join(metric.name for metric in second.metrics) or 'none'}."
        )
    name = name or second.run_id
    notes = [
        f"{new.name} was measured in two ways: first, {old.method}; second, {new.method}."
        for old, new in shared
        if old.method != new.method
    ]
    samples: list[tuple[str, ...]] = []
    pairs: list[Pair] = []
    is_paired = True
    for first_task, task in product(first.tasks, second.tasks):
        if first_task.name != task.name:
            continue
        old, new = (_by_id(run, task.name) for run in (olds, news))
        own = [(old[key], each) for key, each in new.items() if key in old]
        is_paired = is_paired and len(own) == len(old) == len(new)
        if reason := _not_paired(first_task, task, own):
            notes.append(f"{task.name}: {reason}; differences are not paired.")
            is_paired = False
            continue
        pairs += own
        same = sum(one.answer == two.answer for one, two in own)
        counts = (len(own), len(old) - len(own), len(new) - len(own), same)
        samples += [
            (task.name, "", *[""] * len(counts), *_ends(first_task, [*old.values()])),
            (task.name, name, *map("{:,}".format, counts), *_ends(task, [*new.values()])),
        ] * bool(old or new)
    found = [(new, old.values) for old, new in pairs]
    points = product(first.latency, second.latency)
    return ComparedRun(
        name=name,
        report=second,
        shared=tuple(
            SharedMetric(old, new, compare_metric(new, old.value, found)) for old, new in shared
        ),
        samples=tuple(samples),
        changed=_changed([new for _, new in shared], pairs),
        latency=tuple((old, new) for old, new in points if old.place == new.place),
        notes=tuple(notes),
        pairs=tuple(pairs),
        is_paired=is_paired,
    )


def _by_id(run: Sequence[Prediction], task: str) -> dict[str | int, Prediction]:
    """Return the samples of a task by their id; earlier versions wrote none."""
    return {each.id or each.index: each for each in run if each.task == task}


def _ends(task: TaskReport, predictions: Sequence[Prediction]) -> list[str]:
    """Return the share of samples without an answer, and how requests ended.

    The share is empty where no sample has an answer: a task that asks for probabilities alone.
    """
    empty = sum(not each.answer.strip() for each in predictions)
    silent = "" if empty == len(predictions) else f"{empty / len(predictions):.1%}"
    return [silent, *(f"{getattr(task.requests, each):,}" for each in Tally.NAMES)]


def judged(
    first: Report, runs: Sequence[ComparedRun], bounds: Mapping[str, Bound]
) -> list[ComparedRun]:
    """Return the runs with the verdicts of the bounds, tested together over all runs.

    Raises:
        ValueError: a bound is on a metric that a run has not in common with the first.
    """
    baseline = {metric.name: metric for metric in first.metrics}
    measured = [
        [
            Measured(
                metric,
                baseline[metric.name],
                pairs_of(metric, [(new, old.values) for old, new in run.pairs if old.task == task]),
            )
            for task, metrics in ((each.name, each.metrics) for each in run.report.tasks)
            for metric in metrics
            if metric.name in baseline
        ]
        for run in runs
    ]
    gates = apply_gates(measured, bounds)
    return [replace(run, gate=gate) for run, gate in zip(runs, gates, strict=True)]


def _not_paired(first: TaskReport, second: TaskReport, pairs: Sequence[Pair]) -> str:
    """Return why a task's samples cannot be compared one by one; empty if they can."""
    if first.version != second.version:
        return f"the runs used versions {first.version} and {second.version} of the task"
    is_other = first.dataset.sha256 != second.dataset.sha256
    if is_other and not any(new.id for _, new in pairs):
        return f"the runs used other data ({first.dataset.name}, {second.dataset.name})"
    return ""


def _changed(metrics: Sequence[Metric], pairs: Sequence[Pair]) -> tuple[ChangedSample, ...]:
    fractions = dict.fromkeys(each.sample_value for each in metrics if each.unit == "fraction")
    found = []
    for old, new in pairs:
        known = [name for name in fractions if name in old.values.keys() & new.values.keys()]
        both = {name: (old.values[name], new.values[name]) for name in known}
        words = {name: _word(*each) for name, each in both.items() if each[0] != each[1]}
        if words:
            found.append(ChangedSample(old, new, words))
    return tuple(found)


def _word(before: float, after: float) -> str:
    if {before, after} == {0.0, 1.0}:
        return "now right" if after > before else "now wrong"
    return "better" if after > before else "worse"


def comparison_page(
    first: Report,
    runs: Sequence[ComparedRun],
    *,
    name: str = "",
    failed: Mapping[str, str] | None = None,
    unjudged: Sequence[str] = (),
) -> Page:
    """Return the runs next to the first, verdicts first; `failed` runs by name have a reason.

    `unjudged` are figures without a bound, which the verdicts name.
    """
    name, failed = name or first.run_id, failed or {}
    reports = {name: first} | {run.name: run.report for run in runs}
    text = comparison_text(first, runs, name=name, failed=failed, unjudged=unjudged)
    drawn = [(each, asdict(replace(own, history=()))) for each, own in reports.items()]
    return Page(_title(first), text, {"runs": drawn}, *_outcome(runs, failed))


def comparison_text(
    first: Report,
    runs: Sequence[ComparedRun],
    *,
    name: str = "",
    failed: Mapping[str, str] | None = None,
    unjudged: Sequence[str] = (),
    most: int = ON_PAGE,
    longest: int | None = None,
) -> str:
    """Return the Markdown of a comparison with the first `most` changed samples.

    `longest` is the most characters of a sample's texts.
    """
    name, failed = name or first.run_id, failed or {}
    speeds: dict[LatencyPoint, list[tuple[str, LatencyPoint]]] = {}
    for run in runs:
        for old, new in run.latency:
            speeds.setdefault(old, []).append((run.name, new))
    # The first run's own row stands once for each task.
    samples = [
        (task, row or name, *rest)
        for task, row, *rest in dict.fromkeys(row for run in runs for row in run.samples)
    ]
    return markdown(
        "comparison",
        title=_title(first),
        verdict=_outcome(runs, failed)[0],
        facts=[(name, _described(first)), *((run.name, _described(run.report)) for run in runs)],
        name=name,
        first=first,
        runs=runs,
        failed=failed,
        judged=any(run.gate.verdicts for run in runs),
        unjudged=unjudged,
        samples=samples,
        ends=Tally.NAMES,
        speeds=[*speeds.items()],
        changed=[(run.name, each) for run in runs for each in run.changed],
        most=most,
        longest=longest,
    )


def _title(first: Report) -> str:
    return f"{first.run.name}: comparison"


def _outcome(runs: Sequence[ComparedRun], failed: Mapping[str, str]) -> tuple[str, str]:
    """Return what the runs came to in a few words, and its colour."""
    if not failed and not any(run.gate.verdicts for run in runs):
        return "", QUIET
    found: dict[str, list[str]] = {BAD: [], UNDECIDED: list(failed), GOOD: []}
    for run in runs:
        is_breached = run.gate.exit_code == EXIT_GATE_BREACHED
        found[BAD if is_breached else GOOD if run.gate.passed else UNDECIDED].append(run.name)
    words = {BAD: "breached", UNDECIDED: "undecided", GOOD: "held"}
    text = "; ".join(f"{words[each]}: {', '.join(names)}" for each, names in found.items() if names)
    return text, next(each for each, names in found.items() if names)


def _described(report: Report) -> str:
    run = report.run
    known = (run.engine or run.server, run.parallelism, run.weights, run.data_type)
    return f"{report.run_id} ({', '.join(filter(None, known)) or 'of an unknown model'})"
