"""Says how fast a layout should be with the figures of today, and what bounds it. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.coordinator.allocate.dividing import placement_of
from shoal.coordinator.allocate.interface import Snapshot
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.plan import Foreseen, Stage
from shoal.protocol.wire_format import Formats

SPARED = 0.98
"""A new layout takes wider formats if its tokens/s with them are at least this share of those with the thinnest."""
KEPT = 0.95
"""A live layout keeps its wider formats as long as its tokens/s are at least this share of those with the thinnest."""


def foresee(
    snapshot: Snapshot, stages: Sequence[Stage], workload: Workload | None = None, *, synchronous: bool = False
) -> Foreseen | None:
    """How fast the stages should be by the throughput objective; None: it cannot say.

    Args:
        snapshot: with workload and network. Peers that are not in it are left out of the stages.
        workload: with the formats in which tensors travel; None: the snapshot's.
        synchronous: without anything that runs ahead (s_max = 0).
    """
    workload = workload or snapshot.workload
    assert workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return None
    if synchronous:
        workload = replace(workload, s_max=0, control=None)
    objective = ThroughputObjective(topology_of(snapshot), workload)
    cost, bound = objective.cost(placement), objective.bottleneck(placement)
    if bound is None or not math.isfinite(cost.seconds):
        return None
    return Foreseen(cost.parts["tokens_per_s"], *bound)


def choose_formats(
    snapshot: Snapshot,
    stages: Sequence[Stage],
    workloads: Mapping[Formats, Workload],
    *,
    kept: Formats | None = None,
) -> Formats:
    """The first of the formats with which the step hardly waits: what costs no time is not made thinner, as that costs
    learning. Where nobody can say, it is the last, with which layouts are searched.

    Args:
        workloads: by format, what costs least learning first, the thinnest last.
        kept: the formats that the stages have now.
    """
    foreseen = [foresee(snapshot, stages, workload) for workload in workloads.values()]
    rates = [each.tokens_per_s if each is not None else 0.0 for each in foreseen]
    if not all(rates):
        return [*workloads][-1]
    return next(
        formats
        for formats, rate in zip(workloads, rates, strict=True)
        if rate >= (KEPT if formats == kept else SPARED) * rates[-1]
    )
