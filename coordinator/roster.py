"""Knows which peers are there: the last heartbeat of each, and when its silence means that it is gone. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from shoal.coordinator.adaptive_timeout import Arrivals
from shoal.coordinator.allocate.interface import MeasuredPeer
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEERS_MAX
from shoal.protocol.messages import Absence, Advert, ArrivalStatistics, Heartbeat, PeerStatus
from shoal.protocol.plan import Plan

FLOOR_HEARTBEATS = 3.0
"""A process that stands still for three heartbeats and answers no ping either is as good as gone; it may come back."""
OVERDUE_HEARTBEATS = 1.1
"""Heartbeats vary by a twentieth; a peer whose heartbeat is later than this is pinged."""
SILENT_HEARTBEATS = 2.5
"""A peer that has not been heard for so long is said not to answer."""
ABSENT_MAX = 16
"""A coordinator names so many silent peers to the next one."""
ARRIVALS_TOLD_MAX = 64
"""A coordinator tells the next one of so many peers whose heartbeats are irregular."""
MEMORY_HEARTBEATS = 60.0
DOUBT_HEARTBEATS = 2.0
FORGOTTEN_HEARTBEATS = 60.0


_ENDS = 2
"""A stage may have embeddings and a head beside its layers."""


def span(said_s: float | None) -> float | None:
    """A duration as another peer tells it, which may be anything."""
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
    """Its process is not there any more, so what was in its memory is lost. A peer that is only silent may come back
    with it."""
    silent_since_s: float | None = None
    """The time at which it was heard last: by the coordinator before us if we have not heard it, or in an earlier term
    of ours."""

    def silent_s(self, now_s: float) -> float:
        """The time since its last heartbeat, or since it was owed one."""
        return now_s - (self.arrivals.last_s if self.silent_since_s is None else self.silent_since_s)


@dataclass(slots=True)
class Roster:
    """All peers that were heard, or are owed time to be heard."""

    heartbeat_s: float
    presences: dict[PeerID, Presence] = field(default_factory=dict)
    _learned: dict[PeerID, ArrivalStatistics] = field(default_factory=dict)
    """What was learned of the heartbeats of peers before this term."""

    def has_room_for(self, peer: PeerID) -> bool:
        """Whether `peer` is known, or may become so."""
        return peer in self.presences or len(self.presences) < PEERS_MAX

    def heard(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> None:
        """Note a heartbeat; there must be room for the peer (`has_room_for`)."""
        presence = self.presences.get(peer)
        if presence is None or presence.left:
            presence = self.presences[peer] = Presence(self._arrivals(peer, now_s))
        elif presence.heartbeat is None:
            presence.arrivals.excuse(now_s)  # the gap says when the role moved, not how this peer's heart beats
        else:
            presence.arrivals.arrived(now_s)
        presence.advert, presence.heartbeat, presence.silent_since_s = heartbeat.advert, heartbeat, None

    def doubt(self, peer: PeerID, now_s: float) -> None:
        """Others have found `peer` silent: leave it little of its timeout, enough for one heartbeat to get through."""
        arrivals = self.presences[peer].arrivals
        arrivals.age(arrivals.patience_s - DOUBT_HEARTBEATS * self.heartbeat_s, now_s)

    def signed(self, peer: PeerID, now_s: float) -> None:
        """`peer` gave a sign of life, though no heartbeat."""
        if peer in self.presences:
            self.presences[peer].arrivals.signed(now_s)

    def heard_otherwise(self, peer: PeerID, now_s: float) -> None:
        """Something of `peer` has been handled that is no heartbeat. It is a sign of life of whoever counts as alive;
        of a peer that is gone it may be what had been left of it."""
        if not self.is_gone(peer, now_s):
            self.signed(peer, now_s)

    def sign_s(self, peer: PeerID) -> float:
        """The time at which `peer` last gave a sign of life, or was excused."""
        return self.presences[peer].arrivals.sign_s

    def suspect_at_s(self, peer: PeerID) -> float:
        """The time at which the silence of `peer`, if it lasts until then, means that it is gone."""
        return self.presences[peer].arrivals.suspect_at_s

    def patience_s(self, peer: PeerID) -> float:
        """How long `peer` may be silent."""
        return self.presences[peer].arrivals.patience_s

    def overdue_at_s(self, peer: PeerID) -> float:
        """The time at which the next heartbeat of `peer` is late."""
        arrivals = self.presences[peer].arrivals
        return arrivals.last_s + max(OVERDUE_HEARTBEATS * self.heartbeat_s, arrivals.usual_s)

    def was_heard(self, peer: PeerID) -> bool:
        """Whether a heartbeat of `peer` has come; an expected peer is alive without one."""
        seen = self.presences.get(peer)
        return seen is not None and seen.heartbeat is not None

    def is_gone(self, peer: PeerID, now_s: float) -> bool:
        """Whether `peer` left, or was silent for too long, or was never heard of."""
        seen = self.presences.get(peer)
        return seen is None or seen.left or now_s >= seen.arrivals.suspect_at_s

    def expect(self, peer: PeerID, advert: Advert | None, now_s: float) -> None:
        """Count `peer` alive from now on until its silence says otherwise; heartbeats outrank this."""
        presence = self.presences.get(peer)
        if presence is None:
            if len(self.presences) < PEERS_MAX:
                self.presences[peer] = Presence(self._arrivals(peer, now_s), advert)
        elif not presence.left:
            if presence.heartbeat is not None:
                presence.silent_since_s = now_s - presence.silent_s(now_s)  # a new term makes no silence shorter
            presence.arrivals.excuse(now_s)
            presence.advert = presence.advert or advert

    def absent(self, members: Iterable[PeerID], now_s: float) -> tuple[Absence, ...]:
        """Those of `members` that have been silent for a while."""
        known = ((peer, self.presences[peer]) for peer in members if peer in self.presences)
        silent = (
            Absence(peer, seen.advert, seen.silent_s(now_s))
            for peer, seen in known
            if seen.advert is not None and seen.silent_s(now_s) > SILENT_HEARTBEATS * self.heartbeat_s
        )
        return tuple(islice(silent, ABSENT_MAX))

    def expect_absent(self, absent: Iterable[Absence], now_s: float) -> None:
        """Note which peers the coordinator before us has missed, each since when. They get as much time as the others
        to be heard; how long they have been silent is told to people."""
        for absence in islice(absent, ABSENT_MAX):
            seen = self.presences.get(absence.peer)
            if seen is not None and seen.heartbeat is None:
                seen.advert = seen.advert or absence.advert
                seen.silent_since_s = now_s - (span(absence.seconds) or 0.0)

    def irregular(self) -> tuple[ArrivalStatistics, ...]:
        """The arrival statistics of peers that may be silent for longer than a regular peer, the most patient timeout
        first, at most `ARRIVALS_TOLD_MAX`."""
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
        """Use these statistics from the first heartbeat of such a peer on. Learned anew, they would cost it a time-out
        first. Values that no heartbeats can have are ignored."""
        longest_s = MEMORY_HEARTBEATS * self.heartbeat_s
        for arrivals in islice(learned, ARRIVALS_TOLD_MAX):
            if all(
                0.0 <= seconds <= longest_s for seconds in (arrivals.mean_s, arrivals.deviation_s, arrivals.worst_s)
            ):
                self._learned[arrivals.peer] = arrivals

    def excuse_all(self, now_s: float) -> None:
        """This peer slept: no silence until now counts."""
        for presence in self.presences.values():
            presence.arrivals.excuse(now_s)

    def has_vanished(self, peer: PeerID, now_s: float) -> bool:
        """Whether `peer` is gone, and neither drained nor said good-bye before."""
        seen = self.presences.get(peer)
        polite = seen is None or seen.said_goodbye or self.draining(peer)
        return not polite and self.is_gone(peer, now_s)

    def leave(self, peer: PeerID) -> None:
        """`peer` says good-bye."""
        self.lose(peer)
        if peer in self.presences:
            self.presences[peer].said_goodbye = True

    def lose(self, peer: PeerID, *, dead: bool = False) -> None:
        """`peer` has been found to be gone. Args: dead: for good."""
        if peer in self.presences:
            self.presences[peer].left = True
            self.presences[peer].dead = dead

    def is_dead(self, peer: PeerID) -> bool:
        """Whether `peer` was found to be gone for good, and has not been heard since."""
        return peer in self.presences and self.presences[peer].dead

    def may_return(self, peer: PeerID, group: int, era: int, now_s: float) -> bool:
        """Whether `peer` is silent, was not found dead, and held the state of `group` when it was heard last."""
        seen = self.presences.get(peer)
        beat = seen.heartbeat if seen is not None else None
        if seen is None or seen.said_goodbye or seen.dead or not self.is_gone(peer, now_s):
            return False
        if beat is None:
            return True  # silent for all of our term: the coordinator before us may have heard it
        return beat.era == era and (
            (beat.synced and beat.stage == group) or any(held == group for held, _ in beat.held)
        )

    def forget_silent(self, now_s: float, *, keep: frozenset[PeerID]) -> None:
        """Drop peers that left or have been silent for long and are not in `keep`, so that the roster does not grow for
        ever."""
        horizon_s = FORGOTTEN_HEARTBEATS * self.heartbeat_s
        for peer, presence in list(self.presences.items()):
            if peer not in keep and (presence.left or now_s - presence.arrivals.last_s > horizon_s):
                del self.presences[peer]

    def alive(self, now_s: float) -> tuple[PeerID, ...]:
        """The peers that are alive, in the order of their identifiers."""
        return tuple(sorted(peer for peer in self.presences if not self.is_gone(peer, now_s)))

    def unheard(self, now_s: float) -> tuple[PeerID, ...]:
        """The peers that count as alive without a heartbeat so far, because they are expected."""
        return tuple(peer for peer in self.alive(now_s) if self.presences[peer].heartbeat is None)

    def draining(self, peer: PeerID) -> bool:
        """Whether `peer` says that it is leaving."""
        seen = self.presences.get(peer)
        return seen is not None and seen.heartbeat is not None and seen.heartbeat.draining

    def holds(self, peer: PeerID, group: int, era: int) -> bool:
        """Whether `peer` has said that it holds the state of this group of experts."""
        seen = self.presences.get(peer)
        beat = seen.heartbeat if seen is not None else None
        return beat is not None and beat.era == era and any(held == group for held, _ in beat.held)

    def has_state(self, peer: PeerID, live: Plan) -> bool:
        """Whether `peer` has said that it holds the state of the stage that `live` gives it.

        What it held of that stage before it got the place does not count: it fetches the state again.
        """
        seen = self.presences.get(peer)
        beat = seen.heartbeat if seen is not None else None
        return (
            beat is not None
            and beat.synced
            and (beat.era, beat.stage) == (live.era, live.stage_of(peer))
            and beat.plan_sequence >= live.since_of(peer)
        )

    def light(self, peer: PeerID, live: Plan) -> tuple[int, int] | None:
        """(Layers whose state is there, layers of its stage) of who trains with weights alone in the place that `live`
        gives it; within what that stage has, whatever was said."""
        seen, stage = self.presences.get(peer), live.stage_of(peer)
        beat = seen.heartbeat if seen is not None else None
        if beat is None or beat.light is None or beat.synced or stage is None:
            return None
        if (beat.era, beat.stage) != (live.era, stage) or beat.plan_sequence < live.since_of(peer):
            return None
        first, last = live.stages[stage].layers
        num = max(0, min(beat.light[1], last - first + _ENDS))
        return max(0, min(beat.light[0], num)), num

    def may_coordinate(self, peer: PeerID, now_s: float) -> bool:
        """Whether `peer` is alive, has been heard, and is willing."""
        seen = self.presences.get(peer)
        if seen is None or seen.heartbeat is None or self.is_gone(peer, now_s):
            return False
        return seen.heartbeat.advert.willing_to_coordinate and not seen.heartbeat.draining

    def measured(self, now_s: float) -> tuple[MeasuredPeer, ...]:
        """The peers that are alive and whose advert is known, for the allocator."""
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
        """One peer for people; None: its advert is not known."""
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

    def _arrivals(self, peer: PeerID, now_s: float) -> Arrivals:
        floor_s, memory_s = FLOOR_HEARTBEATS * self.heartbeat_s, MEMORY_HEARTBEATS * self.heartbeat_s
        known = self._learned.get(peer, ArrivalStatistics(peer, 0.0, 0.0, 0.0))
        return Arrivals(self.heartbeat_s, now_s, floor_s, memory_s, known.mean_s, known.deviation_s, known.worst_s)
