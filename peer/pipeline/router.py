"""Which replica of the next stage gets the next microbatch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID


@dataclass(kw_only=True, slots=True)
class Router:
    """Follows the plan's shares, corrected by what each replica still owes us and by who is ready.

    The replica with the least `(outstanding + 1) / share` gets the next one: with equal speeds that is the plan's
    split exactly, and a replica that slows down has more outstanding and is given less at once, long before a plan
    could say so. Ties go by plan order.
    """

    shares: Mapping[PeerID, float] = field(default_factory=dict)
    _ready: set[PeerID] = field(default_factory=set)
    _outstanding: dict[PeerID, int] = field(default_factory=dict)
    _given: dict[PeerID, int] = field(default_factory=dict)

    def set_shares(self, shares: Mapping[PeerID, float]) -> None:
        """A new plan: readiness and what is outstanding stay known. Its split starts to count from now."""
        self.shares = dict(shares)
        self._given = {}

    def set_ready(self, peer: PeerID, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(peer)

    def is_ready(self, peer: PeerID) -> bool:
        return peer in self._ready

    @property
    def has_target(self) -> bool:
        return any(peer in self._ready for peer in self.shares)

    def pick(self, *, avoid: PeerID | None = None) -> PeerID | None:
        """The next target, counted as outstanding; None if nobody is ready (other than `avoid`)."""
        candidates = [peer for peer in self.shares if peer in self._ready and peer != avoid]
        if not candidates:
            return None
        # Outstanding first; among equals the one furthest behind its share, else a tie always feeds the same peer.
        target = min(
            candidates,
            key=lambda p: (
                (self._outstanding.get(p, 0) + 1) / self.shares[p],
                (self._given.get(p, 0) + 1) / self.shares[p],
            ),
        )
        self._outstanding[target] = self._outstanding.get(target, 0) + 1
        self._given[target] = self._given.get(target, 0) + 1
        return target

    def returned(self, peer: PeerID) -> None:
        left = self._outstanding.get(peer, 0) - 1
        if left > 0:
            self._outstanding[peer] = left
        else:
            self._outstanding.pop(peer, None)
