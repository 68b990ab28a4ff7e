"""The rule-based allocator: it balances measured speed over stages and keeps placed peers in place. Pure.

The first plan cuts the model so that the most expensive stage is as cheap as possible; if the number of stages is free,
it takes the fewest that fit into the peers' memory. It then takes the peers, fastest first, and gives each one to the
*poorest* stage that fits into its memory: the stage with the least total speed relative to its cost (longest processing
time first, Graham 1969). Later plans keep the boundaries and each peer's stage, because moving state is expensive. A
newcomer joins the poorest stage, or its old stage if that is about as poor. A stage that lost its last holder gets a
spare, a newcomer, or a member of the richest stage. A draining peer is left out once another member holds its stage's
state.

All members of a stage all-reduce with each other, so each must reach every other. A microbatch visits one member of
each stage, so each member must reach at least one member of the stage before and one of the stage after. Where a member
fails in this, the member that cannot reach the most others leaves its stage at once (`separated`). A search may find a
better place for it later."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from blake3 import blake3

from shoal.coordinator.allocate.interface import NO_MOVES, Layout, MeasuredPeer, NoLayout, SwarmSnapshot
from shoal.coordinator.allocate.measured import Pair, pair_of
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STAGES_MAX
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.topology import Floats

FIRST_PLAN = "first plan: "


@dataclass(slots=True)
class Slot:
    """A stage while it is being filled. `holders` includes draining peers that must stay for now."""

    index: int
    first_layer: int
    last_layer: int
    cost: float
    holders: list[MeasuredPeer] = field(default_factory=list)
    needed_bytes: float = 0.0
    """The memory that a holder needs for the stage's state and one step on it."""
    unreachable: frozenset[Pair] = frozenset()

    @property
    def stayers(self) -> list[MeasuredPeer]:
        """The holders that are not draining (leaving)."""
        return [peer for peer in self.holders if not peer.draining]

    @property
    def headroom(self) -> float:
        """FLOP/s of the staying holders / the stage's cost. The stage with the least headroom limits the pipeline."""
        return sum(peer.flop_per_s for peer in self.stayers) / self.cost

    def admits(self, peer: MeasuredPeer) -> bool:
        """True if `peer` may hold this stage: it has the memory, and for stage 0 the text, and reaches all holders."""
        able = (peer.has_data or self.index > 0) and peer.memory_bytes >= self.needed_bytes
        return able and not num_unreachable(peer, self.holders, self.unreachable)


Choose = Callable[[Sequence[Slot], Sequence[Slot], MeasuredPeer], Slot]
"""A function (all slots, the slots that the newcomer may serve, the newcomer) -> the slot that it joins."""


class GreedyAllocator:
    """Implements `Allocator` by the rules of this module."""

    def allocate(self, snapshot: SwarmSnapshot, previous: Plan | None, *, seed: int) -> Layout:
        return arrange(snapshot, previous, seed=seed)


def arrange(
    snapshot: SwarmSnapshot,
    previous: Plan | None,
    *,
    seed: int,
    standby: Collection[PeerID] = (),
    choose: Choose | None = None,
) -> Layout:
    """Make a layout by the rules of this module.

    Args:
        standby: spares and newcomers that get no stage.
        choose: picks the stage where a newcomer helps most; None: `poorest`.
    Raises: NoLayout: the peers cannot hold the model."""
    if previous is not None:
        slots = slots_of(snapshot, previous)
        spares, moved = _fill(snapshot, slots, seed, standby, choose or poorest)
        stages = tuple(stage_of(slot) for slot in slots)
        reason = _reason(stages, spares, previous, moved, snapshot.unreachable)
        return Layout(stages=stages, spares=spares, reason=reason)
    most = min(len(snapshot.layer_costs), sum(not peer.draining for peer in snapshot.peers), STAGES_MAX)
    why = NoLayout("no peer is here")
    for number in range(1, most + 1) if snapshot.num_stages is None else (snapshot.num_stages,):
        ends = pairwise(partition(snapshot.layer_costs, number))
        slots = [_slot(snapshot, number, index, first, last, []) for index, (first, last) in enumerate(ends)]
        try:
            spares, _ = _fill(snapshot, slots, seed, standby, choose or poorest)
        except NoLayout as flaw:
            why = flaw
            continue
        reason = first_reason(sum(len(slot.holders) for slot in slots) + len(spares), number)
        return Layout(stages=tuple(stage_of(slot) for slot in slots), spares=spares, reason=reason)
    raise why


