"""Decide which round (attempt to reduce a step) a member follows, and number the rounds that it opens. Pure.

Of two rounds of one step, members follow the one with the higher number. But a round with a member that is gone is
*dead*: no further member can finish it, and a member that has finished it shows that by its digest. So any other round
replaces a dead one, and the leader opens a new one.
"""

from dataclasses import dataclass, field
from typing import Final

from shoal.peer.replica.members import MembershipView
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundStart
from shoal.protocol.wire_format import WireFormat

_EACH: Final = 1000
"""A round's number has four parts of this base: plan's sequence, retries under the plan, leader's rank, incarnation."""
_PLANS_AHEAD_MAX: Final = 16
"""A leader may know this many plans that we do not know yet. A round numbered by a plan further ahead is refused, since
its number would shut out every other round."""


def attempt(plan_sequence: int, retries: int, *, rank: int, incarnation: int) -> int:
    """Return the number of a round. Two leaders, or two incarnations (starts) of one leader, may not know each other's
    rounds, so their numbers always differ: otherwise parts of two rounds could enter one sum.

    Args: retries: number of rounds dropped at this version; rank: the leader's rank in the plan."""
    order = plan_sequence * _EACH + retries
    return (order * _EACH + rank) * _EACH + incarnation % _EACH


@dataclass(kw_only=True, slots=True)
class Rounds:
    """One member's rounds by step, until their results are compared.

    Args: forms: number formats of gradients that a round may use."""

    members: MembershipView
    forms: tuple[WireFormat, ...] = ("fp32",)
    plan_sequence: int = 0
    retries: int = 0
    """Number of rounds dropped at our version."""
    open: dict[int, RoundStart] = field(default_factory=dict)

    def is_sound(self, start: RoundStart) -> bool:
        """True if an honest leader may have opened this round. An invalid round would shut out all other rounds."""
        peers = {member.peer for member in start.members}
        ahead = attempt(self.plan_sequence + _PLANS_AHEAD_MAX, 0, rank=0, incarnation=0)
        return (
            0 < len(peers) == len(start.members)
            and len(start.learners) < len(peers)
            and peers.issuperset(start.learners)
            and all(0.0 < member.bandwidth < 1e18 for member in start.members)
            and start.attempt < ahead
            and start.form in self.forms
        )

    def is_dead(self, start: RoundStart) -> bool:
        """True if a member of the round is gone."""
        return any(self.members.is_gone(member.peer) for member in start.members)

    def outbids(self, start: RoundStart) -> bool:
        """True if we should follow round `start` and no longer the round of the same step that we follow, if any."""
        known = self.open.get(start.step)
        return (
            known is None or start.attempt > known.attempt or (start.attempt != known.attempt and self.is_dead(known))
        )

    def void(self, step: int) -> None:
        """Drop the round of `step`, which will not end. Members will follow our next round: its number is higher."""
        order = self.open.pop(step).attempt // _EACH**2
        self.retries = max(self.retries, order - self.plan_sequence * _EACH) + 1

    def void_if_dead(self, step: int) -> None:
        start = self.open.get(step)
        if start is not None and self.is_dead(start):
            self.void(step)

    @property
    def named(self) -> set[PeerID]:
        """The members of all rounds that are in progress, or have results that are not compared yet."""
        return {member.peer for start in self.open.values() for member in start.members}

    def has_named(self, peer: PeerID, step: int) -> bool:
        """True if `peer` is a member of the round of `step`."""
        return step in self.open and any(member.peer == peer for member in self.open[step].members)

    def forget_before(self, step: int) -> None:
        self.open = {at: start for at, start in self.open.items() if at >= step}
