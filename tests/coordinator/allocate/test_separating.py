"""Who leaves a layout because it cannot reach those with whom it works, and what rules and search make of it."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.coordinator.allocate.at_once import plan_at_once
from shoal.coordinator.allocate.greedy import GreedyAllocator, separated
from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot, places_of
from shoal.coordinator.allocate.live_allocator import EvolutionaryAllocator
from shoal.coordinator.allocate.measured import MeasuredNetwork, pair_of
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.coordinator.allocate.planner import default_work, plan
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.plan import Plan
from shoal.protocol.spec import AUTO_STAGES, ModelSpec, RunSpec, SwarmSpec, TrainingSpec
from shoal.protocol.topology import make_topology

SPEC = RunSpec(model=ModelSpec(num_layers=6), swarm=SwarmSpec(stages=2))
WORKLOAD = Workload.of(SPEC)
ALLOCATORS = [GreedyAllocator(), EvolutionaryAllocator()]


def peers_of(names, **says):
    usual = {"flop_per_s": 1e10, "upload_bytes_per_s": 1e7, "memory_bytes": 1 << 40, "has_data": True}
    return tuple(MeasuredPeer(peer=name, **(usual | says.get(name, {}))) for name in sorted(names))


def pairs(*names):
    return frozenset(pair_of(*name) for name in names)


def snapshot_of(names, *apart, stages=2, **says):
    n = len(names)
    return SwarmSnapshot(
        peers=peers_of(names, **says),
        layer_costs=(1.0,) * 6,
        num_stages=stages,
        workload=WORKLOAD,
        network=MeasuredNetwork(
            latency_s=np.full((n, n), 0.01),
            bytes_per_s=np.full((n, n), 1e7),
            is_certain=np.ones((n, n), dtype=np.bool_),
        ),
        unreachable=pairs(*apart),
    )


def plan_of(layout):
    return Plan(
        run="r",
        term=1,
        sequence=1,
        previous="",
        coordinator="a",
        stages=layout.stages,
        spares=layout.spares,
        not_started=False,
    )


def relies_on(layout, apart):
    """The pairs of `apart` in one group, and the members that reach nobody of a neighbouring stage."""
    groups = [set(stage.peers) for stage in layout.stages]
    inside = {pair for pair in apart for group in groups if set(pair) <= group}
    cut_off = {
        peer
        for k, group in enumerate(groups)
        for near in groups[max(0, k - 1) : k] + groups[k + 1 : k + 2]
        for peer in group
        if all(pair_of(peer, other) in apart for other in near)
    }
    return inside | cut_off


def test_of_a_pair_in_one_group_goes_who_misses_more_then_who_lacks_the_state_then_the_slower():
    a, b, c, d = peers_of("abcd", a={"synced_stage": 0}, b={"flop_per_s": 2e10}, c={"synced_stage": 0})
    assert separated([[a, c, d]], pairs("ac", "ad")) == [a]
    assert separated([[a, b], [c, d]], pairs("ab")) == [b], "who has no state, though it is quicker"
    assert separated([[b, d], [a]], pairs("bd")) == [d]
    assert separated([[b, d], [a, c]], pairs("bd", "ab")) == [b]


def test_a_member_that_reaches_nobody_of_the_next_stage_goes_unless_it_is_the_last():
    a, b, c, d = peers_of("abcd")
    assert separated([[a, b], [c, d]], pairs("ac")) == [], "it reaches one of them"
    assert separated([[a, b], [c, d]], pairs("ac", "ad")) == [a]
    assert separated([[a], [c]], pairs("ac")) == []


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("apart", [("ab",), ("ab", "cd"), ("ab", "ac", "ad"), ("ae", "bf", "cd")])
def test_no_layout_at_once_relies_on_a_pair_that_cannot_talk(allocator, apart):
    first = allocator.allocate(snapshot_of("abcdef", *apart), None, seed=1)
    assert not relies_on(first, pairs(*apart))
    before = allocator.allocate(snapshot_of("abcdef"), None, seed=1)
    synced = {peer: {"synced_stage": k} for k, stage in enumerate(before.stages) for peer in stage.peers}
    after = allocator.allocate(snapshot_of("abcdef", *apart, **synced), plan_of(before), seed=2)
    assert not relies_on(after, pairs(*apart))
    assert {*after.spares, *(p for stage in after.stages for p in stage.peers)} == set("abcdef"), "nobody is lost"
    if places_of(after) != places_of(before):
        assert "cannot reach each other" in after.reason


@pytest.mark.parametrize("apart", [("ab", "cd"), ("ab", "ac", "ad", "bc", "bd"), ("ae", "bf", "cd")])
@pytest.mark.parametrize("stages", [None, 2])
def test_a_search_relies_on_no_pair_that_cannot_talk(apart, stages):
    layout, _ = EvolutionaryAllocator().search(snapshot_of("abcdef", *apart, stages=stages), None, seed=1)
    assert not relies_on(layout, pairs(*apart))


def test_a_peer_that_reaches_nobody_stops_no_plan():
    apart = [f"a{other}" for other in "bcdef"]
    for allocator in ALLOCATORS:
        layout = allocator.allocate(snapshot_of("abcdef", *apart), None, seed=1)
        assert layout.spares == ("a",)
    topology = topology_of(snapshot_of("abcdef", *apart))
    assert not topology.bytes_per_s[0].any()


def test_where_most_are_behind_routers_a_search_begins_at_something_possible():
    """Of random groups of these hardly one is possible."""
    model = ModelSpec(dim=256, num_layers=6, ffn_dim=704, context=128)
    training = TrainingSpec(microbatches_per_step=24, microbatch_size=1, keep="recompute")
    workload = Workload.of(RunSpec(model=model, training=training, swarm=SwarmSpec(stages=AUTO_STAGES)))
    n, public = 40, 8
    rates = np.full((n, n), 2.5e6)
    hidden = np.arange(n) >= public
    rates[hidden[:, None] & hidden[None, :]] = 0.0
    memory = 0.5 * workload.resident_bytes(0, workload.num_layers, members=1)
    topology = make_topology(np.full((n, n), 0.02), rates, flop_per_s=4e9, memory_bytes=memory)
    for found, cost in (plan(topology, workload, work=default_work(n)), plan_at_once(topology, workload)):
        assert np.isfinite(cost.seconds)
        assert ThroughputObjective(topology, workload).cost(found).seconds == cost.seconds


def test_an_unreachable_pair_of_strangers_changes_nothing():
    snapshot = snapshot_of("abcdef")
    with_strangers = replace(snapshot, unreachable=pairs("xy", "ax"))
    for allocator in ALLOCATORS:
        assert allocator.allocate(snapshot, None, seed=1) == allocator.allocate(with_strangers, None, seed=1)
