"""Bounds: what passes, what breaches, what a breach says."""

import math
from dataclasses import replace

import pytest

from inference.evaluation.bounds import PairedBound, check_bounds, parse_bounds
from inference.evaluation.gate import (
    ADVISORY,
    CRITICAL,
    EXIT_GATE_BREACHED,
    EXIT_INSUFFICIENT,
    EXIT_PASS,
    GateResult,
    Measured,
    apply_gate,
)
from inference.evaluation.options import Bound
from inference.evaluation.paired_tests import Pairs
from inference.evaluation.report.files import verdict_of
from tests.conftest import present

NAME = "lambada_last_word"


def breaches(metric, bound) -> list[str]:
    result = apply_gate([Measured(metric)], {metric.name: bound})
    return [str(each) for each in result.of("breached")]


def test_a_value_on_its_bound_passes(make_metric):
    assert breaches(make_metric(value=0.5), Bound(min=0.5, max=0.5)) == []


def test_a_breach_names_metric_value_and_bound(make_metric):
    assert breaches(make_metric(value=0.4), Bound(min=0.5)) == [f"{NAME} = 0.4 breaches min 0.5"]
    assert breaches(make_metric(value=0.6), Bound(max=0.5)) == [f"{NAME} = 0.6 breaches max 0.5"]


def test_not_a_number_breaches_every_bound(make_metric):
    found = breaches(make_metric(value=math.nan), Bound(min=0.0, max=1.0))
    assert len(found) == 2


def test_a_bound_on_an_unmeasured_metric_cannot_pass(make_metric):
    with pytest.raises(ValueError, match="other: this metric was not measured"):
        apply_gate([Measured(make_metric())], {"other": Bound(min=0.0)})


def test_bounds_that_can_never_apply_are_all_named():
    problems = check_bounds(
        {"typo": Bound(min=0.1), NAME: Bound(), "b": Bound(min=2, max=1)},
        known=(NAME, "b"),
    )
    assert [problem.split()[0] for problem in problems] == [
        "evaluate.gate.typo",
        f"evaluate.gate.{NAME}",
        "evaluate.gate.b.min=2",
    ]


POINT = "no drop of more than 1 point at 95 %"


def paired(metric, sentence, pairs: Pairs, *, tier=CRITICAL, **others) -> GateResult:
    measured = Measured(metric, baseline=metric, pairs=pairs, tier=tier)
    return apply_gate([measured], {metric.name: Bound(paired=sentence, **others)})


def answers(count: int, *, lost: int = 0, gained: int = 0) -> Pairs:
    same = (1.0,) * (count - lost - gained)
    return Pairs((0.0,) * lost + (1.0,) * gained + same, (1.0,) * lost + (0.0,) * gained + same)


@pytest.mark.parametrize(
    ("pairs", "status", "code", "text"),
    [
        (answers(1000), "held", EXIT_PASS, "drop 0 points, at most 0.2"),
        (answers(1000, lost=40), "breached", EXIT_GATE_BREACHED, "drop 4 points, at least 3"),
        (answers(1000, lost=12), "insufficient", EXIT_INSUFFICIENT, "samples would decide"),
        (answers(64), "insufficient", EXIT_INSUFFICIENT, "; 299 samples would decide"),
        (answers(1000, lost=10), "insufficient", EXIT_INSUFFICIENT, "no number of samples"),
    ],
)
def test_a_sentence_is_held_breached_or_needs_more_samples(make_metric, pairs, status, code, text):
    found = paired(make_metric(scale="mean"), POINT, pairs)
    (verdict,) = found.verdicts
    assert (verdict.status, found.exit_code, found.passed) == (status, code, code == 0)
    assert text in str(verdict)
    assert "80 % of runs catch" in str(verdict)


@pytest.mark.parametrize(("gained", "status"), [(1, "insufficient"), (9, "held")])
def test_a_run_that_became_better_is_judged_where_no_drop_is_allowed(make_metric, gained, status):
    pairs = answers(100, gained=gained)
    (verdict,) = paired(make_metric(scale="mean"), "no drop at 95 %", pairs).verdicts
    assert verdict.status == status


@pytest.mark.parametrize("amount", ["1", "99.9 points", "150 points"])
def test_a_bound_that_allows_nearly_every_loss_is_judged(make_metric, amount):
    metric = make_metric(scale="mean", count=2, stderr=0.5)
    bound = f"no drop of more than {amount} at 95 %"
    (verdict,) = paired(metric, bound, answers(2, lost=1)).verdicts
    assert verdict.status == "held"
    assert verdict.smallest is None


