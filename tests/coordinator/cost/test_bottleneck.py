"""What keeps a step from being faster, on swarms in which it is plain to see."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.placement import Bottleneck, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Topology, make_topology

PAIRS = Placement(stages=((0, 1), (2, 3)), bounds=(0, 2, 4))
WORK = Workload(
    layer_flop=(1e12,) * 4,
    backward_per_forward=2.0,
    layer_parameters=(1e6,) * 4,
    gradient_bytes_per_parameter=4.0,
    memory=StageMemory(layer_held_bytes=(1e6,) * 4, resident_bytes_per_parameter=20.0),
    cut_bytes=1e6,
    microbatches=100,
    tokens_per_microbatch=1000,
    s_max=1,
)
LARGE = replace(WORK, layer_parameters=(1e9,) * 4)
FEW = replace(WORK, microbatches=2, s_max=0)


def swarm(*, latency_s: float = 0.001, rate: float = 1e12, **devices: object) -> Topology:
    return make_topology(np.full((4, 4), latency_s), np.full((4, 4), rate), **({"flop_per_s": 1e13} | devices))


@pytest.mark.parametrize(
    ("topology", "workload", "bound"),
    [
        (swarm(), WORK, ("compute", 0)),
        (swarm(flop_per_s=[1e13, 1e13, 1e12, 1e12]), WORK, ("compute", 1)),
        (swarm(up_bytes_per_s=[1e12, 1e12, 1e6, 1e6]), WORK, ("card", 1)),
        (swarm(up_bytes_per_s=[1e7, 1e7, 1e12, 1e12], memory_bytes=1e12), LARGE, ("reduction", 0)),
        (swarm(rate=1e5), WORK, ("paths", 0)),
        (swarm(latency_s=30.0), FEW, ("commit", 0)),
        (swarm(latency_s=30.0), replace(FEW, layer_flop=(1e14,) * 4), ("round trip", 0)),
    ],
    ids=["equal", "slow devices", "slow cards", "large gradients", "slow paths", "far apart", "far apart and slow"],
)
def test_what_bounds_a_step(topology: Topology, workload: Workload, bound: Bottleneck) -> None:
    assert ThroughputObjective(topology, workload).cost(PAIRS).bound == bound


def test_what_cannot_be_has_no_bottleneck() -> None:
    assert ThroughputObjective(swarm(), WORK).cost(Placement(stages=((0,), ()), bounds=(0, 2, 4))).bound is None


@pytest.mark.parametrize("faster", range(4))
def test_nothing_gets_faster_while_the_bottleneck_stays(faster: int) -> None:
    """A device of the stage that does not bound the step may be as fast as it likes; one of the other helps."""
    speeds = np.array([1e13, 1e13, 4e12, 4e12])
    before = ThroughputObjective(swarm(flop_per_s=speeds), WORK).cost(PAIRS)
    assert before.bound == ("compute", 1)
    speeds[faster] *= 2.0
    after = ThroughputObjective(swarm(flop_per_s=speeds), WORK).cost(PAIRS)
    assert before.parts["flow_s"] / after.parts["flow_s"] == pytest.approx(1.5 if faster >= 2 else 1.0, rel=0.01)
