"""What a plan is foreseen to give, once the control has chosen how much runs ahead."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shoal.coordinator.cost.pacing import WINDOW_GAIN, Tail, joined, predicted_step_s
from shoal.protocol.running_ahead import Measured, busy, choose
from shoal.protocol.staleness import FREE, Price

MINDS_QUEUES = Price(0.77, 9, unseen=Price(1.4, 1))


FULL = 0.4
"""How crowded a card is where the norm has it, if all devices are busy."""


def tails(*tails_s: float, crowded: float = FULL) -> Callable[[int], Sequence[Tail]]:
    return lambda steps_ahead: [Tail((100.0 + tail_s) / (steps_ahead + 1.0), crowded) for tail_s in tails_s]


def foreseen(**says: Any) -> float:
    usual: dict[str, Any] = {
        "flow_s": 100.0,
        "stages_s": [100.0],
        "round_trip_s": 5.0,
        "commit_s": 60.0,
        "microbatches": 400,
        "s_max": 1,
        "price": FREE,
    }
    return predicted_step_s(says.pop("tails", tails(65.0)), **(usual | says))


def test_where_staleness_costs_nothing_all_runs_ahead() -> None:
    assert foreseen() == pytest.approx(joined(100.0, 82.5))


def test_commits_scatter_as_far_as_activations_are_on_their_cards_and_devices_are_busy() -> None:
    alone, half, full = (foreseen(tails=tails(65.0, crowded=crowded)) for crowded in (0.0, FULL / 2, FULL))
    assert alone == 100.0
    assert half - alone == pytest.approx(full - half)
    # The other stage's devices are busy for half of the time: what they wait for costs half as much.
    longest: dict[str, Any] = {"tails": tails(0.0, 80.0), "stages_s": [100.0, 50.0]}
    assert foreseen(**longest) == pytest.approx(100.0 + (joined(100.0, 90.0) - 100.0) / 2)
    assert foreseen(**longest | {"tails": tails(80.0, 0.0)}) == pytest.approx(joined(100.0, 90.0))


def test_where_it_costs_too_much_nothing_does() -> None:
    assert foreseen(price=Price(5.0)) == 165.0


def test_devices_that_are_held_back_are_less_busy_while_they_work_ahead() -> None:
    far: dict[str, Any] = {"round_trip_s": 30.0, "commit_s": 35.0}
    measured = Measured(rate_per_s=4.0, round_trip_s=30.0, commit_s=35.0, microbatches=400.0)
    choice = choose(measured, s_max=1, price=MINDS_QUEUES, gain_max=WINDOW_GAIN)
    assert (choice.steps_ahead, choice.gain < 1.3) == (1, True)
    longer = busy(WINDOW_GAIN) / busy(choice.gain) - 1.0
    step_s = joined(100.0 * (1.0 + 0.6475 * longer), 82.5 + 50.0 * longer)
    assert foreseen(price=MINDS_QUEUES, **far) == pytest.approx(step_s)
    assert step_s > 1.01 * foreseen(**far)


def test_where_lines_bound_a_step_the_control_changes_little() -> None:
    by_lines: dict[str, Any] = {"stages_s": [60.0], "commit_s": 95.0, "tails": tails(95.0, crowded=FULL / 0.6)}
    assert foreseen(**by_lines) == pytest.approx(max(100.0, joined(60.0, 97.5)))
    assert foreseen(price=MINDS_QUEUES, **by_lines) / foreseen(**by_lines) < 1.03
