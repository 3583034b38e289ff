"""The checkpoints of a watch, the choice of the best one, and which repositories are kept.

The state is saved in a file from which a later watch continues; a table and a page show it.
"""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from inference.evaluation.task import Metric
from launcher_scripts.configuration.schema import WatchSection
from launcher_scripts.console import Console
from launcher_scripts.trained_checkpoints import TrainedCheckpoint
from stages.progress import read_as, write_json

STATE_NAME, BEST_NAME, PAGE_NAME = "watch.json", "best.json", "watch.html"
_RELOAD_S = 60
_RELOADS = f"This page loads itself again every {_RELOAD_S} seconds."
_ENDED = "The watch has ended."

# States of a checkpoint in the order of its life; the last four are final.
WAITING, RUNNING = "waiting", "running"
EVALUATED, FAILED, PASSED_OVER, GONE = "evaluated", "failed", "passed over", "gone"
FINAL_STATES = (EVALUATED, FAILED, PASSED_OVER, GONE)


@dataclass
class Watched:
    """A checkpoint that a watch has seen.

    Attributes:
        path, name: as in `TrainedCheckpoint`.
        changed: Unix time at which the watch last saw its files change.
        size: fingerprint of its files when last scanned.
        attempts: how often its pipeline was started.
        problem: why it waits or failed.
        refusal: why its pipeline could not start with its present files.
        jobs: stages that were submitted.
        metrics: the metrics of its report, by name.
        verdict: comparison with the best checkpoint before it.
        server: the step whose deploy job serves it, with `watch.exchange`.
    """

    step: int
    path: str
    name: str | None = None
    state: str = WAITING
    changed: float = 0.0
    size: str = ""
    attempts: int = 0
    problem: str = ""
    refusal: str = ""
    jobs: list[str] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    report: str = ""
    verdict: str = ""
    server: int | None = None

    @property
    def must_end(self) -> list[str]:
        """The jobs that must end before the pipeline has ended.

        A shared server may keep running, unless it was the last job: then it has failed.
        """
        shared = "deploy" if self.server is not None else ""
        return [name for name in self.jobs if name != shared or name == self.jobs[-1]]

    @property
    def is_final(self) -> bool:
        """Whether the watch is done with it."""
        return self.state in FINAL_STATES

    @property
    def source(self) -> str:
        """The key of the configuration that names it, with its value."""
        return f"export.model.checkpoint_path={self.path}"

    @property
    def checkpoint(self) -> TrainedCheckpoint:
        """The checkpoint, as it was found."""
        return TrainedCheckpoint(self.step, Path(self.path), self.name)


