"""Bounds on metrics: what a release must reach, absolutely or against a stored baseline.

Standard library only. Exit codes: 0 every bound holds, 3 a bound is breached; anything else
means that the evaluation itself could not be done.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from export_scripts.suggest import did_you_mean
from inference.evaluation.options import Bound
from inference.evaluation.task import Metric

EXIT_PASS = 0
EXIT_GATE_BREACHED = 3
EXIT_NOT_EVALUATED = 4


@dataclass(frozen=True)
class Breach:
    """A metric outside its bound.

    Attributes:
        bound: the bound in words, such as `min 0.13`.
        limit: the number it came to.
        baseline: the baseline's value for a relative bound.
        remedy: what to do about it, where that is known.
    """

    metric: str
    value: float
    bound: str
    limit: float
    baseline: float | None = None
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.metric} = {self.value:.6g} breaches {self.bound}"
        if self.baseline is not None:
            text += f" (limit {self.limit:.6g}, baseline {self.baseline:.6g})"
        return f"{text}; {self.remedy}" if self.remedy else text


@dataclass(frozen=True)
class GateResult:
    """The gate's result: the number of bounds applied, and those breached."""

    checked: int = 0
    breaches: tuple[Breach, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether every bound holds (also when there are none)."""
        return not self.breaches

    @property
    def exit_code(self) -> int:
        """The exit code of a command that trusts this gate."""
        return EXIT_PASS if self.passed else EXIT_GATE_BREACHED


def parse_bounds(gate: Mapping[str, Any]) -> tuple[dict[str, Bound], list[str]]:
    """Return the bounds of `evaluate.gate` by metric, and what is wrong with the rest.

    A bound is a mapping of its limits, as the configuration has it, or a Bound.
    """
    known = [each.name for each in fields(Bound)]
    bounds: dict[str, Bound] = {}
    problems = []
    for metric, limits in gate.items():
        key = f"evaluate.gate.{metric}"
        if isinstance(limits, Bound):
            bounds[metric] = limits
            continue
        if not isinstance(limits, Mapping):
            problems.append(f"{key}={limits} is not a bound; write {key}.min={limits}, or .max.")
            continue
        good = {}
        for name, value in limits.items():
            if name not in known:
                hint = did_you_mean(str(name), known)
                problems.append(
                    f"{key}.{name}: there is no such bound{hint}; use {', '.join(known)}."
                )
            elif value is not None and not _is_number(value):
                problems.append(f"{key}.{name}={value}: expected a number.")
            else:
                good[str(name)] = value
        if good or not limits:
            bounds[metric] = Bound(**good)
    return bounds, problems


def _is_number(value: Any) -> bool:
    """Return whether a value can be compared; nothing is above or below NaN."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def check_bounds(bounds: Mapping[str, Bound], *, known: Sequence[str]) -> list[str]:
    """Return every bound that can never be applied, in the words of the configuration."""
    problems = []
    for name, bound in bounds.items():
        key = f"evaluate.gate.{name}"
        if name not in known:
            measured = ", ".join(known) or "none"
            problems.append(
                f"{key} bounds a metric that is not measured; metrics of this run: {measured}."
            )
        if bound.min is None and bound.max is None and not bound.is_relative:
            problems.append(f"{key} has no bound; set min, max, margin or sigmas.")
        if bound.min is not None and bound.max is not None and bound.min > bound.max:
            problems.append(f"{key}.min={bound.min} is above {key}.max={bound.max}.")
        problems += [
            f"{key}.{field}={value} must not be negative."
            for field, value in (("margin", bound.margin), ("sigmas", bound.sigmas))
            if value is not None and value < 0
        ]
    return problems


def apply_gate(
    metrics: Sequence[Metric],
    bounds: Mapping[str, Bound],
    *,
    baseline: Mapping[str, Metric] | None = None,
) -> GateResult:
    """Compare metrics with their bounds.

    Raises:
        ValueError: a bound names a metric that was not measured, or is relative and the
            baseline lacks that metric.
    """
    by_name = {metric.name: metric for metric in metrics}
    breaches: list[Breach] = []
    checked = 0
    for name, bound in bounds.items():
        if name not in by_name:
            measured = ", ".join(by_name) or "none"
            raise ValueError(
                f"evaluate.gate.{name}: this metric was not measured; measured: {measured}."
            )
        found = _absolute(by_name[name], bound)
        if bound.is_relative:
            if baseline is None or name not in baseline:
                raise ValueError(
                    f"evaluate.gate.{name} is relative, but the baseline has no {name}; record "
                    "one with evaluate.baseline=update."
                )
            found.append(_relative(by_name[name], bound, baseline[name]))
        checked += len(found)
        breaches += [breach for breach in found if breach is not None]
    return GateResult(checked=checked, breaches=tuple(breaches))


def _absolute(metric: Metric, bound: Bound) -> list[Breach | None]:
    """Return one entry per absolute bound: its breach, or None where it holds."""
    found: list[Breach | None] = []
    if bound.min is not None:
        holds = metric.value >= bound.min  # false for NaN, as it should be
        found.append(
            None if holds else Breach(metric.name, metric.value, f"min {bound.min:g}", bound.min)
        )
    if bound.max is not None:
        holds = metric.value <= bound.max
        found.append(
            None if holds else Breach(metric.name, metric.value, f"max {bound.max:g}", bound.max)
        )
    return found


def _relative(metric: Metric, bound: Bound, baseline: Metric) -> Breach | None:
    """Return the breach of the baseline's bound, or None where it holds."""
    spread = math.hypot(metric.stderr, baseline.stderr)
    room = (bound.margin or 0.0) + (bound.sigmas or 0.0) * spread
    sign = 1.0 if metric.higher_is_better else -1.0
    limit = baseline.value - sign * room
    if sign * (metric.value - limit) >= 0:
        return None
    words = f"baseline {'-' if metric.higher_is_better else '+'} {room:.6g}"
    return Breach(metric.name, metric.value, words, limit, baseline.value)
