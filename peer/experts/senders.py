"""Whom a holder of experts listens to, and how much it takes from each. Pure."""

from collections import Counter
from typing import Final

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

LEFT_S: Final = 60.0
"""Who is in no plan any more sends what it still has under way: a drain takes half a minute at most."""
STRANGER: Final = PeerID("")
"""All of them: a name costs nothing."""


class Senders:
    """The members of the plan, and those whom it has dropped of late.

    Of every stage: who moves to another one sends for the one before until it has drained, and a plan that gives a
    spare a place may reach the spare before it reaches us.
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
    """Places, of which nobody takes more than `each`."""

    def __init__(self, total: int, *, each: int) -> None:
        self._total = total
        self._each = each
        self._taken: Counter[PeerID] = Counter()

    def take(self, peer: PeerID) -> bool:
        """One for it. False: there is none."""
        if self._taken[peer] >= self._each or self._taken.total() >= self._total:
            return False
        self._taken[peer] += 1
        return True

    def leave(self, peer: PeerID) -> None:
        """It gives one back."""
        self._taken[peer] -= 1
        if not self._taken[peer]:
            del self._taken[peer]
