"""Prices a stage that one peer alone holds, and gives it a second holder where that costs less. Pure.

With a stage's only holder dead the run goes back to a snapshot, and everybody loses the steps since then. A second
holder prevents that, but has to reduce with the first one at each commit, which over a thin line may take longer than
the step. Which of the two costs less follows from how often the peer has failed, and from what going back costs.
"""

from collections.abc import Sequence
from dataclasses import replace

from shoal.coordinator.allocate.interface import MeasuredPeer, Snapshot
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.experts.failure_records import HORIZON_S

TRIED = 16
"""The number of devices without a place that are tried as second holders: each costs an evaluation."""


def loss_alone(snapshot: Snapshot, peer: MeasuredPeer) -> float:
    """The part of all work that is lost, in the long run, because `peer` alone holds a stage."""
    return peer.failure_probability * snapshot.going_back_s / HORIZON_S


def with_second_holders(objective: ThroughputObjective, placement: Placement, snapshot: Snapshot) -> Placement:
    """Give a second holder to each stage that has one, where the steps become slower by less than what the death of a
    lone holder costs. That device goes there which costs least, whether it was left out or elsewhere.

    Args:
        placement: of the devices of `objective`'s topology, which are the peers of `snapshot` in their order.
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
    """`stages` with one device more at stage `index`."""
    return (*stages[:index], tuple(sorted((*stages[index], device))), *stages[index + 1 :])


def _moved(placement: Placement, device: int, index: int) -> Placement:
    rest = tuple(tuple(d for d in stage if d != device) for stage in placement.stages)
    return replace(placement, stages=with_device(rest, index, device))
