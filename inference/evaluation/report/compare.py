"""Compare runs with the first one: metrics, samples by their content, latency, gate verdicts.

Differences are a run's value minus the first run's. The same page shows two runs, or an upgrade
with several rows, whose bounds are tested together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_PASS, GateResult, Measured
from inference.evaluation.paired import compare_metric, pairs_of
from inference.evaluation.record import Comparison, LatencyPoint, Report, TaskReport
from inference.evaluation.report.document import BAD, GOOD, QUIET, UNDECIDED, Page, markdown
from inference.evaluation.task import Metric, Prediction, Tally

MAX_ON_PAGE = 500  # listed changed samples
_WORDS = {BAD: "breached", UNDECIDED: "undecided", GOOD: "held"}

Run = tuple[Report, Sequence[Prediction]]
Pair = tuple[Prediction, Prediction]  # the same sample in the first run and in another


@dataclass(frozen=True)
class ComparedRun:
    """The comparison of a run with the first one.

    Attributes:
        comparisons: name -> comparison of each metric that both have.
        measured: these metrics with the samples of both runs, as input of a gate.
        samples: rows of the table of samples, the first run's before this one's.
        changed: (first, this run, metric -> change in words) of samples with a changed fraction.
        latency: (first, this run) of each point that both have measured.
        notes: reasons why values may not be comparable.
        is_paired: whether both have the same samples in each common task.
        gate: the verdicts of bounds, if there are any.
    """

    name: str
    report: Report
    comparisons: Mapping[str, Comparison]
    measured: tuple[Measured, ...]
    samples: tuple[tuple[str, ...], ...]
    changed: tuple[tuple[Prediction, Prediction, Mapping[str, str]], ...]
    latency: tuple[tuple[LatencyPoint, LatencyPoint], ...]
    notes: tuple[str, ...]
    is_paired: bool = True
    gate: GateResult = field(default_factory=GateResult)


def compare_runs(first_run: Run, second_run: Run, *, name: str = "") -> ComparedRun:
    """Compare a run with the first one.

    Raises:
        ValueError: they have no metric in common.
    """
    (first, olds), (second, news) = first_run, second_run
    before = {metric.name: metric for metric in first.metrics}
    if before.keys().isdisjoint(metric.name for metric in second.metrics):
        raise ValueError(
            f"{first.run_id} and {second.run_id} have no metric in common: the first has "
            f"{', '.join(before) or 'none'}, the second "
            f"{', '.join(metric.name for metric in second.metrics) or 'none'}."
        )
    name = name or second.run_id
    samples: list[tuple[str, ...]] = []
    pairs: list[Pair] = []
    measured: list[Measured] = []
    comparisons: dict[str, Comparison] = {}
    notes: list[str] = []
    unpaired: list[str] = []
    is_paired = True
    first_tasks = {task.name: task for task in first.tasks}
    for task in second.tasks:
        common: list[Pair] = []
        if first_task := first_tasks.get(task.name):
            old, new = (_by_id(run, task.name) for run in (olds, news))
            common = [(old[key], each) for key, each in new.items() if key in old]
            is_paired = is_paired and len(common) == len(old) == len(new)
            if reason := _not_paired(first_task, task, common):
                unpaired.append(f"{task.name}: {reason}; differences are not paired.")
                common = []
            elif old or new:
                same = sum(one.answer == two.answer for one, two in common)
                counts = (len(common), len(old) - len(common), len(new) - len(common), same)
                samples += [
                    (task.name, "", *[""] * len(counts), *_ends(first_task, [*old.values()])),
                    (task.name, name, *map("{:,}".format, counts), *_ends(task, [*new.values()])),
                ]
        pairs += common
        rows = [(new, old.values) for old, new in common]
        for metric in task.metrics:
            if earlier := before.get(metric.name):
                paired = pairs_of(metric, rows)
                comparisons[metric.name] = compare_metric(metric, earlier, paired)
                measured.append(Measured(metric, earlier, paired))
                if earlier.method != metric.method:
                    notes.append(
                        f"{metric.name} was measured in two ways: {earlier.method} (first run), "
                        f"{metric.method} (second run)."
                    )
    points = {point.place: point for point in second.latency}
    return ComparedRun(
        name,
        second,
        comparisons,
        tuple(measured),
        tuple(samples),
        tuple(_changed([each.metric for each in measured], pairs)),
        tuple((old, points[old.place]) for old in first.latency if old.place in points),
        (*notes, *unpaired),
        is_paired and not unpaired,
    )


def _by_id(run: Sequence[Prediction], task: str) -> dict[str | int, Prediction]:
    """Return the samples of a task by id, or by index in reports of versions without ids."""
    return {each.id or each.index: each for each in run if each.task == task}


def _ends(task: TaskReport, predictions: Sequence[Prediction]) -> list[str]:
    """Return the share of samples without an answer, and the counts of request outcomes.

    The share is an empty text for a task of log probabilities.
    """
    empty = sum(not each.answer.strip() for each in predictions)
    has_text = predictions and any(metric.scale != "exp" for metric in task.metrics)
    share = f"{empty / len(predictions):.1%}" if has_text else ""
    return [share, *(f"{getattr(task.requests, name):,}" for name in Tally.NAMES)]


def _not_paired(first: TaskReport, second: TaskReport, pairs: Sequence[Pair]) -> str:
    """Return the reason why a task's samples cannot be paired; empty if they can."""
    if first.version != second.version:
        return f"the runs used versions {first.version} and {second.version} of the task"
    is_other = first.dataset.sha256 != second.dataset.sha256
    if is_other and not any(new.id for _, new in pairs):
        return f"the runs used other data ({first.dataset.name}, {second.dataset.name})"
    return ""


