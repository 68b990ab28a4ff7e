"""Says how fast a layout should be with the figures of today, and what bounds it. Pure."""

import math
from collections.abc import Sequence

from shoal.coordinator.allocate.dividing import placement_of
from shoal.coordinator.allocate.interface import Snapshot
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.protocol.plan import Foreseen, Stage


def foresee(snapshot: Snapshot, stages: Sequence[Stage]) -> Foreseen | None:
    """How fast the stages should be by the throughput objective; None: it cannot say.

    Args: snapshot: with workload and network. Peers that are not in it are left out of the stages.
    """
    assert snapshot.workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return None
    objective = ThroughputObjective(topology_of(snapshot), snapshot.workload)
    cost, bound = objective.cost(placement), objective.bottleneck(placement)
    if bound is None or not math.isfinite(cost.seconds):
        return None
    return Foreseen(cost.parts["tokens_per_s"], *bound)