def test_a_perplexity_beyond_a_double_breaches(make_metric):
    metric = make_metric(scale="exp", unit="perplexity", value=9.0, higher_is_better=False)
    old = tuple(-2.0 - each / 10 for each in range(8))
    pairs = Pairs(tuple(500 * each for each in old), old, (1.0,) * 8, (1.0,) * 8)
    (verdict,) = paired(metric, "no rise of more than 1 % at 95 %", pairs).of("breached")
    assert "rise inf %" in str(verdict)


def test_an_improvement_beyond_the_bound_is_named(make_metric):
    better = paired(make_metric(scale="mean"), POINT, answers(1000, gained=40))
    assert better.passed
    assert "better than the bound would let it be worse" in str(better.verdicts[0])
    same = paired(make_metric(scale="mean"), POINT, answers(1000, gained=4))
    assert "better than" not in str(same.verdicts[0])


RISE = "no rise of more than 1 % at 95 %"


def perplexity(make_metric, losses, sentence, **others):
    """Return the verdicts on a perplexity whose samples lost so many nats."""
    metric = make_metric(value=50.0, scale="exp", unit="perplexity", higher_is_better=False)
    old = tuple(-3.0 - 0.001 * each for each in range(len(losses)))
    new = tuple(score - loss for score, loss in zip(old, losses, strict=True))
    return paired(metric, sentence, Pairs(new, old), **others)


@pytest.mark.parametrize("count", [2, 64, 1000])
def test_samples_in_which_nothing_happened_do_not_hold_what_few_can_hide(make_metric, count):
    (verdict,) = perplexity(make_metric, [0.0] * count, RISE).verdicts
    assert verdict.status == "insufficient"
    assert present(verdict.needed) == 3299
    assert present(verdict.unseen) == pytest.approx(1 - 0.05 ** (1 / count))
    assert perplexity(make_metric, [0.0] * 3299, RISE).passed


@pytest.mark.parametrize(
    ("losses", "sentence", "status"),
    [
        ([0.0] * 64, "no change", "held"),
        ([1e-6] * 64, "no change", "held"),
        ([0.0] * 63 + [0.1], "no change", "breached"),
        ([0.01, -0.01] * 32, "no change", "breached"),  # though the perplexity is the same
        ([-0.04] * 64, "no change", "breached"),  # better, as with cut prompts
        ([-0.0024] * 64, "no change of more than 0.1 %", "breached"),
        ([-0.0024] * 64, "no change of more than 0.5 %", "held"),
    ],
)
def test_what_should_be_equal_may_change_in_no_direction(make_metric, losses, sentence, status):
    (verdict,) = perplexity(make_metric, losses, sentence).verdicts
    assert verdict.status == status


def test_answers_that_should_be_equal_may_not_change_at_all(make_metric):
    metric = make_metric(scale="mean")
    assert paired(metric, "no change", answers(100)).passed
    assert not paired(metric, "no change", answers(100, lost=1, gained=1)).passed
    allowed = paired(metric, "no change of more than 2 points", answers(100, lost=1, gained=1))
    assert allowed.passed


def test_figures_of_all_answers_together_may_be_bounded_in_their_change(make_metric):
    metric = make_metric(value=30.0, unit="BLEU", scale="")
    for value, status in ((30.0, "held"), (30.4, "breached")):
        measured = Measured(replace(metric, value=value), baseline=metric)
        (verdict,) = apply_gate([measured], {NAME: Bound(paired="no change")}).verdicts
        assert verdict.status == status


def test_what_the_load_alone_changes_is_not_a_breach(make_metric):
    metric = make_metric(value=50.0, scale="exp", unit="perplexity", higher_is_better=False)
    pairs = Pairs((-3.001,) * 8, (-3.0,) * 8)
    measured = Measured(metric, baseline=metric, pairs=pairs, load_effect=0.001)
    found = apply_gate([measured], {NAME: Bound(paired="no change")})
    assert [each.status for each in found.verdicts] == ["insufficient"]


def test_a_sentence_may_be_advisory_beside_one_that_decides(make_metric):
    found = perplexity(make_metric, [0.0] * 64, f"no change; {RISE}, advisory")
    assert [(each.status, each.tier) for each in found.verdicts] == [
        ("held", CRITICAL),
        ("insufficient", ADVISORY),
    ]
    assert found.passed
    assert not perplexity(make_metric, [0.0] * 64, f"no change; {RISE}").passed


