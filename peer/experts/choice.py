"""Which holder of an expert gets the next microbatch's tokens. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.peer.replica.router import Router
from shoal.protocol.identity import PeerID

SHARE_MIN = 1e-3
"""Of our tokens: somebody must be last."""
REMEMBERED = 64.0
"""Choices: who was away for longer is not made to catch up on all of it."""


def sent_by(me: PeerID, holders: Mapping[PeerID, float], senders: Mapping[PeerID, float]) -> dict[PeerID, float]:
    """Which part of its tokens `me` sends to each holder, so that all of them together get their shares.

    A holder serves itself first, whose tokens cost no path, but not beyond its share: what it has above that goes to
    those whose share is more than they have themselves, by how much more it is.

    Args:
        holders: of one expert, and their shares of its tokens, > 0; need not sum to 1.
        senders: the stage's members, and their shares of its microbatches; `me` may be none of them any more.
    Returns: positive, sums to 1 but for `SHARE_MIN`.
    """
    due, have = _normed(holders), _normed(senders)
    mine = have.get(me, 0.0)
    itself = min(1.0, due[me] / mine) if me in due and mine > 0.0 else 0.0
    short = {peer: max(0.0, share - have.get(peer, 0.0)) for peer, share in due.items() if peer != me}
    if sum(short.values()) <= 0.0:
        short = {peer: share for peer, share in due.items() if peer != me}  # nobody is short: we are no member
    rest = _normed(short)
    parts = {peer: itself if peer == me else (1.0 - itself) * rest[peer] for peer in due}
    return {peer: max(SHARE_MIN, part) for peer, part in parts.items()}


def _normed(shares: Mapping[PeerID, float]) -> dict[PeerID, float]:
    total = sum(shares.values())
    return {peer: share / total for peer, share in shares.items()} if total > 0.0 else dict(shares)


@dataclass(kw_only=True, slots=True)
class HolderRouter(Router):
    """Of one expert. Follows its shares over the microbatches of late: a stage sends each expert few at a time, so that
    by what is outstanding alone who has the largest share would get all. What is outstanding counts twice."""

    me: PeerID

    def follow(self, holders: Mapping[PeerID, float], senders: Mapping[PeerID, float]) -> None:
        """A new plan (see `sent_by`)."""
        shares = sent_by(self.me, holders, senders) if holders else {}
        if shares != self.shares:
            self.set_shares(shares)

    def pick(self, *, now_s: float, avoid: PeerID | None = None, shunned: Collection[PeerID] = ()) -> PeerID | None:
        target = Router.pick(self, now_s=now_s, avoid=avoid, shunned=shunned)
        for peer in self._given:
            self._given[peer] *= 1.0 - 1.0 / REMEMBERED
        return target

    def _due(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float], now_s: float) -> list[PeerID]:
        """Nobody: what has no share needs no try, and who is slow `patience.py` knows."""
        return []

    def _least_laden(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float]) -> PeerID:
        def load(peer: PeerID) -> float:
            weight = self.shares[peer] * paces[peer]
            return (self._given.get(peer, 0.0) + self._outstanding.get(peer, 0) + 1.0) / weight

        return min(candidates, key=load)
