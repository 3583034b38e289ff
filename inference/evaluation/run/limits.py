"""The part of an evaluation that a server can answer; what is left out is named."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from inference.evaluation.gate import parse_bounds
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.run.task_run import EvaluationError
from inference.evaluation.tasks import task_entry

logger = logging.getLogger(__name__)


def within_abilities(options: EvaluationOptions, lacks: Mapping[str, str]) -> EvaluationOptions:
    """Return the options without metrics and tasks that need what a server lacks.

    Args:
        options: of the whole evaluation.
        lacks: each ability that the server lacks, with the reason.

    Raises:
        EvaluationError: nothing is left, or a bound is on what is left out.
    """
    kept: list[str] = []
    left_out: dict[str, str] = {}
    found = replace(options, lacks=tuple(lacks))
    for name in options.tasks:
        entry = task_entry(name)
        assert entry is not None, "unknown tasks were refused"
        needs = entry.needs(options)
        missing = {
            metric: lacks[needs[metric]]
            for metric in entry.metrics(options)
            if needs.get(metric) in lacks
        }
        if missing and entry.reduced is None:
            missing |= dict.fromkeys(entry.metrics(options), next(iter(missing.values())))
        rest = tuple(metric for metric in entry.metrics(options) if metric not in missing)
        left_out |= missing
        if rest:
            kept.append(name)
            found = found if entry.reduced is None else entry.reduced(found, rest)
    bounds, _ = parse_bounds(options.gate)
    problems = [
        f"evaluate.gate.{name} bounds what the server cannot answer: {left_out[name]}."
        for name in bounds
        if name in left_out
    ]
    sentences = tuple(f"{metric} is left out: {reason}" for metric, reason in left_out.items())
    if not kept:
        problems += ["nothing that evaluate.tasks asks for can be measured:", *sentences]
    if problems:
        raise EvaluationError("\n".join(problems))
    for sentence in sentences:
        logger.warning(sentence)
    return replace(found, tasks=kept, left_out=sentences)
