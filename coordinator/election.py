"""Says whose turn it is to coordinate. Peers rank by a hash of run, term and peer, so that every peer computes the same
order without asking.

A term's order says which peer coordinates it when the role changes hands in peace (the first), and which proposes the
next term when the coordinator is gone (the first of the others, called the standby; then the next). None of this is a
vote: two peers that see different candidates may both try, and `chain.PlanChain` lets one of them through.
"""

from collections.abc import Iterable
from functools import lru_cache

from blake3 import blake3

from shoal.protocol.identity import PeerID


def rank(run: str, term: int, candidates: Iterable[PeerID]) -> tuple[PeerID, ...]:
    """The candidates of `term`, first in turn first; each once, in an order that differs from term to term."""
    return tuple(sorted(set(candidates), key=lambda peer: _lot(run, term, peer)))


@lru_cache(maxsize=4096)
def _lot(run: str, term: int, peer: PeerID) -> tuple[bytes, PeerID]:
    """The key by which peers rank. It is drawn for every member at every tick of a term, hence the cache."""
    return blake3(f"{run}/{term}/{peer}".encode()).digest(length=16), peer


def standing(run: str, term: int, coordinator: PeerID, candidates: Iterable[PeerID], peer: PeerID) -> int | None:
    """How many others try before `peer` when the coordinator of `term` is gone: 0 is the standby.

    Returns: None if `peer` is no candidate, or is the coordinator itself.
    """
    order = [p for p in rank(run, term, candidates) if p != coordinator]
    return order.index(peer) if peer in order else None
