"""Decides which replica of the next stage gets the next microbatch, and which replicas are far too slow. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from shoal.protocol.identity import PeerID

T = TypeVar("T")

LAGS = 4.0
"""A replica that takes more than this multiple of the quickest replica's time is a laggard: a smaller share would not
help, since even one microbatch delays the step."""
TRIES_APART = 20.0
"""A far too slow replica is tried again after this multiple of its time for a microbatch, so that waiting for trials
costs 1/20 of all time."""
TRIES_APART_S = 5.0
SLOWER = 1.5
"""A member that takes more than this multiple of the others' median time gets only the microbatches that it can finish
while the others finish the rest."""
ALIKE = 0.05
"""Relative difference up to which loads count as equal. Measured shares have noise of 1.5 %: without this margin a
replica with a slightly larger share would get every microbatch that comes while none is outstanding."""
_GAIN = 0.25


@dataclass(slots=True)
class PeerPace:
    """The running average of the seconds that each peer takes for one microbatch, time in queues excluded."""

    _takes_s: dict[PeerID, float] = field(default_factory=dict)
    """Peer -> average seconds for a microbatch, including delays that other peers may have caused (an upper bound)."""
    _blamed_s: dict[PeerID, float] = field(default_factory=dict)
    """Peer -> average seconds for a microbatch, without delays that other peers may have caused."""
    _tried_s: dict[PeerID, float] = field(default_factory=dict)

    def took(self, peer: PeerID, seconds: float, *, blamed_s: float | None = None) -> None:
        """Add the time that a peer took for one microbatch to its running average. A time below the average weighs more
        than one above it: a slow peer is tried rarely, so one quick answer must restore it. Args: blamed_s: the part of
        `seconds` that the peer itself caused; None: all of it."""
        for of, new_s in ((self._takes_s, seconds), (self._blamed_s, seconds if blamed_s is None else blamed_s)):
            before_s = of.get(peer, new_s)
            gain = _GAIN if new_s > before_s else 1.0 - _GAIN
            of[peer] = before_s + gain * (new_s - before_s)

    def gave_up(self, peer: PeerID, after_s: float) -> None:
        """Record that the peer has not answered in time: at least double its average, up to an hour."""
        # In a run that stands still no replica answers; without a limit, doubling would end at infinity, a weight of 0.
        takes_s = min(max(after_s, 2.0 * self._takes_s.get(peer, 0.0)), 3600.0)
        self._takes_s[peer] = self._blamed_s[peer] = takes_s

    def given(self, peer: PeerID, now_s: float) -> None:
        self._tried_s[peer] = now_s

    def weight(self, peer: PeerID, among: Iterable[PeerID], *, waiting_s: float = 0.0) -> float:
        """Return 1 for a peer that takes up to `LAGS` times as long as the quickest of `among`, else the quotient of
        their times.

        Args: waiting_s: age of the peer's oldest unanswered microbatch.
        """
        return self._weight(peer, self._best_s(among), waiting_s)

    def weights(self, among: Iterable[PeerID]) -> dict[PeerID, float]:
        best_s = self._best_s(among)
        return {peer: self._weight(peer, best_s) for peer in among}

    def is_due(self, peer: PeerID, now_s: float) -> bool:
        """True if the peer's last microbatch (if none: the first call of this) is so long ago that it is tried."""
        if peer not in self._tried_s:
            self._tried_s[peer] = now_s  # it is new: give its share time to show
        return now_s >= self._tried_s[peer] + max(TRIES_APART_S, TRIES_APART * self._blamed_s.get(peer, 0.0))

    def _weight(self, peer: PeerID, best_s: float, waiting_s: float = 0.0) -> float:
        takes_s = max(self._blamed_s.get(peer, best_s), waiting_s)
        return best_s / takes_s if takes_s > LAGS * best_s > 0.0 else 1.0

    def _best_s(self, among: Iterable[PeerID]) -> float:
        takes_s, best_s = self._takes_s, math.inf
        for peer in among:
            if peer in takes_s and takes_s[peer] < best_s:
                best_s = takes_s[peer]
        return best_s if best_s < math.inf else 0.0


@dataclass(slots=True)
class Turns:
    """Measures a member's seconds per microbatch: from its grant, or the contribution before it if that is later."""

    _takes_s: dict[PeerID, float] = field(default_factory=dict)
    _made_s: dict[PeerID, float] = field(default_factory=dict)

    def made(self, peer: PeerID, *, given_s: float, now_s: float) -> None:
        """Record that `peer` has contributed a microbatch that was granted to `peer` at `given_s`."""
        takes_s = now_s - max(given_s, self._made_s.get(peer, given_s))
        before_s = self._takes_s.get(peer, takes_s)
        self._takes_s[peer] = before_s + _GAIN * (takes_s - before_s)
        self._made_s[peer] = now_s

    def most(self, peer: PeerID, held: Mapping[PeerID, int], *, left: int) -> int:
        """Return how many microbatches `peer` should hold at most. A slow peer that holds two of a step's last
        microbatches keeps all others waiting. So it holds only as many as it can finish while the others finish the
        rest, but at least one. A peer about as quick as the others has no limit.

        Args: held: ready member -> number of microbatches that it holds; left: microbatches not granted yet.
        """
        own_s = self._takes_s.get(peer, 0.0)
        others_s = {other: s for other in held if other != peer and (s := self._takes_s.get(other, 0.0)) > 0.0}
        if not others_s or own_s <= SLOWER * median(others_s.values()):
            return left + held.get(peer, 0)
        rate_per_s = sum(1.0 / s for s in others_s.values())
        busy_s = (left + sum(held[other] for other in others_s)) / rate_per_s
        return max(1, int(busy_s / own_s))


