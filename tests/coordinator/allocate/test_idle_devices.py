"""When a device that a search has left out gets a place."""

import numpy as np

from shoal.coordinator.allocate.adjustments import backed, filled
from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.objective import SoleHolders
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.identity import PeerID
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec
from shoal.protocol.topology import make_topology

SPEC = RunSpec(
    model=ModelSpec(num_layers=6, dim=256, ffn_dim=704), training=TrainingSpec(microbatches_per_step=24, s_max=1)
)
WORKLOAD = Workload.of(SPEC)


def objective_of(num_devices, *, slow=(), speeds=2e10, may_feed=1.0):
    """Lines of 10 Gbit/s, of `slow` devices 1 kbit/s."""
    rate = np.full((num_devices, num_devices), 1.25e9)
    for device in slow:
        rate[device, :] = rate[:, device] = 125.0
    latency = np.full((num_devices, num_devices), 1e-4)
    topology = make_topology(
        latency,
        rate,
        flop_per_s=speeds,
        memory_bytes=16e9,
        may_feed=may_feed,
        names=[f"p{n}" for n in range(num_devices)],
    )
    return ThroughputObjective(topology, WORKLOAD)


def with_idle_devices(throughput, placement):
    peers = tuple(
        MeasuredPeer(peer=PeerID(name), flop_per_s=1.0, upload_bytes_per_s=1.0, memory_bytes=1, has_data=True)
        for name in throughput.topology.names
    )
    snapshot = SwarmSnapshot(peers=peers, layer_costs=WORKLOAD.layer_flop, num_stages=None)
    losses = SoleHolders(snapshot, throughput.topology)
    return backed(throughput, losses, filled(throughput, losses, placement))


def test_a_device_that_costs_nothing_joins_the_stage_that_computes_longest():
    """Stage 0 is the longest of all, and may not have the device that was left out, which lacks the text."""
    objective = objective_of(7, speeds=[1e9, 1e9, 4e10, 4e10, 2e10, 2e10, 2e10], may_feed=[1.0, 1.0, *[0.0] * 5])
    searched = Placement(stages=((0, 1), (2, 3), (4, 5)), bounds=(0, 2, 4, 6))
    before, joined = objective.cost(searched), with_idle_devices(objective, searched)
    assert joined.stages == ((0, 1), (2, 3), (4, 5, 6))
    assert objective.cost(joined).seconds <= before.seconds * (1.0 + 1e-6)


def test_a_device_over_whose_line_a_reduction_takes_long_stays_out():
    objective = objective_of(4, slow=(3,))
    searched = Placement(stages=((0,), (1,), (2,)), bounds=(0, 2, 4, 6))
    assert with_idle_devices(objective, searched) == searched
