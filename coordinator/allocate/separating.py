"""Finds the members of a layout that have to leave it because they cannot reach those with whom they work. Pure.

All members of a stage reduce with each other, so none of them may be out of another's reach. A microbatch needs one
member of each stage, so a member must reach somebody of the stage before and of the stage behind. Who goes is decided
by rule, at once: whoever is out of reach for most. Where a search finds a better place for it, it goes there later.
"""

from collections.abc import Iterable, Sequence

from shoal.coordinator.allocate.interface import MeasuredPeer
from shoal.coordinator.reachability import Pair, pair_of


def reaches_all(peer: MeasuredPeer, others: Iterable[MeasuredPeer], unreachable: frozenset[Pair]) -> bool:
    """Whether `peer` can reach each of `others`."""
    return not unreachable or all(pair_of(peer.peer, other.peer) not in unreachable for other in others)


def is_cut_off(
    peer: MeasuredPeer, index: int, groups: Sequence[Sequence[MeasuredPeer]], unreachable: frozenset[Pair]
) -> bool:
    """Whether `peer` at stage `index` reaches nobody of a neighbouring stage that has members."""
    if not unreachable:
        return False
    near = (groups[k] for k in (index - 1, index + 1) if 0 <= k < len(groups))
    return any(group and not any(reaches_all(peer, [other], unreachable) for other in group) for group in near)


def separated(groups: Sequence[Sequence[MeasuredPeer]], unreachable: frozenset[Pair]) -> list[MeasuredPeer]:
    """Choose the members of `groups` that have to leave, so that all who stay can reach their whole group and somebody
    of each neighbouring one. The last member of a group never leaves."""
    if not unreachable:
        return []
    left = [list(group) for group in groups]
    leaving: list[MeasuredPeer] = []
    while (found := _next(left, unreachable)) is not None:
        index, peer = found
        left[index].remove(peer)
        leaving.append(peer)
    return leaving


def _next(groups: list[list[MeasuredPeer]], unreachable: frozenset[Pair]) -> tuple[int, MeasuredPeer] | None:
    everybody = [peer for group in groups for peer in group]

    def lost(peer: MeasuredPeer, others: Iterable[MeasuredPeer]) -> int:
        return sum(not reaches_all(peer, [other], unreachable) for other in others)

    candidates = [
        # Who holds the stage's state stays before who does not; else the slower one goes.
        ((lost(peer, group), lost(peer, everybody), peer.synced_stage != index, -peer.flop_per_s, rank), index, peer)
        for index, group in enumerate(groups)
        if len(group) > 1
        for rank, peer in enumerate(group)
        if lost(peer, group) or is_cut_off(peer, index, groups, unreachable)
    ]
    if not candidates:
        return None
    _, index, peer = max(candidates, key=lambda each: each[0])
    return index, peer
