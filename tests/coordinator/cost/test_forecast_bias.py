"""What was seen of layouts says by how much the objective errs, most for the same number of stages."""

import math

import pytest

from shoal.coordinator.cost.forecast_bias import UNBIASED, ForecastBias


def test_nothing_seen_is_no_bias():
    assert [UNBIASED.factor(k) for k in (1, 7)] == [1.0, 1.0]


def test_what_was_seen_counts_for_its_number_of_stages_and_less_for_others():
    bias = ForecastBias(((1, math.log(0.6), 64),))
    factors = [bias.factor(k) for k in (1, 2, 4, 16)]
    assert factors == sorted(factors)
    assert factors[0] == pytest.approx(0.6, rel=0.02)
    assert 0.6 < factors[1] < 0.75 < factors[3] < 0.85


def test_few_steps_say_less_than_many():
    few, many = (ForecastBias(((3, math.log(0.5), steps),)).factor(3) for steps in (1, 64))
    assert 0.5 < many < 0.52 < 0.6 < few < 1.0


def test_two_numbers_are_kept_apart():
    bias = ForecastBias(((1, math.log(0.6), 64), (3, math.log(1.0), 64)))
    assert bias.factor(1) == pytest.approx(0.6, rel=0.02)
    assert bias.factor(3) == pytest.approx(1.0, rel=0.02)
    assert 0.6 < bias.factor(2) < 1.0


def test_a_comparison_of_two_numbers_of_stages_errs_until_both_were_seen():
    one, both = ForecastBias(((2, 0.0, 64),)), ForecastBias(((2, 0.0, 64), (4, 0.0, 64)))
    assert UNBIASED.variance(2, 2) == pytest.approx(0.0)
    assert UNBIASED.variance(2, 3) < UNBIASED.variance(2, 4) == pytest.approx(0.2**2)
    assert UNBIASED.variance(2, 4) > one.variance(2, 4) > 10.0 * both.variance(2, 4) > 0.0
