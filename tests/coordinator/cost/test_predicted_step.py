"""What a plan is foreseen to give, once the control has chosen how much runs ahead."""

from dataclasses import replace
from typing import Any

import pytest

import allocate_swarms as swarms
from shoal.coordinator.cost import pipeline
from shoal.coordinator.cost.pipeline import WINDOW_GAIN, joined
from shoal.coordinator.cost.problem import problem_of, state_of
from shoal.coordinator.cost.throughput import predicted_step_s
from shoal.protocol.running_ahead import Measured, busy, choose
from shoal.protocol.staleness import FREE, Price

MINDS_QUEUES = Price(0.77, 9, unseen=Price(1.4, 1))


FULL = 0.4
"""How crowded a card is where the norm has it, if all devices are busy."""


def foreseen(
    *commits_s: float, price: Price = FREE, computes_s: Any = (100.0,), round_trip_s: float = 5.0, crowded: float = FULL
) -> float:
    """Foresee a step of stages whose flow takes 100 s, as issuing its 400 microbatches does."""
    commits_s = commits_s or (60.0,)
    workload = replace(swarms.workload(microbatches=400), control=price)
    state = state_of(problem_of(swarms.swarm(0, 4), workload), workload, len(commits_s))
    state.step[[pipeline.FLOW_S, pipeline.ISSUE_S, pipeline.AHEAD]] = 100.0, 100.0, 1.0
    state.times[pipeline.TRIP], state.times[pipeline.CROWDED] = round_trip_s, crowded
    state.times[[pipeline.BESIDE, pipeline.ALONE]] = commits_s
    return predicted_step_s(workload, state, computes_s)


def test_where_staleness_costs_nothing_all_runs_ahead() -> None:
    assert foreseen() == pytest.approx(joined(100.0, 82.5))


def test_commits_scatter_as_far_as_activations_are_on_their_cards_and_devices_are_busy() -> None:
    alone, half, full = (foreseen(crowded=crowded) for crowded in (0.0, FULL / 2, FULL))
    assert alone == 100.0
    assert half - alone == pytest.approx(full - half)
    # The other stage's devices are busy for half of the time: what they wait for costs half as much.
    longest = foreseen(0.0, 75.0, computes_s=[100.0, 50.0])
    assert longest == pytest.approx(100.0 + (joined(100.0, 90.0) - 100.0) / 2)
    assert foreseen(75.0, 0.0, computes_s=[100.0, 50.0]) == pytest.approx(joined(100.0, 90.0))


def test_where_it_costs_too_much_nothing_does() -> None:
    assert foreseen(price=Price(5.0)) == 165.0


def test_devices_that_are_held_back_are_less_busy_while_they_work_ahead() -> None:
    measured = Measured(rate_per_s=4.0, round_trip_s=30.0, commit_s=35.0, microbatches=400.0)
    choice = choose(measured, s_max=1, price=MINDS_QUEUES, gain_max=WINDOW_GAIN)
    assert (choice.steps_ahead, choice.gain < 1.3) == (1, True)
    longer = busy(WINDOW_GAIN) / busy(choice.gain) - 1.0
    step_s = joined(100.0 * (1.0 + 0.6475 * longer), 82.5 + 50.0 * longer)
    assert foreseen(35.0, price=MINDS_QUEUES, round_trip_s=30.0) == pytest.approx(step_s)
    assert step_s > 1.01 * foreseen(35.0, round_trip_s=30.0)


def test_where_lines_bound_a_step_the_control_changes_little() -> None:
    by_lines: dict[str, Any] = {"computes_s": [60.0], "crowded": FULL / 0.6}
    assert foreseen(90.0, **by_lines) == pytest.approx(max(100.0, joined(60.0, 97.5)))
    assert foreseen(90.0, price=MINDS_QUEUES, **by_lines) / foreseen(90.0, **by_lines) < 1.03
