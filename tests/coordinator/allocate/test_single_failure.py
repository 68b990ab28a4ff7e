"""When a stage with one holder gets a second one."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.coordinator.allocate.adjustments import backed, filled
from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.objective import SoleHolders
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec
from shoal.protocol.topology import make_topology

SPEC = RunSpec(model=ModelSpec(num_layers=6, dim=256, ffn_dim=704), training=TrainingSpec(microbatches_per_step=24))
WORKLOAD = Workload.of(SPEC)


def snapshot_of(num_peers, *, probability, going_back_s):
    peers = tuple(
        MeasuredPeer(
            peer=PeerID(f"p{number}"),
            flop_per_s=2e10,
            upload_bytes_per_s=1e7,
            memory_bytes=1 << 34,
            has_data=True,
            failure_probability=probability,
        )
        for number in range(num_peers)
    )
    return SwarmSnapshot(peers=peers, layer_costs=WORKLOAD.layer_flop, num_stages=None, going_back_s=going_back_s)


def objective_of(num_peers, bytes_per_s, has_data=1.0, card=None):
    """The first two peers are beside each other, and every other link carries `bytes_per_s`."""
    links = np.full((num_peers, num_peers), bytes_per_s)
    links[0, 1] = links[1, 0] = 1e8
    latency = np.full((num_peers, num_peers), 0.01)
    topology = make_topology(
        latency,
        links,
        flop_per_s=2e10,
        memory_bytes=16e9,
        may_feed=has_data,
        card=card,
        names=[f"p{n}" for n in range(num_peers)],
    )
    return ThroughputObjective(topology, WORKLOAD)


def settle(throughput, placement, snapshot):
    losses = SoleHolders(snapshot, throughput.topology)
    return backed(throughput, losses, filled(throughput, losses, placement))


def test_what_a_lone_holder_costs_is_its_chance_to_fail_times_what_going_back_costs():
    snapshot = snapshot_of(3, probability=0.1, going_back_s=300.0)
    lone, both, all_three = (
        Placement(stages=stages, bounds=tuple(range(len(stages) + 1)))
        for stages in (((0,), (1,)), ((0, 1), (2,)), ((0, 1, 2),))
    )
    topology = objective_of(3, 1e8).topology
    losses = SoleHolders(snapshot, topology)
    assert losses.of(lone) == pytest.approx(2 * 0.05)
    assert losses.of(both) == pytest.approx(0.05)
    assert losses.of(all_three) == 0.0
    assert SoleHolders(replace(snapshot, going_back_s=0.0), topology).of(lone) == 0.0


@pytest.mark.parametrize(("bytes_per_s", "sizes"), [(1e8, [2, 2]), (1e3, [1, 1])])
def test_a_second_holder_comes_where_reducing_with_it_costs_less_than_the_first_ones_death(bytes_per_s, sizes):
    lone = Placement(stages=((0,), (1,)), bounds=(0, 3, 6))
    snapshot = snapshot_of(4, probability=0.03, going_back_s=200.0)
    placed = settle(objective_of(4, bytes_per_s), lone, snapshot)
    assert [len(stage) for stage in placed.stages] == sizes
    assert all(before[0] in after for before, after in zip(lone.stages, placed.stages, strict=True))


def test_a_stage_of_three_gives_one_away_and_a_stage_of_two_does_not():
    often = snapshot_of(4, probability=1.0, going_back_s=1e9)
    three = Placement(stages=((0,), (1, 2, 3)), bounds=(0, 3, 6))
    assert [len(stage) for stage in settle(objective_of(4, 1e8), three, often).stages] == [2, 2]
    two = Placement(stages=((0,), (1, 2)), bounds=(0, 3, 6))
    often = snapshot_of(3, probability=1.0, going_back_s=1e9)
    assert settle(objective_of(3, 1e8), two, often) == two


@pytest.mark.parametrize("card", [[0, 0, 1, 2], [0, 0, 1, 1]])
def test_two_peers_of_one_machine_are_one_holder(card):
    often = snapshot_of(4, probability=1.0, going_back_s=1e9)
    beside = Placement(stages=((0, 1), (2,)), bounds=(0, 3, 6))
    placed = settle(objective_of(4, 1e8, card=card), beside, often)
    assert [len({card[device] for device in stage}) for stage in placed.stages] == [2, 2]


def test_who_has_no_text_does_not_come_to_the_first_stage():
    lone = Placement(stages=((0,), (1,)), bounds=(0, 3, 6))
    often = snapshot_of(3, probability=1.0, going_back_s=1e9)
    placed = settle(objective_of(3, 1e8, has_data=[1.0, 1.0, 0.0]), lone, often)
    assert placed.stages == ((0,), (1, 2))
