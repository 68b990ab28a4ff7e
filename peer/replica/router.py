"""Decides which replica of the next stage gets the next microbatch, and who is out of all proportion slow. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from shoal.protocol.identity import PeerID

T = TypeVar("T")

LAGS = 4.0
"""Beyond this many times the quickest one's time it is no longer a matter of shares."""
TRIES_APART = 20.0
"""A laggard is tried again after this many times what it took: a step that waits for it costs at most a twentieth."""
TRIES_APART_S = 5.0
SLOWER = 1.5
"""Who takes so many times what the others take is not given a second microbatch that they could make sooner."""
ALIKE = 0.05
"""Loads that differ by less, as a part, are the same. Shares follow measured speeds, whose averages have noise of
1.5 %: a replica with slightly more of a share must not get every microbatch that comes while none is outstanding."""
_GAIN = 0.25
_TAKES_S_MAX = 3600.0
"""Where a run stands still nobody answers: what is doubled each time would come to infinity, a weight to zero."""


@dataclass(slots=True)
class Pace:
    """How long each peer takes for one microbatch, queues not counted: an average over the last few."""

    _takes_s: dict[PeerID, float] = field(default_factory=dict)
    """At most: with what may have been no fault of the peer's."""
    _blamed_s: dict[PeerID, float] = field(default_factory=dict)
    """Of that, what surely was the peer's own."""
    _tried_s: dict[PeerID, float] = field(default_factory=dict)

    def took(self, peer: PeerID, seconds: float, *, blamed_s: float | None = None) -> None:
        """Quick to believe that it is quick: it is tried so rarely that each answer must count.

        `blamed_s`: what of it surely was the peer's own; None: all.
        """
        for of, new_s in ((self._takes_s, seconds), (self._blamed_s, seconds if blamed_s is None else blamed_s)):
            before_s = of.get(peer, new_s)
            gain = _GAIN if new_s > before_s else 1.0 - _GAIN
            of[peer] = before_s + gain * (new_s - before_s)

    def gave_up(self, peer: PeerID, after_s: float) -> None:
        """It has not answered in time: the next try is at least twice as far away as the last."""
        takes_s = min(max(after_s, 2.0 * self._takes_s.get(peer, 0.0)), _TAKES_S_MAX)
        self._takes_s[peer] = self._blamed_s[peer] = takes_s

    def given(self, peer: PeerID, now_s: float) -> None:
        self._tried_s[peer] = now_s

    def weight(self, peer: PeerID, among: Iterable[PeerID], *, waiting_s: float = 0.0) -> float:
        """1 for who keeps pace with the quickest of `among`, less for who does not.

        `waiting_s`: for how long it has had something that is not back.
        """
        best_s = self._best_s(among)
        takes_s = max(self._blamed_s.get(peer, best_s), waiting_s)
        return best_s / takes_s if takes_s > LAGS * best_s > 0.0 else 1.0

    def weights(self, among: Iterable[PeerID]) -> dict[PeerID, float]:
        """The `weight` of each of `among`."""
        best_s = self._best_s(among)
        weights = {}
        for peer in among:
            takes_s = self._blamed_s.get(peer, best_s)
            weights[peer] = best_s / takes_s if takes_s > LAGS * best_s > 0.0 else 1.0
        return weights

    def is_due(self, peer: PeerID, now_s: float) -> bool:
        """Whether it has had nothing for so long that it is worth a try: it may be new, or have recovered."""
        if peer not in self._tried_s:
            self._tried_s[peer] = now_s  # it has just come: its share has time to show
        return now_s >= self._tried_s[peer] + max(TRIES_APART_S, TRIES_APART * self._blamed_s.get(peer, 0.0))

    def _best_s(self, among: Iterable[PeerID]) -> float:
        """What the quickest of them takes; 0: nobody knows."""
        takes_s, best_s = self._takes_s, math.inf
        for peer in among:
            if peer in takes_s and takes_s[peer] < best_s:
                best_s = takes_s[peer]
        return best_s if best_s < math.inf else 0.0


