"""The compiled evaluation against the plain one, and the search on it against trying everything."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import allocate_swarms as swarms
from shoal.coordinator.allocate import throughput_kernels
from shoal.coordinator.allocate.evolution import evolve
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator, assignment_of
from shoal.coordinator.cost import compiled, pipeline
from shoal.coordinator.cost.pipeline import IMPOSSIBLE
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.problem import problem_of, state_of
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import PlacedExperts, WireBytes


@pytest.mark.parametrize("tied_parameters", [0.0, 3e5])
@pytest.mark.parametrize("seed", range(40))
def test_compiled_or_not_a_placement_costs_the_same_to_the_last_bit(seed: int, tied_parameters: float) -> None:
    stages, layers = 1 + seed % 4, 6
    topology = swarms.swarm(seed, 12, cards=seed % 3 > 0)
    workload = swarms.workload(layers=layers, s_max=seed % 2, cut_bytes=[4e6, 1e5, 1e8][seed % 3])
    workload = replace(workload, backward_per_forward=2.0 + seed // 4 % 2)
    workload = replace(workload, reduced=replace(workload.reduced, tied_parameters=tied_parameters))
    if seed % 5 == 0:
        experts = PlacedExperts(number=8, held=3, replicas=2, parameters=(6e6,) * layers)
        workload = replace(workload, experts=experts)
    wire = WireBytes.same(workload, stages)
    if seed % 2:
        wire = WireBytes(tuple(2.0 * each for each in wire.cuts[:1]) + wire.cuts[1:], (4.0, 2.0, 1.0, 4.0)[:stages])
    problem = problem_of(topology, workload, cuts=wire.cuts)
    possible = 0
    for each in range(10):
        placement = swarms.random_placement(topology, layers, stages, 100 * seed + each)
        costs, states = [], []
        for loops in (pipeline, compiled):
            state = state_of(problem, workload, stages, wire)
            bounds = np.array(placement.bounds)
            loops.build(problem, state, assignment_of(topology.num_devices, placement), bounds)
            with np.errstate(divide="ignore"):
                costs.append(loops.evaluate(problem, state, np.zeros(1, dtype=np.int64)))
            states.append(state)
        assert costs[0] == costs[1]
        for plain, fast in zip(*states, strict=True):
            assert np.array_equal(plain, fast, equal_nan=True)
        possible += costs[0][0] < IMPOSSIBLE
        cost = ThroughputObjective(topology, workload).cost(placement, wire).seconds
        assert cost == costs[0][0] if costs[0][0] < IMPOSSIBLE else math.isinf(cost)
    assert possible


def test_both_refuse_a_member_of_stage_0_without_the_text() -> None:
    topology = swarms.swarm(1, 4)
    topology = replace(topology, may_feed=np.array([True, True, False, True]))
    for stages, bounds in ((1, (0, 6)), (2, (0, 3, 6))):
        evaluator = ThroughputEvaluator(topology, swarms.workload(layers=6), stages)
        placement = Placement(stages=((0, 2), (1, 3))[:stages], bounds=bounds)
        assert evaluator.evaluate(assignment_of(evaluator.num_devices, placement), bounds) >= IMPOSSIBLE
        assert math.isinf(ThroughputObjective(topology, swarms.workload(layers=6)).cost(placement).seconds)


@pytest.mark.parametrize("seed", range(6))
def test_both_count_the_experts_that_members_of_small_stages_hold_beyond_their_slots(seed: int) -> None:
    stages, layers = 1 + seed % 4, 6
    topology = swarms.swarm(seed, 12)
    dense = swarms.workload(layers=layers)
    placed = PlacedExperts(number=8, held=3, replicas=2, parameters=(6e7,) * layers)
    evaluator = ThroughputEvaluator(topology, replace(dense, experts=placed), stages)
    objective = ThroughputObjective(topology, replace(dense, experts=placed))
    too_many = 0
    for each in range(20):
        placement = swarms.random_placement(topology, layers, stages, 100 * seed + each)
        plain = objective.cost(placement).seconds
        searched = evaluator.evaluate(assignment_of(evaluator.num_devices, placement), placement.bounds)
        too_many += math.isinf(plain) and math.isfinite(ThroughputObjective(topology, dense).cost(placement).seconds)
        assert searched == plain if math.isfinite(plain) else searched >= IMPOSSIBLE
    assert too_many or stages < 3, "four members of twelve hold all that they should"


@pytest.mark.parametrize("seed", range(8))
def test_what_local_search_says_it_has_found_is_what_it_costs(seed: int) -> None:
    """Thousands of moves, taken back and not, leave no stale number behind."""
    topology = swarms.swarm(seed, 14, cards=seed % 2 > 0)
    evaluator = ThroughputEvaluator(topology, swarms.workload(), 3)
    start = evaluator.random(seed)
    found = evaluator.improve(start, seed=seed, work=2_000_000, heat=1.0)
    placement = evaluator.placement_of(found.assignment)
    assert found.cost == ThroughputObjective(topology, swarms.workload()).cost(placement).seconds
    state, kept = (state_of(evaluator.problem, swarms.workload(), 3) for _ in range(2))
    best, bounds = start.copy(), np.array(evaluator.placement_of(start).bounds)
    home, stayers = np.full(14, -1, dtype=np.int64), np.zeros(3, dtype=np.int64)
    cost, _ = throughput_kernels.improve(
        evaluator.problem, state, kept, home, stayers, seed, 200_000, 1.0, best, bounds
    )
    assert evaluator.evaluate(best, bounds) == pytest.approx(cost, rel=1e-9)


def test_the_cut_is_the_best_of_all_cuts() -> None:
    for seed in range(20):
        topology = swarms.swarm(seed, 9, cards=seed % 2 > 0, memory_gb=(50.0, 60.0))
        workload = swarms.workload(layers=8)
        evaluator = ThroughputEvaluator(topology, workload, 3)
        assignment = evaluator.random(seed)
        found = evaluator.placement_of(assignment)
        objective = ThroughputObjective(topology, workload)

        def slowest(bounds: tuple[int, ...]) -> float:
            return objective.cost(Placement(stages=found.stages, bounds=bounds)).parts["stage_s"]  # noqa: B023

        if evaluator.problem.shared_cards:
            continue  # There the parts of a card depend on all cuts at once.
        best = min(slowest((0, a, b, 8)) for a, b in itertools.combinations(range(1, 8), 2))
        assert slowest(found.bounds) == pytest.approx(best, rel=1e-9)


def exhaustive(evaluator: ThroughputEvaluator, layers: int) -> float:
    n, stages = evaluator.num_devices, evaluator.num_stages
    best = math.inf
    cuts = [(0, *cut, layers) for cut in itertools.combinations(range(1, layers), stages - 1)]
    feeds = evaluator.topology.may_feed
    for labels in itertools.product(range(-1, stages), repeat=n):
        if len(set(labels) - {-1}) < stages or any(k == 0 and not feeds[d] for d, k in enumerate(labels)):
            continue
        assignment = np.array(labels, dtype=np.int64)
        best = min(best, *(evaluator.evaluate(assignment, cut) for cut in cuts))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_small_swarms_are_solved(seed: int) -> None:
    """The whole comparison, 50 cases of up to 7 devices, is `tests/bench/planner.py --exhaustive`."""
    topology = swarms.swarm(seed, 5)
    evaluator = ThroughputEvaluator(topology, swarms.workload(layers=4), 2 + seed % 2)
    found = evolve(evaluator, seed=0, work=10_000_000)
    assert found.cost <= exhaustive(evaluator, 4) * 1.005
