"""The coordinator's part, while the role is here: who is there, what should come next, who is next. Pure."""

import math
from dataclasses import dataclass

from shoal.coordinator.chain import is_quorum
from shoal.coordinator.coordination_events import Answered, Ask, Command, LookUp, Note, Publish, Search, Unanswered
from shoal.coordinator.failure_detector import FailureDetector
from shoal.coordinator.leadership_transfer import LeadershipTransfer
from shoal.coordinator.plan_layout import Layout
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import HandOver, Heartbeat, Ping
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.spec import SwarmSpec

HEAD_HEARTBEATS = 10.0
"""How often the coordinator renews the directory's record of the chain."""
ALONE_HEARTBEATS = 1.0
"""How often it looks there while it hears no majority: the others may have another coordinator."""
OVERTIME_HEARTBEATS = 6.0
"""For how long a term goes on beyond its end until a doubt is resolved and planned for, or a search behind a loss has
ended: an heir, who has heard nobody yet, gives everybody time anew."""
SEARCH_HEARTBEATS = 3.0
"""How long such a search may take, and what it finds to be voted on."""
PLAN_HEARTBEATS = 0.5
"""How often it looks whether another plan would be better; at once when somebody comes, is heard first, or dies."""


@dataclass(frozen=True, slots=True)
class KeepRole:
    """The role is ours for another term."""


Want = Layout | KeepRole | None
"""What to propose: a layout, another term of ours, or nothing."""


