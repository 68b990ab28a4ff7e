"""Placements of the throughput planner: repeatable, steady, and impossible in one line."""

from dataclasses import replace

import numpy as np
import pytest

import allocate_swarms as swarms
from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.allocate.planner import default_work, levels, plan
from shoal.coordinator.allocate.throughput_search import ThroughputEvaluator
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective, split
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.simulate.scenario import find_scenario
from shoal.protocol.topology import Topology, make_topology

WORK = 8_000_000


def check(found: Placement, topology: Topology, workload: Workload) -> None:
    assert all(topology.may_feed[device] for device in found.stages[0])
    asked = split(topology, workload, found)
    for stage, shares, parts in zip(found.stages, asked.shares, asked.parts, strict=True):
        assert len(stage) == len(shares) == len(parts) > 0
        assert min(*shares, *parts) > 0.0
        assert sum(shares) == pytest.approx(1.0)
        assert sum(parts) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_swarm_and_seed_give_the_same_plan(seed: int) -> None:
    topology, workload = swarms.swarm(seed, 16), swarms.workload()
    first, second = (plan(topology, workload, seed=seed, work=WORK) for _ in range(2))
    check(first[0], topology, workload)
    assert first == second


@pytest.mark.parametrize("seed", range(3))
def test_a_search_that_begins_at_the_best_finds_little_that_is_better(seed: int) -> None:
    topology, workload = swarms.swarm(seed, 14, cards=False), swarms.workload(microbatches=200)
    now, cost = plan(topology, workload, num_stages=3, seed=seed, work=5 * WORK)
    for later in range(2):
        _, found = plan(topology, workload, num_stages=3, seed=100 + later, work=WORK // 4, current=now)
        assert found.seconds > 0.98 * cost.seconds


def test_what_is_worth_a_move_is_moved_and_what_is_not_is_left() -> None:
    topology = make_topology(
        np.full((6, 6), 0.01), np.full((6, 6), 1e9), flop_per_s=[4e13, 4e13, 4e13, 4e13, 1e13, 1e13]
    )
    workload = swarms.workload(microbatches=64)
    lopsided = Placement(stages=((0, 1, 2, 3), (4, 5)), bounds=(0, 3, 6))
    _, cost = plan(topology, workload, num_stages=2, seed=0, work=WORK, current=lopsided)
    assert cost.seconds < 0.8 * ThroughputObjective(topology, workload).cost(lopsided).seconds
    kept, _ = plan(topology, workload, num_stages=2, seed=0, work=WORK, current=lopsided, horizon_s=0.01)
    assert all(set(after) <= set(before) for before, after in zip(lopsided.stages, kept.stages, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_machines_of_several_devices_make_a_stage_each_whatever_the_seed(seed: int) -> None:
    """Single moves do not lead there: a device moved alone makes two reductions leave their machines."""
    scenario = find_scenario("data-centre")
    topology = replace(scenario.topology, memory_bytes=np.full(64, 40e9))  # which has room for a stage of this size
    found, _ = plan(topology, Workload.of(scenario.spec), seed=seed, work=default_work(64))
    machines = [{topology.card[device] for device in stage} for stage in found.stages]
    assert [len(cards) for cards in machines] == [1] * 8


def test_a_newcomer_is_taken_in_without_anybody_else_moving() -> None:
    topology = make_topology(np.full((7, 7), 0.01), np.full((7, 7), 1e9), flop_per_s=2e13)
    now = Placement(stages=((0, 1, 2), (3, 4, 5)), bounds=(0, 3, 6))
    found, _ = plan(topology, swarms.workload(microbatches=64), num_stages=2, work=WORK, current=now)
    assert found.spares(7) == ()
    assert set(found.stages[0]) >= {0, 1, 2}
    assert set(found.stages[1]) >= {3, 4, 5}


def test_a_device_that_would_slow_the_others_down_is_left_out() -> None:
    up = [1e8] * 6 + [2e4]
    topology = make_topology(np.full((7, 7), 0.01), np.full((7, 7), 1e8), flop_per_s=2e13, up_bytes_per_s=up)
    found, _ = plan(topology, swarms.workload(microbatches=1000), num_stages=2, work=WORK)
    assert found.spares(7) == (6,)


def test_what_cannot_be_is_said_in_one_line() -> None:
    topology = make_topology(np.full((3, 3), 0.01), np.full((3, 3), 1e9), memory_bytes=1e8)
    with pytest.raises(NoLayout, match="does not fit"):
        plan(topology, swarms.workload(), num_stages=2, work=100_000)
    with pytest.raises(NoLayout, match="3 devices cannot hold 4 stages"):
        plan(topology, swarms.workload(), num_stages=4, work=100_000)
    blind = make_topology(np.full((3, 3), 0.01), np.full((3, 3), 1e9), may_feed=0.0)
    with pytest.raises(NoLayout, match="text"):
        plan(blind, swarms.workload(), num_stages=2, work=100_000)


def test_faster_groups_get_more_layers() -> None:
    topology = make_topology(np.full((4, 4), 0.001), np.full((4, 4), 1e9), flop_per_s=[1e13, 1e13, 3e13, 3e13])
    evaluator = ThroughputEvaluator(topology, swarms.workload(layers=8), 2)
    assert evaluator.placement_of(np.array([0, 0, 1, 1])).bounds == (0, 2, 8)


def test_a_large_swarm_is_clustered_and_solved() -> None:
    topology = swarms.swarm(3, 600, cards=False, memory_gb=(20.0, 30.0))
    views = levels(topology, swarms.workload())
    assert len(views) == 2
    assert len(views[0].weight) < 200
    assert views[0].weight.sum() == 600
    assert float(views[0].topology.flop_per_s.sum()) == pytest.approx(float(topology.flop_per_s.sum()))
    workload = swarms.workload(layers=12, microbatches=2000, cut_bytes=1e5)
    found, cost = plan(topology, workload, num_stages=4, work=20_000_000)
    check(found, topology, workload)
    bound = 3.0 * sum(workload.layer_flop) * workload.microbatches / float(topology.flop_per_s.sum())
    assert cost.parts["compute_s"] < 1.3 * bound
