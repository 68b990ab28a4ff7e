"""What is said to help a device that was left out, against the objective itself."""

from dataclasses import replace

import numpy as np

from shoal.coordinator.allocate.at_once import joins, plan_at_once
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.planning.left_out import GAIN_MIN, left_out, said_of_needs
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec, TrainingSpec
from shoal.protocol.topology import Topology, make_topology

_MEGABIT = 1e6 / 8

WORKLOAD = Workload.of(
    RunSpec(
        name="x",
        model=ModelSpec(dim=1024, num_layers=8, num_heads=8, num_kv_heads=8, ffn_dim=2816, context=1024),
        training=TrainingSpec(microbatches_per_step=256, microbatch_size=1),
        swarm=SwarmSpec(stages=1, min_peers=1),
    )
)


def swarm(*, up_mbps: float = 5_000.0, memory_gb: float = 24.0, tflops: float = 20.0) -> Topology:
    """Three devices of a lab, and a last one that is as said."""
    n = 4
    return make_topology(
        np.full((n, n), 0.005),
        np.full((n, n), 5_000 * _MEGABIT),
        flop_per_s=[20e12] * 3 + [tflops * 1e12],
        memory_bytes=[24e9] * 3 + [memory_gb * 1e9],
        up_bytes_per_s=[5_000 * _MEGABIT] * 3 + [up_mbps * _MEGABIT],
        down_bytes_per_s=[5_000 * _MEGABIT] * 4,
        regions=("lab",) * 3 + ("home",),
    )


def of_the_lab(topology: Topology) -> Placement:
    placement, _ = plan_at_once(topology.take([0, 1, 2]), WORKLOAD, num_stages=3)
    return placement


def best_s(topology: Topology, placement: Placement, device: int) -> float:
    objective = ThroughputObjective(topology, WORKLOAD)
    return min(objective.cost(each).seconds for each in joins(topology, WORKLOAD, placement, device))


def test_the_line_that_is_said_to_help_helps_and_a_tenth_less_does_not() -> None:
    topology = swarm(up_mbps=10)
    placement = of_the_lab(topology)
    (group,) = left_out(topology, WORKLOAD, placement)
    assert group.devices == (3,)
    assert group.why.startswith("its line is too slow: with one of them a step takes ")
    (need,) = group.needs
    assert need.line_mbps is not None
    assert need.memory_gb is need.tflops is None
    goal_s = ThroughputObjective(topology, WORKLOAD).cost(placement).seconds * (1.0 - GAIN_MIN)
    assert best_s(swarm(up_mbps=need.line_mbps), placement, 3) <= goal_s
    assert best_s(swarm(up_mbps=0.85 * need.line_mbps), placement, 3) > goal_s
    assert said_of_needs(group) == f"one would help from {need.line_mbps:,.0f} Mbit/s both ways"


def test_memory_is_named_where_memory_is_short() -> None:
    topology = swarm(memory_gb=0.2)
    (group,) = left_out(topology, WORKLOAD, of_the_lab(topology))
    assert group.why == "no place in the plan fits into its 0 GB"
    assert group.step_with_one_s is None
    assert group.needs[0].memory_gb is not None
    assert group.needs[0].line_mbps is None


def test_a_device_that_would_help_is_said_to_have_been_missed() -> None:
    topology = swarm()
    (group,) = left_out(topology, WORKLOAD, of_the_lab(topology))
    assert group.why.startswith("the search has missed it")
    assert group.needs == ()


def test_without_cards_the_paths_are_the_line() -> None:
    slow = swarm().bytes_per_s.copy()
    slow[3, :] = slow[:, 3] = 5 * _MEGABIT
    topology = replace(
        swarm(), bytes_per_s=slow, up_bytes_per_s=np.full(4, np.inf), down_bytes_per_s=np.full(4, np.inf)
    )
    (group,) = left_out(topology, WORKLOAD, of_the_lab(topology))
    assert (group.up_mbps, group.down_mbps) == (None, None)
    assert 5 < (group.needs[0].line_mbps or 0) < 5_000