class Leader:
    """Args:
    policy: says which layout should come next, from its view of the swarm; shared with the core.
    """

    def __init__(self, *, me: PeerID, owner: PeerID, swarm: SwarmSpec, policy: ReplanPolicy, now_s: float) -> None:
        self._me, self._owner, self._policy = me, owner, policy
        self._heartbeat_s = swarm.heartbeat_s
        self._detector = FailureDetector(me=me, heartbeat_s=swarm.heartbeat_s)
        self._transfer = LeadershipTransfer(term_s=swarm.term_s, heartbeat_s=swarm.heartbeat_s, now_s=now_s)
        self._head_at_s = now_s
        self._plan_at_s = now_s
        self._members: frozenset[PeerID] = frozenset()
        self._lost_s = -math.inf
        """When the live plan lost a member."""
        self._known: tuple[tuple[PeerID, ...], bool] = (), False
        """Who was alive when it last looked, and whether it had heard them all."""

    def begin(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> None:
        """A term of ours begins. `silent`: whose silence brought it, if that is why."""
        self._transfer.begin(now_s)
        self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s
        self._members, self._lost_s = frozenset(plan.members), -math.inf
        self._policy.begin_term(plan, now_s, continuing=continuing, silent=silent)
        # Of a dead coordinator that no plan names any more, as after a reset, nothing is asked.
        self._detector.begin((silent,) if silent in plan.members else (), now_s)

    def excuse(self, now_s: float) -> None:
        """We slept: nobody's silence until now counts."""
        self._policy.view.roster.excuse_all(now_s)
        self._detector.begin((), now_s)

    def hasten(self, due_s: float) -> None:
        """The role should move on at `due_s`, if it would not before."""
        self._transfer.hasten(due_s)

    def lost(self, now_s: float, *, outbid: bool) -> None:
        """A plan of ours came to nothing."""
        self._policy.unsettle()
        if outbid:
            # A majority may have promised our term away to somebody who then fell silent: only a later helps.
            self._transfer.hasten(now_s + self._heartbeat_s)

    # --- what others say ---

    def heard(self, peer: PeerID, heartbeat: Heartbeat, plan: Plan, now_s: float) -> None:
        """A heartbeat, which the view has noted. Whom it calls silent is looked for at the next tick."""
        self._detector.heard(peer)
        self._detector.report(peer, heartbeat.silent, plan, now_s)

    def answered(self, event: Answered, now_s: float) -> list[Command]:
        if isinstance(event.asked, HandOver):
            self._transfer.accepted(event.peer, event.took_s, now_s)
        if isinstance(event.asked, Ping):
            return self._detector.answered(event.peer, self._policy.view.roster, now_s)
        return []

    def unanswered(self, event: Unanswered, plan: Plan, now_s: float) -> list[Command]:
        if isinstance(event.asked, HandOver):
            self._transfer.declined(event.peer, now_s)
            return [Note(text=f"{event.peer[-8:]} does not take the role: {event.reason}")]
        if isinstance(event.asked, Ping) and event.refused:
            return self._detector.refused(
                event.peer,
                self._policy.view.roster,
                plan,
                irreplaceable=self._policy.view.is_irreplaceable(event.peer, plan, now_s),
                took_s=event.took_s,
                now_s=now_s,
            )
        return []

    # --- time ---

    def work(
        self, live: SignedPlan, now_s: float, *, eligible: bool, busy: bool, outranked: bool, sequence: int
    ) -> tuple[list[Command], Want]:
        """Args: eligible: we may coordinate the next term too; busy: a proposal of ours is under way; outranked: there
        is word of another coordinator's plan above ours.

        Returns: (commands, what to propose).
        """
        roster = self._policy.view.roster
        members = frozenset(live.plan.members)
        self._lost_s = now_s if members < self._members else self._lost_s
        self._members = members
        commands = self._detector.look(roster, live.plan, now_s)
        alive = roster.alive(now_s)
        hears = is_quorum({self._me, *alive}, live.plan.electors, self._owner)
        alone = outranked or not hears
        why = "there is another coordinator" if hears else "hears no majority of the plan's members"
        if now_s >= self._head_at_s:
            self._head_at_s = now_s + (ALONE_HEARTBEATS if alone else HEAD_HEARTBEATS) * self._heartbeat_s
            commands += [LookUp()] if alone else [LookUp(), Publish(plan=live)]
        if alone:
            self._head_at_s = min(self._head_at_s, now_s + ALONE_HEARTBEATS * self._heartbeat_s)
            return [*commands, Note(text=f"makes no plans: {why}")], None
        if busy:
            return commands, None
        if self._transfer.is_due(now_s) and not (eligible and self._finds_out(live.plan, now_s)):
            order = self._policy.view.successors(live.plan, now_s)
            heir = self._transfer.next([peer for peer in order if peer != self._me or eligible], now_s)
            if heir == self._me:
                return commands, KeepRole()
            if heir is not None:
                commands.append(Note(text=f"term {live.plan.term} ends, {heir[-8:]} is next"))
                commands.append(Ask(peer=heir, message=self._policy.hand_over(live, now_s)))
        if self._transfer.is_waiting:
            return commands, None
        more, want = self._next_plan(live, alive, now_s, sequence=sequence)
        return commands + more, want

    def _finds_out(self, plan: Plan, now_s: float) -> bool:
        """What an heir would have to begin again: whether somebody is gone, or how to make up for the loss."""
        roster, heartbeat_s = self._policy.view.roster, self._heartbeat_s
        finds_out = (
            self._detector.are_open
            or now_s < self._lost_s + SEARCH_HEARTBEATS * heartbeat_s
            or any(roster.is_gone(peer, now_s) for peer in plan.members if peer != self._me)
        )
        may_wait = self._transfer.may_wait(now_s, OVERTIME_HEARTBEATS * heartbeat_s)
        return (finds_out and may_wait) or self._policy.awaits_disks(now_s)

    def _next_plan(
        self, live: SignedPlan, alive: tuple[PeerID, ...], now_s: float, *, sequence: int
    ) -> tuple[list[Command], Want]:
        roster = self._policy.view.roster
        known = alive, all(roster.was_heard(peer) for peer in alive)
        if now_s < self._plan_at_s and known == self._known:
            return [], None
        if not self._detector.is_settled(roster, live.plan, now_s):
            return [], None
        self._plan_at_s, self._known = now_s + PLAN_HEARTBEATS * self._heartbeat_s, known
        found, reason = self._policy.next_plan(live.plan, now_s, sequence=sequence)
        notes: list[Command] = [Note(text=reason)] if reason else []
        match found:
            case Layout():
                self._policy.settle(live.plan, now_s)
                return [Note(text=reason)], found
            case SearchJob():
                return [*notes, Search(job=found)], None
            case None:
                return notes, None