def _changed(
    metrics: Sequence[Metric], pairs: Sequence[Pair]
) -> Iterator[tuple[Prediction, Prediction, Mapping[str, str]]]:
    fractions = dict.fromkeys(each.sample_value for each in metrics if each.unit == "fraction")
    for old, new in pairs:
        words = {
            name: _word(old.values[name], new.values[name])
            for name in fractions
            if name in old.values and new.values.get(name, old.values[name]) != old.values[name]
        }
        if words:
            yield old, new, words


def _word(before: float, after: float) -> str:
    if {before, after} == {0.0, 1.0}:
        return "now right" if after > before else "now wrong"
    return "better" if after > before else "worse"


@dataclass(frozen=True)
class SideBySide:
    """The human-readable comparison of runs with the first one, verdicts first.

    Attributes:
        failed: name of a run -> reason why it has no metrics.
        unjudged: metrics without a bound.
    """

    name: str
    first: Report
    runs: Sequence[ComparedRun]
    failed: Mapping[str, str] = field(default_factory=dict)
    unjudged: Sequence[str] = ()

    def page(self) -> Page:
        """Return the page, whose charts show the record of each run."""
        reports = {self.name: self.first} | {run.name: run.report for run in self.runs}
        records = [(name, asdict(report)) for name, report in reports.items()]
        return Page(self._title, self.text(), {"runs": records}, *self._outcome)

    def text(self, *, most: int = MAX_ON_PAGE, longest: int | None = None) -> str:
        """Return Markdown with at most `most` changed samples, texts cut to `longest`."""
        name, runs = self.name, self.runs
        speeds: dict[LatencyPoint, list[tuple[str, LatencyPoint]]] = {}
        for run in runs:
            for old, new in run.latency:
                speeds.setdefault(old, []).append((run.name, new))
        # Every run repeats the first run's row of a task: list it once.
        rows = dict.fromkeys(row for run in runs for row in run.samples)
        return markdown(
            "comparison",
            **vars(self),
            title=self._title,
            verdict=self._outcome[0],
            facts=[(name, _described(self.first)), *((r.name, _described(r.report)) for r in runs)],
            judged=any(run.gate.verdicts for run in runs),
            samples=[(task, row or name, *rest) for task, row, *rest in rows],
            ends=Tally.NAMES,
            speeds=[*speeds.items()],
            changed=[(run.name, *each) for run in runs for each in run.changed],
            most=most,
            longest=longest,
        )

    @property
    def _title(self) -> str:
        return f"{self.first.run.name}: comparison"

    @property
    def _outcome(self) -> tuple[str, str]:
        """The outcome of the runs in a few words, and its colour."""
        if not self.failed and not any(run.gate.verdicts for run in self.runs):
            return "", QUIET
        by_code = {EXIT_PASS: GOOD, EXIT_GATE_BREACHED: BAD}
        colours = dict.fromkeys(self.failed, UNDECIDED)
        colours |= {run.name: by_code.get(run.gate.exit_code, UNDECIDED) for run in self.runs}
        found = {
            colour: [name for name, its_colour in colours.items() if its_colour == colour]
            for colour in _WORDS
            if colour in colours.values()
        }
        parts = [f"{_WORDS[colour]}: {', '.join(names)}" for colour, names in found.items()]
        return "; ".join(parts), next(iter(found))


def _described(report: Report) -> str:
    run = report.run
    known = (run.engine or run.server, run.parallelism, run.weights, run.data_type)
    return f"{report.run_id} ({', '.join(filter(None, known)) or 'of an unknown model'})"
