"""Parse and check bounds: sentences about paired samples, and limits of a metric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foundations.errors import problem_of
from foundations.files.json_content import Table
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
# Unit of a metric -> the change that "no change" allows without an amount. Between equal runs, a
# perplexity moves by about 1e-6 % on one machine and by 1e-4 % between kinds of processors.
_NO_CHANGE = {"fraction": (0.0, "point"), "perplexity": (0.01, "%")}
_NO_CHANGE_OTHER = (0.01, "%")


@dataclass(frozen=True)
class PairedBound:
    """A parsed sentence of a bound.

    Attributes:
        text: the sentence without ", advisory".
        word: drop, rise, or change; a change counts each sample, in either direction.
        amount: the allowed amount in `unit`: "point", "%" of the baseline, or "" for the metric's
            own; None if the sentence states none.
        confidence: above 0.5 and below 1; 1 for a change, which is observed and not inferred.
        is_advisory: whether it is reported without affecting the exit status.
    """

    text: str
    word: str
    amount: float | None
    unit: str
    confidence: float
    is_advisory: bool = False

    @classmethod
    def parse(cls, sentence: str) -> PairedBound:
        """Parse a sentence. Raises ValueError if it is not a bound."""
        error = ValueError(
            f"{sentence!r} is not a bound; write 'no change', or {EXAMPLE!r} (or rise, a number in "
            "the metric's unit, or % of the baseline; above 50 % and below 100 %), and append ', "
            "advisory' if it should not decide."
        )
        found = _SENTENCE.fullmatch(" ".join(sentence.split()))
        if found is None:
            raise error
        is_change = found["word"] == CHANGE
        confidence = float(found["confidence"] or 100 * is_change) / 100
        if is_change != (confidence == 1) or not 0.5 < confidence <= 1:
            raise error
        amount = None if found["amount"] is None else float(found["amount"])
        unit = (found["unit"] or "").rstrip("s")
        is_advisory = found["advisory"] is not None
        text = sentence.rpartition(",")[0] if is_advisory else sentence
        return cls(text, found["word"], amount, unit, confidence, is_advisory)

    def margin(self, baseline: Metric) -> float:
        """Return the allowed amount, on the scale on which samples are averaged.

        Raises:
            ValueError: the metric has no such unit or direction, is not a mean over samples, or its
                baseline's value is impossible.
        """
        if not math.isfinite(baseline.value) or (baseline.scale == "exp" and baseline.value <= 0):
            raise ValueError(f"the baseline's {baseline.name} is {baseline.value}.")
        word = "drop" if baseline.higher_is_better else "rise"
        if self.word not in (word, CHANGE):
            raise ValueError(f"{baseline.name} gets worse by a {word}; write 'no {word}'.")
        if self.word != CHANGE and not baseline.scale:
            raise ValueError(f"{baseline.name} is not a mean over samples; use 'no change'.")
        if self.unit == "point" and baseline.unit != "fraction":
            raise ValueError(f"{baseline.name} is not measured in points; write a number or %.")
        number, unit = self.amount, self.unit
        if number is None:
            is_change = self.word == CHANGE
            number, unit = (
                _NO_CHANGE.get(baseline.unit, _NO_CHANGE_OTHER) if is_change else (0.0, "")
            )
        amount = number / 100 if unit else number
        if baseline.scale == "exp":
            share = amount if unit == "%" else amount / baseline.value
            return math.log1p(share)
        return amount * abs(baseline.value) if unit == "%" else amount

    def is_idle(self, baseline: Metric) -> bool:
        """Return whether it allows more than a share can lose, so that no run can breach it."""
        room = baseline.value if baseline.higher_is_better else 1 - baseline.value
        is_share = baseline.unit == "fraction" and self.word != CHANGE
        return is_share and self.margin(baseline) >= room


def unsuited(bound: Bound, baseline: Metric) -> list[str]:
    """Return each sentence of a bound that cannot be applied to a metric, with the reason."""
    problems = {
        sentence.text: problem_of(sentence.margin, baseline) for sentence in sentences_of(bound)
    }
    return [f"{text}: {problem}" for text, problem in problems.items() if problem]


def sentences_of(bound: Bound) -> list[PairedBound]:
    """Return the sentences of a bound.

    Raises:
        ValueError: a sentence is not a bound.
    """
    return [] if bound.paired is None else _sentences_in(bound.paired)


def _sentences_in(text: str) -> list[PairedBound]:
    """Return the sentences of a text, at least one; semicolons separate them."""
    sentences = [*filter(None, map(str.strip, text.split(";")))]
    return [PairedBound.parse(sentence) for sentence in sentences or [text]]


def parse_bounds(gate: Table) -> tuple[dict[str, Bound], list[str]]:
    """Return the bounds of `evaluate.gate` by metric, and the problems of the others.

    A bound is one or several sentences, or a mapping of limits.
    """
    bounds = {}
    problems = []
    for metric, limits in gate.items():
        key, valid = f"evaluate.gate.{metric}", {}
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
                valid[str(name)] = value
        if valid or not limits:
            bounds[metric] = Bound(**valid)
    return bounds, problems


def _limit_problem(name: str, value: Any) -> str:
    """Return the problem of one limit; empty if it is valid."""
    known = [each.name for each in fields(Bound)]
    if name not in known:
        return f": there is no such bound{did_you_mean(name, known)}; use {', '.join(known)}."
    if name == "paired" and value is not None:
        if problem := problem_of(_sentences_in, str(value)):
            return f": {problem}"
    elif value is not None and not is_number(value):
        return f"={value}: expected a number."
    return ""


def check_bounds(bounds: Bounds, *, known: Sequence[str]) -> Iterator[str]:
    """Yield a problem for every bound that can never be applied, by its configuration key."""
    for name, bound in bounds.items():
        key = f"evaluate.gate.{name}"
        if name not in known:
            measured = ", ".join(known) or "none"
            yield (
                f"{key} bounds a metric that is not measured{did_you_mean(name, known)}; metrics "
                f"of this run: {measured}."
            )
        if bound.min is None and bound.max is None and not bound.is_relative:
            yield f"{key} has no bound; set min, max or paired."
        if bound.min is not None and bound.max is not None and bound.min > bound.max:
            yield f"{key}.min={bound.min} is above {key}.max={bound.max}."
