"""An allocator that always answers with the same placement: for strategies that plan once, and for baselines."""

from collections.abc import Mapping
from itertools import pairwise

from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, NoLayout, Snapshot
from shoal.coordinator.cost.placement import Placement
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Member, Plan, Stage


class PinnedAllocator:
    """Implements `Allocator`. Who is not there is left out, who has no place is a spare.

    Args:
        peers: device index -> who it is.
    """

    searches = False

    def __init__(self, placement: Placement, peers: Mapping[int, PeerID]) -> None:
        self._placement = placement
        self._peers = peers

    def allocate(self, snapshot: Snapshot, previous: Plan | None, *, seed: int) -> Layout:
        there = {peer.peer: peer for peer in snapshot.peers}
        stages: list[Stage] = []
        for devices, (first, last) in zip(self._placement.stages, pairwise(self._placement.bounds), strict=True):
            holders = [there[self._peers[device]] for device in devices if self._peers[device] in there]
            if not holders:
                raise NoLayout(f"nobody is there who could hold stage {len(stages)}")
            stages.append(Stage(first_layer=first, last_layer=last, members=_members(holders)))
        placed = {member.peer for stage in stages for member in stage.members}
        spares = tuple(peer for peer in there if peer not in placed)
        return Layout(stages=tuple(stages), spares=spares, reason=f"the given placement: {len(placed)} peers hold it")

    def search(self, snapshot: Snapshot, previous: Plan | None, *, seed: int) -> tuple[Layout | None, str]:
        return None, "the placement is given"


def _members(holders: list[MeasuredPeer]) -> tuple[Member, ...]:
    """Traffic by speed, equal parts of the reduction."""
    speed = sum(peer.flop_per_s for peer in holders)
    return tuple(
        Member(peer=peer.peer, share=peer.flop_per_s / speed, bandwidth=1.0 / len(holders)) for peer in holders
    )
