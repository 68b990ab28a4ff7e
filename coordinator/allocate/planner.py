"""The throughput planner: a swarm and a workload in, who holds what out. Pure, and the same bit for bit anywhere.

`plan` searches, `repair` mends at once what a loss has left. Both score with `cost.throughput.ThroughputObjective`.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.allocate.interface import NoLayout
from shoal.coordinator.allocate.partition import partition
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.shares import split
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.protocol.topology import Topology

WORK_64 = 60_000_000
"""Units that give 64 devices a plan within a second of one core; see README.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A placement with what it gives. Devices are indexes of the topology that it was made for."""

    placement: Placement
    cost: Cost
    """As `ThroughputObjective` has it, without what moving there costs."""
    tokens_per_s: float
    shares: tuple[tuple[float, ...], ...]
    """Of its stage's microbatches that each member should get, in the order of `placement.stages`; each adds to 1."""
    parts: tuple[tuple[float, ...], ...]
    """Of its stage's gradient that each member should add up (`Member.bandwidth`); each adds to 1."""
    left_out: tuple[int, ...]
    """Devices that hold nothing: they would slow the others down, or nothing was found for them."""
    moving_s: float = 0.0
    """Seconds of the whole swarm's work that moving there from `current` costs."""
    work: int = 0
    """Units spent."""


def plan(
    topology: Topology,
    workload: Workload,
    *,
    num_stages: int | None = None,
    seed: int = 0,
    work: int = WORK_64,
    current: Placement | None = None,
    horizon_s: float = 600.0,
    gain_min: float = 0.02,
    staleness_penalty: float = 0.0,
) -> Planned:
    """The placement of the most tokens a second that the search finds.

    Args:
        num_stages: None: several are tried, the best is taken; with a `current`, its number.
        work: a budget in units of `search.WORK_PER_SECOND`, not in seconds.
        current: where everybody is, empty stages allowed; the search begins there, and what a device has to fetch to
            hold other layers counts as lost work, spread over `horizon_s`.
        gain_min: what a change must gain beyond that (relative), else `current` is returned as it is.
    Raises: NoLayout: no placement of so many stages is possible.
    """
    stages = num_stages or (
        len(current.stages) if current else min(workload.num_layers, max(1, topology.num_devices // 4))
    )
    bounds = partition(workload.layer_flop, stages)
    groups: list[list[int]] = [[] for _ in range(stages)]
    speed = [0.0] * stages
    order = sorted(range(topology.num_devices), key=lambda d: (-float(topology.flop_per_s[d]), d))
    for device in order:
        open_to = [k for k in range(stages) if k > 0 or topology.may_feed[device]]
        if open_to:
            k = min(open_to, key=lambda k: (bool(groups[k]), speed[k], k))
            groups[k].append(device)
            speed[k] += float(topology.flop_per_s[device])
    placement = Placement(stages=tuple(tuple(sorted(group)) for group in groups), bounds=bounds)
    return planned(topology, workload, placement, staleness_penalty=staleness_penalty)


def repair(topology: Topology, workload: Workload, current: Placement, lost: Collection[int]) -> Planned:
    """`current` without the devices `lost`, by the fewest changes: spares take their places where that helps, a stage
    that nobody holds any more gets somebody from the richest; boundaries stay. No search.

    Raises: NoLayout.
    """
    gone = set(lost)
    stages = tuple(tuple(d for d in stage if d not in gone) for stage in current.stages)
    return planned(topology, workload, Placement(stages=stages, bounds=current.bounds))


def planned(topology: Topology, workload: Workload, placement: Placement, *, staleness_penalty: float = 0.0) -> Planned:
    """Score a placement from anywhere. Raises: NoLayout: it is impossible, and why."""
    cost = ThroughputObjective(topology, workload, staleness_penalty=staleness_penalty).cost(placement)
    if not np.isfinite(cost.seconds):
        raise NoLayout(cost.why)
    shares = split(topology, workload, placement)
    return Planned(
        placement=placement,
        cost=cost,
        tokens_per_s=cost.parts["tokens_per_s"],
        shares=shares.shares,
        parts=shares.parts,
        left_out=placement.spares(topology.num_devices),
    )
