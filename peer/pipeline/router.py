"""Which replica of the next stage gets the next microbatch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shoal.peer.pipeline.pace import Pace
from shoal.protocol.identity import PeerID


@dataclass(kw_only=True, slots=True)
class Router:
    """Follows the plan's shares, corrected by what each replica still owes us and by who is ready.

    The replica with the least `(outstanding + 1) / share` gets the next one: with equal speeds that is the plan's
    split exactly, and a replica that slows down has more outstanding and is given less at once, long before a plan
    could say so. One that is many times slower than the others is given almost nothing (`Pace`), since the whole step
    waits for it; one that has had nothing for long is tried. Ties go by plan order.
    """

    shares: Mapping[PeerID, float] = field(default_factory=dict)
    _ready: set[PeerID] = field(default_factory=set)
    _outstanding: dict[PeerID, int] = field(default_factory=dict)
    _given: dict[PeerID, float] = field(default_factory=dict)
    _pace: Pace = field(default_factory=Pace)

    def set_shares(self, shares: Mapping[PeerID, float]) -> None:
        """A new plan: readiness and what is outstanding stay known. Its split starts to count from now."""
        self.shares = dict(shares)
        self._given = {}

    def set_ready(self, peer: PeerID, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(peer)

    def is_ready(self, peer: PeerID) -> bool:
        return peer in self._ready

    def pick(self, *, now_s: float, avoid: PeerID | None = None, shunned: Collection[PeerID] = ()) -> PeerID | None:
        """The next target, counted as outstanding; not `avoid` if there is another, nor one who is `shunned`
        if there is one beside them. None if nobody is ready."""
        ready = [peer for peer in self.shares if peer in self._ready]
        candidates = [peer for peer in ready if peer != avoid] or ready
        candidates = [peer for peer in candidates if peer not in shunned] or candidates
        if not candidates:
            return None
        weights = {peer: self.shares[peer] * self._pace.weight(peer, candidates) for peer in candidates}
        due = self._due(candidates, now_s)
        target = min(due or candidates, key=lambda peer: self._load(peer, weights[peer]))
        self._pace.given(target, now_s)
        self._outstanding[target] = self._outstanding.get(target, 0) + 1
        self._given[target] = self._given.get(target, 0) + 1
        return target

    def _due(self, candidates: Collection[PeerID], now_s: float) -> list[PeerID]:
        """Who has had nothing for so long that one of them is next, whatever the shares say."""
        idle = [p for p in candidates if not self._outstanding.get(p) and self._pace.is_due(p, now_s)]
        # Where microbatches are far apart everyone is due: then the laggard goes first, or it is never seen to recover.
        return [p for p in idle if self._pace.weight(p, candidates) < 1.0] or idle

    def _load(self, peer: PeerID, weight: float) -> tuple[float, ...]:
        """The next goes to whoever has least."""
        # Outstanding first; among equals the one furthest behind its share, else a tie always feeds the same peer.
        return (self._outstanding.get(peer, 0) + 1) / weight, (self._given.get(peer, 0) + 1) / weight

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
