"""Price a stage that only one peer holds, and give it a second holder where that costs less. Pure.

If a stage's only holder dies, the run goes back to a snapshot and all peers lose the steps since then. A second holder
prevents that, but the two must all-reduce at each commit, which over a slow line may take longer than the step. The
peer's failure rate and the cost of going back decide which of the two is cheaper.
"""

from collections.abc import Sequence
from dataclasses import replace

from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.experts.failure_records import HORIZON_S

TRIED = 16
"""The number of unplaced devices that are tried: each costs an evaluation or one for each stage."""


def loss_alone(snapshot: SwarmSnapshot, peer: MeasuredPeer) -> float:
    """Return the part of all work that is lost in the long run because `peer` is the only holder of a stage."""
    return peer.failure_probability * snapshot.going_back_s / HORIZON_S


def with_second_holders(objective: ThroughputObjective, placement: Placement, snapshot: SwarmSnapshot) -> Placement:
    """Give a second holder to each single-holder stage where that slows the steps by less than the expected loss. The
    device that costs least goes there, whether it was unplaced or in another stage.

    Args: placement: over the devices of `objective`'s topology, which are `snapshot.peers` in their order.
    """
    settled: set[int] = set()
    while True:
        stages = placement.stages
        lone = next((k for k, stage in enumerate(stages) if len(stage) == 1 and k not in settled), None)
        if lone is None:
            return placement
        settled.add(lone)
        left_out = placement.spares(objective.topology.num_devices)[:TRIED]
        givers = [device for stage in stages if len(stage) > 2 for device in stage]
        options = [_moved(placement, device, lone) for device in (*left_out, *givers)]
        if not options:
            continue
        costs = [objective.cost(option).seconds for option in options]
        allowed = 1.0 + loss_alone(snapshot, snapshot.peers[stages[lone][0]])
        if min(costs) <= allowed * objective.cost(placement).seconds:
            placement = options[costs.index(min(costs))]


def with_device(stages: Sequence[tuple[int, ...]], index: int, device: int) -> tuple[tuple[int, ...], ...]:
    """Return `stages` with `device` added to stage `index`."""
    return (*stages[:index], tuple(sorted((*stages[index], device))), *stages[index + 1 :])


def _moved(placement: Placement, device: int, index: int) -> Placement:
    rest = tuple(tuple(d for d in stage if d != device) for stage in placement.stages)
    return replace(placement, stages=with_device(rest, index, device))
