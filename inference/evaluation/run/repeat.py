"""Ask a few samples again, one at a time, to see how far answers depend on the server's load."""

from __future__ import annotations

from inference.evaluation.gate import amount_text
from inference.evaluation.paired import pairs_of
from inference.evaluation.paired_tests import check_drop
from inference.evaluation.run.task_run import TaskRun
from inference.evaluation.task import TextGenerator

_SAMPLES = 16


def movement(run: TaskRun, model: TextGenerator) -> tuple[dict[str, float], str]:
    """Return how far the samples asked again move each metric, and that in words.

    Only metrics of other scores than 0 and 1 are known so well by a few samples. Both are empty
    where no metric is a mean over samples.
    """
    if not any(metric.scale for metric in run.metrics):
        return {}, ""
    chosen = range(0, len(run.samples), max(1, len(run.samples) // _SAMPLES))[:_SAMPLES]
    samples = [run.samples[index] for index in chosen]
    first = [run.predictions[index].values for index in chosen]
    again = [run.task.score(sample, model).values for sample in samples]
    asked = f"{len(samples)} samples asked again, one at a time,"
    if again == first:
        return {}, f"{asked} gave the same digits."
    units = {metric.name: metric.unit for metric in run.metrics}
    moved = {}
    for metric in run.metrics:
        rows = [i for i, each in enumerate(samples) if metric.group in ("", each.group)]
        pairs = pairs_of(metric, [first[i] for i in rows], [again[i] for i in rows])
        if pairs is not None and not pairs.is_binary:
            moved[metric.name] = abs(check_drop(pairs, 0.0, confidence=0.95).drop)
    changed = sum(one != other for one, other in zip(first, again, strict=True))
    figures = ", ".join(f"{name} by {amount_text(d, units[name])}" for name, d in moved.items())
    return moved, (
        f"{asked} gave other digits for {changed}"
        + (f", which moves {figures}" * bool(moved))
        + "; evaluate.concurrency=1 gives the same each time."
    )
