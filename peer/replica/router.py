"""Decides which replica of the next stage gets the next microbatch, and which replicas are far too slow. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from shoal.protocol.identity import PeerID

T = TypeVar("T")

LAGS = 4.0
"""A replica slower than this multiple of the quickest one's time is a laggard: shares do not help."""
TRIES_APART = 20.0
"""A laggard is tried again after this multiple of its time: a step that waits for it costs at most a twentieth."""
TRIES_APART_S = 5.0
SLOWER = 1.5
"""A member slower than this multiple of the others' time gets no second microbatch that they could finish sooner."""
ALIKE = 0.05
"""Relative difference up to which loads count as equal. Measured shares have noise of 1.5 %: a replica with slightly
more must not get every microbatch that comes while none is outstanding."""
_GAIN = 0.25


@dataclass(slots=True)
class PeerPace:
    """Seconds that each peer takes for one microbatch, queues not counted: an average over the last few."""

    _takes_s: dict[PeerID, float] = field(default_factory=dict)
    """Upper bound: includes delays that may not be the peer's fault."""
    _blamed_s: dict[PeerID, float] = field(default_factory=dict)
    """The part of it that surely is the peer's own."""
    _tried_s: dict[PeerID, float] = field(default_factory=dict)

    def took(self, peer: PeerID, seconds: float, *, blamed_s: float | None = None) -> None:
        """Average in a new time. Shorter times weigh more: a slow peer is tried so rarely that each answer must count.
        Args: blamed_s: the part that surely is the peer's own; None: all."""
        for of, new_s in ((self._takes_s, seconds), (self._blamed_s, seconds if blamed_s is None else blamed_s)):
            before_s = of.get(peer, new_s)
            gain = _GAIN if new_s > before_s else 1.0 - _GAIN
            of[peer] = before_s + gain * (new_s - before_s)

    def gave_up(self, peer: PeerID, after_s: float) -> None:
        """Note that it has not answered in time: the next try is at least twice as far away as the last."""
        # In a run that stands still no replica answers, and doubling without end would give infinity, a weight of 0.
        takes_s = min(max(after_s, 2.0 * self._takes_s.get(peer, 0.0)), 3600.0)
        self._takes_s[peer] = self._blamed_s[peer] = takes_s

    def given(self, peer: PeerID, now_s: float) -> None:
        self._tried_s[peer] = now_s

    def weight(self, peer: PeerID, among: Iterable[PeerID], *, waiting_s: float = 0.0) -> float:
        """Return 1 for a peer that keeps pace with the quickest of `among`, less for a laggard. Args: waiting_s: age of
        its oldest unanswered microbatch."""
        return self._weight(peer, self._best_s(among), waiting_s)

    def weights(self, among: Iterable[PeerID]) -> dict[PeerID, float]:
        """Return the `weight` of each of `among`."""
        best_s = self._best_s(among)
        return {peer: self._weight(peer, best_s) for peer in among}

    def is_due(self, peer: PeerID, now_s: float) -> bool:
        """True if the peer has had nothing for so long that it is worth a try: it may be new, or have recovered."""
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
    """Seconds that each claimant takes per microbatch: since its previous one, or since the grant if that is later."""

    _takes_s: dict[PeerID, float] = field(default_factory=dict)
    _made_s: dict[PeerID, float] = field(default_factory=dict)

    def made(self, peer: PeerID, *, given_s: float, now_s: float) -> None:
        """Note that `peer` has contributed the microbatch that it was given at `given_s`."""
        takes_s = now_s - max(given_s, self._made_s.get(peer, given_s))
        before_s = self._takes_s.get(peer, takes_s)
        self._takes_s[peer] = before_s + _GAIN * (takes_s - before_s)
        self._made_s[peer] = now_s

    def most(self, peer: PeerID, held: Mapping[PeerID, int], *, left: int) -> int:
        """Return how many microbatches `peer` should hold at most: a slow peer with two of a step's last ones keeps all
        others waiting. So it holds only what it can finish while the others finish theirs and what is left, but at
        least one. There is no limit for a peer about as quick as the others.

        Args: held: number that each present claimant holds. left: microbatches that are not granted yet.
        """
        own_s = self._takes_s.get(peer, 0.0)
        others_s = {other: s for other in held if other != peer and (s := self._takes_s.get(other, 0.0)) > 0.0}
        if not others_s or own_s <= SLOWER * median(others_s.values()):
            return left + held.get(peer, 0)
        rate_per_s = sum(1.0 / s for s in others_s.values())
        busy_s = (left + sum(held[other] for other in others_s)) / rate_per_s
        return max(1, int(busy_s / own_s))


