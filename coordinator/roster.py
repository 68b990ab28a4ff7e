"""The table of peers: all that this peer knows of each, and when its silence means that it is gone. Pure.

A record outlives the peer's presence and our terms as coordinator: a peer that returns gets its former stage. What is
measured of a member stays for our next term; everything else is dropped when that term begins."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from shoal.coordinator.adaptive_timeout import Arrivals
from shoal.coordinator.allocate.interface import MeasuredPeer
from shoal.coordinator.allocate.measured import Estimate
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEERS_MAX
from shoal.protocol.messages import Absence, Advert, ArrivalStatistics, Heartbeat, PeerStatus
from shoal.protocol.plan import Plan

FLOOR_HEARTBEATS = 3.0
"""A process that is silent for three heartbeats and answers no ping counts as gone, but may return."""
OVERDUE_HEARTBEATS = 1.1
"""A peer gets a ping if its next heartbeat is not here after this time; heartbeats vary by a twentieth."""
SILENT_HEARTBEATS = 2.5
"""A peer that is silent for longer is shown as not answering."""
ABSENT_MAX = 16
"""Maximum number of silent peers in a leadership transfer."""
TOLD_MAX = 64
"""Maximum number of adverts, of heartbeat statistics and of unreachable pairs in a leadership transfer. With these the
successor need not wait for reports."""
MEMORY_HEARTBEATS = 60.0
DOUBT_HEARTBEATS = 2.0
ABSENT_KEPT_MAX = 4096
"""If there are more records than this, those of peers that are neither present nor members are dropped."""
_ENDS = 2
"""The number of parts that a stage may have beside its layers: the embeddings and the head."""


def span(said_s: float | None) -> float | None:
    """Return a duration that another peer reports, or 0 if it is negative or not finite."""
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
    """True if the peer's process, and the state in its memory, are gone. A silent peer may return with its state."""
    silent_since_s: float | None = None
    """Last sign of life before this term, to us or the last coordinator, if none came in this term; else None."""

    def silent_s(self, now_s: float) -> float:
        """Return the time since the peer was last heard; if it never was, the time since we began to wait."""
        return now_s - (self.arrivals.last_s if self.silent_since_s is None else self.silent_since_s)


@dataclass(slots=True)
class LinkRecord:
    """One peer's reports about its link towards another."""

    round_trip: Estimate = field(default_factory=Estimate)
    sent: Estimate = field(default_factory=Estimate)
    received: Estimate = field(default_factory=Estimate)
    num_probes: int = 0
    fell_to: float = math.inf
    """The link's new rate in bytes/s, if the link has become slow and stayed slow; inf: it has not."""
    told: tuple[float, int] = 0.0, 0
    """(bytes/s, number of probes) in the last report. If the next report is equal, it repeats the same measurement."""


@dataclass(frozen=True, slots=True)
class Failing:
    """One peer's claim that it cannot reach another."""

    tries: int
    since_s: float
    said_s: float
    has_met: bool = True
    """True if the peer has ever had an answer from the other one."""


@dataclass(slots=True)
class PeerRecord:
    """All that this peer knows of another one."""

    presence: Presence | None = None
    """The peer's presence; None: it is not present now, but it was earlier, or others have reported about it."""
    irregular: ArrivalStatistics | None = None
    """Statistics of the gaps between the peer's heartbeats before this term; None: regular, or not known."""
    speed: Estimate = field(default_factory=Estimate)
    """FLOP/s of the peer's device, from reports made while the peer had the layers `speed_of`."""
    speed_of: tuple[int, int] | None = None
    links: dict[PeerID, LinkRecord] = field(default_factory=dict)
    """The peer's reports about its links towards others; the last reported link comes last."""
    failing: dict[PeerID, Failing] = field(default_factory=dict)
    """The peers that this peer reports it cannot reach; the last reported one comes last."""
    asked_s: dict[PeerID, float] = field(default_factory=dict)
    """Other peer -> when this peer was last asked to measure its link towards that other peer."""
    rests_s: float = -math.inf
    """The earliest time to measure another link towards the peer, if the peer's line may have become slow."""
    machine: str = ""
    """The machine that the peer claims to be on; empty: a machine of its own, or not heard in this term."""
    former_stage: int | None = None
    """The last stage that a plan gave to the peer, and to which it may return."""


_NOTHING = PeerRecord()


