"""The plan that this peer follows, and recent earlier plans. The peer takes messages only from peers in these plans.

The newest plan alone would not be enough: a peer that has lost its place drains (finishes its work) for up to half a
minute; until then it sends activations and owes gradients.
"""

import math
from collections import deque
from dataclasses import dataclass

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import RECENT_PLAN_S, RECENT_PLANS_MAX
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.ports import Clock


@dataclass(slots=True)
class _Obeyed:
    plan: Plan
    until_s: float = math.inf


class Plans:
    """The plan in force, and earlier plans: each is kept as long as peers that it places may still drain."""

    def __init__(self, clock: Clock) -> None:
        self.signed: SignedPlan | None = None
        """The plan in force; None before the first."""
        self._clock = clock
        self._obeyed: deque[_Obeyed] = deque(maxlen=RECENT_PLANS_MAX)

    @property
    def newest(self) -> Plan | None:
        """The plan in force, without its signature."""
        return self.signed.plan if self.signed is not None else None

    def obey(self, signed: SignedPlan, *, predecessor: SignedPlan | None = None) -> None:
        """Put a plan in force. Args: predecessor: the plan before it, which tells a newcomer the draining peers."""
        self.signed = signed
        now_s = self._clock.now_s()
        for plan in (predecessor.plan if predecessor is not None else None, signed.plan):
            if plan is None or (self._obeyed and plan.order <= self._obeyed[-1].plan.order):
                continue
            if self._obeyed:
                self._obeyed[-1].until_s = now_s + RECENT_PLAN_S
            self._obeyed.append(_Obeyed(plan))
        while self._obeyed[0].until_s < now_s:
            self._obeyed.popleft()

    def knows(self, peer: PeerID) -> bool:
        """True if a recent plan has a place for `peer`, even as a spare."""
        now_s = self._clock.now_s()
        return any(entry.plan.has(peer) for entry in self._obeyed if entry.until_s >= now_s)

    def former(self, group: int) -> frozenset[PeerID]:
        """Return peers that recent plans, but not the newest, had in `group` with its present layers (and expert)."""
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
        """Return the present and recent members of the stage that ends just before `layer`."""
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
    """Return (first layer, end layer, number of the expert or, for a stage, -1) of a group. None: no such group."""
    stages = len(plan.stages)
    if group < stages:
        return (*plan.stages[group].layers, -1)
    if group >= stages + len(plan.experts):
        return None
    entry = plan.experts[group - stages]
    return (*plan.stages[entry.stage].layers, entry.expert)
