"""Splits a placement's work: each member's part of its stage's traffic and of its reduction.

Both go into the plan (`Member.share`, `Member.bandwidth`), and the throughput objective assumes exactly these values.
Every live or simulated plan is made with `split`.
"""

from dataclasses import dataclass

import numpy as np

from shoal.coordinator.cost.path_rates import reduction_parts
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The shares in the order of `Placement.stages`; each stage's numbers are positive and add to 1."""

    shares: tuple[tuple[float, ...], ...]
    """Each member's share of the stage's microbatches."""
    parts: tuple[tuple[float, ...], ...]
    """The part of the stage's gradient that each member adds up for the others."""


def split(topology: Topology, workload: Workload, placement: Placement) -> Split:
    """Split a placement's work. Shares follow each member's capacity for a step (`ThroughputObjective`): its compute,
    its paths to both neighbours, and the part of its card that the reduction leaves. Empty stages give empty tuples."""
    return Split(
        shares=ThroughputObjective(topology, workload).shares(placement),
        parts=tuple(
            tuple(
                float(part) for part in reduction_parts(topology, np.asarray(stage, dtype=np.int64), workload.cut_bytes)
            )
            for stage in placement.stages
        ),
    )
