"""Knows which pairs of peers cannot reach each other, though others reach both. Pure.

Two peers behind routers may never connect, and a connected pair may lose its connection. Each peer reports how many
tries to reach another have failed since that one last answered (`LinkReport.num_failed`).

**Evidence.** A pair is unreachable if both of its ends report it, with at least one try each and `TRIES_MIN` together,
and have not connected for `PATIENCE_HEARTBEATS`; if they have never connected, one try each is enough. So no third peer
can separate two others, a peer that calls all others unreachable is not believed, and two liars only harm their own
pair. (Lost: one end is enough. A peer could then choose its partners, or exclude a coordinator.) If only one end has
tried, the coordinator asks the other end to try as well (`LinkSurvey`).

**End.** A pair is reachable again when either end reports an answer of the other, or when no report has arrived for
`EXPIRY_HEARTBEATS`. Until then the coordinator asks both ends to try again, every `RETRY_HEARTBEATS`."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import LinkReport, UnreachablePair

TRIES_MIN = 3
PATIENCE_HEARTBEATS = 2.0
"""Both ends must report the failure for this long. A broken connection often returns at once."""
RETRY_HEARTBEATS = 30.0
EXPIRY_HEARTBEATS = 150.0
CLAIMS_KEPT_MAX = 64
TOLD_MAX = 64
"""Maximum number of pairs in a leadership transfer."""

Pair = tuple[PeerID, PeerID]
"""The lesser identifier first."""


def pair_of(one: PeerID, other: PeerID) -> Pair:
    return (one, other) if one < other else (other, one)


@dataclass(slots=True)
class _Claim:
    tries: int
    since_s: float
    said_s: float
    has_met: bool = True
    """True if it has ever had an answer of the other."""


class Reachability:
    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._claims: dict[PeerID, dict[PeerID, _Claim]] = {}
        """Reporter -> the peers that it cannot reach."""

    def note(self, reporter: PeerID, reports: Iterable[LinkReport], now_s: float) -> None:
        """Record the links in a heartbeat of `reporter`, which is not trusted."""
        for report in islice(reports, LINKS_PER_HEARTBEAT_MAX):
            if report.peer == reporter:
                continue
            claims = self._claims.get(reporter, {})
            claim = claims.get(report.peer)
            if report.num_failed <= 0:
                if claim is not None:
                    self._met(reporter, report.peer)
                continue
            if claim is None:
                claims = self._claims.setdefault(reporter, claims)
                claim = claims[report.peer] = _Claim(0, now_s, now_s)
            claim.tries, claim.said_s, claim.has_met = report.num_failed, now_s, report.round_trip_s > 0.0
            claims[report.peer] = claims.pop(report.peer)  # latest last
            if len(claims) > CLAIMS_KEPT_MAX:
                del claims[next(iter(claims))]

    def forget_all(self) -> None:
        self._claims = {}

    def keep(self, peers: Collection[PeerID]) -> None:
        """Forget the reports of all other peers, and reports about them."""
        self._claims = {
            peer: {target: claim for target, claim in claims.items() if target in peers}
            for peer, claims in self._claims.items()
            if peer in peers
        }

    def pairs(self, now_s: float, among: Collection[PeerID] | None = None) -> frozenset[Pair]:
        """Return the pairs that cannot reach each other. Args: among: only pairs of these; None: all."""
        return frozenset(
            (one, other)
            for one, claims in self._claims.items()
            for other in claims
            if one < other
            and (among is None or (one in among and other in among))
            and self._is_apart(one, other, now_s)
        )

    def cannot_reach(self, peer: PeerID, now_s: float) -> frozenset[PeerID]:
        return frozenset(other for other in self._claims.get(peer, ()) if self._is_apart(peer, other, now_s))

    def failed_from(self, peer: PeerID) -> frozenset[PeerID]:
        """Return the peers that `peer` reports as unreachable, without a check of the other ends."""
        return frozenset(self._claims.get(peer, ()))

    def accused_by_others(self, peer: PeerID) -> frozenset[PeerID]:
        """Return the peers that report `peer` as unreachable, and on which `peer` has not reported."""
        own = self._claims.get(peer, {})
        return frozenset(other for other, claims in self._claims.items() if peer in claims and other not in own)

    def tell(self, now_s: float) -> tuple[UnreachablePair, ...]:
        """Return the pairs for the next coordinator."""
        told = ((self._said_s(one, other), one, other) for one, other in self.pairs(now_s))
        newest = sorted(told, key=lambda each: (-each[0], each[1:]))[:TOLD_MAX]
        return tuple(UnreachablePair(one, other, now_s - said_s) for said_s, one, other in newest)

    def take_over(self, pairs: Iterable[UnreachablePair], now_s: float) -> None:
        """Believe the previous coordinator, as if both ends had reported the pair at that time."""
        for pair in islice(pairs, TOLD_MAX):
            if pair.one == pair.other or not 0.0 <= pair.age_s < EXPIRY_HEARTBEATS * self._heartbeat_s:
                continue
            said_s = now_s - pair.age_s
            for one, other in ((pair.one, pair.other), (pair.other, pair.one)):
                claims = self._claims.setdefault(one, {})
                if other not in claims and len(claims) < CLAIMS_KEPT_MAX:
                    since_s = said_s - PATIENCE_HEARTBEATS * self._heartbeat_s
                    claims[other] = _Claim(TRIES_MIN, since_s, said_s)

    def _is_apart(self, one: PeerID, other: PeerID, now_s: float) -> bool:
        ours = self._claims.get(one, {}).get(other)
        theirs = self._claims.get(other, {}).get(one)
        if ours is None or theirs is None or now_s >= self._said_s(one, other) + EXPIRY_HEARTBEATS * self._heartbeat_s:
            return False
        since_s = max(ours.since_s, theirs.since_s)
        is_settled = now_s >= since_s + PATIENCE_HEARTBEATS * self._heartbeat_s
        have_met = ours.has_met or theirs.has_met
        return not have_met or (is_settled and ours.tries + theirs.tries >= TRIES_MIN)

    def _said_s(self, one: PeerID, other: PeerID) -> float:
        return max(self._claims[one][other].said_s, self._claims[other][one].said_s)

    def _met(self, one: PeerID, other: PeerID) -> None:
        for here, there in ((one, other), (other, one)):
            self._claims.get(here, {}).pop(there, None)
