"""Makes the electoral roll of a plan: which members vote on the plan after it, and which are one voice. Pure."""

from collections.abc import Callable, Collection

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

Roll = tuple[tuple[int, ...], ...]
"""The type of `Plan.roll`."""
InviteOf = Callable[[PeerID], bytes]
"""Returns the key of the invite by which a member came; empty: it is not known, or the member needed none."""


class Electorate:
    """Decides who votes on the next plan.

    Args: invite_of: tells by which invite a member came, as far as this peer knows and votes are to be counted by it.
    """

    def __init__(self, invite_of: InviteOf) -> None:
        self._invite_of = invite_of

    def roll(self, before: Plan | None, plan: Plan, now_s: float) -> Roll:
        """Return the roll of `plan`, which has none yet and follows `before`."""
        return self._grouped(plan, plan.members)

    def _grouped(self, plan: Plan, electors: Collection[PeerID]) -> Roll:
        groups: dict[bytes | PeerID, list[int]] = {}
        for at, peer in enumerate(plan.members):
            if peer in electors:
                groups.setdefault(self._invite_of(peer) or peer, []).append(at)
        return tuple(map(tuple, groups.values()))
