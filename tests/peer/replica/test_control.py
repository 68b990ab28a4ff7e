"""What stage 0 makes of what it measures, and who may begin then (what comes of it: `test_swarm_timeline.py`)."""

import math
from dataclasses import replace

import pytest

from shoal.peer.replica.flow import Control, Window
from shoal.protocol.running_ahead import Choice, Measured, choose
from shoal.protocol.staleness import Price


def measured_window(*, round_trip_s: float = 2.0, rate_per_s: float = 4.0) -> Window:
    """Empty, with a past."""
    window = Window(num_stages=3)
    ends_s = [at / rate_per_s for at in range(64)]
    for end_s in ends_s:
        window._delivered_at_s = end_s
    window.round_trip_s, window.rate_per_s = round_trip_s, rate_per_s
    return window


def fill(window: Window, count: int) -> None:
    for _ in range(count):
        window.sent(object(), now_s=100.0)


def test_before_a_step_is_measured_nothing_is_held_back_once_all_of_the_step_before_is_granted() -> None:
    control, window = Control(s_max=1, price=Price(5.0)), Window(num_stages=3)
    fill(window, 100)
    assert control.steps_ahead == 0
    assert control.most_ahead(window) >= 1
    control.reached(1, window, commit_s=1.0)
    assert control.choice is None
    assert control.most_ahead(window) >= 1


def test_it_measures_its_own_part_of_a_step() -> None:
    control, window = Control(s_max=1, price=Price(0.0)), measured_window()
    for _ in range(40):
        control.begun(0)
    for _ in range(7):
        control.begun(1)  # ahead; they count for their own step
    control.reached(1, window, commit_s=1.0)
    measured = Measured(rate_per_s=4.0, round_trip_s=2.0, commit_s=1.0, microbatches=40.0)
    assert control.choice == choose(measured, s_max=1, price=Price(0.0), gain_max=window.gain)
    for _ in range(13):
        control.begun(1)
    control.reached(2, window, commit_s=1.0)
    measured = replace(measured, microbatches=30.0)
    assert control.choice == choose(measured, s_max=1, price=Price(0.0), gain_max=window.gain)


def test_it_chooses_by_what_is_measured_after_the_synchronous_steps() -> None:
    """In those a pipeline that is longer than a step is never full, and running ahead would seem to save nothing."""
    control, window = Control(s_max=1, price=Price(0.0), synchronous_steps=3), measured_window()
    for version in (1, 2, 3):
        control.begun(version - 1)
        control.reached(version, window, commit_s=1.0)
        assert control.choice is None
    control.begun(3)
    control.reached(4, window, commit_s=1.0)
    assert control.choice is not None


def test_so_many_are_let_in_that_an_empty_pipeline_is_full_with_them() -> None:
    control, window = Control(s_max=2, price=Price(0.0)), measured_window()
    control.choice = Choice(steps_ahead=1, gain=1.25, step_s=1.0, staleness_steps=1.0)
    fill(window, 10)
    assert control.most_ahead(window) >= 1, "ten of 1.25 x 8 + 1"
    assert control.most_ahead(window) < 2
    fill(window, 1)
    assert control.most_ahead(window) < 1


def test_the_whole_window_is_the_windows_affair() -> None:
    control, window = Control(s_max=1, price=Price(0.0)), measured_window()
    control.choice = Choice(steps_ahead=1, gain=window.gain, step_s=1.0, staleness_steps=1.0)
    fill(window, 100)
    assert control.most_ahead(window) >= 1


def test_synchronous_training_lets_none_in() -> None:
    control = Control(s_max=1, price=Price(0.0))
    control.choice = Choice(steps_ahead=0, gain=1.0, step_s=1.0, staleness_steps=0.0)
    assert control.most_ahead(measured_window()) < 1


def test_what_the_groups_lead_has_chosen_goes_before_our_own() -> None:
    control, window = Control(s_max=2, price=Price(0.0)), measured_window()
    control.choice = Choice(steps_ahead=2, gain=window.gain, step_s=1.0, staleness_steps=1.0)
    control.follow(1, 1.25)
    fill(window, 10)
    assert control.most_ahead(window) >= 1
    assert control.most_ahead(window) < 2
    fill(window, 1)
    assert control.most_ahead(window) < 1
    control.follow(0, 1.0)
    assert control.most_ahead(measured_window()) < 1
    control.follow(-1, 1.0)
    assert control.most_ahead(window) >= 2, "the lead does not know yet"


@pytest.mark.parametrize("gain", [math.nan, math.inf, -math.inf, 0.0, 0.99])
def test_what_no_control_chooses_is_not_followed(gain: float) -> None:
    control = Control(s_max=1, price=Price(0.0))
    with pytest.raises(ValueError, match="in flight"):
        control.follow(1, gain)
    assert control.in_force is None