def _fill(
    snapshot: SwarmSnapshot, slots: list[Slot], seed: int, standby: Collection[PeerID], choose: Choose
) -> tuple[tuple[PeerID, ...], list[tuple[PeerID, int]]]:
    """Fill the stages. Returns: (spares, [(peer, new stage)] of peers taken from other stages). Raises: NoLayout."""
    by_id = {peer.peer: peer for peer in snapshot.peers}
    placed = {peer.peer for slot in slots for peer in slot.holders}
    newcomers = sorted(
        (p for p in snapshot.peers if p.peer not in placed and p.peer not in standby and not p.draining),
        key=lambda peer: (-peer.flop_per_s, _lot(seed, peer.peer)),
    )
    kept_standby = [peer for peer in standby if peer in by_id and not by_id[peer].draining]
    spares = tuple(sorted((*_deal(slots, newcomers, choose), *kept_standby)))
    moved = _rescue(slots)
    _release(slots)
    for slot in slots:
        if not slot.holders:
            if len(placed) + len(newcomers) < len(slots):
                raise NoLayout(f"{len(placed) + len(newcomers)} peers cannot hold {len(slots)} stages")
            raise NoLayout(_why_empty(slot, snapshot.peers))
    return spares, moved


def _why_empty(slot: Slot, peers: Sequence[MeasuredPeer]) -> str:
    able = [peer for peer in peers if peer.memory_bytes >= slot.needed_bytes]
    if not able and peers:
        needed, most = slot.needed_bytes / 1e9, max(peer.memory_bytes for peer in peers) / 1e9
        return f"stage {slot.index} takes {needed:.1f} GB of memory, and no peer has more than {most:.1f} GB"
    what = "has the run's text" if slot.index == 0 else "is free"
    return f"no peer {what} to hold stage {slot.index}"


