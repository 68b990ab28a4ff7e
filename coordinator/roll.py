"""Makes the electoral roll of a plan: the members that vote on the next plan, and their groups. Pure.

A vote follows work. The first roll has all members with a place. Later a member joins the roll after
`PROBATION_HEARTBEATS` in a place, and stays on it while it is a member. If fewer than `ELECTORS_MIN` are left, members
with places join at once, the oldest first.

Members that came by one invite form one group for good. A coordinator may not have seen every certificate, so it
assigns newcomers to groups and moves no other member. Voters check the groups by what they know (`Electorate.flaw`)."""

from collections.abc import Callable, Iterable, Sequence, Set

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import Plan

PROBATION_HEARTBEATS = 120.0
"""Two minutes at one heartbeat a second, which is two terms."""
ELECTORS_MIN = 3

Roll = tuple[tuple[int, ...], ...]
"""The type of `Plan.roll`."""
InviteOf = Callable[[PeerID], bytes | None]
"""Returns the key of a member's invite; empty: it needed none; None: unknown."""


class Electorate:
    """Decides which members vote on the next plan, and which rolls this peer accepts."""

    def __init__(self, heartbeat_s: float, invite_of: InviteOf) -> None:
        self._probation_s = PROBATION_HEARTBEATS * heartbeat_s
        self._invite_of = invite_of
        self._placed_s: dict[PeerID, float] = {}
        """Member with a place -> when it got the place, as far as we have seen."""
        self._came_s: dict[PeerID, float] = {}
        """The same for members that we have seen arrive."""
        self._refused: set[PeerID] = set()
        self._one_by_one = False

    def obey(self, plan: Plan, now_s: float, *, follows: bool) -> None:
        """Record a live plan. Args: follows: it is the successor of the plan that we obeyed before."""
        holders = _holders(plan)
        came = [peer for peer in holders if peer not in self._placed_s] if follows else []
        self._placed_s = {peer: self._placed_s.get(peer, now_s) for peer in holders}
        self._came_s = {peer: at_s for peer, at_s in self._came_s.items() if peer in self._placed_s}
        self._came_s.update(dict.fromkeys(came, now_s))

    def begin_term(self) -> None:
        self._refused, self._one_by_one = set(), False

    def refused(self, before: Plan, plan: Plan) -> None:
        """Record that `plan`, ours, was refused. If it may be for its roll, newcomers join one by one."""
        added = _on_roll(plan) - _on_roll(before)
        self._one_by_one = self._one_by_one or len(added) > 1
        if len(added) == 1:
            self._refused |= added

    def roll(self, before: Plan | None, plan: Plan, now_s: float) -> Roll:
        """Return the roll of `plan`, which has none yet and follows `before`."""
        holders = _holders(plan)
        if before is None:
            return self._numbered(plan, (), holders)
        kept = [peer for peer in plan.members if peer in _on_roll(before)]
        waiting = sorted(
            {*holders} - {*kept} - self._refused,
            key=lambda peer: (self._placed_s.get(peer, now_s), peer),
        )
        needed = ELECTORS_MIN - len(kept)
        added = [
            peer
            for at, peer in enumerate(peer for peer in waiting if self._invite_of(peer) is not None)
            if at < needed or now_s >= self._placed_s.get(peer, now_s) + self._probation_s
        ]
        if len(kept) + len(added) == 0:
            added = holders
        if self._one_by_one and needed <= 0:
            added = added[:1]
        # Plans of older releases have no rolls: make the groups anew.
        groups = [[peer for peer in group if plan.has(peer)] for group in before.groups_on_roll] if before.roll else []
        return self._numbered(plan, groups, added if before.roll else [*kept, *added])

    def _numbered(self, plan: Plan, groups: Iterable[list[PeerID]], added: Iterable[PeerID]) -> Roll:
        """Add members to the groups of a roll: to the group of the same invite, if there is one."""
        found = [list(group) for group in groups if group]
        of_invite = {invite: group for group in found for peer in group if (invite := self._invite_of(peer))}
        for peer in added:
            invite = self._invite_of(peer)
            group = of_invite.get(invite) if invite else None
            if group is None:
                found.append(group := [])
                if invite:
                    of_invite[invite] = group
            group.append(peer)
        at = {peer: at for at, peer in enumerate(plan.members)}
        return tuple(sorted(tuple(sorted(at[peer] for peer in group)) for group in found))

    def are_enough(self, signed: Set[PeerID], signers: Sequence[PeerID]) -> bool:
        """True if a majority has signed, from at least two invites if the signers joined by several."""

        def invites(peers: Iterable[PeerID]) -> int:
            return len({self._invite_of(peer) or peer for peer in peers})

        return 2 * len(signed) > len(signers) and invites(signed) >= min(2, invites(signers))

    def flaw(self, plan: Plan, before: Plan, now_s: float, name_of: Callable[[PeerID], str]) -> str:
        """Say why we reject the roll of `plan`, the successor of `before`; empty: nothing that we know of."""
        old, new = _on_roll(before), _on_roll(plan)
        kept = {peer for peer in old if plan.has(peer)}
        if gone := sorted(kept - new):
            return f"it takes {name_of(gone[0])} off the roll"
        if before.roll and _parted(before, kept) != _parted(plan, kept):
            return "it groups electors anew"
        added = sorted(new - kept)
        if idle := [peer for peer in added if not plan.groups_of(peer)]:
            return f"it gives {name_of(idle[0])} a vote, which holds no place"
        early = [peer for peer in added if now_s < self._came_s.get(peer, -self._probation_s) + self._probation_s / 2]
        if len(early) > max(0, ELECTORS_MIN - len(kept)):
            return f"it gives {name_of(early[0])} a vote, which came a moment ago"
        for peer in added:
            invite = self._invite_of(peer)
            for group in plan.groups_on_roll if invite else ():
                known = {other: self._invite_of(other) for other in group if other != peer}
                odd = (o for o, by in known.items() if by and (by == invite) is not (peer in group))
                if (other := next(odd, None)) is not None:
                    how = "with" if peer in group else "apart from"
                    return f"it counts {name_of(peer)} {how} {name_of(other)}, against their invites"
        return ""


def _holders(plan: Plan) -> list[PeerID]:
    return [peer for peer in plan.members if plan.groups_of(peer)]


def _on_roll(plan: Plan) -> set[PeerID]:
    return {peer for group in plan.groups_on_roll for peer in group}


def _parted(plan: Plan, among: set[PeerID]) -> set[frozenset[PeerID]]:
    """Return the groups of the roll, restricted to `among`."""
    return {found for group in plan.groups_on_roll if (found := frozenset(group) & among)}