@dataclass
class _Saved:
    """The contents of the state file."""

    run: str
    best: int | None
    watched: list[Watched]
    held: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class WatchState:
    """All checkpoints that a watch has seen, and the best of them.

    Two checkpoints are ranked by the first figure in which they differ: `watch.metric` alone if it
    is set, else the figures with bounds (`gated`), then perplexities, which are more sensitive than
    shares of right answers, then the rest.

    Attributes:
        run: folder of the training run.
        repository: path of a pipeline's repository, relative to its results folder.
        gated: names of the figures that `evaluate.gate` bounds.
        watched: checkpoints by step.
        best: step of the best checkpoint.
        held: by the step of each server, the steps whose weights it may have mapped.
    """

    options: WatchSection
    run: Path
    repository: Path | None = None
    gated: Sequence[str] = ()
    watched: dict[int, Watched] = field(default_factory=dict)
    best: int | None = None
    held: dict[int, list[int]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of the state, the page and the results of each step."""
        return self.options.output_dir

    def results_of(self, step: int) -> Path:
        """Return the folder of a checkpoint's pipeline."""
        return self.folder / f"step_{step:07d}"

    @property
    def in_order(self) -> list[Watched]:
        """The checkpoints sorted by step."""
        return [self.watched[step] for step in sorted(self.watched)]

    @property
    def best_checkpoint(self) -> Watched | None:
        """The best checkpoint so far."""
        return None if self.best is None else self.watched[self.best]

    def read(self) -> None:
        """Load the state that an earlier watch left in the folder, if any.

        Raises:
            DamagedFileError: the file does not hold a state.
            ValueError: another training run was watched there.
        """
        found = read_as(self.folder / STATE_NAME, _Saved, "the state of a watch")
        if found is None:
            return
        self.watched = {one.step: one for one in found.watched}
        self.best = found.best if found.best in self.watched else None
        self.held = found.held
        if found.run != str(self.run):
            raise ValueError(
                f"watch.output_dir={self.folder} holds the watch of {found.run}, not of "
                f"{self.run}; choose another folder."
            )

    def write(self) -> None:
        """Save the state."""
        saved = _Saved(str(self.run), self.best, self.in_order, self.held)
        write_json(self.folder / STATE_NAME, saved)

    def judge(self, watched: Watched, *, may_be_best: bool) -> None:
        """Compare a checkpoint with the best before it, and replace that if it is better.

        Only with `may_be_best` can it become the best.
        """
        names, best = self._figures([watched]), self.best_checkpoint
        if not watched.metrics:
            return
        if names[0] not in watched.metrics:
            known = ", ".join(watched.metrics)
            watched.verdict = f"watch.metric={names[0]} is not one of its figures: {known}"
            return
        name = names[0]
        if best is not None:
            shared = [name for name in names if name in best.metrics]
            differing = (n for n in shared if best.metrics[n].value != watched.metrics[n].value)
            name = next(differing, name)
            watched.verdict = _verdict(best, watched, name)
        if may_be_best and (best is None or _rank(watched, names) > _rank(best, names)):
            self.best = watched.step
            write_json(self.folder / BEST_NAME, {"metric": name, **asdict(watched)})

    def keep_the_best(self) -> None:
        """Delete the shards and repositories that this watch made, except those of the best.

        Only paths within the folder are deleted: its state may have been copied from another one.
        """
        if self.repository is None:
            return
        names = self._figures(self.in_order)
        ended = [
            one
            for one in self.in_order
            if one.is_final and one.attempts and self._repository_of(one.step).is_dir()
        ]
        ranked = sorted(
            (one for one in ended if names and names[0] in one.metrics),
            key=lambda watched: _rank(watched, names),
        )
        kept = ranked[-self.options.keep :] if self.options.keep else []
        held = {step for steps in self.held.values() for step in steps}
        for watched in ended:
            if watched not in kept and watched.step not in held:
                shutil.rmtree(self._repository_of(watched.step), ignore_errors=True)

    def _repository_of(self, step: int) -> Path:
        """Return the repository of a pipeline; a path that does not exist if links lead outside."""
        path = self.results_of(step) / (self.repository or "")
        is_within = path.resolve() == self.folder.resolve() / path.relative_to(self.folder)
        return path if is_within else path / "is a link"

    def table(self, console: Console) -> str:
        """Return a table of all checkpoints."""
        rows = [
            (
                str(one.step),
                self.label(one),
                self._value(one),
                one.verdict or one.problem or "-",
            )
            for one in self.in_order
        ]
        name = self._metric(self.in_order) or "metric"
        return console.table(("step", "state", name, ""), rows)

    def shown(self, watched: Watched) -> str:
        """Return the name of a checkpoint, or its path relative to the run's folder."""
        return watched.name or os.path.relpath(watched.path, self.run)

    def page(self, *, has_ended: bool = False) -> str:
        """Return the HTML page of the watch, which charts every metric over the steps."""
        from inference.evaluation.report.document import Page, markdown

        title = f"Checkpoints of {self.run}"
        return Page(
            title,
            markdown("checkpoints", title=title, state=self),
            {"checkpoints": [one for one in self.in_order if one.metrics]},
            footer=_ENDED if has_ended else _RELOADS,
            reload_s=None if has_ended else _RELOAD_S,
        ).html()

    def report_page(self, watched: Watched) -> str:
        """Return the path of a checkpoint's report, relative to the folder."""
        return os.path.relpath(Path(watched.report).with_suffix(".html"), self.folder)

    def figure(self, watched: Watched) -> str:
        """Return the name and value of a checkpoint's deciding figure; empty without figures."""
        return f"{self._metric(self.in_order)} {self._value(watched)}" if watched.metrics else ""

    def label(self, watched: Watched) -> str:
        """Return the state of a checkpoint, and whether it is the best."""
        return watched.state + (", best" if watched.step == self.best else "")

    def _metric(self, checkpoints: list[Watched]) -> str | None:
        return next(iter(self._figures(checkpoints)), None)

    def _figures(self, checkpoints: list[Watched]) -> list[str]:
        """Return the names of the checkpoints' figures in the order in which they decide."""
        if self.options.metric is not None:
            return [self.options.metric]
        found = {name: metric for one in checkpoints for name, metric in one.metrics.items()}
        gated = [name for name in self.gated if name in found]
        sharp = [name for name, metric in found.items() if metric.unit == "perplexity"]
        return list(dict.fromkeys([*gated, *sharp, *found]))

    def _value(self, watched: Watched) -> str:
        found = watched.metrics.get(str(self._metric(self.in_order)))
        return f"{found.value + 0.0:.4g} ({found.low:.4g} to {found.high:.4g})" if found else "-"


def _rank(watched: Watched, names: Sequence[str]) -> tuple[float, ...]:
    """Return a sort key: the figures in `names`, each larger for a better checkpoint."""
    found = [watched.metrics.get(name) for name in names]
    return tuple(
        -math.inf if metric is None else metric.value if metric.higher_is_better else -metric.value
        for metric in found
    )


def _verdict(best: Watched, watched: Watched, metric: str) -> str:
    """Return in words how a checkpoint compares with the best so far, sample by sample."""
    from inference.evaluation.report.compare import compare_runs
    from inference.evaluation.report.files import read_run

    try:
        compared = compare_runs(read_run(Path(best.report)), read_run(Path(watched.report)))
    except (OSError, ValueError) as error:
        return f"not comparable with step {best.step}: {error}"
    found = compared.comparisons.get(metric)
    if found is None or found.low is None or found.high is None:
        return ""
    sign = 1 if watched.metrics[metric].higher_is_better else -1
    low, high = sorted((sign * found.low, sign * found.high))
    word = "better than" if low > 0 else "worse than" if high < 0 else "not distinguished from"
    limits = f"{found.low:+.4g} to {found.high:+.4g}"
    return f"{word} step {best.step}: {metric} {found.difference:+.4g} ({limits})"
