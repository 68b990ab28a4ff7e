"""Says how fast a layout should be with the figures of today, and what bounds it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from shoal.coordinator.allocate.dividing import placement_of
from shoal.coordinator.allocate.interface import Snapshot
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.protocol.plan import Foreseen, Stage
from shoal.protocol.wire_format import WireFormat

SPARED = 0.98
"""A wider format of reductions is chosen if the tokens/s with it are at least this share of those with the thinnest."""
KEPT = 0.95
"""A live layout keeps its wider format as long as its tokens/s are at least this share of those with the thinnest."""


def foresee(
    snapshot: Snapshot, stages: Sequence[Stage], sums: WireFormat | None = None, *, synchronous: bool = False
) -> Foreseen | None:
    """How fast the stages should be by the throughput objective; None: it cannot say.

    Args:
        snapshot: with workload and network. Peers that are not in it are left out of the stages.
        sums: the format of reductions; None: the workload's.
        synchronous: without anything that runs ahead (s_max = 0).
    """
    assert snapshot.workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return None
    workload = snapshot.workload if sums is None else snapshot.workload.with_sums(sums)
    if synchronous:
        workload = replace(workload, s_max=0, control=None)
    objective = ThroughputObjective(topology_of(snapshot), workload)
    cost, bound = objective.cost(placement), objective.bottleneck(placement)
    if bound is None or not math.isfinite(cost.seconds):
        return None
    return Foreseen(cost.parts["tokens_per_s"], *bound)


def choose_sums(
    snapshot: Snapshot, stages: Sequence[Stage], forms: Sequence[WireFormat], *, kept: WireFormat | None = None
) -> WireFormat:
    """The widest of `forms` that the step hardly waits for: what costs no time is not made thinner, as that costs
    learning. Where nobody can say, it is the thinnest, with which layouts are searched.

    Args:
        forms: the widest first.
        kept: the format that the stages have now.
    """
    foreseen = [foresee(snapshot, stages, form) for form in forms]
    rates = [each.tokens_per_s if each is not None else 0.0 for each in foreseen]
    if not all(rates):
        return forms[-1]
    return next(
        form for form, rate in zip(forms, rates, strict=True) if rate >= (KEPT if form == kept else SPARED) * rates[-1]
    )
