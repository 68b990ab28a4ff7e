"""Says how fast a layout should be with the figures of today, what bounds it, and how its tensors travel. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from shoal.coordinator.allocate.dividing import placement_of
from shoal.coordinator.allocate.interface import Snapshot
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.coordinator.cost.format_choice import formats_of
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import FormatBytes, WireBytes
from shoal.protocol.plan import Foreseen, Stage
from shoal.protocol.wire_format import Formats


def foresee(
    snapshot: Snapshot, stages: Sequence[Stage], wire: WireBytes | None = None, *, synchronous: bool = False
) -> Foreseen | None:
    """How fast the stages should be by the throughput objective; None: it cannot say.

    Args:
        snapshot: with workload and network. Peers that are not in it are left out of the stages.
        wire: what tensors take as they travel; None: all what the snapshot's workload says.
        synchronous: without anything that runs ahead (s_max = 0).
    """
    workload = snapshot.workload
    assert workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return None
    if synchronous:
        workload = replace(workload, s_max=0, control=None)
    objective = ThroughputObjective(topology_of(snapshot), workload, wire)
    cost, bound = objective.cost(placement), objective.bottleneck(placement)
    if bound is None or not math.isfinite(cost.seconds):
        return None
    return Foreseen(cost.parts["tokens_per_s"], *bound)


def choose_formats(
    snapshot: Snapshot, stages: Sequence[Stage], takes: FormatBytes, *, kept: Formats | None = None
) -> Formats:
    """How the stages' tensors are to travel (`cost/format_choice.py`). Where nobody can say, all in the thinnest way.

    Args:
        snapshot: as `foresee`.
        takes: the formats among which to choose.
        kept: the formats that the stages have now.
    """
    assert snapshot.workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return takes.thinnest(len(stages))
    return formats_of(topology_of(snapshot), snapshot.workload, placement, takes, kept=kept)
