import itertools

import pytest

from shoal.deploy.demo.pace import WINDOW_STEPS, longest_stall_s, lost_s, recovery_s


def at(*spans: tuple[int, float], start_s: float = 0.0) -> list[float]:
    """Times of steps: so many of each length."""
    gaps = [seconds for count, seconds in spans for _ in range(count)]
    return list(itertools.accumulate(gaps, initial=start_s))


def test_recovery_is_how_long_the_pace_was_gone() -> None:
    times = at((40, 0.5), (1, 4.0), (40, 0.5))
    assert recovery_s(times, 20.1) == pytest.approx(3.9)


def test_a_fault_that_costs_nothing_is_over_with_the_next_step() -> None:
    assert recovery_s(at((80, 0.5)), 20.1) == pytest.approx(0.4)


def test_a_slower_pace_is_none_until_it_is_nine_tenths_of_the_one_before() -> None:
    times = at((40, 0.5), (20, 0.6), (40, 0.55))
    assert recovery_s(times, 20.0) == pytest.approx(12.0, abs=0.6 * WINDOW_STEPS)


def test_a_pace_that_never_comes_back_is_infinite() -> None:
    assert recovery_s(at((40, 0.5), (40, 0.6)), 20.0) == float("inf")


def test_one_slow_step_in_ten_is_part_of_the_pace() -> None:
    spans = [(9, 0.5), (1, 0.9)] * 8
    assert recovery_s(at(*spans), 21.7) == pytest.approx(0.3, abs=0.9 * 2)


def test_too_few_steps_tell_nothing() -> None:
    assert recovery_s(at((WINDOW_STEPS - 1, 0.5), (40, 0.5)), 2.6) is None
    assert recovery_s(at((40, 0.5), (WINDOW_STEPS, 0.5)), 20.0) is None
    assert recovery_s([], 1.0) is None


def test_the_longest_stall_may_be_the_last() -> None:
    times = at((5, 1.0), (1, 3.0), (5, 1.0))
    assert longest_stall_s(times) == 3.0
    assert longest_stall_s(times, end_s=times[-1] + 7.0) == 7.0
    assert longest_stall_s([], end_s=7.0) == 0.0


def test_what_a_fault_has_cost_is_the_wait_less_the_steps_that_came_meanwhile() -> None:
    assert lost_s(at((40, 0.5), (1, 4.0), (40, 0.5)), 20.1) == pytest.approx(3.9 - 0.5)
    slower = at((40, 0.5), (20, 0.6), (40, 0.5))
    gone_s = recovery_s(slower, 20.0)
    assert gone_s is not None
    assert lost_s(slower, 20.0) == pytest.approx(gone_s / 6, abs=0.1)
    assert lost_s(at((80, 0.5)), 20.1) == 0.0


def test_what_never_comes_back_costs_without_end_and_too_few_steps_tell_nothing() -> None:
    assert lost_s(at((40, 0.5), (40, 0.6)), 20.0) == float("inf")
    assert lost_s([], 1.0) is None