def _slot(
    snapshot: SwarmSnapshot, num_stages: int, index: int, first: int, last: int, holders: list[MeasuredPeer]
) -> Slot:
    """Make one slot. Its need of memory is computed as if all stages had equally many peers."""
    members = max(1, len(snapshot.peers) // num_stages)
    w = snapshot.workload
    needed_bytes = w.resident_bytes(first, last, members=members) if w is not None else 0.0
    cost = sum(snapshot.layer_costs[first:last])
    return Slot(index, first, last, cost, holders, needed_bytes, snapshot.unreachable)


def slots_of(snapshot: SwarmSnapshot, previous: Plan) -> list[Slot]:
    """Return the stages of `previous`, each with its live holders that can hold the stage and reach each other."""
    by_id = {peer.peer: peer for peer in snapshot.peers}
    slots = [
        _slot(
            snapshot,
            len(previous.stages),
            index,
            stage.first_layer,
            stage.last_layer,
            # A stage-0 holder with a different text cannot serve stage 0 any more.
            [peer for p in stage.peers if (peer := by_id.get(p)) and (index > 0 or peer.has_data)],
        )
        for index, stage in enumerate(previous.stages)
    ]
    for slot in slots:
        slot.holders = _with_room(slot, snapshot)
    leaving = {peer.peer for peer in separated([slot.holders for slot in slots], snapshot.unreachable)}
    for slot in slots:
        slot.holders = [peer for peer in slot.holders if peer.peer not in leaving]
    return slots


def _with_room(slot: Slot, snapshot: SwarmSnapshot) -> list[MeasuredPeer]:
    """Return the holders of a stage that have enough memory for it. Return all holders if the run places experts (then
    the memory that a member needs is not known), or if no holder with enough memory has the stage's state and stays."""
    roomy = [peer for peer in slot.holders if peer.memory_bytes >= slot.needed_bytes]
    has_state = any(peer.synced_stage == slot.index and not peer.draining for peer in roomy)
    is_placed = snapshot.workload is not None and snapshot.workload.experts is not None
    return roomy if has_state and not is_placed else slot.holders


def may_serve(slots: Sequence[Slot], slot: Slot, peer: MeasuredPeer) -> bool:
    """True if `peer` may hold this stage and reaches a member of each neighbouring stage."""
    return slot.admits(peer) and not is_cut_off(peer, slot.index, [s.holders for s in slots], slot.unreachable)


def _deal(slots: Sequence[Slot], newcomers: Iterable[MeasuredPeer], choose: Choose) -> list[PeerID]:
    """Add each newcomer to a stage that it may serve, empty stages first. Returns: the peers that may serve none."""
    waiting = list(newcomers)
    able = [peer for peer in waiting if may_serve(slots, slots[0], peer)] if not slots[0].stayers else []
    if able:
        # Stage 0 is filled first, while peers that can serve it are still free. If only some newcomers can serve it,
        # the slowest of these is enough to begin with; if all can, the fastest takes it.
        first = able[0] if len(able) == len(waiting) else able[-1]
        slots[0].holders.append(first)
        waiting.remove(first)
    spares = []
    for peer in waiting:
        able_at = [slot for slot in slots if may_serve(slots, slot, peer)]
        fitting = [slot for slot in able_at if not slot.stayers] or able_at
        if fitting:
            choose(slots, fitting, peer).holders.append(peer)
        else:
            spares.append(peer.peer)
    return spares


def poorest(slots: Sequence[Slot], fitting: Sequence[Slot], peer: MeasuredPeer) -> Slot:
    """Return the stage of `fitting` with the least headroom (FLOP/s / cost), the poorest. But if `peer` has a home (a
    stage where it starts sooner) that is poorer than the poorest stage would be with `peer`, return the home."""
    poorest = min(fitting, key=lambda slot: (slot.headroom, slot.index))
    bound = poorest.headroom + peer.flop_per_s / poorest.cost
    homes = [slot for slot in fitting if slot.index in peer.homes and slot.headroom <= bound]
    return min(homes, key=lambda slot: peer.homes.index(slot.index), default=poorest)


def _rescue(slots: Sequence[Slot]) -> list[tuple[PeerID, int]]:
    """If all members of a stage leave, it gets a member of the richest stage (most speed for its cost) that can spare
    one. If no other peer has the text, stage 0 may take the only holder of another stage, which is then rescued in
    turn."""
    enough = sum(len(slot.stayers) for slot in slots) >= len(slots)
    moved: list[tuple[PeerID, int]] = []
    for slot in slots:
        if slot.stayers:
            continue
        donors = [
            (_reluctance(other, peer), slot.index not in peer.homes, -other.headroom, other.index, -rank, other, peer)
            for other in slots
            if len(other.stayers) > 1 or (slot.index == 0 and enough)
            for rank, peer in enumerate(other.stayers)
            if may_serve(slots, slot, peer)
        ]
        if donors:
            *_, other, peer = min(donors, key=lambda donor: donor[:5])
            other.holders.remove(peer)
            slot.holders.append(peer)
            moved.append((peer.peer, slot.index))
    return moved


def _reluctance(slot: Slot, peer: MeasuredPeer) -> int:
    """Return what a stage loses if `peer` leaves: 3: its last member; 2: its only state; 1: its leader; 0: nothing."""
    if len(slot.stayers) == 1:
        return 3
    synced = [p for p in slot.stayers if p.synced_stage == slot.index]
    if synced == [peer]:
        return 2
    return 1 if peer is slot.stayers[0] else 0


def _release(slots: Sequence[Slot]) -> None:
    """Remove each stage's draining peers; keep one of them if no staying member has the stage's state."""
    for slot in slots:
        leaving = [peer for peer in slot.holders if peer.draining]
        if any(peer.synced_stage == slot.index for peer in slot.stayers):
            slot.holders = slot.stayers
        elif leaving:
            last = next((peer for peer in leaving if peer.synced_stage == slot.index), leaving[0])
            slot.holders = [peer for peer in slot.holders if peer is last or not peer.draining]


def stage_of(slot: Slot) -> Stage:
    """Return the slot as a plan's stage: work shares are proportional to speed, reduction parts to upload rate."""
    speed = sum(peer.flop_per_s for peer in slot.holders)
    upload = sum(peer.upload_bytes_per_s for peer in slot.holders)
    members = (
        Member(peer=p.peer, share=p.flop_per_s / speed, bandwidth=p.upload_bytes_per_s / upload) for p in slot.holders
    )
    return Stage(first_layer=slot.first_layer, last_layer=slot.last_layer, members=tuple(members))


def _reason(
    stages: Sequence[Stage],
    spares: Sequence[PeerID],
    previous: Plan,
    moved: Sequence[tuple[PeerID, int]],
    unreachable: frozenset[Pair],
) -> str:
    now = {peer for stage in stages for peer in stage.peers} | set(spares)
    before = set(previous.members)
    parts = [f"{peer[-8:]} joined" for peer in sorted(now - before)]
    parts += [f"{peer[-8:]} left" for peer in sorted(before - now)]
    parts += [f"{peer[-8:]} moved to stage {index}" for peer, index in moved]
    displaced = {p for old, new in zip(previous.stages, stages, strict=True) for p in set(old.peers) - set(new.peers)}
    parts += [
        f"{one[-8:]} and {other[-8:]} cannot reach each other"
        for one, other in sorted(unreachable)
        if displaced & now & {one, other} and {one, other} <= before
    ]
    # The list of changes is cut short, so that the plan of a large swarm still fits into one message.
    shown = parts[:4] + ([f"{len(parts) - 4} more changes"] if len(parts) > 4 else [])
    return ", ".join(shown) or NO_MOVES


def first_reason(num_peers: int, num_stages: int) -> str:
    peers, stages = ("peer" if num_peers == 1 else "peers"), ("stage" if num_stages == 1 else "stages")
    return f"{FIRST_PLAN}{num_peers} {peers} on {num_stages} {stages}"


def _lot(seed: int, peer: PeerID) -> bytes:
    """Return a sort key for `peer`, random by `seed`, that orders equally fast peers."""
    return blake3(f"{seed}/{peer}".encode()).digest(length=8)


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the bounds [num_stages + 1] of the division of layers in which the most expensive stage is cheapest."""
    assert 0 < num_stages <= len(costs)
    total = np.array([0.0, *accumulate(costs)])
    cost: Floats = np.where(np.tri(len(total), k=0, dtype=np.bool_), np.inf, total[None, :] - total[:, None])
    bounds = cheapest_cut([cost] * num_stages)
    assert bounds is not None
    return bounds


def cheapest_cut(costs: Sequence[Floats]) -> tuple[int, ...] | None:
    """Find the best cut of L layers into K stages, exactly, by dynamic programming in O(K L^2). Returns: its bounds;
    None if every cut is impossible.

    In the best cut the most expensive stage is cheapest. Ties are broken by the least sum of squares, which keeps the
    other stages even, then by earlier boundaries. This takes two passes: a single pass would minimise the largest cost
    among the first stages even where a later stage costs most and only the sum of squares matters.

    Args: costs: for each stage float64 [L + 1, L + 1], the cost of the layers from each bound to each later one; inf
    where that is impossible."""
    largest, _ = _cheapest(costs, np.maximum)
    if largest == math.inf:
        return None
    _, bounds = _cheapest([np.where(cost <= largest, cost * cost, np.inf) for cost in costs], np.add)
    return bounds


def _cheapest(costs: Sequence[Floats], join: Callable[[Floats, Floats], Floats]) -> tuple[float, tuple[int, ...]]:
    rest = np.full(len(costs[0]), np.inf)  # the cost of the later stages, by their first layer
    rest[-1] = 0.0
    ends = []
    for cost in reversed(costs):
        total = join(cost, rest[None, :])
        ends.append(total.argmin(axis=1))
        rest = total.min(axis=1)
    bounds = [0]
    for end in reversed(ends):
        bounds.append(int(end[bounds[-1]]))
    return float(rest[0]), tuple(bounds)


def num_unreachable(peer: MeasuredPeer, others: Iterable[MeasuredPeer], unreachable: frozenset[Pair]) -> int:
    """Return how many of `others` `peer` cannot reach."""
    return sum(pair_of(peer.peer, other.peer) in unreachable for other in others) if unreachable else 0


def is_cut_off(
    peer: MeasuredPeer, index: int, groups: Sequence[Sequence[MeasuredPeer]], unreachable: frozenset[Pair]
) -> bool:
    """True if a stage next to `index` has members, but none that `peer` can reach."""
    near = (groups[k] for k in (index - 1, index + 1) if 0 <= k < len(groups))
    return any(group and num_unreachable(peer, group, unreachable) == len(group) for group in near)


def separated(groups: Sequence[Sequence[MeasuredPeer]], unreachable: frozenset[Pair]) -> list[MeasuredPeer]:
    """Choose the members of `groups` (the stages) that must leave, so that each remaining member reaches all others of
    its group and a member of each neighbouring group. The last member of a group never leaves."""
    left = [list(group) for group in groups]
    leaving: list[MeasuredPeer] = []
    while unreachable:
        everybody = [peer for group in left for peer in group]
        candidates = [
            # A peer without the stage's state leaves before one with it; among equals the slower one leaves.
            (
                (
                    missed,
                    num_unreachable(peer, everybody, unreachable),
                    peer.synced_stage != index,
                    -peer.flop_per_s,
                    rank,
                ),
                peer,
            )
            for index, group in enumerate(left)
            if len(group) > 1
            for rank, peer in enumerate(group)
            if (missed := num_unreachable(peer, group, unreachable)) or is_cut_off(peer, index, left, unreachable)
        ]
        if not candidates:
            break
        _, leaver = max(candidates, key=lambda each: each[0])
        leaving.append(leaver)
        left = [[peer for peer in group if peer is not leaver] for group in left]
    return leaving
