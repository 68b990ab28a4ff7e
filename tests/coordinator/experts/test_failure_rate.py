"""What a node's past says about its next hour."""

import pytest

from shoal.coordinator.experts.failure_rate import failure_probability, rounded

HOUR_S = 3600.0


def test_a_long_record_counts_for_more_than_the_prior() -> None:
    newcomer = failure_probability(0, 0.0, horizon_s=HOUR_S)
    steady = failure_probability(0, 200 * HOUR_S, horizon_s=HOUR_S)
    flaky = failure_probability(200, 200 * HOUR_S, horizon_s=HOUR_S)
    assert steady < 0.01 < newcomer < flaky
    assert flaky == pytest.approx(0.63, abs=0.03)  # 1 - 1/e: one failure an hour.


def test_a_longer_horizon_is_riskier() -> None:
    assert failure_probability(3, HOUR_S, horizon_s=60.0) < failure_probability(3, HOUR_S, horizon_s=HOUR_S) < 1.0


def test_like_estimates_are_the_same() -> None:
    assert rounded(0.11) == rounded(0.14) == 0.125
    assert rounded(0.0) == rounded(1e-9) == 2.0**-20
    assert rounded(1.0) == 1.0
