"""Decide which members are ready and open, and which leader each member names. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import DRAINING_S_MAX
from shoal.protocol.plan import Member


@dataclass(slots=True)
class Mate:
    """Our knowledge about one other member."""

    is_ready: bool = False
    """The member takes part, with the group's state or as a learner."""
    is_learner: bool = False
    """The member takes part with weights alone, without the optimizer's moments."""
    is_open: bool = True
    is_present: bool = False
    """The member has announced itself since it was last recorded as lost."""
    is_absent: bool = False
    """The member is lost (see `lost`), or it is unreachable and not ready. We wait for no message from it."""
    reported_empty: bool = False
    """The member's last announcement said that it is not ready, is a learner, or has a place elsewhere."""
    names: PeerID | None = None
    """The leader that the member's reports name; None: no report has named one; empty: the member knows no leader."""
    count: int = -1
    """`Progress.count` of the report that named that leader; reports with a lower count are older, and ignored."""
    incarnation: int = -1
    """The highest incarnation (number of its latest start in this group) that the member has reported; -1: none."""
    dropped_s: float | None = None
    """The time at which a plan that we followed dropped the member, if that was recently."""


@dataclass(kw_only=True, slots=True)
class MembershipView:
    """One member's view of its group: the members that the plan names, and what each has announced about itself.

    The fields from `in_plan` to `is_leader` are derived: they are computed anew after each change.
    """

    me: PeerID
    ready: bool = False
    is_learner: bool = False
    is_open: bool = True
    planned: tuple[Member, ...] = ()
    """The plan's members by rank, ourselves included if it names us."""
    in_plan: bool = field(init=False, default=False)
    group_peers: tuple[PeerID, ...] = field(init=False, default=())
    """The plan's members except us, in rank order, ready or not, without peers that we bar from the group."""
    ready_members: tuple[PeerID, ...] = field(init=False, default=())
    full_members: tuple[PeerID, ...] = field(init=False, default=())
    """The ready members that hold the full state, without ourselves."""
    learners: frozenset[PeerID] = field(init=False, default=frozenset())
    """The ready learners, ourselves included if we are one."""
    ranked: tuple[PeerID, ...] = field(init=False, default=())
    """The plan's ready members by rank, ourselves included if we are ready."""
    open_members: tuple[PeerID, ...] = field(init=False, default=())
    draining: tuple[PeerID, ...] = field(init=False, default=())
    """Ready members that the plan no longer names: they drain."""
    leader: PeerID | None = field(init=False, default=None)
    """The first open full member by rank; if no member is open, the first full member; None: the group has none."""
    doubtful: tuple[PeerID, ...] = field(init=False, default=())
    """Members that may still follow another leader than us; while there are any, we do not act as the leader."""
    is_leader: bool = field(init=False, default=False)
    """We are the leader, and no member may still follow another (`doubtful` is empty)."""
    _known: dict[PeerID, Mate] = field(init=False, default_factory=dict)
    _barred: set[PeerID] = field(init=False, default_factory=set)
    """Peers that we refuse as members, whatever the plan or their messages say."""

    @property
    def standing(self) -> tuple[int, int]:
        """(Our rank among the full members, from 0; their number). The rank is their number if we are none."""
        whole = tuple(peer for peer in self.ranked if peer not in self.learners)
        return whole.index(self.me) if self.me in whole else len(whole), len(whole)

    @property
    def reported_empty(self) -> frozenset[PeerID]:
        """The members that have reported that they have no state."""
        return frozenset(peer for peer, mate in self._known.items() if mate.reported_empty)

    def has_spoken(self, peer: PeerID) -> bool:
        """True if the peer has named a leader."""
        mate = self._known.get(peer)
        return mate is not None and mate.names is not None

    def is_ready(self, peer: PeerID) -> bool:
        if peer == self.me:
            return self.ready
        mate = self._known.get(peer)
        return mate is not None and mate.is_ready

    def is_near(self, peer: PeerID) -> bool:
        """True if the plan names the peer, or the peer is still draining."""
        return peer in self.group_peers or peer in self.draining

    def may_drain(self, peer: PeerID, now_s: float) -> bool:
        """True if a plan dropped the peer less than `DRAINING_S_MAX` ago, so that it may still drain."""
        return now_s < self._dropped_s(peer) + DRAINING_S_MAX

    def overstayed(self, now_s: float) -> list[PeerID]:
        """Return the members that still drain `DRAINING_S_MAX` seconds after a plan dropped them."""
        return [peer for peer in self.draining if not self.may_drain(peer, now_s)]

    @property
    def overstays_at_s(self) -> float:
        """The time at which the first draining member must be gone. Call this only if a member drains."""
        return min(self._dropped_s(peer) for peer in self.draining) + DRAINING_S_MAX

    def is_gone(self, peer: PeerID) -> bool:
        """True if we expect nothing more from the peer: it died, has left, or is unreachable and not ready."""
        if self.is_ready(peer) or peer == self.me:
            return False
        mate = self._known.get(peer)
        return peer not in self.group_peers or (mate is not None and mate.is_absent)

    def incarnation_of(self, peer: PeerID) -> int:
        """Return the highest incarnation (number of a start) that the peer has reported; -1: none."""
        mate = self._known.get(peer)
        return mate.incarnation if mate is not None else -1

    # --- events ---

    def set_planned(self, members: Sequence[Member], former: Collection[PeerID], *, now_s: float) -> None:
        """Follow a new plan. Args: former: other peers that recent plans had in the group."""
        ready = [peer for peer, mate in self._known.items() if mate.is_ready]
        before = {member.peer for member in self.planned}.union(former, ready)
        self.planned = tuple(members)
        named = {member.peer for member in members} | {self.me}
        for peer in sorted(before - named):
            mate = self._of(peer)
            mate.dropped_s = now_s if mate.dropped_s is None else mate.dropped_s
        for peer, mate in self._known.items():
            is_over = mate.dropped_s is not None and now_s >= mate.dropped_s + DRAINING_S_MAX and not mate.is_ready
            if peer in named or is_over:
                mate.dropped_s = None
        self._changed()

    def forget_all_but(self, known: Collection[PeerID]) -> None:
        """Drop what we know of peers outside `known`: no recent plan names them."""
        kept = {*self.group_peers, *known}
        for peer, mate in list(self._known.items()):
            if peer not in kept and not mate.is_ready and mate.dropped_s is None:
                del self._known[peer]
        self._changed()

    def set_ready(self, ready: bool, *, learner: bool = False) -> None:
        self.ready, self.is_learner = ready, ready and learner
        self._changed()

    def set_open(self, is_open: bool) -> None:
        self.is_open = is_open
        self._changed()

    def announced(self, peer: PeerID, *, ready: bool, is_open: bool, learner: bool = False) -> bool:
        """Record a member's announcement. Return True if we must send our progress: the member is new or newly
        ready."""
        mate = self._of(peer)
        news = not mate.is_present or (ready and not mate.is_ready)
        mate.is_open, mate.is_ready, mate.is_learner = is_open, ready, ready and learner
        mate.reported_empty = learner or not ready
        mate.is_present, mate.is_absent = True, False
        self._changed()
        return news

    def has_no_state(self, peer: PeerID) -> None:
        """Record that a peer has no state of our group: it reported this, or it has a place elsewhere."""
        self._of(peer).reported_empty = True

    def moves_away(self, peer: PeerID, *, now_s: float) -> None:
        """Record that a member drains here because a plan, which we may not have seen, moved it elsewhere."""
        mate = self._of(peer)
        if peer not in self.group_peers and mate.dropped_s is None:
            mate.dropped_s = now_s

    def speaks_as(self, peer: PeerID, incarnation: int) -> None:
        mate = self._of(peer)
        if incarnation != mate.incarnation:
            mate.incarnation, mate.count = incarnation, -1

    def names(self, peer: PeerID, leader: PeerID, *, count: int) -> None:
        """Record which leader a member names. Ignore the message if a later one (higher `count`) arrived first."""
        mate = self._of(peer)
        before = mate.is_absent, mate.names
        if count > mate.count:
            mate.names, mate.count = leader, count
        mate.is_absent = False
        if before != (False, mate.names):
            self._changed()

    def lost(self, peer: PeerID) -> None:
        """Record that a member died or dropped its state; its earlier announcements no longer hold."""
        mate = self._of(peer)
        mate.is_absent, mate.is_present, mate.is_ready, mate.names = True, False, False, None
        mate.is_learner = False
        self._changed()

    def bar(self, peer: PeerID) -> None:
        """Refuse a peer as a member for as long as we have this place."""
        self._barred.add(peer)
        self._changed()

    def is_barred(self, peer: PeerID) -> bool:
        return peer in self._barred

    def silent(self, peer: PeerID) -> None:
        """Record that a peer is unreachable. If the peer is not ready, we no longer wait until it names a leader."""
        mate = self._of(peer)
        if not mate.is_ready:
            mate.is_absent = True
            self._changed()

    # --- inside ---

    def _of(self, peer: PeerID) -> Mate:
        mate = self._known.get(peer)
        if mate is None:
            mate = self._known[peer] = Mate()
        return mate

    def _dropped_s(self, peer: PeerID) -> float:
        mate = self._known.get(peer)
        return -math.inf if mate is None or mate.dropped_s is None else mate.dropped_s

    def _changed(self) -> None:
        known = self._known
        self.in_plan = any(member.peer == self.me for member in self.planned)
        self.group_peers = tuple(m.peer for m in self.planned if m.peer != self.me and m.peer not in self._barred)
        ready = {peer for peer, mate in known.items() if mate.is_ready}
        self.ready_members = tuple(peer for peer in self.group_peers if peer in ready)
        learners = {peer for peer in ready if known[peer].is_learner}
        self.learners = frozenset(learners | {self.me}) if self.is_learner else frozenset(learners)
        self.full_members = tuple(peer for peer in self.ready_members if peer not in learners)
        self.open_members = tuple(peer for peer in self.ready_members if known[peer].is_open)
        self.draining = tuple(sorted(ready.difference(self.group_peers)))
        here = {*ready, self.me} if self.ready else ready
        self.ranked = ranked = tuple(member.peer for member in self.planned if member.peer in here)
        whole = [peer for peer in ranked if peer not in self.learners]
        takes_traffic = (peer for peer in whole if (self.is_open if peer == self.me else known[peer].is_open))
        self.leader = next(takes_traffic, whole[0] if whole else None)
        asked = ready.union(self.group_peers) - {peer for peer, mate in known.items() if mate.is_absent}
        self.doubtful = tuple(sorted(peer for peer in asked if not self._stands_back(peer)))
        self.is_leader = self.leader == self.me and not self.doubtful

    def _stands_back(self, peer: PeerID) -> bool:
        """True if the peer surely follows no other leader: it names us, or it drains and names a peer that has left."""
        mate = self._known.get(peer)
        named = peer if mate is None or mate.names is None else mate.names
        return named == self.me or (peer not in self.group_peers and named != peer and not self.is_near(named))
