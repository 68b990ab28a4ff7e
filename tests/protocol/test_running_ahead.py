"""The model, and what is chosen by it. `tests/peer/test_swarm_timeline.py` has what comes of it."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.running_ahead import Measured, busy, choose, expected
from shoal.protocol.staleness import Price

GAIN = 1.5

NO_REDUCTION = Measured(rate_per_s=10.0, round_trip_s=4.0, commit_s=0.0, microbatches=400.0)
LONG_REDUCTION = replace(NO_REDUCTION, commit_s=20.0)
SHORT_STEPS = Measured(rate_per_s=10.0, round_trip_s=4.0, commit_s=1.0, microbatches=10.0)
"""The way there and back takes four times as long as a step's work."""

measurements = st.builds(
    Measured,
    rate_per_s=st.floats(0.01, 1e3),
    round_trip_s=st.floats(1e-3, 1e3),
    commit_s=st.floats(0.0, 1e3),
    microbatches=st.floats(0.2, 4096.0),
)
prices = st.builds(Price, st.floats(0.0, 4.0), st.sampled_from([1, 2, 9]))


def seconds(measured: Measured, price: Price, steps_ahead: int, gain: float) -> float:
    """The time to a loss by the formulas at the top of the module, written down a second time."""
    r, R, C, M = measured.rate_per_s, measured.round_trip_s, measured.commit_s, measured.microbatches
    W, idle = M / r, max(0.0, R - 1 / r + C)
    if steps_ahead == 0:
        return W + idle
    e, x = gain**3 / (gain**3 + 0.1), min(1.0, idle / W)
    T = max(W * (1 - x + x / e), (W / e + idle) / (steps_ahead + 1))
    s = sum(min(steps_ahead, (C + (u + 0.5) / 64 * gain * R) / T) for u in range(64)) / 64
    return T * (1 + price.at_one * s ** (price.half_powers / 2))


@given(measured=measurements, s_max=st.integers(0, 4), price=prices)
def test_nothing_is_better_than_what_is_chosen(measured: Measured, s_max: int, price: Price) -> None:
    chosen = choose(measured, s_max=s_max, price=price, gain_max=GAIN)
    gains = [1.0 + 0.01 * place for place in range(51)]
    best = min(seconds(measured, price, k, gain) for k, gain in itertools.product(range(s_max + 1), gains))
    found = seconds(measured, price, chosen.steps_ahead, chosen.gain)
    assert found == pytest.approx(chosen.step_s * price.more_steps(chosen.staleness_steps), rel=1e-3)
    assert found <= best * 1.003, "gains in between the steps that are tried are worth that much at most"


@given(measured=measurements, s_max=st.integers(0, 4), price=prices)
def test_it_is_never_later_than_synchronous_training(measured: Measured, s_max: int, price: Price) -> None:
    chosen = choose(measured, s_max=s_max, price=price, gain_max=GAIN)
    synchronous_s = measured.work_s + measured.idle_s
    assert chosen.step_s * price.more_steps(chosen.staleness_steps) <= synchronous_s * (1 + 1e-9)


@given(measured=measurements, s_max=st.integers(1, 4), low=prices, high=prices)
def test_a_higher_price_never_buys_shorter_steps(measured: Measured, s_max: int, low: Price, high: Price) -> None:
    low, high = (
        Price(min(low.at_one, high.at_one), low.half_powers),
        Price(max(low.at_one, high.at_one), low.half_powers),
    )
    cheap, dear = (choose(measured, s_max=s_max, price=price, gain_max=GAIN) for price in (low, high))
    assert cheap.step_s <= dear.step_s * (1 + 1e-9)


@pytest.mark.parametrize("measured", [NO_REDUCTION, LONG_REDUCTION, SHORT_STEPS])
def test_what_costs_nothing_is_let_in_and_what_costs_too_much_is_not(measured: Measured) -> None:
    free = choose(measured, s_max=2, price=Price(0.0), gain_max=GAIN)
    assert (free.steps_ahead, free.gain) == (2, GAIN)
    dear = choose(measured, s_max=2, price=Price(5.0), gain_max=GAIN)
    assert (dear.steps_ahead, dear.staleness_steps) == (0, 0.0)
    assert dear.step_s == pytest.approx(measured.work_s + measured.idle_s)


@pytest.mark.parametrize("price", [Price(0.0), Price(0.2), Price(0.9)])
def test_who_may_not_be_stale_is_not(price: Price) -> None:
    assert choose(NO_REDUCTION, s_max=0, price=price, gain_max=GAIN).steps_ahead == 0


def test_queues_are_cut_where_staleness_comes_of_them() -> None:
    chosen = choose(NO_REDUCTION, s_max=1, price=Price(0.2), gain_max=GAIN)
    assert chosen.steps_ahead == 1
    assert 1.0 < chosen.gain < 1.4
    assert chosen.staleness_steps < 0.9 * expected(NO_REDUCTION, 1, GAIN).staleness_steps


def test_the_whole_window_is_used_where_the_reduction_takes_long() -> None:
    assert choose(LONG_REDUCTION, s_max=1, price=Price(0.2), gain_max=GAIN).gain == GAIN


def test_a_step_that_is_shorter_than_the_way_takes_all_that_s_max_allows() -> None:
    chosen = choose(SHORT_STEPS, s_max=2, price=Price(0.2), gain_max=GAIN)
    assert chosen.steps_ahead == 2
    assert chosen.step_s < 0.4 * choose(SHORT_STEPS, s_max=0, price=Price(0.2), gain_max=GAIN).step_s


SEES = Price(0.77, 9, unseen=Price(1.4, 1))
"""Of a strategy that is better the more it sees."""


def test_it_runs_ahead_where_most_of_a_step_is_back_and_not_where_all_of_it_is_in_flight() -> None:
    long_steps = replace(NO_REDUCTION, commit_s=2.0)
    assert long_steps.seen(1.0) == pytest.approx(1.0 - 0.1 * 4.0 / 6.0)
    assert choose(long_steps, s_max=1, price=SEES, gain_max=GAIN).steps_ahead == 1
    # Eight cities with sixteen microbatches a step: twice as fast ahead, and 2.2 times as many steps.
    all_in_flight = Measured(rate_per_s=7.0, round_trip_s=2.4, commit_s=0.1, microbatches=16.0)
    assert all_in_flight.seen(1.0) == pytest.approx(1.0 - 2.4 / 2.5)
    assert choose(all_in_flight, s_max=1, price=SEES, gain_max=GAIN).steps_ahead == 0
    assert choose(all_in_flight, s_max=1, price=Price(SEES.at_one, SEES.half_powers), gain_max=GAIN).steps_ahead == 1


def test_more_in_flight_keeps_devices_busier() -> None:
    assert [round(busy(gain), 2) for gain in (1.0, 1.25, 1.5, 2.0)] == [0.91, 0.95, 0.97, 0.99]
