"""Intervals against values worked out elsewhere."""

import math

import pytest

from inference.evaluation.statistics import (
    mean_and_stderr,
    wilson_interval,
)


def test_wilson_interval_of_a_textbook_case():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 and 15 of 148, method 3.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)


def test_wilson_interval_at_the_ends_is_not_empty():
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)  # Newcombe, table I
    low, high = wilson_interval(20, 20)
    assert low == pytest.approx(1 - 0.1611, abs=5e-5)
    assert high == 1.0


def test_standard_error_uses_the_sample_variance():
    found = mean_and_stderr([1.0, 0.0, 0.0, 1.0, 1.0])
    assert found == pytest.approx((0.6, math.sqrt(0.6 * 0.4 / 4)))


def test_a_weighted_mean_repeats_its_values():
    mean, stderr = mean_and_stderr([6.0, 2.0, 4.0], [3.0, 1.0, 2.0])
    assert (mean, stderr) == (2.0, 0.0)
    assert mean_and_stderr([9.0, 1.0], [2.0, 2.0])[0] == 2.5
