"""Who is there: the last heartbeat of every peer, and when its silence means that it is gone. Pure.

Suspicion is measured, not guessed: each peer's heartbeats have a mean interval and a mean deviation (the estimator of
TCP's retransmission timer, RFC 6298: gains 1/8 and 1/4), and silence is suspicious beyond mean + 8 deviations. Phi
accrual (Hayashibara 2004) fits a distribution to the same two numbers; with the floor below, which dominates on every
link we have seen, the extra arithmetic changes nothing.
"""

from dataclasses import dataclass, field

from shoal.coordinator.allocate.interface import MeasuredPeer
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEERS_MAX
from shoal.protocol.messages import Advert, Heartbeat, PeerStatus

FLOOR_HEARTBEATS = 5.0
"""Four lost in a row happen to a busy machine (a garbage collection, a disk flush); five are a second thought."""
CEILING_HEARTBEATS = 30.0
DOUBT_HEARTBEATS = 2.0
DEVIATIONS = 8.0


@dataclass(slots=True)
class Arrivals:
    """When something that should come every `interval_s` came, and how long its silence may last."""

    interval_s: float
    last_s: float
    mean_s: float = 0.0
    deviation_s: float = 0.0

    def __post_init__(self) -> None:
        self.mean_s = self.mean_s or self.interval_s

    def arrived(self, now_s: float) -> None:
        # A gap beyond patience may be the link's or ours: it counts as no longer than that, so that one does not blunt
        # the measure for minutes, and a rhythm that is really slower is still learned.
        gap_s = min(now_s - self.last_s, self.patience_s)
        self.deviation_s += (abs(gap_s - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (gap_s - self.mean_s) / 8
        self.last_s = now_s

    def excuse(self, now_s: float) -> None:
        """Start waiting anew without learning from the gap: it was ours, not the sender's."""
        self.last_s = now_s

    @property
    def patience_s(self) -> float:
        floor_s, ceiling_s = FLOOR_HEARTBEATS * self.interval_s, CEILING_HEARTBEATS * self.interval_s
        return min(max(self.mean_s + DEVIATIONS * self.deviation_s, floor_s), ceiling_s)

    @property
    def suspect_at_s(self) -> float:
        return self.last_s + self.patience_s


@dataclass(slots=True)
class Presence:
    """One peer as the coordinator sees it. `advert` is None until it is known."""

    arrivals: Arrivals
    advert: Advert | None = None
    heartbeat: Heartbeat | None = None
    left: bool = False


@dataclass(slots=True)
class Roster:
    """All peers that were heard, or are owed time to be."""

    heartbeat_s: float
    presences: dict[PeerID, Presence] = field(default_factory=dict)

    def heard(self, peer: PeerID, heartbeat: Heartbeat, now_s: float) -> bool:
        """Note a heartbeat. Returns: False if there is no room for a stranger."""
        presence = self.presences.get(peer)
        if presence is None or presence.left:
            if presence is None and len(self.presences) >= PEERS_MAX:
                return False
            presence = self.presences[peer] = Presence(Arrivals(self.heartbeat_s, now_s))
        elif presence.heartbeat is None:
            presence.arrivals.excuse(now_s)  # the gap says when the role moved, not how this peer's heart beats
        else:
            presence.arrivals.arrived(now_s)
        presence.advert, presence.heartbeat = heartbeat.advert, heartbeat
        return True

    def doubt(self, peer: PeerID, now_s: float) -> None:
        """Others have found `peer` silent: leave it little of its patience, enough for one heartbeat to get through."""
        arrivals = self.presences[peer].arrivals
        arrivals.last_s = now_s - arrivals.patience_s + DOUBT_HEARTBEATS * self.heartbeat_s

    def expect(self, peer: PeerID, advert: Advert | None, now_s: float) -> None:
        """Count `peer` alive from now on until its silence says otherwise; heartbeats outrank this."""
        presence = self.presences.get(peer)
        if presence is None:
            if len(self.presences) < PEERS_MAX:
                self.presences[peer] = Presence(Arrivals(self.heartbeat_s, now_s), advert)
        elif not presence.left:
            presence.arrivals.excuse(now_s)
            presence.advert = presence.advert or advert

    def excuse_all(self, now_s: float) -> None:
        """We slept: nobody's silence until now counts."""
        for presence in self.presences.values():
            presence.arrivals.excuse(now_s)

    def leave(self, peer: PeerID) -> None:
        if peer in self.presences:
            self.presences[peer].left = True

    def forget_silent(self, now_s: float, *, keep: frozenset[PeerID]) -> None:
        """Drop who left or has been silent for long and is not in `keep`, so that the roster does not grow forever."""
        horizon_s = 2 * CEILING_HEARTBEATS * self.heartbeat_s
        for peer, presence in list(self.presences.items()):
            if peer not in keep and (presence.left or now_s - presence.arrivals.last_s > horizon_s):
                del self.presences[peer]

    def alive(self, now_s: float) -> tuple[PeerID, ...]:
        """In the order of their identifiers."""
        return tuple(
            sorted(p for p, seen in self.presences.items() if not seen.left and now_s < seen.arrivals.suspect_at_s)
        )

    def unheard(self, now_s: float) -> tuple[PeerID, ...]:
        """Alive on credit: expected, without a heartbeat so far."""
        return tuple(peer for peer in self.alive(now_s) if self.presences[peer].heartbeat is None)

    def draining(self, peer: PeerID) -> bool:
        seen = self.presences.get(peer)
        return seen is not None and seen.heartbeat is not None and seen.heartbeat.draining

    def may_coordinate(self, peer: PeerID, now_s: float) -> bool:
        seen = self.presences.get(peer)
        if seen is None or seen.heartbeat is None or seen.left or now_s >= seen.arrivals.suspect_at_s:
            return False
        return seen.heartbeat.advert.willing_to_coordinate and not seen.heartbeat.draining

    @property
    def version_max(self) -> int:
        return max((s.heartbeat.version for s in self.presences.values() if s.heartbeat), default=0)

    def measured(self, now_s: float) -> tuple[MeasuredPeer, ...]:
        """Those alive whose advert is known, for the allocator."""
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

    def status(self, peer: PeerID, stage: int | None, now_s: float) -> PeerStatus | None:
        seen = self.presences.get(peer)
        if seen is None or seen.advert is None:
            return None
        beat = seen.heartbeat
        return PeerStatus(
            peer=peer,
            name=seen.advert.name,
            device=seen.advert.device,
            stage=stage,
            version=beat.version if beat else -1,
            synced=bool(beat and beat.synced),
            draining=bool(beat and beat.draining),
            seen_s_ago=now_s - seen.arrivals.last_s,
            forward_s=beat.forward_s if beat else 0.0,
            window=beat.window if beat else 0,
        )
