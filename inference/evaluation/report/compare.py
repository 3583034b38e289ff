"""Compare runs with the first one: metrics, samples by their content, latency, gate verdicts.

Differences are a run's value minus the first run's. The same page shows two runs, or an upgrade
with several rows, whose bounds are tested together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product

from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_PASS, GateResult, Measured
from inference.evaluation.paired import compare_metric, pairs_of
from inference.evaluation.record import Comparison, Report, TaskReport
from inference.evaluation.report.document import BAD, GOOD, QUIET, UNDECIDED, Page, markdown
from inference.evaluation.task import Prediction

MAX_ON_PAGE = 500  # listed changed samples
_WORDS = {BAD: "breached", UNDECIDED: "undecided", GOOD: "held"}

Run = tuple[Report, Sequence[Prediction]]


@dataclass(frozen=True)
class ComparedTask:
    """A task in two runs.

    Attributes:
        first, second: its reports.
        olds, news: the samples of each run by id, or by index in reports of versions without ids.
    """

    first: TaskReport
    second: TaskReport
    olds: Mapping[str | int, Prediction]
    news: Mapping[str | int, Prediction]

    @property
    def reason(self) -> str:
        """The reason why its samples cannot be paired; empty if they can."""
        first, second = self.first, self.second
        if first.version != second.version:
            return f"the runs used versions {first.version} and {second.version} of the task"
        is_other = first.dataset.sha256 != second.dataset.sha256
        if is_other and not any(self.news[key].id for key in self.olds.keys() & self.news.keys()):
            return f"the runs used other data ({first.dataset.name}, {second.dataset.name})"
        return ""

    @property
    def pairs(self) -> list[tuple[Prediction, Prediction]]:
        """The same sample in both runs, for each that can be paired."""
        if self.reason:
            return []
        return [(self.olds[key], new) for key, new in self.news.items() if key in self.olds]

    @property
    def same_answers(self) -> int:
        """The number of samples with the same answer."""
        return sum(old.answer == new.answer for old, new in self.pairs)

    @property
    def has_samples(self) -> bool:
        """Whether a run has samples that can be paired."""
        return not self.reason and bool(self.olds or self.news)

    @property
    def is_paired(self) -> bool:
        """Whether both runs have the same samples."""
        return not self.reason and self.olds.keys() == self.news.keys()


@dataclass(frozen=True)
class ComparedRun:
    """The comparison of a run with the first one.

    Attributes:
        tasks: the tasks that both have.
        measured: the metrics that both have, with the samples of both, as input of a gate.
        gate: the verdicts of bounds, if there are any.
    """

    name: str
    report: Report
    tasks: Sequence[ComparedTask]
    measured: Sequence[Measured]
    gate: GateResult = field(default_factory=GateResult)

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """The comparison of each metric, by name."""
        return {
            each.metric.name: compare_metric(each.metric, each.baseline, each.pairs)
            for each in self.measured
            if each.baseline is not None
        }

    @property
    def changed(self) -> Iterator[tuple[Prediction, Prediction, Mapping[str, str]]]:
        """The samples with a changed fraction: (first run, this one, metric -> change in words)."""
        metrics = [each.metric for each in self.measured if each.metric.unit == "fraction"]
        fractions = dict.fromkeys(metric.sample_value for metric in metrics)
        for old, new in chain.from_iterable(task.pairs for task in self.tasks):
            words = {
                name: _word(old.values[name], new.values[name])
                for name in fractions
                if name in old.values and new.values.get(name, old.values[name]) != old.values[name]
            }
            if words:
                yield old, new, words


def compare_runs(first_run: Run, second_run: Run, *, name: str = "") -> ComparedRun:
    """Compare a run with the first one.

    Raises:
        ValueError: they have no metric in common.
    """
    (first, olds), (second, news) = first_run, second_run
    before = {metric.name: metric for metric in first.metrics}
    measured = []
    tasks = []
    for old, new in product(first.tasks, second.tasks):
        if old.name != new.name:
            continue
        task = ComparedTask(old, new, _by_id(olds, old.name), _by_id(news, old.name))
        rows = [(sample, earlier.values) for earlier, sample in task.pairs]
        tasks.append(task)
        measured += [
            Measured(metric, before[metric.name], pairs_of(metric, rows))
            for metric in new.metrics
            if metric.name in before
        ]
    if not measured:
        raise ValueError(
            f"{first.run_id} and {second.run_id} have no metric in common: the first has "
            f"{', '.join(before) or 'none'}, the second "
            f"{', '.join(metric.name for metric in second.metrics) or 'none'}."
        )
    return ComparedRun(name or second.run_id, second, tasks, measured)


def _by_id(run: Sequence[Prediction], task: str) -> dict[str | int, Prediction]:
    return {each.id or each.index: each for each in run if each.task == task}


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
        records = [*self._reports.items()]
        return Page(self._title, self.text(), {"runs": records}, *self._outcome)

    def text(self, *, most: int = MAX_ON_PAGE, longest: int | None = None) -> str:
        """Return Markdown with at most `most` changed samples, texts cut to `longest`."""
        runs = self.runs
        points = [(run.name, point) for run in runs for point in run.report.latency]
        speeds = {
            old: [(name, new) for name, new in points if new.place == old.place]
            for old in self.first.latency
        }
        return markdown(
            "comparison",
            **vars(self),
            title=self._title,
            verdict=self._outcome[0],
            facts=[(name, _described(report)) for name, report in self._reports.items()],
            judged=any(run.gate.verdicts for run in runs),
            sampled=[(r.name, task) for r in runs for task in r.tasks if task.has_samples],
            speeds=speeds,
            changed=[(run.name, *each) for run in runs for each in run.changed],
            most=most,
            longest=longest,
        )

    @property
    def _reports(self) -> dict[str, Report]:
        return {self.name: self.first} | {run.name: run.report for run in self.runs}

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
