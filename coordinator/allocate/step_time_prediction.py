"""Estimates of a layout's speed and bottleneck by the current figures, and its tensor formats. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from shoal.coordinator.allocate.interface import SwarmSnapshot
from shoal.coordinator.allocate.measured_topology import topology_of
from shoal.coordinator.allocate.repartitioning import placement_of
from shoal.coordinator.cost.format_choice import formats_of
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import FormatBytes, WireBytes
from shoal.protocol.plan import Foreseen, Stage
from shoal.protocol.wire_format import Formats


def predict_step_time(
    snapshot: SwarmSnapshot, stages: Sequence[Stage], wire: WireBytes | None = None, *, synchronous: bool = False
) -> Foreseen | None:
    """Return the layout's speed and bottleneck by the throughput objective; None if they cannot be computed.

    Args:
        snapshot: with workload and network. Peers that are not in it are left out of the stages.
        wire: the bytes of travelling tensors; None: as in the snapshot's workload.
        synchronous: without running ahead (s_max = 0).
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
    snapshot: SwarmSnapshot, stages: Sequence[Stage], takes: FormatBytes, *, kept: Formats | None = None
) -> Formats:
    """Choose the formats in which the stages' tensors travel (`cost/format_choice.py`); the thinnest if a stage has no
    known peer.

    Args:
        snapshot: as `predict_step_time`.
        takes: the formats to choose from.
        kept: the present formats of the stages.
    """
    assert snapshot.workload is not None
    placement = placement_of(stages, snapshot.peers)
    if not all(placement.stages):
        return takes.thinnest(len(stages))
    return formats_of(topology_of(snapshot), snapshot.workload, placement, takes, kept=kept)
