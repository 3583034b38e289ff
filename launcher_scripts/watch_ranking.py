"""The best checkpoint of a watch: by which figure, how each compares with it, what is kept.

Its table and its page show every checkpoint.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from inference.evaluation.task import Metric
from launcher_scripts.configuration.schema import WatchSection
from launcher_scripts.console import Console
from launcher_scripts.watch_state import Watched, WatchState
from stages.progress import write_json

BEST_NAME, PAGE_NAME = "best.json", "watch.html"
_RELOAD_S = 60


@dataclass(frozen=True)
class Ranking:
    """Orders the checkpoints of a watch by one figure; `folder` receives the best one's record."""

    state: WatchState
    options: WatchSection
    folder: Path

    def judge(self, each: Watched, *, is_sound: bool) -> None:
        """Compare a checkpoint with the best before it; a sound one can become the best."""
        name = self._metric([each])
        if name is None or not each.metrics:
            return
        if name not in each.metrics:
            known = ", ".join(each.metrics)
            each.verdict = f"watch.metric={name} is not one of its figures: {known}"
            return
        best = self.state.the_best
        if best is not None:
            each.verdict = _verdict(best, each, name)
        if is_sound and (best is None or _rank(each.metrics[name]) > _rank(best.metrics[name])):
            self.state.best = each.step
            write_json(self.folder / BEST_NAME, {"metric": name, **asdict(each)})

    def keep_the_best(self) -> None:
        """Delete the shards and repositories that this watch made, but for those of the best."""
        name = self._metric(self.state.in_order)
        ended = [each for each in self.state.in_order if each.is_final and each.repository]
        ranked = sorted(
            (each for each in ended if name in each.metrics),
            key=lambda each: _rank(each.metrics[str(name)]),
        )
        kept = ranked[-self.options.keep :] if self.options.keep else []
        for each in ended:
            if each not in kept:
                shutil.rmtree(each.repository, ignore_errors=True)
                each.repository = ""

    def table(self, console: Console) -> str:
        """Return what is known of every checkpoint, as a table."""
        rows = [
            (
                str(each.step),
                self._state(each),
                self._value(each),
                each.verdict or each.problem or "-",
            )
            for each in self.state.in_order
        ]
        name = self._metric(self.state.in_order) or "metric"
        return console.table(("step", "state", name, ""), rows)

    def page(self) -> str:
        """Return the page of the watch, which charts every metric over the steps."""
        from markupsafe import Markup

        from inference.evaluation.record import HistoryPoint
        from inference.evaluation.report.charts import history_chart
        from inference.evaluation.report.formatting import metric_title
        from inference.evaluation.report.page import render_page

        run, points, rows = self.state.run, [], []
        for each in self.state.in_order:
            step, shown = f"step {each.step}", self._state(each)
            if each.metrics:
                points.append(HistoryPoint(step, run, step, {}, each.metrics))
                report = f"step_{each.step:07d}/results/evaluate/report.html"
                shown = Markup('<a href="{}">{}</a>').format(report, shown)
            remarks = (each.verdict or "-", each.problem or "-")
            rows.append((str(each.step), shown, each.checkpoint.label, *remarks))
        names = dict.fromkeys(name for point in points for name in point.metrics)
        return render_page(
            "page.html",
            title=f"Checkpoints of {run}",
            charts=[(metric_title(name), history_chart(points, name)) for name in names],
            head=("step", "state", "checkpoint", "against the best before it", "remark"),
            rows=rows,
            numbers=(0,),
            footer=f"This page loads itself again every {_RELOAD_S} seconds.",
            reload_s=_RELOAD_S,
        )

    def figure(self, each: Watched) -> str:
        """Return the name and the value of a checkpoint's figure; empty without any figure."""
        return f"{self._metric(self.state.in_order)} {self._value(each)}" if each.metrics else ""

    def _state(self, each: Watched) -> str:
        return each.state + (", best" if each.step == self.state.best else "")

    def _metric(self, checkpoints: list[Watched]) -> str | None:
        first = next((name for each in checkpoints for name in each.metrics), None)
        return first if self.options.metric is None else self.options.metric

    def _value(self, each: Watched) -> str:
        found = each.metrics.get(str(self._metric(self.state.in_order)))
        return f"{found.value:.4g} ({found.low:.4g} to {found.high:.4g})" if found else "-"


def _rank(metric: Metric) -> float:
    """Return the value, larger for a better checkpoint."""
    return metric.value if metric.higher_is_better else -metric.value


def _verdict(best: Watched, each: Watched, metric: str) -> str:
    """Return in words how a checkpoint compares with the best before it, sample by sample."""
    from inference.evaluation.report.compare import compare_runs
    from inference.evaluation.report.files import read_run

    try:
        compared = compare_runs(read_run(Path(best.report)), read_run(Path(each.report)))
    except (OSError, ValueError) as error:
        return f"not comparable with step {best.step}: {error}"
    found = next((one for one in compared.metrics if one.metric == metric), None)
    if found is None or found.low is None or found.high is None:
        return ""
    sign = 1 if each.metrics[metric].higher_is_better else -1
    low, high = sorted((sign * found.low, sign * found.high))
    word = "better than" if low > 0 else "worse than" if high < 0 else "not distinguished from"
    return (
        f"{word} step {best.step}: {found.difference:+.4g} ({found.low:+.4g} to {found.high:+.4g})"
    )
