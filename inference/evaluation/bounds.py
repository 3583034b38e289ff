"""Bounds as they are written: sentences about paired samples, and limits of a metric."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foundations.suggest import did_you_mean
from inference.evaluation.options import Bound, Bounds
from inference.evaluation.statistics import is_number
from inference.evaluation.task import Metric

_SENTENCE = re.compile(
    r"no (?P<word>drop|rise|change)"
    r"(?: of more than (?P<amount>\d+(?:\.\d+)?) ?(?P<unit>points?|%)?)?"
    r"(?: at (?P<confidence>\d+(?:\.\d+)?) ?%)?(?P<advisory>, advisory)?"
)
CHANGE = "change"
EXAMPLE = "no drop of more than 1 point at 95 %"
# The change that "no change" allows unless it says how much, of a metric's unit. Equal runs move a
# perplexity by about 1e-6 % on one machine, and by 1e-4 % between kinds of processors.
_EQUAL = {"fraction": (0.0, "point"), "perplexity": (0.01, "%")}
_EQUAL_ELSEWHERE = (0.01, "%")


@dataclass(frozen=True)
class PairedBound:
    """A bound's sentence, taken apart.

    Attributes:
        text: the sentence, without what makes it advisory.
        word: drop, rise, or change, which is of each sample and in either direction.
        amount: of what is allowed, in `unit`: "point", "%" of the baseline, or "", the metric's
            own; None where the sentence names none.
        confidence: above 0.5 and below 1; of a change, which is seen and not inferred, 1.
        is_advisory: whether it is reported, but does not decide.
    """

    text: str
    word: str
    amount: float | None
    unit: str
    confidence: float
    is_advisory: bool = False

    @classmethod
    def parse(cls, sentence: str) -> PairedBound:
        """Return what a sentence says. Raises ValueError if it is none."""
        found = _SENTENCE.fullmatch(" ".join(sentence.split()))
        confidence, is_change = 0.0, found is not None and found["word"] == CHANGE
        if found is not None:
            confidence = float(found["confidence"] or 100 * is_change) / 100
        if found is None or is_change != (confidence == 1) or not 0.5 < confidence <= 1:
            raise ValueError(
                f"{sentence!r} is not a bound; write 'no change', or {EXAMPLE!r} (or rise, a "
                "number in the metric's unit, or % of the baseline; above 50 % and below 100 %), "
                "with ', advisory' behind it where it does not decide."
            )
        amount = None if found["amount"] is None else float(found["amount"])
        unit = (found["unit"] or "").rstrip("s")
        is_advisory = found["advisory"] is not None
        text = sentence.rpartition(",")[0] if is_advisory else sentence
        return cls(text, found["word"], amount, unit, confidence, is_advisory)

    def problem(self, baseline: Metric) -> str:
        """Return why it cannot be applied to a metric; empty where it can."""
        try:
            self.margin(baseline)
        except ValueError as error:
            return str(error)
        return ""

    def margin(self, baseline: Metric) -> float:
        """Return what is allowed, on the scale on which samples are averaged.

        Raises:
            ValueError: the metric has no such unit or direction, is not a mean over samples, or the
                baseline's figure cannot be.
        """
        if not math.isfinite(baseline.value) or (baseline.scale == "exp" and baseline.value <= 0):
            raise ValueError(f"the baseline's {baseline.name} is {baseline.value}.")
        word = "drop" if baseline.higher_is_better else "rise"
        if self.word not in (word, CHANGE):
            raise ValueError(f"{baseline.name} gets worse by a {word}; write 'no {word}'.")
        if self.word != CHANGE and not baseline.scale:
            raise ValueError(f"{baseline.name} is made of all answers together; use 'no change'.")
        if self.unit == "point" and baseline.unit != "fraction":
            raise ValueError(f"{baseline.name} is not measured in points; write a number or %.")
        number, unit = self.amount, self.unit
        if number is None:
            is_change = self.word == CHANGE
            number, unit = _EQUAL.get(baseline.unit, _EQUAL_ELSEWHERE) if is_change else (0.0, "")
        amount = number / 100 if unit else number
        if baseline.scale == "exp":
            share = amount if unit == "%" else amount / baseline.value
            return math.log1p(share)
        return amount * abs(baseline.value) if unit == "%" else amount

    def is_idle(self, baseline: Metric) -> bool:
        """Return whether it allows more than a share can lose, so that no run breaks it."""
        room = baseline.value if baseline.higher_is_better else 1 - baseline.value
        is_share = baseline.unit == "fraction" and self.word != CHANGE
        return is_share and self.margin(baseline) >= room


def unsuited(bound: Bound, baseline: Metric) -> list[str]:
    """Return why sentences of a bound cannot be applied to a metric, each behind its sentence."""
    found = {each.text: each.problem(baseline) for each in sentences_of(bound)}
    return [f"{sentence}: {problem}" for sentence, problem in found.items() if problem]


def sentences_of(bound: Bound) -> list[PairedBound]:
    """Return the sentences of a bound, which stand with semicolons between them.

    Raises:
        ValueError: one is none.
    """
    sentences = map(str.strip, (bound.paired or "").split(";"))
    return [PairedBound.parse(each) for each in sentences if each]


def parse_bounds(gate: Mapping[str, Any]) -> tuple[dict[str, Bound], list[str]]:
    """Return the bounds of `evaluate.gate` by metric, and what is wrong with the rest.

    A bound is a sentence or several, or a mapping of its limits.
    """
    bounds: dict[str, Bound] = {}
    problems = []
    for metric, limits in gate.items():
        key, good = f"evaluate.gate.{metric}", {}
        if isinstance(limits, str):
            limits = {"paired": limits}
        if not isinstance(limits, Mapping):
            problems.append(
                f"{key}={limits} is not a bound; write {key}='{EXAMPLE}', {key}.min={limits}, or "
                ".max."
            )
            continue
        for name, value in limits.items():
            if problem := _limit_problem(str(name), value):
                problems.append(f"{key}.{name}{problem}")
            else:
                good[str(name)] = value
        if good or not limits:
            bounds[metric] = Bound(**good)
    return bounds, problems


def _limit_problem(name: str, value: Any) -> str:
    """Return what is wrong with one limit; empty where nothing is."""
    known = [each.name for each in fields(Bound)]
    if name not in known:
        return f": there is no such bound{did_you_mean(name, known)}; use {', '.join(known)}."
    if name == "paired" and value is not None:
        try:
            if not sentences_of(Bound(paired=str(value))):
                PairedBound.parse(str(value))
        except ValueError as error:
            return f": {error}"
    elif value is not None and not is_number(value):
        return f"={value}: expected a number."
    return ""


def check_bounds(bounds: Bounds, *, known: Sequence[str]) -> list[str]:
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
            problems.append(f"{key} has no bound; set min, max or paired.")
        if bound.min is not None and bound.max is not None and bound.min > bound.max:
            problems.append(f"{key}.min={bound.min} is above {key}.max={bound.max}.")
    return problems
