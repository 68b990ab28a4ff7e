"""The plans that this peer has followed lately. It listens only to peers with a place in one of them.

The newest alone would not do: a peer that has lost its place drains for up to half a minute, and meanwhile sends and
owes as before. Pure; the caller passes the time.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import RECENT_PLAN_S, RECENT_PLANS_MAX
from shoal.protocol.plan import Plan


@dataclass(slots=True)
class _Obeyed:
    plan: Plan
    until_s: float = math.inf


@dataclass(slots=True)
class RecentPlans:
    """The plan that a peer follows, and earlier ones for as long as a peer may drain from them."""

    _obeyed: deque[_Obeyed] = field(default_factory=lambda: deque(maxlen=RECENT_PLANS_MAX))

    @property
    def newest(self) -> Plan | None:
        return self._obeyed[-1].plan if self._obeyed else None

    def obey(self, plan: Plan, *, now_s: float, before: Plan | None = None) -> None:
        """Add a plan. Args: before: the plan before it: a newcomer finds draining peers in it."""
        for old in (before, plan):
            if old is None or (self._obeyed and old.order <= self._obeyed[-1].plan.order):
                continue
            if self._obeyed:
                self._obeyed[-1].until_s = now_s + RECENT_PLAN_S
            self._obeyed.append(_Obeyed(old))
        while self._obeyed[0].until_s < now_s:
            self._obeyed.popleft()

    def has(self, peer: PeerID, *, now_s: float) -> bool:
        """True if a recent plan has a place for `peer`, even as a spare."""
        return any(entry.plan.has(peer) for entry in self._obeyed if entry.until_s >= now_s)

    def former(self, group: int) -> frozenset[PeerID]:
        """Return the peers that have left `group` since it holds what it holds by the newest plan."""
        newest = self.newest
        if newest is None:
            return frozenset()
        held = _held_by(newest, group)
        before = {
            member.peer
            for entry in self._obeyed
            if entry.plan.era == newest.era and _held_by(entry.plan, group) == held
            for member in entry.plan.group_members(group)
        }
        return frozenset(before.difference(member.peer for member in newest.group_members(group)))

    def ending_at(self, layer: int) -> frozenset[PeerID]:
        """Return the present and recent holders of the stage that ends just before `layer`."""
        newest = self.newest
        return frozenset(
            peer
            for entry in self._obeyed
            if newest is not None and entry.plan.era == newest.era
            for stage in entry.plan.stages
            if stage.last_layer == layer
            for peer in stage.peers
        )


def _held_by(plan: Plan, group: int) -> tuple[int, int, int] | None:
    """Return (first layer, last layer, expert or -1) of a group; None: the plan has no such group."""
    stages = len(plan.stages)
    if group < stages:
        return (*plan.stages[group].layers, -1)
    if group >= stages + len(plan.experts):
        return None
    entry = plan.experts[group - stages]
    return (*plan.stages[entry.stage].layers, entry.expert)