def in_turn(receivers: Sequence[T], sender: int, num_senders: int) -> Sequence[T]:
    """Return the receivers in the order in which sender `sender` of `num_senders` begins with them.

    A sender knows only what it has sent itself. If all began with the first, each would give its seven microbatches of
    a step to the same seven of eleven receivers, and the step would wait for the longest queue."""
    first = sender * len(receivers) // num_senders
    return (*receivers[first:], *receivers[:first])


@dataclass(kw_only=True, slots=True)
class Router:
    """Follows the plan's shares, corrected by what each replica still owes us and by readiness.

    The replica with the least `(outstanding + 1) / share` gets the next microbatch; of several that are `ALIKE`, the
    one furthest behind its share. With equal speeds that is the plan's split exactly. A replica that slows down has
    more outstanding and is given less at once, long before a plan could say so. A laggard is given almost nothing
    (`PeerPace`), since the whole step waits for it; a replica without work for long is tried. Ties go by the order of
    `shares`, which differs between senders (`in_turn`)."""

    shares: Mapping[PeerID, float] = field(default_factory=dict)
    _ready: set[PeerID] = field(default_factory=set)
    _here: list[PeerID] = field(default_factory=list)
    _outstanding: dict[PeerID, int] = field(default_factory=dict)
    _given: dict[PeerID, float] = field(default_factory=dict)
    _pace: PeerPace = field(default_factory=PeerPace)

    def set_shares(self, shares: Mapping[PeerID, float]) -> None:
        """Start a new plan's split from now; keep readiness and what is outstanding."""
        self.shares = dict(shares)
        self._given = {}
        self._here = [peer for peer in shares if peer in self._ready]

    def set_ready(self, peer: PeerID, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(peer)
        self._here = [peer for peer in self.shares if peer in self._ready]

    def is_ready(self, peer: PeerID) -> bool:
        return peer in self._ready

    def pick(self, *, now_s: float, avoid: PeerID | None = None, shunned: Collection[PeerID] = ()) -> PeerID | None:
        """Return the next target, now outstanding: neither `avoid` nor `shunned` if another is ready. None: none is
        ready."""
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
        """Return the replicas without work for so long that one of them is next, whatever the shares say."""
        idle, laggards = [], []
        for peer in candidates:
            if not self._outstanding.get(peer) and self._pace.is_due(peer, now_s):
                idle.append(peer)
                if paces[peer] < 1.0:
                    laggards.append(peer)
        # With rare microbatches every replica is due: then laggards go first, or their recovery is never seen.
        return laggards or idle

    def _least_laden(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float]) -> PeerID:
        """Return the replica furthest behind its share among those that owe least for their share."""
        weights = {peer: self.shares[peer] * paces[peer] for peer in candidates}
        owed = {peer: (self._outstanding.get(peer, 0) + 1) / weight for peer, weight in weights.items()}
        most = (1.0 + ALIKE) * min(owed.values())
        given = {peer: (self._given.get(peer, 0) + 1) / weights[peer] for peer in candidates if owed[peer] <= most}
        return min(given, key=lambda peer: (given[peer], owed[peer]))

    def took(self, peer: PeerID, seconds: float) -> None:
        """Note that a microbatch came back from `peer` after `seconds`, time in queues excluded."""
        self._pace.took(peer, seconds)

    def gave_up(self, peer: PeerID, after_s: float) -> None:
        """Note that another replica gets what `peer` has had for `after_s`."""
        self._pace.gave_up(peer, after_s)
        self.returned(peer)

    def returned(self, peer: PeerID) -> None:
        left = self._outstanding.get(peer, 0) - 1
        if left > 0:
            self._outstanding[peer] = left
        else:
            self._outstanding.pop(peer, None)
