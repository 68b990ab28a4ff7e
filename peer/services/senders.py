"""The peers from which a holder of experts accepts tokens, and how much from each. Pure."""

from collections import Counter
from typing import Final

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

LEFT_S: Final = 60.0
"""A peer that has left the plan may still send what it has under way: a drain takes half a minute at most."""
STRANGER: Final = PeerID("")
"""All strangers together share one room, since a new name costs nothing."""


class Senders:
    """The members of the plan, of any stage, and those that recent plans dropped.

    A member that moves keeps sending for its old stage until it has drained, and a standby may learn of its place
    before us.
    """

    def __init__(self, me: PeerID) -> None:
        self._me = me
        self._plan: Plan | None = None
        self._left_s: dict[PeerID, float] = {}

    def follow(self, plan: Plan, *, now_s: float) -> None:
        if not plan.experts:
            return  # nobody has anything to send
        self._left_s = {peer: left_s for peer, left_s in self._left_s.items() if now_s < left_s + LEFT_S}
        if self._plan is not None:
            self._left_s |= dict.fromkeys(plan.dropped_since(self._plan), now_s)
        self._plan = plan

    def admits(self, peer: PeerID) -> bool:
        return peer == self._me or peer in self._left_s or (self._plan is not None and self._plan.has(peer))


class Room:
    """A limited number of places; one peer takes at most `each`."""

    def __init__(self, total: int, *, each: int) -> None:
        self._total = total
        self._each = each
        self._taken: Counter[PeerID] = Counter()

    def take(self, peer: PeerID) -> bool:
        """Take a place for the peer. False: there is none."""
        if self._taken[peer] >= self._each or self._taken.total() >= self._total:
            return False
        self._taken[peer] += 1
        return True

    def leave(self, peer: PeerID) -> None:
        self._taken[peer] -= 1
        if not self._taken[peer]:
            del self._taken[peer]
