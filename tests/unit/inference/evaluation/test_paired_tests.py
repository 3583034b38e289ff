"""Tests of paired samples: against other definitions, at their limits, and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from inference.evaluation.paired_tests import (
    MAX_LOSS,
    MAX_LOSS_NATS,
    Pairs,
    _tails,
    check_drop,
    holm,
    smallest_drop,
)
from tests.conftest import present

COUNTS = st.integers(0, 60)
SCORES = st.lists(
    st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)), min_size=8, max_size=60
)


def binary(count: int, losses: int, gains: int) -> Pairs:
    same = count - losses - gains
    return Pairs(
        (0.0,) * losses + (1.0,) * gains + (1.0,) * same,
        (1.0,) * losses + (0.0,) * gains + (1.0,) * same,
    )


@given(COUNTS, COUNTS)
def test_mcnemar_is_the_binomial_test_of_the_changed(losses, gains):
    more, fewer = _tails(losses, gains, 120, 0.0)
    if losses + gains:
        for found, side in ((more, "greater"), (fewer, "less")):
            expected = stats.binomtest(losses, losses + gains, alternative=side).pvalue
            assert found == pytest.approx(expected, rel=1e-9)
    else:
        assert (more, fewer) == (1.0, 1.0)


@pytest.mark.parametrize("count", [20, 64, 298, 1000])
@pytest.mark.parametrize("margin", [0.002, 0.01, 0.05, 0.2])
def test_neither_verdict_is_false_more_often_than_stated(count, margin):
    """Summed over all likely tables at a drop of the margin, for rates of gains from none on."""
    for gained in (0, 0.3 / count, 1 / count, 3 / count, 0.01, 0.05, 0.3):
        losses, gains, chances = likely_tables(count, min(1 - gained, gained + margin), gained)
        for tail in _tails(losses, gains, count, margin):
            for level in (0.05, 0.05 / 3):
                assert chances[tail <= level].sum() <= 1.04 * level


def likely_tables(count: int, lost: float, gained: float):
    """Return losses and gains of all but very rare tables, and their chances."""
    limits = [stats.binom.interval(1 - 1e-12, count, each) for each in (lost, gained)]
    ends = [np.arange(max(0, int(low)), int(high) + 1) for low, high in limits]
    losses, gains = (each.ravel() for each in np.meshgrid(*ends))
    same = count - losses - gains
    losses, gains, same = losses[same >= 0], gains[same >= 0], same[same >= 0]
    tables, shares = np.stack([losses, gains, same], 1), [lost, gained, 1 - lost - gained]
    return losses, gains, stats.multinomial.pmf(tables, count, shares)


@pytest.mark.parametrize(("losses", "gains", "margin"), [(9, 2, 0.01), (40, 30, 0.02), (3, 0, 0.1)])
def test_the_score_is_that_of_tango(losses, gains, margin):
    """With corrections, on the sides on which the test is strict."""
    more, fewer = _tails(losses, gains, 200, margin)
    score = tango(losses, gains, 200, margin)
    error = (losses - gains - 200 * margin) / score
    above, below = stats.norm.sf(score - 0.8 / error), stats.norm.cdf(score + 1 / error)
    assert more == pytest.approx(
        max(above, stats.binom.sf(losses - gains - 1, 200, margin)), rel=0.01
    )
    assert fewer == pytest.approx(min(below, stats.binom.cdf(losses, 200, margin)), rel=0.01)


def tango(losses: int, gains: int, count: int, margin: float) -> float:
    """The score statistic, with the rate of gains found by looking at many."""
    rates = np.linspace(1e-9, (1 - margin) / 2 - 1e-9, 20001)
    same = count - losses - gains
    likely = losses * np.log(rates + margin) + gains * np.log(rates)
    rate = rates[np.argmax(likely + same * np.log(1 - 2 * rates - margin))]
    return (losses - gains - count * margin) / math.sqrt(
        count * (2 * rate + margin - margin * margin)
    )


@settings(max_examples=40)
@given(SCORES)
def test_breaches_of_means_are_tested_as_by_student_s_t(scores):
    new, old = (np.array(column) for column in zip(*scores, strict=True))
    pairs = Pairs(tuple(new), tuple(old))
    assume(not pairs.is_binary)  # which has an exact test
    found = check_drop(pairs, 0.0, confidence=0.95, bounded=False)
    differences = old - new
    assert found.drop == pytest.approx(differences.mean(), abs=1e-12)
    if differences.std() < 1e-6:
        return
    expected = stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue
    assert found.p_breached == pytest.approx(expected, abs=2e-3)
    low = stats.ttest_1samp(differences, 0.0).confidence_interval(0.9).low
    assert found.low == pytest.approx(low, abs=1e-3)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_holm_is_the_step_down_method(p_values):
    found = holm(p_values)
    rejected = set()  # by its definition: one after the other, each at the level of those left
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(order):
        if p_values[index] > 0.05 / (len(p_values) - rank):
            break
        rejected.add(index)
    assert {index for index, p in enumerate(found) if p <= 0.05} == rejected
    assert all(p >= own for p, own in zip(found, p_values, strict=True))


def test_a_ratio_is_weighted_by_its_tokens():
    """The jackknife, which knows nothing of influence functions, gives the same error."""
    random = np.random.default_rng(3)
    tokens = random.integers(20, 200, 80).astype(float)
    old = -3 * tokens + random.normal(0, 5, 80)
    new = old - 0.02 * tokens + random.normal(0, 1, 80)
    found = check_drop(
        Pairs(tuple(new), tuple(old), tuple(tokens), tuple(tokens)), 0.0, confidence=0.95
    )
    assert found.drop == pytest.approx((old.sum() - new.sum()) / tokens.sum())
    left_out = np.array(
        [np.delete(old - new, i).sum() / np.delete(tokens, i).sum() for i in range(80)]
    )
    error = math.sqrt(79 / 80 * ((left_out - left_out.mean()) ** 2).sum())
    assert found.deviation / math.sqrt(80) == pytest.approx(error, rel=0.02)


def test_equal_answers_show_as_much_as_their_number():
    """The rule of three: after 300 samples without a loss, less than one in a hundred is lost."""
    assert check_drop(binary(298, 0, 0), 0.01, confidence=0.95).p_held > 0.05
    assert check_drop(binary(300, 0, 0), 0.01, confidence=0.95).p_held < 0.05
    same = Pairs((0.25,) * 298, (0.25,) * 298)
    assert check_drop(same, 0.01, confidence=0.95).p_held > 0.05
    found = check_drop(binary(64, 0, 0), 0.01, confidence=0.95)
    assert found.needed == 299


@pytest.mark.parametrize(("bounded", "most"), [(True, MAX_LOSS), (False, MAX_LOSS_NATS)])
def test_as_many_samples_hold_as_are_said_to_be_needed(bounded, most):
    scores = (0.25,) * 2
    test = check_drop(Pairs(scores, scores), 0.5, confidence=0.95, bounded=bounded)
    needed = present(test.needed)
    # The first bet holds three quarters of the stake, and grows alone where nothing changes.
    assert needed == math.ceil(math.log(0.05 * 0.75) / math.log1p(-0.5 / most))
    for count, holds in ((9 * needed // 10, False), (needed, True)):
        pairs = Pairs((0.25,) * count, (0.25,) * count)
        test = check_drop(pairs, 0.5, confidence=0.95, bounded=bounded)
        assert (test.p_held <= 0.05) is holds
        assert (test.high <= 0.5 + 1e-6) is holds


@settings(max_examples=40)
@given(SCORES, st.floats(0.01, 0.9))
def test_the_upper_limit_is_where_the_test_turns(scores, margin):
    pairs = Pairs(*(tuple(column) for column in zip(*scores, strict=True)))
    if pairs.is_binary:
        return
    found = check_drop(pairs, margin, confidence=0.95)
    if abs(found.high - margin) > 1e-4:
        assert (found.p_held <= 0.05) == (found.high < margin)


def rare_losses(share: float, margin: float, tokens: bool):
    """Draw pairs in which a `share` of samples loses so much that the drop is the margin."""

    def draw(random: np.random.Generator, count: int) -> Pairs:
        lost = (random.random(count) < share) * (margin / share) + random.normal(0, 1e-6, count)
        old = random.uniform(0.9, 1, count)
        if not tokens:
            return Pairs(tuple(old - lost), tuple(old))
        weights = random.integers(40, 120, count).astype(float)
        old, new = -3 * weights * old, -3 * weights * old - lost * weights
        return Pairs(tuple(new), tuple(old), tuple(weights), tuple(weights))

    return draw


@pytest.mark.parametrize(
    ("count", "share", "margin", "tokens"),
    [
        (64, 0.002, 0.01, True),
        (250, 0.005, 0.01, True),
        (100, 0.05, 0.05, False),
    ],
)
def test_drops_that_few_samples_bear_are_not_held(count, share, margin, tokens):
    """The drop is the margin, so that "held" is false in every run."""
    random, draw, number = np.random.default_rng(7), rare_losses(share, margin, tokens), 100
    holds = sum(
        check_drop(draw(random, count), margin, confidence=0.95, bounded=not tokens).p_held <= 0.05
        for _ in range(number)
    )
    assert holds <= number * 0.05


def test_healthy_means_are_held_as_often_as_is_said():
    random, margin, holds = np.random.default_rng(8), 0.02, 0
    first = check_drop(noisy(random, 400), margin, confidence=0.95)
    needed = present(first.needed)
    for _ in range(60):
        holds += check_drop(noisy(random, needed), margin, confidence=0.95).p_held <= 0.05
    assert holds >= 0.65 * 60  # 80 % less the errors of the estimate and of the simulation


def noisy(random: np.random.Generator, count: int) -> Pairs:
    old = random.uniform(0.3, 0.7, count)
    return Pairs(tuple(old + random.normal(0, 0.1, count)), tuple(old))


def test_one_sample_shows_nothing():
    found = check_drop(Pairs((0.2,), (0.9,)), 0.1, confidence=0.95)
    assert min(found.p_breached, found.p_held) >= 0.5
    assert found.low == -math.inf
    assert found.high == pytest.approx(0.988, abs=1e-3)


@pytest.mark.parametrize(("margin", "alpha"), [(0.0, 0.05), (0.01, 0.05), (0.05, 0.0125)])
def test_power_is_that_of_the_test_itself(margin, alpha):
    """As many of all likely runs as are asked for are caught at the smallest drop."""
    drop = present(smallest_drop(300, math.sqrt(0.02), margin, alpha=alpha, binary=True))
    losses, gains, chances = likely_tables(300, 0.01 + drop, 0.01)
    caught = chances[_tails(losses, gains, 300, margin)[0] <= alpha].sum()
    assert caught == pytest.approx(0.8, abs=0.03)


@pytest.mark.soak
@pytest.mark.parametrize("bounded", [True, False])
def test_means_raise_as_few_false_alarms(bounded, soak):
    random = np.random.default_rng(5)
    number, margin = 100 * soak, 0.02
    alarms = holds = 0
    for _ in range(number):
        old = random.beta(0.5, 0.5, 100)
        new = np.clip(old - margin + random.normal(0, 0.05, 100), 0 if bounded else -9, 9)
        true = margin if not bounded else float((old - new).mean())
        found = check_drop(Pairs(tuple(new), tuple(old)), true, confidence=0.95, bounded=bounded)
        alarms += found.p_breached <= 0.05
        holds += found.p_held <= 0.05
    assert max(alarms, holds) <= number * 0.05 + 3 * math.sqrt(number * 0.05 * 0.95)
