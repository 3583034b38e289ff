"""The page of a watch: every checkpoint, and each figure over the steps with its interval."""

from markupsafe import Markup

from inference.evaluation.record import HistoryPoint
from inference.evaluation.report.charts import history_chart
from inference.evaluation.report.formatting import metric_title
from inference.evaluation.report.page import render_page
from launcher_scripts.watch_state import Watched, WatchState

PAGE_NAME = "watch.html"
_RELOAD_S = 60


def watch_page(state: WatchState) -> str:
    """Return the page, which charts every metric of the reports."""
    points = [
        HistoryPoint(
            run_id=f"step {each.step}",
            name=state.run,
            started_at=f"step {each.step}",
            samples={},
            metrics=each.metrics,
        )
        for each in state.in_order
        if each.metrics
    ]
    names = dict.fromkeys(name for point in points for name in point.metrics)
    return render_page(
        "page.html",
        title=f"Checkpoints of {state.run}",
        charts=[(metric_title(name), history_chart(points, name)) for name in names],
        head=_HEAD,
        rows=[_row(each, state) for each in state.in_order],
        numbers=(0,),
        footer=f"This page loads itself again every {_RELOAD_S} seconds.",
        reload_s=_RELOAD_S,
    )


_HEAD = ("step", "state", "checkpoint", "against the best before it", "remark")


def _row(each: Watched, state: WatchState) -> tuple[str, ...]:
    shown = each.state + (", best" if each.step == state.best else "")
    if each.metrics:
        report = f"step_{each.step:07d}/results/evaluate/report.html"
        shown = Markup('<a href="{}">{}</a>').format(report, shown)
    return str(each.step), shown, each.checkpoint.label, each.verdict or "-", each.problem or "-"
