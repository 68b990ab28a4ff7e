"""Looks for another division of the model into stages: other boundaries, more stages or fewer. Pure.

Such a change has a price. While training goes on, everybody fetches the layers that it does not hold, and steps are a
little slower. Then the run stands still (`Plan.ends_at`): the pipeline drains, what is still missing travels, and the
pipeline fills again. What a search finds must gain more than that within the time for which a layout is expected to
last.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.cost.placement import Cost, Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import STATE_BYTES_PER_PARAMETER, Workload
from shoal.protocol.plan import Plan
from shoal.protocol.topology import Topology

DRAIN_STEPS = 2.0
"""How many steps the pipeline does without while it drains and fills, and the plans are agreed upon."""
FOLLOWED_PART = 0.5
"""A peer keeps up with the gradients of so many of the layers that it has fetched as travel in this part of a step; the
others it fetches in the standstill (`peer/MEASURED.md`)."""
SLOWED = 0.05
"""Steps are slower by this part while state travels: by 0.3 to 4 % where it was measured."""
GAIN_MIN = 0.1
"""The gain in tokens/s, by the objective, below which nobody fetches anything: figures are measured, and a division
that is hardly better is as likely to be worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A placement that is worth its standstill."""

    placement: Placement
    gain: float
    """The gain in tokens/s, relative."""
    standstill_s: float


def placement_of(plan: Plan, peers: tuple[MeasuredPeer, ...]) -> Placement:
    """The live plan's layout, by the numbers of `peers`; peers that are not there are left out."""
    number = {peer.peer: device for device, peer in enumerate(peers)}
    return Placement(
        stages=tuple(tuple(sorted(number[p] for p in stage.peers if p in number)) for stage in plan.stages),
        bounds=(0, *(stage.last_layer for stage in plan.stages)),
    )


def worth_its_standstill(
    snapshot: Snapshot, topology: Topology, current: Placement, found: Placement, *, horizon_s: float
) -> Division | None:
    """`found`, if it gains enough over `current` and the standstill pays within `horizon_s`."""
    if found.bounds == current.bounds or not all(current.stages):
        return None
    workload = snapshot.workload
    assert workload is not None
    objective = ThroughputObjective(topology, workload)
    before_s, after_s = seen_or_foreseen_s(snapshot, objective.cost(current)), objective.cost(found).seconds
    gain = before_s / after_s - 1.0
    travel_s = fetch_s(topology, workload, current, found)
    standstill_s = DRAIN_STEPS * before_s + left_s(workload, travel_s, step_s=before_s)
    price_s = standstill_s + SLOWED * travel_s
    if not gain >= GAIN_MIN or not (1.0 - after_s / before_s) * (horizon_s - travel_s) > price_s:
        return None
    return Division(placement=found, gain=gain, standstill_s=standstill_s)


def seen_or_foreseen_s(snapshot: Snapshot, live: Cost) -> float:
    """What a step of the live layout is reckoned to take. Where it is seen to be quicker than the figures of its
    devices and links say, a figure is wrong, and nothing is gained by leaving what is quick."""
    if not snapshot.seen_tokens_per_s or not math.isfinite(live.seconds):
        return live.seconds
    return live.seconds * min(1.0, live.parts["tokens_per_s"] / snapshot.seen_tokens_per_s)


def fetch_s(topology: Topology, workload: Workload, current: Placement, found: Placement) -> float:
    """Seconds until everybody has what it is to hold: the busiest download, or the upload of those that alone hold a
    layer, whichever takes longer. Each layer comes in equal parts from its holders."""
    num_devices = topology.num_devices
    held = [set[int]() for _ in range(num_devices)]
    for devices, first, last in _ranges(current):
        for device in devices:
            held[device].update(range(first, last))
    layer_bytes = STATE_BYTES_PER_PARAMETER * np.array(workload.layer_parameters)
    into, out = np.zeros(num_devices), np.zeros(num_devices)
    for devices, first, last in _ranges(found):
        for device in devices:
            for layer in sorted(set(range(first, last)) - held[device]):
                holders = [other for other in range(num_devices) if layer in held[other]]
                into[device] += layer_bytes[layer]
                out[holders] += layer_bytes[layer] / len(holders)
    down = np.maximum(topology.bytes_per_s.max(axis=0), 1.0)
    up = np.maximum(topology.bytes_per_s.max(axis=1), 1.0)
    return float(max((into / down).max(), (out / up).max()))


def left_s(workload: Workload, travel_s: float, *, step_s: float) -> float:
    """How much of `travel_s` is left for the standstill: of layers that were fetched ahead the gradient of one step,
    the others whole."""
    part = workload.gradient_bytes_per_parameter / STATE_BYTES_PER_PARAMETER
    gradients_s = part * travel_s
    followed = min(1.0, FOLLOWED_PART * step_s / gradients_s) if gradients_s > 0.0 else 1.0
    return travel_s * (1.0 - followed * (1.0 - part))


def _ranges(placement: Placement) -> list[tuple[tuple[int, ...], int, int]]:
    return list(zip(placement.stages, placement.bounds, placement.bounds[1:], strict=False))
