"""What a plan is foreseen to give, once the control has chosen how much runs ahead."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.coordinator.cost.foresight import foreseen_s
from shoal.coordinator.cost.pacing import joined
from shoal.protocol.running_ahead import Measured, busy, choose
from shoal.protocol.staleness import FREE, Price

GAIN = 1.5
MINDS_QUEUES = Price(0.77, 9, unseen=Price(1.4, 1))


def chain(tail_s: float) -> Callable[[int], float]:
    return lambda steps_ahead: (100.0 + tail_s) / (steps_ahead + 1.0)


def foreseen(**says: Any) -> float:
    usual: dict[str, Any] = {
        "flow_s": 100.0,
        "compute_s": 100.0,
        "round_trip_s": 5.0,
        "commit_s": 60.0,
        "crowded": 0.45,
        "microbatches": 400,
        "s_max": 1,
        "price": FREE,
        "gain_max": GAIN,
    }
    return foreseen_s(says.pop("chain_s", chain(65.0)), **(usual | says))


def test_where_staleness_costs_nothing_all_runs_ahead() -> None:
    assert foreseen() == pytest.approx(joined(100.0, 82.5))


def test_what_activations_leave_of_the_cards_says_how_much_commits_scatter() -> None:
    alone, half, full = (foreseen(crowded=crowded) for crowded in (0.0, 0.225, 0.45))
    assert alone == 100.0
    assert half - alone == pytest.approx(full - half)
    assert full == pytest.approx(joined(100.0, 82.5))


def test_where_it_costs_too_much_nothing_does() -> None:
    assert foreseen(price=Price(5.0)) == 165.0


def test_devices_that_are_held_back_are_less_busy_while_they_work_ahead() -> None:
    far: dict[str, Any] = {"round_trip_s": 30.0, "commit_s": 35.0}
    measured = Measured(rate_per_s=4.0, round_trip_s=30.0, commit_s=35.0, microbatches=400.0)
    choice = choose(measured, s_max=1, price=MINDS_QUEUES, gain_max=GAIN)
    assert (choice.steps_ahead, choice.gain < 1.3) == (1, True)
    longer = busy(GAIN) / busy(choice.gain) - 1.0
    step_s = joined(100.0 * (1.0 + 0.6475 * longer), 82.5 + 50.0 * longer)
    assert foreseen(price=MINDS_QUEUES, **far) == pytest.approx(step_s)
    assert step_s > 1.01 * foreseen(**far)


def test_where_lines_bound_a_step_the_control_changes_little() -> None:
    by_lines: dict[str, Any] = {"compute_s": 60.0, "commit_s": 95.0, "chain_s": chain(95.0)}
    assert foreseen(**by_lines) == pytest.approx(max(100.0, joined(60.0, 97.5)))
    assert foreseen(price=MINDS_QUEUES, **by_lines) / foreseen(**by_lines) < 1.03
