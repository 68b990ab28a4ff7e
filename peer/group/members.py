"""Who is of the group, who of them is ready and open, and whom each takes for the lead. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import DEPARTING_S_MAX
from shoal.protocol.plan import Member


@dataclass(kw_only=True, slots=True)
class Members:
    """One member's view of its group: the plan's word on who should be here, and everyone's own on how they are."""

    me: PeerID
    ready: bool = False
    is_open: bool = True
    planned: tuple[Member, ...] = ()
    """By rank, ourselves included if the plan names us."""
    _dropped_s: dict[PeerID, float] = field(default_factory=dict)
    """Who had a place in the group by a plan of late, and since when it has none."""
    without_state: set[PeerID] = field(default_factory=set)
    """Who has said itself, as its last word, that it is not ready, or that it is elsewhere."""
    _ready_mates: set[PeerID] = field(default_factory=set)
    _closed_mates: set[PeerID] = field(default_factory=set)
    _present: set[PeerID] = field(default_factory=set)
    _absent: set[PeerID] = field(default_factory=set)
    _named: dict[PeerID, PeerID] = field(default_factory=dict)
    _incarnations: dict[PeerID, int] = field(default_factory=dict)
    _counts: dict[PeerID, int] = field(default_factory=dict)

    @property
    def mates(self) -> tuple[PeerID, ...]:
        """The others of the plan's group, ready or not, in rank order."""
        return tuple(member.peer for member in self.planned if member.peer != self.me)

    @property
    def in_plan(self) -> bool:
        return any(member.peer == self.me for member in self.planned)

    @property
    def ready_mates(self) -> tuple[PeerID, ...]:
        return tuple(peer for peer in self.mates if peer in self._ready_mates)

    @property
    def open_mates(self) -> tuple[PeerID, ...]:
        """Ready, and taking traffic."""
        return tuple(peer for peer in self.ready_mates if peer not in self._closed_mates)

    @property
    def departing(self) -> tuple[PeerID, ...]:
        """Ready, but no longer in the plan: they drain."""
        return tuple(sorted(self._ready_mates.difference(self.mates)))

    @property
    def lead(self) -> PeerID | None:
        """The first ready and open member by rank; if all of them drain, the first ready one."""
        first_ready = None
        for member in self.planned:
            if self.is_ready(member.peer):
                if self._is_open(member.peer):
                    return member.peer
                first_ready = first_ready or member.peer
        return first_ready

    @property
    def standing(self) -> tuple[int, int]:
        """(our rank among the ready members from 0, how many there are)."""
        ready = [member.peer for member in self.planned if self.is_ready(member.peer)]
        return ready.index(self.me) if self.me in ready else len(ready), len(ready)

    @property
    def is_lead(self) -> bool:
        """We are the lead, and everyone who could think otherwise has said so."""
        return self.lead == self.me and not self.doubtful

    @property
    def doubtful(self) -> list[PeerID]:
        """Who could take somebody else than us for the lead, as far as we have heard."""
        asked = self._ready_mates.union(self.mates) - self._absent
        return sorted(mate for mate in asked if not self._stands_back(mate))

    def _stands_back(self, mate: PeerID) -> bool:
        """It names us; or one whom our plan has dropped, because it drains and has not heard of that plan yet."""
        named = self._named.get(mate, mate)
        return named == self.me or (mate not in self.mates and named != mate and not self.is_near(named))

    def has_spoken(self, peer: PeerID) -> bool:
        """Of whom it takes for the lead."""
        return peer in self._named

    def is_ready(self, peer: PeerID) -> bool:
        return self.ready if peer == self.me else peer in self._ready_mates

    def is_near(self, peer: PeerID) -> bool:
        """In the plan, or still here though it is not."""
        return peer in self._ready_mates or peer in self.mates

    def may_drain(self, peer: PeerID, now_s: float) -> bool:
        """A plan of late has dropped it, so it may be here for as long as a drain takes."""
        return now_s < self._dropped_s.get(peer, -math.inf) + DEPARTING_S_MAX

    def overstayed(self, now_s: float) -> list[PeerID]:
        """Who says that it drains, and should be gone."""
        return [peer for peer in self.departing if not self.may_drain(peer, now_s)]

    @property
    def overstays_at_s(self) -> float:
        """When somebody who drains should be gone."""
        return (
            min((self._dropped_s.get(peer, -math.inf) for peer in self.departing), default=math.inf) + DEPARTING_S_MAX
        )

    def is_gone(self, peer: PeerID) -> bool:
        """Nothing is to be heard from it: it died, it cannot be reached and is not ready, or it has left."""
        if peer == self.me or peer in self._ready_mates:
            return False
        return peer in self._absent or peer not in self.mates

    def share_of(self, peer: PeerID) -> float:
        """Its part of the traffic among the ready members, in [0, 1]."""
        shares = {member.peer: member.share for member in self.planned if self.is_ready(member.peer)}
        return shares.get(peer, 0.0) / sum(shares.values()) if shares else 0.0

    def _is_open(self, peer: PeerID) -> bool:
        return self.is_open if peer == self.me else peer not in self._closed_mates

    def incarnation(self, peer: PeerID) -> int:
        """The latest that we have heard of; -1: none."""
        return self._incarnations.get(peer, -1)

    # --- what is heard ---

    def plan(self, members: Sequence[Member], former: Collection[PeerID], *, now_s: float) -> None:
        """Args: former: who else had a place here by the plans of late."""
        dropped = [*(member.peer for member in self.planned), *former, *self._dropped_s, *sorted(self._ready_mates)]
        self.planned = tuple(members)
        since_s = {peer: self._dropped_s.get(peer, now_s) for peer in dropped if peer not in (self.me, *self.mates)}
        self._dropped_s = {
            peer: at_s for peer, at_s in since_s.items() if peer in self._ready_mates or now_s < at_s + DEPARTING_S_MAX
        }

    def forget_all_but(self, known: Collection[PeerID]) -> None:
        """What is kept of anybody else is of no use: no plan of late names it."""
        kept = {*self.mates, *self._ready_mates, *self._dropped_s, *known}
        for names in (self._closed_mates, self._present, self._absent, self.without_state):
            names &= kept
        for table in (self._named, self._incarnations, self._counts):
            for peer in table.keys() - kept:
                del table[peer]

    def state(self, peer: PeerID, *, ready: bool, is_open: bool) -> bool:
        """A mate says how it is. Returns: whether that is news to us: it needs to know what is here."""
        news = peer not in self._present or (ready and peer not in self._ready_mates)
        (self._closed_mates.discard if is_open else self._closed_mates.add)(peer)
        (self._ready_mates.add if ready else self._ready_mates.discard)(peer)
        (self.without_state.discard if ready else self.without_state.add)(peer)
        self._absent.discard(peer)
        self._present.add(peer)
        return news

    def moves_away(self, peer: PeerID, *, now_s: float) -> None:
        """The plan has it in another place, and it says that it drains from this one: since now, as far as we know."""
        if peer not in self.mates:
            self._dropped_s.setdefault(peer, now_s)

    def speaks_as(self, peer: PeerID, incarnation: int) -> None:
        if incarnation != self._incarnations.get(peer):
            self._counts.pop(peer, None)
        self._incarnations[peer] = incarnation

    def names(self, peer: PeerID, lead: PeerID, *, count: int) -> None:
        """A mate says whom it takes for the lead; its words may overtake each other."""
        if count > self._counts.get(peer, -1):
            self._named[peer], self._counts[peer] = lead, count
        self._absent.discard(peer)

    def lost(self, peer: PeerID) -> None:
        """It died or dropped its state; what it said before it says no more."""
        self._absent.add(peer)
        self._present.discard(peer)
        self._ready_mates.discard(peer)
        self._named.pop(peer, None)

    def silent(self, peer: PeerID) -> None:
        """It cannot be reached: if it is not ready, nobody waits for its word on who leads."""
        if peer not in self._ready_mates:
            self._absent.add(peer)