@dataclass(slots=True)
class Roster:
    """The records of all peers that this peer has heard, or heard of."""

    heartbeat_s: float
    records: defaultdict[PeerID, PeerRecord] = field(default_factory=lambda: defaultdict(PeerRecord))

    def of(self, peer: PeerID) -> PeerRecord:
        """Return the record of `peer`, a new one if there is none."""
        return self.records[peer]

    def at(self, peer: PeerID) -> PeerRecord:
        """Return the record of `peer` for reading; an empty one if there is none."""
        return self.records.get(peer, _NOTHING)

    @property
    def presences(self) -> dict[PeerID, Presence]:
        """The peers that were heard, or still have time to be heard."""
        return {peer: seen for peer, record in self.records.items() if (seen := record.presence) is not None}

    def obey(self, plan: Plan) -> None:
        """Record the stage of each peer in a live plan, and keep the table from growing without bound."""
        for index, stage in enumerate(plan.stages):
            for peer in stage.peers:
                self.of(peer).former_stage = index
        spare = len(self.records) - ABSENT_KEPT_MAX
        if spare > 0:
            gone = (peer for peer, record in self.records.items() if record.presence is None and not plan.has(peer))
            for peer in tuple(islice(gone, spare)):
                del self.records[peer]

    def begin_term(self, members: frozenset[PeerID]) -> None:
        """Begin a term of ours. Keep `members`' measurements, and all former stages and irregular statistics."""
        irregular, before = self.irregular(), dict(self.records)
        self.records.clear()
        for peer, old in before.items():
            if peer in members:
                failing = {other: claim for other, claim in old.failing.items() if other in members}
                self.records[peer] = PeerRecord(
                    speed=old.speed,
                    speed_of=old.speed_of,
                    links=old.links,
                    failing=failing,
                    former_stage=old.former_stage,
                )
            elif old.former_stage is not None:
                self.records[peer] = PeerRecord(former_stage=old.former_stage)
        self.take_over(irregular)

    def has_room_for(self, peer: PeerID) -> bool:
        is_here = self.at(peer).presence is not None
        return is_here or len(self.records) < PEERS_MAX or len(self.presences) < PEERS_MAX

    def heard(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> None:
        """Record a heartbeat; there must be room for the peer (`has_room_for`)."""
        record = self.of(peer)
        presence = record.presence
        if presence is None or presence.left:
            presence = record.presence = Presence(self._new_arrivals(record, now_s))
        elif presence.heartbeat is None:
            presence.arrivals.excuse(now_s)  # this gap depends on the change of coordinator, not on the peer
        else:
            presence.arrivals.arrived(now_s)
        presence.advert, presence.heartbeat, presence.silent_since_s = heartbeat.advert, heartbeat, None
        record.machine = heartbeat.advert.machine

    def doubt(self, peer: PeerID, now_s: float) -> None:
        """Shorten the timeout of `peer`, which others have found silent; leave time for one heartbeat."""
        arrivals = self.arrivals(peer)
        arrivals.age(arrivals.patience_s - DOUBT_HEARTBEATS * self.heartbeat_s, now_s)

    def signed(self, peer: PeerID, now_s: float) -> None:
        if (seen := self.at(peer).presence) is not None:
            seen.arrivals.signed(now_s)

    def heard_otherwise(self, peer: PeerID, now_s: float) -> None:
        """Record a call or frame of `peer`, unless the peer counts as gone: its old messages may still arrive."""
        if not self.is_gone(peer, now_s):
            self.signed(peer, now_s)

    def arrivals(self, peer: PeerID) -> Arrivals:
        """Return the heartbeat statistics of a peer that is present."""
        seen = self.at(peer).presence
        assert seen is not None
        return seen.arrivals

    def advert(self, peer: PeerID) -> Advert | None:
        seen = self.at(peer).presence
        return seen.advert if seen is not None else None

    def beat(self, peer: PeerID) -> Heartbeat | None:
        """Return the last heartbeat of `peer`; None: none has arrived in this term."""
        seen = self.at(peer).presence
        return seen.heartbeat if seen is not None else None

    def beats(self, peers: Iterable[PeerID]) -> Iterator[tuple[PeerID, Heartbeat]]:
        """Yield the last heartbeat of each of `peers` that has sent one."""
        return ((peer, beat) for peer in peers if (beat := self.beat(peer)) is not None)

    def overdue_at_s(self, peer: PeerID) -> float:
        """Return the time at which the next heartbeat of `peer` is late."""
        arrivals = self.arrivals(peer)
        return arrivals.last_s + max(OVERDUE_HEARTBEATS * self.heartbeat_s, arrivals.usual_s)

    def are_heard(self, peers: Iterable[PeerID]) -> bool:
        """True if a heartbeat of each peer has arrived in this term. (`expect` counts a peer as alive without one.)"""
        return all(self.beat(peer) is not None for peer in peers)

    def is_gone(self, peer: PeerID, now_s: float) -> bool:
        """True if `peer` left, was silent for too long, or is unknown."""
        seen = self.at(peer).presence
        return seen is None or seen.left or now_s >= seen.arrivals.suspect_at_s

    def expect(self, peer: PeerID, advert: Advert | None, now_s: float) -> None:
        """Count `peer` as alive, without a heartbeat, until its timeout passes. Keep what its heartbeats have told."""
        presence = self.at(peer).presence
        if presence is None:
            if self.has_room_for(peer):
                record = self.of(peer)
                record.presence = Presence(self._new_arrivals(record, now_s), advert)
        elif not presence.left:
            if presence.heartbeat is not None:
                presence.silent_since_s = now_s - presence.silent_s(now_s)  # a new term does not shorten a silence
            presence.arrivals.excuse(now_s)
            presence.advert = presence.advert or advert

    def absent(self, members: Iterable[PeerID], now_s: float) -> tuple[Absence, ...]:
        """Return those of `members` that have been silent for more than `SILENT_HEARTBEATS`."""
        known = ((peer, self.at(peer).presence) for peer in members)
        silent = (
            Absence(peer, seen.advert, seen.silent_s(now_s))
            for peer, seen in known
            if seen is not None and seen.advert is not None
            if seen.silent_s(now_s) > SILENT_HEARTBEATS * self.heartbeat_s
        )
        return tuple(islice(silent, ABSENT_MAX))

    def expect_absent(self, absent: Iterable[Absence], now_s: float) -> None:
        """Record the peers that the previous coordinator missed, so that people see them. Each gets a full timeout."""
        for absence in islice(absent, ABSENT_MAX):
            seen = self.at(absence.peer).presence
            if seen is not None and seen.heartbeat is None:
                seen.advert = seen.advert or absence.advert
                seen.silent_since_s = now_s - (span(absence.seconds) or 0.0)

    def irregular(self) -> tuple[ArrivalStatistics, ...]:
        """Return the heartbeat statistics of peers with a longer timeout than the minimum, longest first."""
        here = {peer: seen.arrivals for peer, seen in self.presences.items() if not seen.left}
        irregular = [(-known.patience_s, peer) for peer, known in here.items() if known.patience_s > known.floor_s]
        return tuple(
            ArrivalStatistics(peer, here[peer].mean_s, here[peer].deviation_s, here[peer].worst_s)
            for _, peer in sorted(irregular)[:TOLD_MAX]
        )

    def take_over(self, learned: Iterable[ArrivalStatistics]) -> None:
        """Use another coordinator's heartbeat statistics, unless impossible, from each peer's first heartbeat on."""
        longest_s = MEMORY_HEARTBEATS * self.heartbeat_s
        for arrivals in islice(learned, TOLD_MAX):
            figures = arrivals.mean_s, arrivals.deviation_s, arrivals.worst_s
            if all(0.0 <= seconds <= longest_s for seconds in figures):
                self.of(arrivals.peer).irregular = arrivals

    def excuse_all(self, now_s: float) -> None:
        """Restart all timeouts, because this peer was suspended."""
        for presence in self.presences.values():
            presence.arrivals.excuse(now_s)

    def has_vanished(self, peer: PeerID, now_s: float) -> bool:
        """True if `peer` is gone, and neither drained nor said good-bye."""
        seen = self.at(peer).presence
        polite = seen is None or seen.said_goodbye or self.draining(peer)
        return not polite and self.is_gone(peer, now_s)

    def leave(self, peer: PeerID) -> None:
        self.lose(peer)
        if (seen := self.at(peer).presence) is not None:
            seen.said_goodbye = True

    def lose(self, peer: PeerID, *, dead: bool = False) -> None:
        """Record that `peer` is gone. Args: dead: its process is gone."""
        if (seen := self.at(peer).presence) is not None:
            seen.left, seen.dead = True, dead

    def is_dead(self, peer: PeerID) -> bool:
        """True if the process of `peer` is gone, and `peer` has not been heard since."""
        seen = self.at(peer).presence
        return seen is not None and seen.dead

    def may_return(self, peer: PeerID, group: int, era: int, now_s: float) -> bool:
        """True if `peer` is silent, not known to be dead, and held the state of `group` when it was last heard."""
        seen, beat = self.at(peer).presence, self.beat(peer)
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
        for peer, presence in self.presences.items():
            if peer not in keep and (presence.left or now_s - presence.arrivals.last_s > horizon_s):
                self.records[peer].presence = None

    def alive(self, now_s: float) -> tuple[PeerID, ...]:
        """Return the live peers, in the order of their identifiers."""
        return tuple(sorted(peer for peer in self.records if not self.is_gone(peer, now_s)))

    def followers(self, now_s: float) -> list[PeerID]:
        """Return the live peers that send us heartbeats. A peer that only answers our pings may send its
        heartbeats to another coordinator."""
        return [peer for peer in self.alive(now_s) if now_s < (of := self.arrivals(peer)).last_s + of.patience_s]

    def accusers(self) -> dict[PeerID, set[PeerID]]:
        """Map each peer that others report as unsound (`Heartbeat.unsound`) to its accusers."""
        found: dict[PeerID, set[PeerID]] = {}
        for peer, beat in self.beats(self.records):
            for accused in beat.unsound:
                found.setdefault(accused, set()).add(peer)
        return found

    def name_of(self, peer: PeerID) -> str:
        """Return the peer's own name, or the end of its identifier."""
        return self.own_name_of(peer) or peer[-8:]

    def own_name_of(self, peer: PeerID) -> str:
        advert = self.advert(peer)
        return advert.name if advert is not None else ""

    def draining(self, peer: PeerID) -> bool:
        beat = self.beat(peer)
        return beat is not None and beat.draining

    def holds(self, peer: PeerID, group: int, era: int) -> bool:
        """True if `peer` reports that it holds the state of `group`, a stage or a group of experts, in this era."""
        beat = self.beat(peer)
        return beat is not None and beat.era == era and any(held == group for held, _ in beat.held)

    def has_state(self, peer: PeerID, live: Plan) -> bool:
        """True if `peer` reports the state of the stage that `live` gives it. A report from before `peer` got that
        stage does not count, because `peer` downloads the state again."""
        beat = self._beat_in_place(peer, live)
        return beat is not None and beat.synced

    def is_whole(self, live: Plan) -> bool:
        """True if every member of a stage of `live` has that stage's state."""
        return all(self.has_state(peer, live) for stage in live.stages for peer in stage.peers)

    def _beat_in_place(self, peer: PeerID, live: Plan) -> Heartbeat | None:
        """Return the last heartbeat of `peer` if it reports the stage that `live` gives to `peer`; else None."""
        beat = self.beat(peer)
        if beat is None or (beat.era, beat.stage) != (live.era, live.stage_of(peer)):
            return None
        return beat if beat.plan_sequence >= live.since_of(peer) else None

    def light(self, peer: PeerID, live: Plan) -> tuple[int, int] | None:
        """Return (number of layers that `peer` has, number in its stage) if it is a learner in `live`, else None."""
        beat, stage = self._beat_in_place(peer, live), live.stage_of(peer)
        if beat is None or beat.light is None or beat.synced or stage is None:
            return None
        first, last = live.stages[stage].layers
        num = max(0, min(beat.light[1], last - first + _ENDS))
        return max(0, min(beat.light[0], num)), num

    def may_coordinate(self, peer: PeerID, now_s: float) -> bool:
        """True if `peer` is alive, has been heard, and is willing to coordinate."""
        beat = self.beat(peer)
        if beat is None or self.is_gone(peer, now_s):
            return False
        return beat.advert.willing_to_coordinate and not beat.draining

    def measured(self, now_s: float) -> tuple[MeasuredPeer, ...]:
        """Return the live peers with known adverts, for the allocator."""
        seen = ((peer, self.advert(peer), self.beat(peer)) for peer in self.alive(now_s))
        return tuple(
            MeasuredPeer.of(
                peer,
                advert,
                draining=self.draining(peer),
                synced_stage=beat.stage if beat is not None and beat.synced else None,
            )
            for peer, advert, beat in seen
            if advert is not None
        )

    def status(self, peer: PeerID, live: Plan, now_s: float, *, share: float = 0.0) -> PeerStatus | None:
        """Return one peer's status for people; None: its advert is not known."""
        seen = self.at(peer).presence
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
            fetch=beat.fetch if beat else None,
        )

    def _new_arrivals(self, record: PeerRecord, now_s: float) -> Arrivals:
        floor_s, memory_s = FLOOR_HEARTBEATS * self.heartbeat_s, MEMORY_HEARTBEATS * self.heartbeat_s
        known = record.irregular
        figures = (known.mean_s, known.deviation_s, known.worst_s) if known is not None else ()
        return Arrivals(self.heartbeat_s, now_s, floor_s, memory_s, *figures)
