"""Who is of the group, who of them is ready and open, and whom each takes for the leader. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import DEPARTING_S_MAX
from shoal.protocol.plan import Member


@dataclass(slots=True)
class Mate:
    """What one member knows of another."""

    is_ready: bool = False
    """It takes part: it holds the group's state, unless it is light."""
    is_light: bool = False
    """It takes part with weights alone."""
    is_open: bool = True
    """It takes traffic."""
    is_present: bool = False
    """It has said how it is, since it was last lost."""
    is_absent: bool = False
    """It died, or cannot be reached and is not ready. Nobody waits for its word."""
    without_state: bool = False
    """It has said itself, as its last word, that it is not ready, that it is light, or that it is elsewhere."""
    names: PeerID | None = None
    """Whom it takes for the leader; None: it has not said so. An empty name: it knows of none."""
    count: int = -1
    """Of the Progress in which it named that leader."""
    incarnation: int = -1
    """The latest that we have heard of; -1: none."""
    dropped_s: float | None = None
    """When a plan dropped it that we have obeyed, if that was of late."""


@dataclass(kw_only=True, slots=True)
class Members:
    """One member's view of its group: the plan's word on who should be here, and everyone's own on how they are.

    What follows from both (`lead` and what stands around it) is worked out anew whenever something has changed.
    """

    me: PeerID
    ready: bool = False
    is_light: bool = False
    """We are ready, and hold weights alone."""
    is_open: bool = True
    planned: tuple[Member, ...] = ()
    """By rank, ourselves included if the plan names us."""
    in_plan: bool = field(init=False, default=False)
    """The plan names us."""
    mates: tuple[PeerID, ...] = field(init=False, default=())
    """The others of the plan's group, ready or not, in rank order, without those that we have barred."""
    ready_mates: tuple[PeerID, ...] = field(init=False, default=())
    whole_mates: tuple[PeerID, ...] = field(init=False, default=())
    """Those of the ready ones that hold the state."""
    light: frozenset[PeerID] = field(init=False, default=frozenset())
    """Who is ready and holds weights alone, ourselves among them if we do."""
    ranked: tuple[PeerID, ...] = field(init=False, default=())
    """The ready members of the plan by rank, ourselves among them if we are."""
    open_mates: tuple[PeerID, ...] = field(init=False, default=())
    """Ready, and taking traffic."""
    departing: tuple[PeerID, ...] = field(init=False, default=())
    """Ready, but no longer in the plan: they drain."""
    lead: PeerID | None = field(init=False, default=None)
    """The first ready and open member by rank that holds the state; if all of them drain, the first that does."""
    doubtful: tuple[PeerID, ...] = field(init=False, default=())
    """Who could take somebody else than us for the leader, as far as we have heard."""
    is_lead: bool = field(init=False, default=False)
    """We are the leader, and everyone who could think otherwise has said so."""
    _known: dict[PeerID, Mate] = field(init=False, default_factory=dict)
    _barred: set[PeerID] = field(init=False, default_factory=set)
    """The members that are no mates of ours, whatever the plan and they themselves say."""

    @property
    def standing(self) -> tuple[int, int]:
        """(our rank among the members that hold the state from 0, how many there are)."""
        whole = tuple(peer for peer in self.ranked if peer not in self.light)
        return whole.index(self.me) if self.me in whole else len(whole), len(whole)

    @property
    def without_state(self) -> frozenset[PeerID]:
        """Who has said itself that it has no state."""
        return frozenset(peer for peer, mate in self._known.items() if mate.without_state)

    def has_spoken(self, peer: PeerID) -> bool:
        """Of whom it takes for the leader."""
        mate = self._known.get(peer)
        return mate is not None and mate.names is not None

    def is_ready(self, peer: PeerID) -> bool:
        if peer == self.me:
            return self.ready
        mate = self._known.get(peer)
        return mate is not None and mate.is_ready

    def is_near(self, peer: PeerID) -> bool:
        """In the plan, or still here though it is not."""
        return peer in self.mates or peer in self.departing

    def may_drain(self, peer: PeerID, now_s: float) -> bool:
        """A plan of late has dropped it, so it may be here for as long as a drain takes."""
        return now_s < self._dropped_s(peer) + DEPARTING_S_MAX

    def overstayed(self, now_s: float) -> list[PeerID]:
        """Who says that it drains, and should be gone."""
        return [peer for peer in self.departing if not self.may_drain(peer, now_s)]

    @property
    def overstays_at_s(self) -> float:
        """When the first of those who drain should be gone; there must be one."""
        return min(self._dropped_s(peer) for peer in self.departing) + DEPARTING_S_MAX

    def is_gone(self, peer: PeerID) -> bool:
        """Nothing is to be heard from it: it died, it cannot be reached and is not ready, or it has left."""
        if self.is_ready(peer) or peer == self.me:
            return False
        mate = self._known.get(peer)
        return peer not in self.mates or (mate is not None and mate.is_absent)

    def share_of(self, peer: PeerID) -> float:
        """Its part of the traffic among the ready members, in [0, 1]."""
        shares = {member.peer: member.share for member in self.planned if member.peer in self.ranked}
        return shares.get(peer, 0.0) / sum(shares.values()) if shares else 0.0

    def incarnation(self, peer: PeerID) -> int:
        """The latest that we have heard of; -1: none."""
        mate = self._known.get(peer)
        return mate.incarnation if mate is not None else -1

    # --- what is heard ---

    def plan(self, members: Sequence[Member], former: Collection[PeerID], *, now_s: float) -> None:
        """Args: former: who else had a place here by the plans of late."""
        ready = [peer for peer, mate in self._known.items() if mate.is_ready]
        before = {member.peer for member in self.planned}.union(former, ready)
        self.planned = tuple(members)
        named = {member.peer for member in members} | {self.me}
        for peer in sorted(before - named):
            mate = self._of(peer)
            mate.dropped_s = now_s if mate.dropped_s is None else mate.dropped_s
        for peer, mate in self._known.items():
            is_over = mate.dropped_s is not None and now_s >= mate.dropped_s + DEPARTING_S_MAX and not mate.is_ready
            if peer in named or is_over:
                mate.dropped_s = None
        self._changed()

    def forget_all_but(self, known: Collection[PeerID]) -> None:
        """What is kept of anybody else is of no use: no plan of late names it."""
        kept = {*self.mates, *known}
        for peer, mate in list(self._known.items()):
            if peer not in kept and not mate.is_ready and mate.dropped_s is None:
                del self._known[peer]
        self._changed()

    def set_ready(self, ready: bool, *, light: bool = False) -> None:
        """We take part, with the group's state or with weights alone; or do no longer."""
        self.ready, self.is_light = ready, ready and light
        self._changed()

    def set_open(self, is_open: bool) -> None:
        """We take traffic, or do not."""
        self.is_open = is_open
        self._changed()

    def state(self, peer: PeerID, *, ready: bool, is_open: bool, light: bool = False) -> bool:
        """A mate says how it is. Returns: whether that is news to us: it needs to know what is here."""
        mate = self._of(peer)
        news = not mate.is_present or (ready and not mate.is_ready)
        mate.is_open, mate.is_ready, mate.is_light = is_open, ready, ready and light
        mate.without_state = light or not ready
        mate.is_present, mate.is_absent = True, False
        self._changed()
        return news

    def has_no_state(self, peer: PeerID) -> None:
        """It says so itself, or that it is elsewhere."""
        self._of(peer).without_state = True

    def moves_away(self, peer: PeerID, *, now_s: float) -> None:
        """A member of the plan drains from here to its place elsewhere: it may have left this group by a plan that came
        before us."""
        mate = self._of(peer)
        if peer not in self.mates and mate.dropped_s is None:
            mate.dropped_s = now_s

    def speaks_as(self, peer: PeerID, incarnation: int) -> None:
        mate = self._of(peer)
        if incarnation != mate.incarnation:
            mate.incarnation, mate.count = incarnation, -1

    def names(self, peer: PeerID, lead: PeerID, *, count: int) -> None:
        """A mate's word on who leads; what it said earlier may arrive later."""
        mate = self._of(peer)
        before = mate.is_absent, mate.names
        if count > mate.count:
            mate.names, mate.count = lead, count
        mate.is_absent = False
        if before != (False, mate.names):
            self._changed()

    def lost(self, peer: PeerID) -> None:
        """It died or dropped its state; what it said before it says no more."""
        mate = self._of(peer)
        mate.is_absent, mate.is_present, mate.is_ready, mate.names = True, False, False, None
        mate.is_light = False
        self._changed()

    def bar(self, peer: PeerID) -> None:
        """It is no mate of ours any more, for as long as we have this place."""
        self._barred.add(peer)
        self._changed()

    def is_barred(self, peer: PeerID) -> bool:
        return peer in self._barred

    def silent(self, peer: PeerID) -> None:
        """It cannot be reached: if it is not ready, nobody waits for its word on who leads."""
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
        """Work out what follows from the plan and from what everyone has said."""
        known = self._known
        self.in_plan = any(member.peer == self.me for member in self.planned)
        self.mates = tuple(m.peer for m in self.planned if m.peer != self.me and m.peer not in self._barred)
        ready = {peer for peer, mate in known.items() if mate.is_ready}
        self.ready_mates = tuple(peer for peer in self.mates if peer in ready)
        light = {peer for peer in ready if known[peer].is_light}
        self.light = frozenset(light | {self.me}) if self.is_light else frozenset(light)
        self.whole_mates = tuple(peer for peer in self.ready_mates if peer not in light)
        self.open_mates = tuple(peer for peer in self.ready_mates if known[peer].is_open)
        self.departing = tuple(sorted(ready.difference(self.mates)))
        here = {*ready, self.me} if self.ready else ready
        self.ranked = ranked = tuple(member.peer for member in self.planned if member.peer in here)
        whole = [peer for peer in ranked if peer not in self.light]
        takes_traffic = (peer for peer in whole if (self.is_open if peer == self.me else known[peer].is_open))
        self.lead = next(takes_traffic, whole[0] if whole else None)
        asked = ready.union(self.mates) - {peer for peer, mate in known.items() if mate.is_absent}
        self.doubtful = tuple(sorted(peer for peer in asked if not self._stands_back(peer)))
        self.is_lead = self.lead == self.me and not self.doubtful

    def _stands_back(self, peer: PeerID) -> bool:
        """It names us; or one whom our plan has dropped, because it drains and has not heard of that plan yet."""
        mate = self._known.get(peer)
        named = peer if mate is None or mate.names is None else mate.names
        return named == self.me or (peer not in self.mates and named != peer and not self.is_near(named))
