"""Where an era begins, and when a stage has no peer left from which its state could come. Pure.

Versions grow within an era. An era ends when a stage has lost every holder of its state: at once if all of them are
dead, after three heartbeats if one lives and may only be fetching. The next one begins from the newest snapshot that is
whole on the disks of the peers that are left, or from the run's seed. An era's number is never used twice: what is on
disks, or under way, under the old number belongs to another history.

The era's first plan is `fresh`: members without state begin from its beginning. The first commit is followed by a plan
that is not fresh, so that a peer that restarts, or comes late, fetches from the others instead of beginning the era a
second time. If a newer snapshot is whole except for disks that are not here, the run waits for them: thirty heartbeats,
or as long as the peers that are here would take to train the same steps again, whichever is longer. A swarm that was
switched off as a whole comes back by the same rule.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.coordinator.plan_layout import Beginning, Layout
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import group_keys, held_keys
from shoal.protocol.limits import ERA_JUMP_MAX, ERA_MAX
from shoal.protocol.messages import Holding
from shoal.protocol.plan import Plan
from shoal.protocol.spec import ModelSpec

PATIENCE_HEARTBEATS = 3.0
"""A living holder may be without its state, or may not have said that it has it, for so long: it may be fetching it."""
MISSING_HEARTBEATS = 30.0
"""The run waits at least so long for the disks that would make a newer snapshot whole, before it goes on without
them."""
RESIGNED_HEARTBEATS = 3.0
"""A coordinator that has given up those disks keeps the role for so long, to make the plan that does without them."""
SAFE_COPIES = 2
"""Each layer of a snapshot is on so many disks before older snapshots may go: any one of the disks may fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks:
    """The snapshots on disks, by (era, version): which peers have which layers."""

    parts: Mapping[tuple[int, int], Mapping[PeerID, frozenset[str]]]

    @classmethod
    def of(cls, holdings: Iterable[tuple[PeerID, Sequence[Holding]]]) -> "Disks":
        """Collect what peers say of their disks. Snapshots of version 0 are left out, since the seed makes those."""
        parts: dict[tuple[int, int], dict[PeerID, frozenset[str]]] = {}
        for peer, held in holdings:
            for holding in held:
                if holding.version > 0 and 0 <= holding.era < ERA_MAX:
                    by_peer = parts.setdefault((holding.era, holding.version), {})
                    by_peer[peer] = by_peer.get(peer, frozenset()) | frozenset(holding.layers)
        return cls(parts=parts)

    def only(self, certified: Callable[[tuple[int, int]], frozenset[str] | None]) -> "Disks":
        """Leave out what nobody has to believe. Args: certified: (era, version) -> the layers of it that are certified;
        None: all that is there counts."""
        parts: dict[tuple[int, int], dict[PeerID, frozenset[str]]] = {}
        for age, by_peer in self.parts.items():
            sound = certified(age)
            kept = {peer: held if sound is None else held & sound for peer, held in by_peer.items()}
            if kept := {peer: held for peer, held in kept.items() if held}:
                parts[age] = kept
        return Disks(parts=parts)

    @property
    def newest(self) -> tuple[int, int] | None:
        """The last (era, version) of which any layer is on a disk."""
        return max(self.parts, default=None)

    @property
    def era_max(self) -> int:
        """The last era of any snapshot; -1: there is none."""
        return max((era for era, _ in self.parts), default=-1)

    def layers(self, snapshot: tuple[int, int]) -> frozenset[str]:
        """The layers of `snapshot` that are on some disk."""
        return frozenset().union(*self.parts.get(snapshot, {}).values())

    def covers(self, snapshot: tuple[int, int], layers: Iterable[str]) -> bool:
        """Whether each of `layers` is on some disk."""
        return self.layers(snapshot).issuperset(layers)

    def newest_whole(self, layers: Collection[str]) -> tuple[int, int] | None:
        """The last (era, version) of which every layer is on some disk."""
        return next((snapshot for snapshot in sorted(self.parts, reverse=True) if self.covers(snapshot, layers)), None)

    def newest_safe(self, layers: Collection[str]) -> tuple[int, int] | None:
        """The last (era, version) of which every layer is on `SAFE_COPIES` disks: nobody needs an older one."""
        for snapshot in sorted(self.parts, reverse=True):
            copies = Counter(layer for held in self.parts[snapshot].values() for layer in held)
            if all(copies[layer] >= SAFE_COPIES for layer in layers):
                return snapshot
        return None

    def has(self, peer: PeerID, snapshot: tuple[int, int], layers: Iterable[str]) -> bool:
        """Whether `peer` alone has all of `layers`."""
        return self.parts.get(snapshot, {}).get(peer, frozenset()).issuperset(layers)


