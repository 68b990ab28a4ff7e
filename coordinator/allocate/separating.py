"""Choose the members that must leave a layout because they cannot reach the members they work with. Pure.

All members of a stage all-reduce with each other, so each must reach every other. A microbatch visits one member of
each stage, so a member must reach at least one member of the stage before and of the stage after. The rule decides at
once: the member that fails to reach most others leaves. A search may find a better place for it later.
"""

from collections.abc import Iterable, Sequence

from shoal.coordinator.allocate.interface import MeasuredPeer
from shoal.coordinator.allocate.reachability import Pair, pair_of


def reaches_all(peer: MeasuredPeer, others: Iterable[MeasuredPeer], unreachable: frozenset[Pair]) -> bool:
    """True if `peer` can reach each of `others`."""
    return not unreachable or all(pair_of(peer.peer, other.peer) not in unreachable for other in others)


def is_cut_off(
    peer: MeasuredPeer, index: int, groups: Sequence[Sequence[MeasuredPeer]], unreachable: frozenset[Pair]
) -> bool:
    """True if `peer` at stage `index` reaches no member of a neighbouring stage that has members."""
    if not unreachable:
        return False
    near = (groups[k] for k in (index - 1, index + 1) if 0 <= k < len(groups))
    return any(group and not any(reaches_all(peer, [other], unreachable) for other in group) for group in near)


def separated(groups: Sequence[Sequence[MeasuredPeer]], unreachable: frozenset[Pair]) -> list[MeasuredPeer]:
    """Choose the members of `groups` that must leave so that each remaining one reaches its whole group and a member of
    each neighbouring one. The last member of a group never leaves."""
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
        # A peer without the stage's state leaves before one with it; among equals the slower one leaves.
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
