"""Defines an allocator that keeps one placement, for strategies that plan once."""

from collections.abc import Mapping
from itertools import pairwise

from shoal.coordinator.allocate.interface import Layout, NoLayout, SwarmSnapshot
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import Split
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Plan, Stage


class PinnedAllocator:
    """Implements `Allocator` by one placement, without absent devices. A peer outside the placement gets no stage.

    Args:
        peers: device index -> peer.
        split: how the throughput objective divides the work of each stage among its members.
    """

    def __init__(self, placement: Placement, peers: Mapping[int, PeerID], split: Split) -> None:
        self._placement = placement
        self._peers = peers
        self._members = {
            peers[device]: Member(peer=peers[device], share=share, bandwidth=part)
            for devices, shares, parts in zip(placement.stages, split.shares, split.parts, strict=True)
            for device, share, part in zip(devices, shares, parts, strict=True)
        }

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        there = {peer.peer for peer in snapshot.peers}
        stages: list[Stage] = []
        for devices, (first, last) in zip(self._placement.stages, pairwise(self._placement.bounds), strict=True):
            members = tuple(self._members[self._peers[device]] for device in devices if self._peers[device] in there)
            if not members:
                raise NoLayout(f"no device is present that can hold stage {len(stages)}")
            stages.append(Stage(first_layer=first, last_layer=last, members=members))
        placed = {member.peer for stage in stages for member in stage.members}
        spares = tuple(peer.peer for peer in snapshot.peers if peer.peer not in placed)
        return Layout(stages=tuple(stages), spares=spares, reason=f"the given placement: {len(placed)} peers hold it")