@dataclass(slots=True)
class Turns:
    """How long each claimant takes for one microbatch after the other: from one that it has made to the next, or from
    when it was given one if it had nothing else."""

    _takes_s: dict[PeerID, float] = field(default_factory=dict)
    _made_s: dict[PeerID, float] = field(default_factory=dict)

    def made(self, peer: PeerID, *, given_s: float, now_s: float) -> None:
        """`peer` has made what it was given at `given_s`."""
        takes_s = now_s - max(given_s, self._made_s.get(peer, given_s))
        before_s = self._takes_s.get(peer, takes_s)
        self._takes_s[peer] = before_s + _GAIN * (takes_s - before_s)
        self._made_s[peer] = now_s

    def most(self, peer: PeerID, held: Mapping[PeerID, int], *, left: int) -> int:
        """How many microbatches `peer` should hold at most.

        A slow one that holds two of a step's last ones keeps all others waiting. So it holds as many as it makes
        while the others make what they hold and what is left; one in any case, and as many as it likes if it is about
        as quick as they are.

        Args:
            held: what each claimant that is here holds.
            left: microbatches that nobody holds yet.
        """
        own_s = self._takes_s.get(peer, 0.0)
        others_s = {other: s for other in held if other != peer and (s := self._takes_s.get(other, 0.0)) > 0.0}
        if not others_s or own_s <= SLOWER * median(others_s.values()):
            return left + held.get(peer, 0)
        rate_per_s = sum(1.0 / s for s in others_s.values())
        busy_s = (left + sum(held[other] for other in others_s)) / rate_per_s
        return max(1, int(busy_s / own_s))


def in_turn(receivers: Sequence[T], sender: int, num_senders: int) -> Sequence[T]:
    """The receivers in the order in which sender `sender` of `num_senders` begins with them.

    A sender knows only what it has sent itself. If all began with the first, each would give the seven microbatches
    that it has of a step to the same seven of eleven receivers, and the step would wait for the longest queue.
    """
    first = sender * len(receivers) // num_senders
    return (*receivers[first:], *receivers[:first])


@dataclass(kw_only=True, slots=True)
class Router:
    """Follows the plan's shares, corrected by what each replica still owes us and by who is ready.

    The replica with the least `(outstanding + 1) / share` gets the next one, and of several that are `ALIKE` the one
    that is furthest behind its share. With equal speeds that is the plan's split exactly. A replica that slows down has
    more outstanding and is given less at once, long before a plan could say so. One that is many times slower than the
    others is given almost nothing (`Pace`), since the whole step waits for it; one that has had nothing for long is
    tried. Ties go by the order of `shares`, which is another one for each sender (`in_turn`).
    """

    shares: Mapping[PeerID, float] = field(default_factory=dict)
    _ready: set[PeerID] = field(default_factory=set)
    _here: list[PeerID] = field(default_factory=list)
    """Those of the plan who are ready, in plan order."""
    _outstanding: dict[PeerID, int] = field(default_factory=dict)
    _given: dict[PeerID, float] = field(default_factory=dict)
    _pace: Pace = field(default_factory=Pace)

    def set_shares(self, shares: Mapping[PeerID, float]) -> None:
        """A new plan: readiness and what is outstanding stay known. Its split starts to count from now."""
        self.shares = dict(shares)
        self._given = {}
        self._here = [peer for peer in shares if peer in self._ready]

    def set_ready(self, peer: PeerID, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(peer)
        self._here = [peer for peer in self.shares if peer in self._ready]

    def is_ready(self, peer: PeerID) -> bool:
        return peer in self._ready

    def pick(self, *, now_s: float, avoid: PeerID | None = None, shunned: Collection[PeerID] = ()) -> PeerID | None:
        """The next target, counted as outstanding; not `avoid` if there is another, nor one who is `shunned`
        if there is one beside them. None if nobody is ready."""
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
        """Who has had nothing for so long that one of them is next, whatever the shares say."""
        idle, laggards = [], []
        for peer in candidates:
            if not self._outstanding.get(peer) and self._pace.is_due(peer, now_s):
                idle.append(peer)
                if paces[peer] < 1.0:
                    laggards.append(peer)
        # Where microbatches are far apart everyone is due: then the laggard goes first, or it is never seen to recover.
        return laggards or idle

    def _least_laden(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float]) -> PeerID:
        """Who gets the next: of those who owe least for their share, the one furthest behind it."""
        weights = {peer: self.shares[peer] * paces[peer] for peer in candidates}
        owed = {peer: (self._outstanding.get(peer, 0) + 1) / weight for peer, weight in weights.items()}
        most = (1.0 + ALIKE) * min(owed.values())
        given = {peer: (self._given.get(peer, 0) + 1) / weights[peer] for peer in candidates if owed[peer] <= most}
        return min(given, key=lambda peer: (given[peer], owed[peer]))

    def took(self, peer: PeerID, seconds: float) -> None:
        """A microbatch came back from `peer` after `seconds`, without what it stood in queues."""
        self._pace.took(peer, seconds)

    def gave_up(self, peer: PeerID, after_s: float) -> None:
        """What `peer` has had for `after_s` goes to somebody else."""
        self._pace.gave_up(peer, after_s)
        self.returned(peer)

    def returned(self, peer: PeerID) -> None:
        left = self._outstanding.get(peer, 0) - 1
        if left > 0:
            self._outstanding[peer] = left
        else:
            self._outstanding.pop(peer, None)
