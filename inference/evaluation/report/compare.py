"""Runs next to the first one: metrics, samples by their content, latency, and verdicts of a gate.

Differences are a run's figure minus the first's. The same document serves two runs side by side
and an upgrade with several rows, whose bounds are tested together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

from inference.evaluation.gate import EXIT_GATE_BREACHED, GateResult, Measured, apply_gates
from inference.evaluation.options import Bound
from inference.evaluation.paired import compare_metric, pairs_of
from inference.evaluation.record import Comparison, LatencyPoint, Prediction, Report, TaskReport
from inference.evaluation.report.document import (
    BAD,
    GOOD,
    QUIET,
    UNDECIDED,
    Chart,
    Document,
    Section,
    Table,
)
from inference.evaluation.report.formatting import (
    LATENCY_HEAD,
    METRIC_HEAD,
    latency_row,
    load_text,
    metric_row,
    metric_title,
    shape_text,
)
from inference.evaluation.task import Metric, Tally

ON_PAGE, IN_TERMINAL = 500, 14  # changed samples that are listed
_MOST_TEXT = 32  # characters of an answer in the terminal
_GATE_HEAD = ("run", "metric", "bound", "verdict", "found")
_SAMPLES_HEAD = ("task", "run", "in both", "only first", "only here", "same answer", "no answer",
                 *Tally.NAMES)  # fmt: skip
_CHANGED_HEAD = ("#", "run", "passage", "expected", "first answered", "answered", "changed")

Run = tuple[Report, Sequence[Prediction]]
Pair = tuple[Prediction, Prediction]  # the same sample in the first run and in another


@dataclass(frozen=True)
class ChangedSample:
    """A sample that two runs scored differently; `words` say how, by metric."""

    first: Prediction
    second: Prediction
    words: Mapping[str, str]


@dataclass(frozen=True)
class ComparedRun:
    """A run next to the first one.

    Attributes:
        shared: the metrics that both have, of the first and of this run.
        metrics: their comparisons, in the same order.
        samples: rows of _SAMPLES_HEAD, the first run's before this one's.
        changed: samples of both that a fraction scores differently.
        latency: points measured in both.
        notes: why figures may not be comparable.
        gate: the verdicts of bounds, if there are any.
        is_paired: whether both have the same samples of each task that both have.
    """

    name: str
    report: Report
    shared: tuple[tuple[Metric, Metric], ...]
    metrics: tuple[Comparison, ...]
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
        shared=tuple(shared),
        metrics=tuple(compare_metric(new, old.value, found) for old, new in shared),
        samples=tuple(samples),
        changed=_changed([new for _, new in shared], pairs),
        latency=tuple((old, new) for old, new in points if _place(old) == _place(new)),
        notes=tuple(notes),
        pairs=tuple(pairs),
        is_paired=is_paired,
    )


def _by_id(run: Sequence[Prediction], task: str) -> dict[str | int, Prediction]:
    """Return the samples of a task by their id; earlier versions wrote none."""
    return {each.id or each.index: each for each in run if each.task == task}


def _place(point: LatencyPoint) -> tuple[str, str]:
    return shape_text(point), load_text(point)


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


def comparison_document(
    first: Report,
    runs: Sequence[ComparedRun],
    *,
    name: str = "",
    failed: Mapping[str, str] | None = None,
    most: int = ON_PAGE,
    unjudged: Sequence[str] = (),
) -> Document:
    """Return the runs next to the first, verdicts first; `failed` runs by name have a reason.

    `unjudged` are figures without a bound, which the verdicts name.
    """
    name = name or first.run_id
    names = (name, *(run.name for run in runs))
    facts = zip(names, map(_described, (first, *(run.report for run in runs))), strict=True)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    sections = [
        *_verdict_sections(runs, failed or {}, unjudged),
        Section("Metrics", notes, _charts(names, runs), (_metric_table(name, first, runs),)),
        *_table_sections(names, runs),
        *_changed_sections(runs, most),
    ]
    verdict, status = outcome(runs, failed or {})
    return Document(f"{first.run.name}: comparison", sections, verdict, status, [*facts])


def outcome(runs: Sequence[ComparedRun], failed: Mapping[str, str]) -> tuple[str, str]:
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


def _verdict_sections(
    runs: Sequence[ComparedRun], failed: Mapping[str, str], unjudged: Sequence[str]
) -> list[Section]:
    rows = [
        (run.name, each.metric, each.bound, each.status, each.text)
        for run in runs
        for each in run.gate.verdicts
    ]
    rows += [(name, "", "", "undecided", reason) for name, reason in failed.items()]
    text = ["All bounds of all runs are tested together, by Holm's method."]
    text += [f"Without a bound, and not judged: {', '.join(unjudged)}."] * bool(unjudged)
    table = Table(_GATE_HEAD, rows, verdict=3)
    return [Section("Verdicts", text, tables=(table,))] if rows else []


def _charts(names: Sequence[str], runs: Sequence[ComparedRun]) -> list[Chart]:
    news = [{new.name: new for _, new in run.shared} for run in runs]
    rows = [
        {"name": metric_title(old.name), "metrics": [old, *(new.get(old.name) for new in news)]}
        for old in (old for old, _ in (runs[0].shared if runs else ()))
        if old.unit == "fraction"
    ]
    return [Chart("runs", {"names": names, "rows": rows})] if rows else []


def _metric_table(name: str, first: Report, runs: Sequence[ComparedRun]) -> Table:
    found = [
        (run.name, metric_row(new, each))
        for run in runs
        for each, (_, new) in zip(run.metrics, run.shared, strict=True)
    ]
    rows = [
        (run, *row)
        for old in first.metrics
        for run, row in ((name, metric_row(old)), *found)
        if row[0] == old.name
    ]
    return Table(("run", *METRIC_HEAD), rows, tuple(range(2, len(METRIC_HEAD) + 1)))


def _table_sections(names: Sequence[str], runs: Sequence[ComparedRun]) -> list[Section]:
    samples = Table(
        _SAMPLES_HEAD,
        # The first run's once for each task, under its name.
        [
            (task, row or names[0], *rest)
            for task, row, *rest in dict.fromkeys(row for run in runs for row in run.samples)
        ],
        tuple(range(2, len(_SAMPLES_HEAD))),
    )
    speeds: dict[tuple[str, str], list[tuple[str, LatencyPoint]]] = {}
    for run in runs:
        for old, new in run.latency:
            speeds.setdefault(_place(new), [(names[0], old)]).append((run.name, new))
    rows = [
        (run, *latency_row(point), _change(point, own[0][1]))
        for own in speeds.values()
        for run, point in own
    ]
    head = ("run", *LATENCY_HEAD, "change")
    drawn = [{"name": ", ".join(key), "points": own} for key, own in speeds.items()]
    chart = Chart("speeds", {"names": names, "rows": drawn})
    sections = [
        Section("Samples", ("Samples are matched by their content.",), tables=(samples,)),
        Section(
            "Latency",
            ("The points that the runs have in common; the change is of tokens/s.",),
            (chart,),
            (Table(head, rows, tuple(range(3, len(head)))),),
        ),
    ]
    return [each for each in sections if each.tables[0].rows]


def _change(point: LatencyPoint, first: LatencyPoint) -> str:
    if point is first or not first.tokens_per_s:
        return ""
    return f"{point.tokens_per_s / first.tokens_per_s - 1:+.1%}"


def _changed_sections(runs: Sequence[ComparedRun], most: int) -> list[Section]:
    """Return the samples that a run got right and the first wrong, or the other way round."""
    changed = [(run.name, each) for run in runs for each in run.changed]
    if not changed:
        return []
    rows = [_changed_row(*each) for each in islice(changed, most)]
    s = "s" * (len(changed) > 1)
    text = f"{len(changed):,} sample{s} changed between right and wrong"
    text += f"; the first {most} are listed." if len(changed) > most else "."
    return [Section("Changed samples", (text,), tables=(Table(_CHANGED_HEAD, rows, (0,), 6),))]


def _changed_row(name: str, each: ChangedSample) -> tuple[str, ...]:
    words = ", ".join(f"{metric_title(n).lower()} {word}" for n, word in each.words.items())
    texts = (each.second.text, each.second.target, each.first.answer, each.second.answer)
    return str(each.second.index), name, *texts, words


def comparison_text(document: Document) -> str:
    """Return a comparison as tables for the terminal."""
    parts = [f"{document.title}: {document.verdict}"] if document.verdict else []
    parts.append(Table(("", ""), document.facts).text().strip("\n"))
    for section in document.sections:
        parts += section.text
        for table in section.tables:
            most = _MOST_TEXT if table.head == _CHANGED_HEAD else None
            rows = [[" ".join(cell.split())[:most] for cell in row] for row in table.rows]
            parts.append(replace(table, rows=rows).text())
    return "\n\n".join(parts)