class HolderWatch:
    """Knows since when each stage, and each placed expert, has had no holder of its state."""

    def __init__(self, heartbeat_s: float, now_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._begun_s = now_s
        self._held: dict[int, tuple[float, frozenset[PeerID]]] = {}
        self._lost_s: float | None = None
        self._wait_s = 0.0

    def lost(
        self,
        plan: Plan,
        holders: Sequence[frozenset[PeerID]],
        alive: Collection[PeerID],
        now_s: float,
        *,
        behind: Collection[int] = (),
    ) -> tuple[int, ...]:
        """The groups of `plan` whose state nobody will hold again unless the run goes back.

        Args:
            holders: by group, the peers that hold its state now, or could make it without the others.
            behind: groups of which a living peer has said that it holds their state, at a version too old to believe
                it: its next heartbeat may say more.
        """
        lost = []
        for index in range(len(plan.stages) + len(plan.experts)):
            if holders[index]:
                self._held[index] = now_s, holders[index]
                continue
            last_s, former = self._held.get(index, (self._begun_s, _members(plan, index)))
            # A peer that has died will not come back with what was in its memory.
            has_died = former.isdisjoint(alive) and index not in behind
            if now_s >= last_s + PATIENCE_HEARTBEATS * self._heartbeat_s or has_died:
                lost.append(index)
        if not lost:
            self._lost_s = None
        return tuple(lost)

    def is_hopeless(self, now_s: float, *, relearn_s: float = 0.0) -> bool:
        """Whether the wait for disks that are not here is over. Ask only while a stage has lost its state.

        Args: relearn_s: how long it would take to train again what those disks have. The wait is as long as that, so
            that waiting in vain and training again in vain cost the same at most.
        """
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        self._wait_s = max(MISSING_HEARTBEATS * self._heartbeat_s, relearn_s)
        return now_s >= self._lost_s + self._wait_s

    def is_waiting(self, now_s: float) -> bool:
        """Whether the wait is on, or has ended a moment ago."""
        if self._lost_s is None:
            return False
        return now_s < self._lost_s + self._wait_s + RESIGNED_HEARTBEATS * self._heartbeat_s


def disks_of(roster: Roster, now_s: float, *, among: Layout | None = None) -> Disks:
    """The snapshots of the peers that are alive, and what they carry from one layout to the next.

    Args: among: if given, only of those peers that a plan with this layout would reach.
    """
    peers = roster.alive(now_s)
    if among is not None:
        members = {*among.spares, *(peer for stage in among.stages for peer in stage.peers)}
        peers = tuple(peer for peer in peers if peer in members)
    beats = ((peer, roster.presences[peer].heartbeat) for peer in peers)
    carried = ((peer, (*beat.holdings, *([beat.carried] if beat.carried else ()))) for peer, beat in beats if beat)
    return Disks.of(carried)


def holders(
    live: Plan, roster: Roster, disks: Disks, model: ModelSpec, *, fresh: bool, now_s: float
) -> list[frozenset[PeerID]]:
    """The peers that hold each group's state or, in a plan that is still `fresh`, could make it."""
    floor = _version_min(live, disks, model)
    holding: dict[int, set[PeerID]] = {}
    for peer, group, version in _said(live, roster, now_s):
        if version >= floor:
            holding.setdefault(group, set()).add(peer)
    num_stages = len(live.stages)
    stored = disks.layers((live.restore_era, live.restore_version)) if fresh else frozenset()
    found = []
    for index in range(num_stages + len(live.experts)):
        begins = fresh and (live.restore_version == 0 or stored.issuperset(group_keys(model, live, index)))
        found.append(_members(live, index) if begins else frozenset(holding.get(index, ())))
    return found


def behind(live: Plan, roster: Roster, disks: Disks, model: ModelSpec, now_s: float) -> frozenset[int]:
    """The groups of which a living peer has said that it holds their state, at a version that does not count."""
    floor = _version_min(live, disks, model)
    return frozenset(group for _, group, version in _said(live, roster, now_s) if version < floor)


def _version_min(live: Plan, disks: Disks, model: ModelSpec) -> int:
    """The lowest version that counts: a peer that reports an older one does not hold this era's state.

    A peer that is more than one commit behind a whole snapshot has begun the era again without being told to. A member
    may be one commit behind: its mate has committed, and died before it sent the sums that it owed. The member then
    commits without that mate.
    """
    snapshot = disks.newest_whole(held_keys(model, placed=bool(live.experts)))
    if snapshot is None or snapshot[0] != live.era:
        return live.restore_version
    return max(live.restore_version, snapshot[1] - 1)


def _said(live: Plan, roster: Roster, now_s: float) -> Iterator[tuple[PeerID, int, int]]:
    """(peer, group, version) of all state that living peers say that they hold in this era."""
    num_stages = len(live.stages)
    for peer in roster.alive(now_s):  # once: group by group, a thousand peers with hundreds of them take too long
        beat = roster.presences[peer].heartbeat
        if beat is None or beat.era != live.era:
            continue
        if beat.synced and beat.stage is not None and beat.stage < num_stages:
            yield peer, beat.stage, beat.version
        for group, version in beat.held:
            if group >= num_stages:
                yield peer, group, version


def is_last_holder(peer: PeerID, plan: Plan, held: Sequence[frozenset[PeerID]]) -> bool:
    """Whether no peer but `peer` holds the state of some group. Args: held: by group, its holders now (`holders`)."""
    return any((now or _members(plan, group)) == {peer} for group, now in enumerate(held))


def group_name(plan: Plan, group: int) -> str:
    """The group's name for people."""
    if group < len(plan.stages):
        return f"stage {group}"
    entry = plan.experts[group - len(plan.stages)]
    return f"expert {entry.expert} of stage {entry.stage}"


def _members(plan: Plan, group: int) -> frozenset[PeerID]:
    return frozenset(member.peer for member in plan.group_members(group))


def next_beginning(live: Plan | None, roster: Roster, disks: Disks, model: ModelSpec, *, placed: bool) -> Beginning:
    """The beginning of the era after all that any peer here has heard of, from the newest snapshot that is whole on
    `disks`."""
    heard = (seen.heartbeat.era for seen in roster.presences.values() if seen.heartbeat)
    last = live.era if live else 0
    # Whoever claims a later one is not believed: the plan that begins after it would be a jump that nobody follows.
    era_max = (last + ERA_JUMP_MAX if live else ERA_MAX) - 1
    era = 1 + max(last, *(era for era in (*heard, *(era for era, _ in disks.parts)) if era <= era_max), 0)
    from_era, version = disks.newest_whole(held_keys(model, placed=placed)) or (0, 0)
    return Beginning(era=era, version=version, from_era=from_era)


def stages_on(disks: Disks, peer: PeerID, snapshot: tuple[int, int], plan: Plan, model: ModelSpec) -> tuple[int, ...]:
    """The stages of `plan` of which `peer` has all layers of `snapshot` on its disk."""
    ranges = (group_keys(model, plan, index) for index in range(len(plan.stages)))
    return tuple(index for index, keys in enumerate(ranges) if disks.has(peer, snapshot, keys))
