"""The layout by rule: possible, deterministic, not far from what a search finds, and cut as well as can be."""

import itertools
import math
from functools import partial

import pytest

import allocate_swarms as swarms
from shoal.coordinator.allocate.at_once import climb, cut, joins, plan_at_once
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.allocate.planner import plan
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective


@pytest.mark.parametrize("seed", range(8))
def test_the_rule_is_possible_repeats_and_is_near_the_search(seed: int) -> None:
    topology, workload = swarms.swarm(seed, 10, cards=seed % 2 > 0), swarms.workload()
    placement, cost = plan_at_once(topology, workload)
    assert plan_at_once(topology, workload) == (placement, cost)
    assert ThroughputObjective(topology, workload).cost(placement) == cost
    assert math.isfinite(cost.seconds)
    _, searched = plan(topology, workload, seed=0, work=5_000_000)
    assert cost.seconds < 2.0 * searched.seconds


def test_the_number_of_stages_can_be_given() -> None:
    topology, workload = swarms.swarm(1, 10), swarms.workload()
    for stages in (1, 3, 5):
        assert len(plan_at_once(topology, workload, num_stages=stages)[0].stages) == stages


def test_what_cannot_be_is_said() -> None:
    topology, workload = swarms.swarm(1, 3), swarms.workload()
    with pytest.raises(NoLayout, match="does not fit into 5 of these devices"):
        plan_at_once(topology, workload, num_stages=5)


def test_places_of_a_device_hold_it_once() -> None:
    topology, workload = swarms.swarm(2, 6), swarms.workload()
    placement, _ = plan_at_once(topology.take([0, 1, 2, 3, 4]), workload)
    found = list(joins(topology, workload, placement, 5))
    assert found
    for each in found:
        assert [d for stage in each.stages for d in stage].count(5) == 1
        assert (each.bounds[0], each.bounds[-1]) == (0, workload.num_layers)
        assert list(each.bounds) == sorted(set(each.bounds))


def test_the_cut_is_the_best_that_fits() -> None:
    topology, workload = swarms.swarm(3, 6), swarms.workload(layers=7)
    stages = ((0, 1), (2,), (3, 4, 5))

    def slowest(bounds: tuple[int, ...]) -> float:
        seconds = 0.0
        for members, (first, last) in zip(stages, itertools.pairwise(bounds), strict=True):
            resident = workload.resident_bytes(first, last, members=len(members))
            if resident + 2.0 * sum(workload.layer_held_bytes[first:last]) > topology.memory_bytes[list(members)].min():
                return math.inf
            seconds = max(seconds, workload.job_flop(first, last) / float(topology.flop_per_s[list(members)].sum()))
        return seconds

    best = min(slowest((0, a, b, 7)) for a, b in itertools.combinations(range(1, 7), 2))
    bounds = cut(topology, workload, stages, held=2.0)
    assert bounds is not None
    assert slowest(bounds) == pytest.approx(best)


class Distance:
    """Implements `Objective`: how far the members of stage 0 are from a goal; counts its evaluations."""

    def __init__(self, goal: set[int]) -> None:
        self.goal, self.asked = goal, 0

    def cost(self, placement: Placement) -> Cost:
        self.asked += 1
        return Cost(seconds=1.0 + len(self.goal ^ set(placement.stages[0])))


def toggled(device: int, placement: Placement) -> list[Placement]:
    members = tuple(sorted({*placement.stages[0]} ^ {device}))
    return [Placement(stages=(members,), bounds=placement.bounds)]


@pytest.mark.parametrize("budget", [0, 1, 3, 100])
def test_a_climb_takes_what_helps_until_nothing_does_or_its_budget_is_spent(budget: int) -> None:
    objective, start = Distance({1, 3, 4}), Placement(stages=((0,),), bounds=(0, 1))
    found, cost = climb(objective, start, [partial(toggled, device) for device in range(5)], budget)
    assert cost.seconds == Distance({1, 3, 4}).cost(found).seconds == max(1.0, 5.0 - {0: 0, 1: 1, 3: 2}.get(budget, 4))
    assert objective.asked == 1 + min(budget, 10), "the second pass finds nothing"


def test_a_move_leads_to_the_best_of_its_neighbours() -> None:
    def both(placement: Placement) -> list[Placement]:
        return [Placement(stages=(members,), bounds=(0, 1)) for members in ((1,), (1, 2), (2,))]

    found, _ = climb(Distance({1, 2}), Placement(stages=((0,),), bounds=(0, 1)), [both], 9)
    assert found.stages == ((1, 2),)