def test_an_advisory_breach_neither_hides_nor_outranks_a_critical_bound(make_metric, report):
    advisory = paired(make_metric(scale="mean"), POINT, answers(100, lost=90), tier=ADVISORY)
    critical = paired(make_metric(scale="mean"), POINT, answers(64))
    both = GateResult(advisory.verdicts + critical.verdicts)
    assert (both.exit_code, both.deciding) == (EXIT_INSUFFICIENT, critical.verdicts)
    texts = [
        verdict_of(replace(report, bounds={NAME: Bound()}, gate=gate))[0]
        for gate in (both, advisory)
    ]
    assert texts == [
        "gate undecided (1 of 2 bounds need more samples)",
        "gate passed (0 of 1 bounds hold, the others are advisory)",
    ]


def test_a_breach_goes_before_a_bound_that_needs_more_samples(make_metric):
    found = paired(make_metric(value=0.4, scale="mean"), POINT, answers(64), min=0.5)
    assert [each.status for each in found.verdicts] == ["breached", "insufficient"]
    assert found.exit_code == EXIT_GATE_BREACHED


def test_the_breaches_of_a_run_share_its_false_alarms(make_metric):
    metrics = [make_metric(name=f"m_{number}", scale="mean") for number in range(10)]
    pairs = answers(1000, lost=17)
    (alone,) = paired(metrics[0], POINT, pairs).verdicts
    together = apply_gate(
        [Measured(each, baseline=each, pairs=pairs) for each in metrics],
        {each.name: Bound(paired=POINT) for each in metrics},
    )
    assert (alone.status, {each.status for each in together.verdicts}) == (
        "breached",
        {"insufficient"},
    )
    assert together.verdicts[0].p_value == pytest.approx(10 * present(alone.p_value))


def test_a_perplexity_is_bounded_in_percent(make_metric):
    metric = make_metric(value=50.0, scale="exp", unit="perplexity", higher_is_better=False)
    old = [-3.0 - 0.001 * each for each in range(4000)]
    rise = "no rise of more than 1 % at 95 %"
    for worse, status in ((0.0, "held"), (0.03, "breached")):
        new = [each - worse - 0.0001 * (index % 7) for index, each in enumerate(old)]
        (verdict,) = paired(metric, rise, Pairs(tuple(new), tuple(old))).verdicts
        assert verdict.status == status
    assert "rise 3.08 %, at least 3.0" in str(verdict)


@pytest.mark.parametrize(
    ("sentence", "changes", "reported"),
    [
        ("no rise of more than 1 point at 95 %", {}, "gets worse by a drop"),
        ("no drop of more than 1 point at 95 %", {"scale": ""}, "is not a mean over samples"),
        ("no drop of more than 1 point at 95 %", {"unit": "BLEU"}, "not measured in points"),
        (
            "at most one point",
            {},
            "is not a bound; write 'no change', or 'no drop of more than 1 point at 95 %'",
        ),
        ("no drop of more than 3 % at 95 %", {"value": math.inf}, "is inf"),
        ("no change", {"value": math.nan}, "is nan"),
        ("no drop at 95 %", {"value": 0.0, "scale": "exp"}, "is 0.0"),
        ("no drop at 40 %", {}, "above 50 %"),
        ("no drop at 100 %", {}, "below 100 %"),
        ("no drop", {}, "is not a bound"),
        ("no change at 95 %", {}, "is not a bound"),
    ],
)
def test_a_sentence_that_does_not_fit_its_metric_is_refused(
    make_metric, sentence, changes, reported
):
    metric = make_metric(**{"scale": "mean", **changes})
    with pytest.raises(ValueError, match=reported):
        paired(metric, sentence, answers(10))


def test_units_of_a_sentence(make_metric):
    metric = make_metric(value=0.5, scale="mean")
    for text, margin in (("2 points", 0.02), ("2 %", 0.01), ("0.02", 0.02)):
        bound = PairedBound.parse(f"no drop  of more than {text} at 97.5%")
        assert bound.margin(metric) == pytest.approx(margin)
        assert bound.confidence == 0.975
    assert PairedBound.parse("no drop at 95 %").margin(metric) == 0.0


def test_bounds_are_read_from_sentences_and_mappings():
    bounds, problems = parse_bounds(
        {"a": POINT, "b": {"paired": POINT, "min": 0.1}, "c": "better", "d": {"pared": 1}, "e": 5}
    )
    assert bounds == {"a": Bound(paired=POINT), "b": Bound(paired=POINT, min=0.1)}
    assert [each.partition(":")[0] for each in problems[:2]] == [
        "evaluate.gate.c.paired",
        "evaluate.gate.d.pared",
    ]
    assert "did you mean" in problems[1]
    assert problems[2].startswith("evaluate.gate.e=5 is not a bound; write evaluate.gate.e='no dr")
