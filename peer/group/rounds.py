"""Which round of each step a member holds to, and under which number it opens another. Pure.

The highest number holds. But a round one of whose members is gone is *dead*: nobody can end it any more, and whoever
has ended it says so by its digest. So any other round takes its place, and the lead opens one.
"""

from dataclasses import dataclass, field
from typing import Final

from shoal.peer.group.members import Members
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundStart
from shoal.protocol.wire_format import WireFormat

_ATTEMPTS_PER_PLAN: Final = 1000
_RANKS: Final = 1000
_TENURES: Final = 1000
_PLANS_AHEAD_MAX: Final = 16
"""A lead may have heard of as many plans more than we. Under a number from further ahead nobody could open another."""
_BANDWIDTH_MAX: Final = 1e18
"""As in a plan."""


def attempt(plan_sequence: int, retries: int, *, rank: int, incarnation: int) -> int:
    """The number of a round: no two leads, nor two tenures of one, open different rounds of a step under one. Each may
    not have heard of the other's, and their parts must not meet in one sum."""
    order = plan_sequence * _ATTEMPTS_PER_PLAN + retries
    return (order * _RANKS + rank) * _TENURES + incarnation % _TENURES


@dataclass(kw_only=True, slots=True)
class Rounds:
    """One member's, by step, until their results have been compared. Args: forms: as `Commit.sums`."""

    members: Members
    forms: tuple[WireFormat, ...] = ("fp32",)
    plan_sequence: int = 0
    retries: int = 0
    """Of ours, at our version."""
    open: dict[int, RoundStart] = field(default_factory=dict)

    def is_sound(self, start: RoundStart) -> bool:
        """An honest lead may have opened it. One that nobody can reduce, once taken, would let no other in."""
        peers = {member.peer for member in start.members}
        ahead = attempt(self.plan_sequence + _PLANS_AHEAD_MAX, 0, rank=0, incarnation=0)
        return (
            0 < len(peers) == len(start.members)
            and len(start.light) < len(peers)
            and peers.issuperset(start.light)
            and all(0.0 < member.bandwidth < _BANDWIDTH_MAX for member in start.members)
            and start.attempt < ahead
            and start.form in self.forms
        )

    def is_dead(self, start: RoundStart) -> bool:
        """Somebody of it is gone."""
        return any(self.members.is_gone(member.peer) for member in start.members)

    def outbids(self, start: RoundStart) -> bool:
        """Whether it takes the place of what we hold to."""
        known = self.open.get(start.step)
        return (
            known is None or start.attempt > known.attempt or (start.attempt != known.attempt and self.is_dead(known))
        )

    def void(self, step: int) -> None:
        """It will not end: the next that we open outbids it at those who still hold to it, whoever had opened it."""
        order = self.open.pop(step).attempt // (_RANKS * _TENURES)
        self.retries = max(self.retries, order - self.plan_sequence * _ATTEMPTS_PER_PLAN) + 1

    def void_if_dead(self, step: int) -> None:
        start = self.open.get(step)
        if start is not None and self.is_dead(start):
            self.void(step)

    def number(self, rank: int, incarnation: int) -> int:
        """Of the next that we open."""
        return attempt(self.plan_sequence, self.retries, rank=rank, incarnation=incarnation)

    @property
    def named(self) -> set[PeerID]:
        """Everybody in any of them."""
        return {member.peer for start in self.open.values() for member in start.members}

    def has_named(self, peer: PeerID, step: int) -> bool:
        """Whether `peer` takes part in the round of `step`."""
        return step in self.open and any(member.peer == peer for member in self.open[step].members)

    def forget_before(self, step: int) -> None:
        self.open = {at: start for at, start in self.open.items() if at >= step}