def in_turn(receivers: Sequence[T], sender: int, num_senders: int) -> Sequence[T]:
    """Return the receivers, rotated so that each sender begins with a different receiver. Args: sender: index of the
    sender, below `num_senders`.

    A sender knows only its own microbatches. If all senders began with the first receiver, senders with seven
    microbatches each would all choose the same seven of eleven receivers, and the step would wait for long queues."""
    first = sender * len(receivers) // num_senders
    return (*receivers[first:], *receivers[:first])


@dataclass(kw_only=True, slots=True)
class Router:
    """Chooses a ready replica for each microbatch, by the plan's shares and the number of microbatches that each
    replica owes us.

    The replica with the least `(outstanding + 1) / share` gets the next microbatch; if several replicas are within
    `ALIKE` of the least, the one furthest behind its share gets it. At equal speeds this gives exactly the plan's
    split. A replica that slows down has more microbatches outstanding and gets fewer at once, long before a new plan. A
    far slower replica gets almost nothing (`PeerPace`), since the whole step waits for it; a replica that has had no
    work for long is tried. The order of `shares`, which differs between senders (`in_turn`), decides ties."""

    shares: Mapping[PeerID, float] = field(default_factory=dict)
    _ready: set[PeerID] = field(default_factory=set)
    _here: list[PeerID] = field(default_factory=list)
    _outstanding: dict[PeerID, int] = field(default_factory=dict)
    _given: dict[PeerID, float] = field(default_factory=dict)
    _pace: PeerPace = field(default_factory=PeerPace)

    def set_shares(self, shares: Mapping[PeerID, float]) -> None:
        """Follow a new plan's shares. Count given microbatches from 0 again; keep the counts of outstanding ones."""
        self.shares = dict(shares)
        self._given = {}
        self._here = [peer for peer in shares if peer in self._ready]

    def set_ready(self, peer: PeerID, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(peer)
        self._here = [peer for peer in self.shares if peer in self._ready]

    def is_ready(self, peer: PeerID) -> bool:
        return peer in self._ready

    def pick(self, *, now_s: float, avoid: PeerID | None = None, shunned: Collection[PeerID] = ()) -> PeerID | None:
        """Choose the replica that gets the next microbatch, and count that microbatch as outstanding. Peer `avoid` and
        the peers `shunned` are chosen only if no other replica is ready. None: no replica is ready."""
        candidates = self._here
        if avoid is not None:
            candidates = [peer for peer in candidates if peer != avoid] or candidates
        if shunned:
            candidates = [peer for peer in candidates if peer not in shunned] or candidates
        if not candidates:
            return None
        paces = self._pace.weights(candidates)
        target = self._least_laden(self._due(candidates, paces, now_s) or candidates, paces)
        self._pace.given(target, now_s)
        self._outstanding[target] = self._outstanding.get(target, 0) + 1
        self._given[target] = self._given.get(target, 0) + 1
        return target

    def _due(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float], now_s: float) -> list[PeerID]:
        """Return the replicas that have had no work for so long that one is next; if any lag, only those that lag."""
        idle, laggards = [], []
        for peer in candidates:
            if not self._outstanding.get(peer) and self._pace.is_due(peer, now_s):
                idle.append(peer)
                if paces[peer] < 1.0:
                    laggards.append(peer)
        # If microbatches are rare, every replica is due: then laggards go first, or nobody would see their recovery.
        return laggards or idle

    def _least_laden(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float]) -> PeerID:
        """Return the replica with the least outstanding work for its share. If several are about equal, return the one
        that has so far been given the least work for its share."""
        weights = {peer: self.shares[peer] * paces[peer] for peer in candidates}
        owed = {peer: (self._outstanding.get(peer, 0) + 1) / weight for peer, weight in weights.items()}
        most = (1.0 + ALIKE) * min(owed.values())
        given = {peer: (self._given.get(peer, 0) + 1) / weights[peer] for peer in candidates if owed[peer] <= most}
        return min(given, key=lambda peer: (given[peer], owed[peer]))

    def took(self, peer: PeerID, seconds: float) -> None:
        """Record that a microbatch came back from `peer` after `seconds`, time in queues excluded."""
        self._pace.took(peer, seconds)

    def gave_up(self, peer: PeerID, after_s: float) -> None:
        """Record that a microbatch which `peer` has had for `after_s` goes to another replica."""
        self._pace.gave_up(peer, after_s)
        self.returned(peer)

    def returned(self, peer: PeerID) -> None:
        left = self._outstanding.get(peer, 0) - 1
        if left > 0:
            self._outstanding[peer] = left
        else:
            self._outstanding.pop(peer, None)
