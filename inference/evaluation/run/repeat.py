"""Ask a few samples again, one at a time, to see how far answers depend on the server's load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inference.evaluation.gate import amount_text
from inference.evaluation.options import Bound
from inference.evaluation.paired import pairs_of
from inference.evaluation.paired_tests import check_drop
from inference.evaluation.run.task_run import TaskRun
from inference.evaluation.task import TextGenerator

_SAMPLES = 16


@dataclass(frozen=True)
class Movement:
    """The change of each metric over samples that were asked again, and the same in words."""

    by_metric: dict[str, float] = field(default_factory=dict)
    text: str = ""


def movement(run: TaskRun, model: TextGenerator, bounds: Mapping[str, Bound]) -> Movement:
    """Ask samples again where a bound compares a metric that is a mean over them.

    Only metrics of other scores than 0 and 1 are known so well by a few samples.
    """
    compared = {name for name, bound in bounds.items() if bound.is_relative}
    if not any(metric.scale and metric.name in compared for metric in run.metrics):
        return Movement()
    chosen = range(0, len(run.samples), max(1, len(run.samples) // _SAMPLES))[:_SAMPLES]
    samples = [run.samples[index] for index in chosen]
    first = [run.predictions[index].values for index in chosen]
    again = [run.task.score(sample, model).values for sample in samples]
    asked = f"{len(samples)} samples asked again, one at a time,"
    if again == first:
        return Movement(text=f"{asked} gave the same digits")
    units = {metric.name: metric.unit for metric in run.metrics}
    moved: dict[str, float] = {}
    for metric in run.metrics:
        rows = [i for i, each in enumerate(samples) if metric.group in ("", each.group)]
        pairs = pairs_of(metric, [first[i] for i in rows], [again[i] for i in rows])
        if pairs is not None and not pairs.is_binary:
            moved[metric.name] = abs(check_drop(pairs, 0.0, confidence=0.95).drop)
    changed = sum(one != other for one, other in zip(first, again, strict=True))
    figures = ", ".join(f"{name} by {amount_text(d, units[name])}" for name, d in moved.items())
    return Movement(
        moved,
        f"{asked} gave other digits for {changed}"
        + (f", which moves {figures}" * bool(moved))
        + "; evaluate.concurrency=1 gives the same each time",
    )
