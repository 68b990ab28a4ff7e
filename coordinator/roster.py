"""Knows the last heartbeat of each peer, and when its silence means that it is gone. Pure."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from shoal.coordinator.adaptive_timeout import Arrivals
from shoal.coordinator.allocate.interface import MeasuredPeer
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEERS_MAX
from shoal.protocol.messages import Absence, Advert, ArrivalStatistics, Heartbeat, PeerStatus
from shoal.protocol.plan import Plan

FLOOR_HEARTBEATS = 3.0
"""A process that stands still for three heartbeats and answers no ping counts as gone; it may return."""
OVERDUE_HEARTBEATS = 1.1
"""Heartbeats vary by a twentieth; a later one causes a ping."""
SILENT_HEARTBEATS = 2.5
"""A peer that is silent for longer is shown as not answering."""
ABSENT_MAX = 16
ARRIVALS_TOLD_MAX = 64
"""Maximum numbers of silent peers, and of peers with irregular heartbeats, in a leadership transfer."""
MEMORY_HEARTBEATS = 60.0
DOUBT_HEARTBEATS = 2.0


_ENDS = 2
"""A stage may have embeddings and a head beside its layers."""


def span(said_s: float | None) -> float | None:
    """Return a duration that another peer reports, bounded to sane values."""
    if said_s is None:
        return None
    return said_s if math.isfinite(said_s) and said_s >= 0.0 else 0.0


@dataclass(slots=True)
class Presence:
    """One peer as the coordinator sees it. `advert` is None until it is known."""

    arrivals: Arrivals
    advert: Advert | None = None
    heartbeat: Heartbeat | None = None
    left: bool = False
    said_goodbye: bool = False
    dead: bool = False
    """Its process is gone, and with it the state in its memory. A peer that is only silent may return with it."""
    silent_since_s: float | None = None
    """When the previous coordinator, or we in an earlier term, heard it last, if it is silent in this term."""

    def silent_s(self, now_s: float) -> float:
        """Return the time since its last heartbeat, or since one was due."""
        return now_s - (self.arrivals.last_s if self.silent_since_s is None else self.silent_since_s)


@dataclass(slots=True)
class Roster:
    """All peers that were heard, or still have time to be heard."""

    heartbeat_s: float
    presences: dict[PeerID, Presence] = field(default_factory=dict)
    _learned: dict[PeerID, ArrivalStatistics] = field(default_factory=dict)
    """Heartbeat statistics of peers from before this term."""

    def has_room_for(self, peer: PeerID) -> bool:
        return peer in self.presences or len(self.presences) < PEERS_MAX

    def heard(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> None:
        """Record a heartbeat; there must be room for the peer (`has_room_for`)."""
        presence = self.presences.get(peer)
        if presence is None or presence.left:
            presence = self.presences[peer] = Presence(self._new_arrivals(peer, now_s))
        elif presence.heartbeat is None:
            presence.arrivals.excuse(now_s)  # this gap depends on the change of coordinator, not on the peer
        else:
            presence.arrivals.arrived(now_s)
        presence.advert, presence.heartbeat, presence.silent_since_s = heartbeat.advert, heartbeat, None

    def doubt(self, peer: PeerID, now_s: float) -> None:
        """Shorten the timeout of `peer`, which others have found silent: one heartbeat can still get through."""
        arrivals = self.presences[peer].arrivals
        arrivals.age(arrivals.patience_s - DOUBT_HEARTBEATS * self.heartbeat_s, now_s)

    def signed(self, peer: PeerID, now_s: float) -> None:
        if peer in self.presences:
            self.presences[peer].arrivals.signed(now_s)

    def heard_otherwise(self, peer: PeerID, now_s: float) -> None:
        """Record a call or frame of `peer`, unless it is gone: old messages may still arrive."""
        if not self.is_gone(peer, now_s):
            self.signed(peer, now_s)

    def arrivals(self, peer: PeerID) -> Arrivals:
        return self.presences[peer].arrivals

    def beat(self, peer: PeerID) -> Heartbeat | None:
        """Return the last heartbeat of `peer`; None: none has arrived in this term."""
        seen = self.presences.get(peer)
        return seen.heartbeat if seen is not None else None

    def beats(self, peers: Iterable[PeerID]) -> Iterator[tuple[PeerID, Heartbeat]]:
        """Yield the last heartbeat of each of `peers` that has sent one."""
        return ((peer, beat) for peer in peers if (beat := self.beat(peer)) is not None)

    def overdue_at_s(self, peer: PeerID) -> float:
        """Return the time at which the next heartbeat of `peer` is late."""
        arrivals = self.presences[peer].arrivals
        return arrivals.last_s + max(OVERDUE_HEARTBEATS * self.heartbeat_s, arrivals.usual_s)

    def was_heard(self, peer: PeerID) -> bool:
        """True if a heartbeat of `peer` has arrived; an expected peer is alive without one."""
        return self.beat(peer) is not None

    def is_gone(self, peer: PeerID, now_s: float) -> bool:
        """True if `peer` left, was silent for too long, or is unknown."""
        seen = self.presences.get(peer)
        return seen is None or seen.left or now_s >= seen.arrivals.suspect_at_s

    def expect(self, peer: PeerID, advert: Advert | None, now_s: float) -> None:
        """Count `peer` as alive until its timeout passes; a heartbeat outranks this."""
        presence = self.presences.get(peer)
        if presence is None:
            if len(self.presences) < PEERS_MAX:
                self.presences[peer] = Presence(self._new_arrivals(peer, now_s), advert)
        elif not presence.left:
            if presence.heartbeat is not None:
                presence.silent_since_s = now_s - presence.silent_s(now_s)  # a new term does not shorten a silence
            presence.arrivals.excuse(now_s)
            presence.advert = presence.advert or advert

    def absent(self, members: Iterable[PeerID], now_s: float) -> tuple[Absence, ...]:
        """Return those of `members` that have been silent for a while."""
        known = ((peer, self.presences[peer]) for peer in members if peer in self.presences)
        silent = (
            Absence(peer, seen.advert, seen.silent_s(now_s))
            for peer, seen in known
            if seen.advert is not None and seen.silent_s(now_s) > SILENT_HEARTBEATS * self.heartbeat_s
        )
        return tuple(islice(silent, ABSENT_MAX))

    def expect_absent(self, absent: Iterable[Absence], now_s: float) -> None:
        """Record, for people, the peers that the previous coordinator missed; they get a full timeout like the
        others."""
        for absence in islice(absent, ABSENT_MAX):
            seen = self.presences.get(absence.peer)
            if seen is not None and seen.heartbeat is None:
                seen.advert = seen.advert or absence.advert
                seen.silent_since_s = now_s - (span(absence.seconds) or 0.0)

    def irregular(self) -> tuple[ArrivalStatistics, ...]:
        """Return the statistics of peers with a longer timeout than regular ones, longest first."""
        irregular = [
            (seen.arrivals.patience_s, peer, seen.arrivals)
            for peer, seen in self.presences.items()
            if not seen.left and seen.arrivals.patience_s > seen.arrivals.floor_s
        ]
        irregular.sort(key=lambda each: (-each[0], each[1]))
        return tuple(
            ArrivalStatistics(peer, found.mean_s, found.deviation_s, found.worst_s)
            for _, peer, found in irregular[:ARRIVALS_TOLD_MAX]
        )

    def take_over(self, learned: Iterable[ArrivalStatistics]) -> None:
        """Use these statistics, if they are possible, from the peers' first heartbeats on."""
        longest_s = MEMORY_HEARTBEATS * self.heartbeat_s
        for arrivals in islice(learned, ARRIVALS_TOLD_MAX):
            if all(
                0.0 <= seconds <= longest_s for seconds in (arrivals.mean_s, arrivals.deviation_s, arrivals.worst_s)
            ):
                self._learned[arrivals.peer] = arrivals

    def excuse_all(self, now_s: float) -> None:
        """Restart all timeouts, because this peer was suspended."""
        for presence in self.presences.values():
            presence.arrivals.excuse(now_s)

    def has_vanished(self, peer: PeerID, now_s: float) -> bool:
        """True if `peer` is gone without draining or a good-bye."""
        seen = self.presences.get(peer)
        polite = seen is None or seen.said_goodbye or self.draining(peer)
        return not polite and self.is_gone(peer, now_s)

    def leave(self, peer: PeerID) -> None:
        self.lose(peer)
        if peer in self.presences:
            self.presences[peer].said_goodbye = True

    def lose(self, peer: PeerID, *, dead: bool = False) -> None:
        """Record that `peer` is gone. Args: dead: its process is gone."""
        if peer in self.presences:
            self.presences[peer].left = True
            self.presences[peer].dead = dead

    def is_dead(self, peer: PeerID) -> bool:
        """True if the process of `peer` is gone, and it has not been heard since."""
        return peer in self.presences and self.presences[peer].dead

    def may_return(self, peer: PeerID, group: int, era: int, now_s: float) -> bool:
        """True if `peer` is silent, not known to be dead, and held the state of `group` when it was last heard."""
        seen, beat = self.presences.get(peer), self.beat(peer)
        if seen is None or seen.said_goodbye or seen.dead or not self.is_gone(peer, now_s):
            return False
        if beat is None:
            return True  # silent for all of our term: the previous coordinator may have heard it
        return beat.era == era and (
            (beat.synced and beat.stage == group) or any(held == group for held, _ in beat.held)
        )

    def forget_silent(self, now_s: float, *, keep: frozenset[PeerID]) -> None:
        """Drop peers outside `keep` that left or have been silent for long, to bound the roster."""
        horizon_s = 60.0 * self.heartbeat_s
        for peer, presence in list(self.presences.items()):
            if peer not in keep and (presence.left or now_s - presence.arrivals.last_s > horizon_s):
                del self.presences[peer]

    def alive(self, now_s: float) -> tuple[PeerID, ...]:
        """Return the live peers, in the order of their identifiers."""
        return tuple(sorted(peer for peer in self.presences if not self.is_gone(peer, now_s)))

    def unheard(self, now_s: float) -> tuple[PeerID, ...]:
        """Return the peers that count as alive only because they are expected."""
        return tuple(peer for peer in self.alive(now_s) if self.presences[peer].heartbeat is None)

    def accusers(self) -> dict[PeerID, set[PeerID]]:
        """Map each peer that others report as unsound (`Heartbeat.unsound`) to these others."""
        found: dict[PeerID, set[PeerID]] = {}
        for peer, beat in self.beats(self.presences):
            for accused in beat.unsound:
                found.setdefault(accused, set()).add(peer)
        return found

    def name_of(self, peer: PeerID) -> str:
        """Return the peer's own name, or the end of its identifier."""
        return self.own_name_of(peer) or peer[-8:]

    def own_name_of(self, peer: PeerID) -> str:
        seen = self.presences.get(peer)
        return seen.advert.name if seen is not None and seen.advert is not None else ""

    def draining(self, peer: PeerID) -> bool:
        beat = self.beat(peer)
        return beat is not None and beat.draining

    def holds(self, peer: PeerID, group: int, era: int) -> bool:
        """True if `peer` reports that it holds the state of this group of experts."""
        beat = self.beat(peer)
        return beat is not None and beat.era == era and any(held == group for held, _ in beat.held)

    def has_state(self, peer: PeerID, live: Plan) -> bool:
        """True if `peer` reports the state of the stage that `live` gives it. A report from before it got the place
        does not count, because it downloads the state again."""
        beat = self.beat(peer)
        return (
            beat is not None
            and beat.synced
            and (beat.era, beat.stage) == (live.era, live.stage_of(peer))
            and beat.plan_sequence >= live.since_of(peer)
        )

    def light(self, peer: PeerID, live: Plan) -> tuple[int, int] | None:
        """Return (layers with state, layers of its stage) of a learner in its place in `live`; None: it is none."""
        beat, stage = self.beat(peer), live.stage_of(peer)
        if beat is None or beat.light is None or beat.synced or stage is None:
            return None
        if (beat.era, beat.stage) != (live.era, stage) or beat.plan_sequence < live.since_of(peer):
            return None
        first, last = live.stages[stage].layers
        num = max(0, min(beat.light[1], last - first + _ENDS))
        return max(0, min(beat.light[0], num)), num

    def may_coordinate(self, peer: PeerID, now_s: float) -> bool:
        """True if `peer` is alive, has been heard, and is willing."""
        beat = self.beat(peer)
        if beat is None or self.is_gone(peer, now_s):
            return False
        return beat.advert.willing_to_coordinate and not beat.draining

    def measured(self, now_s: float) -> tuple[MeasuredPeer, ...]:
        """Return the live peers with known adverts, for the allocator."""
        seen = ((peer, self.presences[peer]) for peer in self.alive(now_s))
        return tuple(
            MeasuredPeer.of(
                peer,
                presence.advert,
                draining=self.draining(peer),
                synced_stage=presence.heartbeat.stage if presence.heartbeat and presence.heartbeat.synced else None,
            )
            for peer, presence in seen
            if presence.advert is not None
        )

    def status(self, peer: PeerID, live: Plan, now_s: float, *, share: float = 0.0) -> PeerStatus | None:
        """Return one peer's status for people; None: its advert is not known."""
        seen = self.presences.get(peer)
        if seen is None or seen.advert is None:
            return None
        beat = seen.heartbeat
        paused_s = span(beat.paused_s) if beat else None
        if paused_s is not None:
            paused_s += seen.silent_s(now_s)
        return PeerStatus(
            peer=peer,
            name=seen.advert.name,
            device=seen.advert.device,
            stage=live.stage_of(peer),
            version=beat.version if beat else -1,
            synced=self.has_state(peer, live),
            draining=bool(beat and beat.draining),
            seen_s_ago=seen.silent_s(now_s),
            forward_s=beat.forward_s if beat else 0.0,
            window=beat.window if beat else 0,
            share=round(share, 4),
            flop_per_s=seen.advert.flop_per_s,
            paused_s=paused_s,
            shortages=max(0, beat.shortages) if beat else 0,
            light=self.light(peer, live),
        )

    def _new_arrivals(self, peer: PeerID, now_s: float) -> Arrivals:
        floor_s, memory_s = FLOOR_HEARTBEATS * self.heartbeat_s, MEMORY_HEARTBEATS * self.heartbeat_s
        known = self._learned.get(peer, ArrivalStatistics(peer, 0.0, 0.0, 0.0))
        return Arrivals(self.heartbeat_s, now_s, floor_s, memory_s, known.mean_s, known.deviation_s, known.worst_s)
