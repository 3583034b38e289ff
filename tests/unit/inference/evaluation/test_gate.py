"""Bounds: what passes, what breaches, what a breach says."""

from __future__ import annotations

import math

import pytest

from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_PASS, apply_gate, check_bounds
from inference.evaluation.options import Bound

NAME = "lambada_last_word"


def breaches(metric, bound, baseline=None) -> list[str]:
    stored = None if baseline is None else {baseline.name: baseline}
    result = apply_gate([metric], {metric.name: bound}, baseline=stored)
    return [str(each) for each in result.breaches]


def test_a_value_on_its_bound_passes(make_metric):
    assert breaches(make_metric(value=0.5), Bound(min=0.5, max=0.5)) == []


def test_a_breach_names_metric_value_and_bound(make_metric):
    assert breaches(make_metric(value=0.4), Bound(min=0.5)) == [f"{NAME} = 0.4 breaches min 0.5"]
    assert breaches(make_metric(value=0.6), Bound(max=0.5)) == [f"{NAME} = 0.6 breaches max 0.5"]


def test_not_a_number_breaches_every_bound(make_metric):
    bound = Bound(min=0.0, max=1.0, margin=1.0)
    found = breaches(make_metric(value=math.nan), bound, make_metric())
    assert len(found) == 3


def test_a_margin_allows_so_much_less_than_the_baseline(make_metric):
    baseline = make_metric(value=0.5)
    assert breaches(make_metric(value=0.49), Bound(margin=0.0101), baseline) == []
    (reported,) = breaches(make_metric(value=0.48), Bound(margin=0.01), baseline)
    assert reported == f"{NAME} = 0.48 breaches baseline - 0.01 (limit 0.49, baseline 0.5)"


def test_better_than_the_baseline_passes(make_metric):
    assert breaches(make_metric(value=0.9), Bound(margin=0.0), make_metric(value=0.5)) == []


def test_lower_is_better_turns_the_margin_round(make_metric):
    baseline = make_metric(value=10.0, higher_is_better=False)
    worse = make_metric(value=10.6, higher_is_better=False)
    assert breaches(worse, Bound(margin=0.5), baseline) == [
        f"{NAME} = 10.6 breaches baseline + 0.5 (limit 10.5, baseline 10)"
    ]
    better = make_metric(value=5.0, higher_is_better=False)
    assert breaches(better, Bound(margin=0.5), baseline) == []


def test_sigmas_widen_the_margin_by_both_standard_errors(make_metric):
    baseline, metric = make_metric(value=0.5, stderr=0.03), make_metric(value=0.41, stderr=0.04)
    assert breaches(metric, Bound(sigmas=2.0), baseline) == []  # 2 x 0.05 = 0.1
    assert len(breaches(metric, Bound(sigmas=1.0), baseline)) == 1


def test_exit_codes_distinguish_pass_and_breach(make_metric):
    metric = make_metric(value=0.5)
    assert apply_gate([metric], {}).exit_code == EXIT_PASS == 0
    assert apply_gate([metric], {NAME: Bound(min=0.6)}).exit_code == EXIT_GATE_BREACHED == 3


def test_a_bound_on_an_unmeasured_metric_cannot_pass(make_metric):
    with pytest.raises(ValueError, match="other: this metric was not measured"):
        apply_gate([make_metric()], {"other": Bound(min=0.0)})


def test_a_relative_bound_needs_the_baseline_s_metric(make_metric):
    with pytest.raises(ValueError, match="the baseline has no lambada_last_word"):
        apply_gate([make_metric()], {NAME: Bound(margin=0.1)}, baseline={})


def test_bounds_that_can_never_apply_are_all_named():
    problems = check_bounds(
        {"typo": Bound(min=0.1), NAME: Bound(), "b": Bound(min=2, max=1), "c": Bound(margin=-1)},
        known=(NAME, "b", "c"),
    )
    assert [problem.split()[0] for problem in problems] == [
        "evaluate.gate.typo",
        f"evaluate.gate.{NAME}",
        "evaluate.gate.b.min=2",
        "evaluate.gate.c.margin=-1",
    ]
