"""Chooses the holder that gets an expert's tokens of the next microbatch. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.peer.replica.router import Router
from shoal.protocol.identity import PeerID

SHARE_MIN = 1e-3
"""The least fraction of our tokens that a holder gets: `sent_by` raises smaller ones to it, so none is excluded."""


def sent_by(me: PeerID, holders: Mapping[PeerID, float], senders: Mapping[PeerID, float]) -> dict[PeerID, float]:
    """Return the fraction of its tokens that `me` sends to each holder, so that each holder gets its share of the
    tokens of all senders.

    A holder serves its own tokens first, because they cost no transfer, but not beyond its share. The remaining tokens
    go to holders with a share above their own tokens, in proportion to the excess.

    Args:
        holders: holder of one expert -> its share of the tokens, > 0; the shares need not sum to 1.
        senders: member of the stage -> its share of the microbatches; `me` may be missing.
    Returns: holder -> fraction; they sum to 1 before those below `SHARE_MIN` are raised to it.
    """
    due, have = _normed(holders), _normed(senders)
    mine = have.get(me, 0.0)
    itself = min(1.0, due[me] / mine) if me in due and mine > 0.0 else 0.0
    short = {peer: max(0.0, share - have.get(peer, 0.0)) for peer, share in due.items() if peer != me}
    if sum(short.values()) <= 0.0:
        short = {peer: share for peer, share in due.items() if peer != me}  # no holder has an excess
    rest = _normed(short)
    parts = {peer: itself if peer == me else (1.0 - itself) * rest[peer] for peer in due}
    return {peer: max(SHARE_MIN, part) for peer, part in parts.items()}


def _normed(shares: Mapping[PeerID, float]) -> dict[PeerID, float]:
    total = sum(shares.values())
    return {peer: share / total for peer, share in shares.items()} if total > 0.0 else dict(shares)


@dataclass(kw_only=True, slots=True)
class HolderRouter(Router):
    """Distributes the microbatches of one expert among its holders by their shares. A holder's load is the number of
    microbatches given to it (about the last 64 choices count) plus those still outstanding. If only these few counted,
    the holder with the largest share would get every microbatch."""

    me: PeerID

    def follow(self, holders: Mapping[PeerID, float], senders: Mapping[PeerID, float]) -> None:
        shares = sent_by(self.me, holders, senders) if holders else {}
        if shares != self.shares:
            self.set_shares(shares)

    def pick(self, *, now_s: float, avoid: PeerID | None = None, shunned: Collection[PeerID] = ()) -> PeerID | None:
        target = Router.pick(self, now_s=now_s, avoid=avoid, shunned=shunned)
        for peer in self._given:
            # About 64 choices are remembered, so that a holder that was away need not make up for all it missed.
            self._given[peer] *= 1.0 - 1.0 / 64.0
        return target

    def _due(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float], now_s: float) -> list[PeerID]:
        """Return an empty list: no holder gets a trial microbatch, since `patience.py` handles slow holders."""
        return []

    def _least_laden(self, candidates: Sequence[PeerID], paces: Mapping[PeerID, float]) -> PeerID:
        def load(peer: PeerID) -> float:
            weight = self.shares[peer] * paces[peer]
            return (self._given.get(peer, 0.0) + self._outstanding.get(peer, 0) + 1.0) / weight

        return min(candidates, key=load)
