"""Bounds as they are written: a sentence about paired samples, and limits of a metric."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from export_scripts.suggest import did_you_mean
from inference.evaluation.options import Bound
from inference.evaluation.statistics import is_number
from inference.evaluation.task import Metric

_SENTENCE = re.compile(
    r"no (?P<word>drop|rise)(?: of more than (?P<amount>\d+(?:\.\d+)?) ?(?P<unit>points?|%)?)?"
    r" at (?P<confidence>\d+(?:\.\d+)?) ?%"
)
EXAMPLE = "no drop of more than 1 point at 95 %"


@dataclass(frozen=True)
class PairedBound:
    """A bound's sentence, taken apart.

    Attributes:
        amount: of the drop that is allowed, in `unit`: "point", "%" of the baseline, or "", the
            metric's own.
        confidence: above 0.5 and below 1.
    """

    word: str
    amount: float
    unit: str
    confidence: float

    @classmethod
    def parse(cls, sentence: str) -> PairedBound:
        """Return what a sentence says. Raises ValueError if it is none."""
        found = _SENTENCE.fullmatch(" ".join(sentence.split()))
        confidence = 0.0 if found is None else float(found["confidence"]) / 100
        if found is None or not 0.5 < confidence < 1:
            raise ValueError(
                f"{sentence!r} is not a bound; write {EXAMPLE!r} (or rise, a number in the "
                "metric's unit, or % of the baseline; above 50 % and below 100 %)."
            )
        unit = (found["unit"] or "").rstrip("s")
        return cls(found["word"], float(found["amount"] or 0.0), unit, confidence)

    def margin(self, baseline: Metric) -> float:
        """Return the drop that is allowed, on the scale on which samples are averaged.

        Raises:
            ValueError: the metric has no such unit or direction, or is not a mean over samples.
        """
        word = "drop" if baseline.higher_is_better else "rise"
        if self.word != word:
            raise ValueError(f"{baseline.name} gets worse by a {word}; write 'no {word}'.")
        if not baseline.scale:
            raise ValueError(f"{baseline.name} is made of all answers together; use margin.")
        if self.unit == "point" and baseline.unit != "fraction":
            raise ValueError(f"{baseline.name} is not measured in points; write a number or %.")
        amount = self.amount / 100 if self.unit else self.amount
        if baseline.scale == "exp":
            share = amount if self.unit == "%" else amount / baseline.value
            return math.log1p(share)
        return amount * abs(baseline.value) if self.unit == "%" else amount


def parse_bounds(gate: Mapping[str, Any]) -> tuple[dict[str, Bound], list[str]]:
    """Return the bounds of `evaluate.gate` by metric, and what is wrong with the rest.

    A bound is a sentence, or a mapping of its limits.
    """
    known = [each.name for each in fields(Bound)]
    bounds: dict[str, Bound] = {}
    problems = []
    for metric, limits in gate.items():
        key = f"evaluate.gate.{metric}"
        if isinstance(limits, str):
            limits = {"paired": limits}
        if not isinstance(limits, Mapping):
            problems.append(
                f"{key}={limits} is not a bound; write {key}='{EXAMPLE}', {key}.min={limits}, or "
                ".max."
            )
            continue
        found = {str(name): _limit_problem(str(name), each, known) for name, each in limits.items()}
        problems += [f"{key}.{name}{problem}" for name, problem in found.items() if problem]
        good = {str(name): each for name, each in limits.items() if not found[str(name)]}
        if good or not limits:
            bounds[metric] = Bound(**good)
    return bounds, problems


def _limit_problem(name: str, value: Any, known: Sequence[str]) -> str:
    """Return what is wrong with one limit; empty where nothing is."""
    if name not in known:
        hint = did_you_mean(name, known)
        return f": there is no such bound{hint}; use {', '.join(known)}."
    if value is None:
        return ""
    if name != "paired":
        return "" if is_number(value) else f"={value}: expected a number."
    try:
        PairedBound.parse(str(value))
    except ValueError as error:
        return f": {error}"
    return ""


def check_bounds(bounds: Mapping[str, Bound], *, known: Sequence[str]) -> list[str]:
    """Return every bound that can never be applied, in the words of the configuration."""
    problems = []
    for name, bound in bounds.items():
        key = f"evaluate.gate.{name}"
        if name not in known:
            measured = ", ".join(known) or "none"
            problems.append(
                f"{key} bounds a metric that is not measured{did_you_mean(name, known)}; metrics "
                f"of this run: {measured}."
            )
        if bound.min is None and bound.max is None and not bound.is_relative:
            problems.append(f"{key} has no bound; set min, max, paired, margin or sigmas.")
        if bound.min is not None and bound.max is not None and bound.min > bound.max:
            problems.append(f"{key}.min={bound.min} is above {key}.max={bound.max}.")
        problems += [
            f"{key}.{field}={value} must not be negative."
            for field, value in (("margin", bound.margin), ("sigmas", bound.sigmas))
            if value is not None and value < 0
        ]
    return problems
