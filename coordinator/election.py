"""Ranks the peers that may coordinate, by a hash of run, term and peer, so that every peer computes the same order.

This is not a vote: two peers that see different candidates may both try, and `PlanChain` lets only one through."""

from collections.abc import Iterable
from functools import lru_cache

from blake3 import blake3

from shoal.protocol.identity import PeerID


def rank(run: str, term: int, candidates: Iterable[PeerID]) -> tuple[PeerID, ...]:
    """Return the candidates of `term`, first choice first."""
    return tuple(sorted(set(candidates), key=lambda peer: _lot(run, term, peer)))


@lru_cache(maxsize=4096)
def _lot(run: str, term: int, peer: PeerID) -> tuple[bytes, PeerID]:
    """Return the sort key of a peer; cached, because each tick ranks every member."""
    return blake3(f"{run}/{term}/{peer}".encode()).digest(length=16), peer


def standing(run: str, term: int, coordinator: PeerID, candidates: Iterable[PeerID], peer: PeerID) -> int | None:
    """Return how many peers try before `peer` if the coordinator of `term` fails; None if it is no candidate."""
    order = [p for p in rank(run, term, candidates) if p != coordinator]
    return order.index(peer) if peer in order else None
