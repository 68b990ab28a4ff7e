"""The coordinator's part: it checks which members are alive, asks for the next layout, and transfers the role. Pure."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from shoal.coordinator.allocate.plan_layout import Layout
from shoal.coordinator.coordination_events import Answered, Ask, Command, LogReason, LookUp, Publish, Search, Unanswered
from shoal.coordinator.failure_detector import FailureDetector
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Heartbeat, Ping, PingRequest, TransferLeadership
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.quorum import is_quorum
from shoal.protocol.spec import SwarmSpec

HEAD_HEARTBEATS = 10.0
"""Interval at which the coordinator renews the directory's record of the chain."""
ALONE_HEARTBEATS = 1.0
"""The same without a majority: the others may have another coordinator."""
OVERTIME_HEARTBEATS = 6.0
"""A term lasts up to this much longer if a check of a member, or the search after a loss, is not finished."""
SEARCH_HEARTBEATS = 3.0
"""Time for the search after a loss, and for the vote on its result."""
LEAST_TERM_HEARTBEATS = 5.0
"""A coordinator that cannot reach a member that others reach transfers the role after this time, or the role would
never rest where no peer reaches all others."""
PLAN_HEARTBEATS = 0.5
"""Interval at which the coordinator checks for a better plan; at once when a peer joins, is first heard, or fails."""
PATIENCE_HEARTBEATS = 1.25
"""Time for an heir's first plan, plus some round trips: requesting the term and the votes takes two."""
ROUND_TRIPS = 6.0
"""Number of our round trips to the heir that are added; the heir's own to the members may be longer."""


@dataclass(frozen=True, slots=True)
class KeepRole:
    """We keep the role for another term."""

    permit: bytes


Want = Layout | KeepRole | None
"""The next proposal: a layout, another term of ours, or nothing."""


def transfer_body(term: int, heir: PeerID) -> bytes:
    """Return what the coordinator of `term` signs when it transfers the role to `heir`."""
    return msgspec.msgpack.encode((term, heir))


class LeadershipTransfer:
    """Decides when the coordinator transfers the role, and to which heir."""

    def __init__(self, *, term_s: float, heartbeat_s: float, now_s: float) -> None:
        self._term_s, self._patience_s = term_s, PATIENCE_HEARTBEATS * heartbeat_s
        self._due_s = now_s + term_s
        self._asked: PeerID | None = None
        self._asked_until_s = 0.0
        self._passed_over: set[PeerID] = set()

    def begin(self, now_s: float) -> None:
        self._due_s = now_s + self._term_s
        self._asked, self._passed_over = None, set()

    def hasten(self, due_s: float) -> None:
        """Move the end of the term forward to `due_s`."""
        self._due_s = min(self._due_s, due_s)

    @property
    def is_waiting(self) -> bool:
        """True if an heir has been asked and still has time for its plan. Meanwhile this peer makes none."""
        return self._asked is not None

    def is_due(self, now_s: float) -> bool:
        """True if an heir should be asked now: the term is over, or the last heir did not take the role."""
        return now_s >= (self._asked_until_s if self._asked is not None else self._due_s)

    def may_wait(self, now_s: float, by_s: float) -> bool:
        """True if the role has been due for less than `by_s`, and no heir has been asked."""
        return self._asked is None and now_s < self._due_s + by_s

    def next(self, order: Sequence[PeerID], now_s: float) -> PeerID | None:
        """Return the next peer of `order` to ask; None: all have been asked, and the role stays for a while."""
        self._asked = next((peer for peer in order if peer not in self._passed_over), None)
        if self._asked is None:
            self._passed_over = set()
            self._due_s = now_s + self._patience_s
        else:
            self._passed_over.add(self._asked)
            self._asked_until_s = now_s + self._patience_s
        return self._asked

    def accepted(self, peer: PeerID, round_trip_s: float, now_s: float) -> None:
        """Record that `peer` takes the role; asking it took `round_trip_s`."""
        if peer == self._asked:
            self._asked_until_s = now_s + self._patience_s + ROUND_TRIPS * round_trip_s

    def declined(self, peer: PeerID, now_s: float) -> None:
        """Record that `peer` will not take the role, or cannot be reached."""
        if peer == self._asked:
            self._asked_until_s = now_s


class Leader:
    """The coordinator's leadership term, from its first plan to the heir's."""

    def __init__(
        self,
        *,
        me: PeerID,
        owner: PeerID,
        swarm: SwarmSpec,
        policy: ReplanPolicy,
        sign_transfer: Callable[[bytes], bytes],
        now_s: float,
    ) -> None:
        self._me, self._owner, self._policy = me, owner, policy
        self._heartbeat_s = swarm.heartbeat_s
        self._sign_transfer = sign_transfer
        self._detector = FailureDetector(me=me, heartbeat_s=swarm.heartbeat_s)
        self._transfer = LeadershipTransfer(term_s=swarm.term_s, heartbeat_s=swarm.heartbeat_s, now_s=now_s)
        self._head_at_s = self._begun_s = now_s
        self._plan_at_s = now_s
        self._members: frozenset[PeerID] = frozenset()
        self._lost_s = -math.inf
        self._known: tuple[tuple[PeerID, ...], bool] = (), False
        """The live peers at the last look, and whether all of them had been heard."""

    def begin(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> None:
        """Begin a term of ours. Args: silent: the coordinator that failed and so caused the term, if any."""
        self._transfer.begin(now_s)
        self._begun_s = now_s
        self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s
        self._members, self._lost_s = frozenset(plan.members), -math.inf
        self._policy.begin_term(plan, now_s, continuing=continuing, silent=silent)
        # A dead coordinator outside the plan, as after a reset, needs no check.
        self._detector.begin((silent,) if silent in plan.members else (), now_s)

    def excuse(self, now_s: float) -> None:
        """Restart all timeouts, because this peer was suspended."""
        self._policy.view.roster.excuse_all(now_s)
        self._detector.begin((), now_s)

    def hasten(self, due_s: float) -> None:
        self._transfer.hasten(due_s)

    def lost(self, now_s: float, *, outbid: bool) -> None:
        self._policy.unsettle()
        if outbid:
            # A majority may have promised our term to a candidate that then failed: only a later term helps.
            self._transfer.hasten(now_s + self._heartbeat_s)

    # --- what others say ---

    def heard(self, peer: PeerID, heartbeat: Heartbeat, plan: Plan, now_s: float) -> None:
        """Handle a heartbeat that the view has recorded."""
        if heartbeat.attested or (plan.cutover_version and heartbeat.carried is not None):
            self._plan_at_s = now_s
        self._detector.heard(peer)
        self._detector.report(peer, heartbeat.silent, plan, now_s)

    def answered(self, event: Answered, now_s: float) -> list[Command]:
        if isinstance(event.asked, TransferLeadership):
            self._transfer.accepted(event.peer, event.took_s, now_s)
        if isinstance(event.asked, Ping):
            return self._detector.answered(event.peer, self._policy.view.roster, now_s)
        if isinstance(event.asked, PingRequest):
            return self._detector.vouched(event.peer, event.asked.peer, self._policy.view.roster, now_s)
        return []

    def unanswered(self, event: Unanswered, plan: Plan, now_s: float) -> list[Command]:
        if isinstance(event.asked, TransferLeadership):
            self._transfer.declined(event.peer, now_s)
            return [LogReason(text=f"{event.peer[-8:]} does not take the role: {event.reason}")]
        if isinstance(event.asked, Ping) and event.refused:
            return self._detector.refused(
                event.peer,
                self._policy.view.roster,
                plan,
                irreplaceable=self._policy.is_irreplaceable(event.peer, plan, now_s),
                took_s=event.took_s,
                now_s=now_s,
            )
        return []

    # --- time ---

    def work(
        self, live: SignedPlan, now_s: float, *, eligible: bool, busy: bool, outranked: bool, sequence: int
    ) -> tuple[list[Command], Want]:
        """Do what is due, and choose what to propose.
        Args: eligible: we may coordinate the next term too. busy: a proposal of ours is under way. outranked: another
        coordinator's plan above ours is known."""
        roster = self._policy.view.roster
        members = frozenset(live.plan.members)
        self._lost_s = now_s if members < self._members else self._lost_s
        self._members = members
        commands = self._detector.look(roster, live.plan, now_s, awaited=self._policy.awaited)
        alive = roster.alive(now_s)
        hears = is_quorum({self._me, *alive}, live.plan, self._owner)
        alone = outranked or not hears
        why = "there is another coordinator" if hears else "hears no majority of the plan's members"
        if now_s >= self._head_at_s:
            self._head_at_s = now_s + (ALONE_HEARTBEATS if alone else HEAD_HEARTBEATS) * self._heartbeat_s
            commands += [LookUp()] if alone else [LookUp(), Publish(plan=live)]
        if alone:
            self._head_at_s = min(self._head_at_s, now_s + ALONE_HEARTBEATS * self._heartbeat_s)
            return [*commands, LogReason(text=f"makes no plans: {why}")], None
        if busy:
            return commands, None
        vouchers = self._detector.vouchers(now_s)
        if vouchers:
            self._transfer.hasten(self._begun_s + LEAST_TERM_HEARTBEATS * self._heartbeat_s)
        stays = eligible and not vouchers
        if self._transfer.is_due(now_s) and not (stays and self._finds_out(live.plan, now_s)):
            order = self._heirs(live.plan, vouchers, now_s)
            heir = self._transfer.next([peer for peer in order if peer != self._me or stays], now_s)
            permit = self._sign_transfer(transfer_body(live.plan.term, heir)) if heir is not None else b""
            if heir == self._me:
                return commands, KeepRole(permit)
            if heir is not None:
                commands.append(LogReason(text=f"term {live.plan.term} ends, {heir[-8:]} is next"))
                commands.append(Ask(peer=heir, message=self._policy.hand_over(live, now_s, permit=permit)))
        if self._transfer.is_waiting:
            return commands, None
        more, want = self._next_plan(live, alive, now_s, sequence=sequence)
        return commands + more, want

    def _heirs(self, plan: Plan, vouchers: Collection[PeerID], now_s: float) -> list[PeerID]:
        """Return the possible heirs: those that most members reach, then those that reach a member that we cannot."""
        view = self._policy.view
        order = view.successors(plan, now_s)
        return sorted(order, key=lambda peer: (view.num_unreached(peer, plan, now_s), peer not in vouchers))

    def _finds_out(self, plan: Plan, now_s: float) -> bool:
        """True if we are about to learn what an heir would have to find out again."""
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
        notes: list[Command] = [LogReason(text=reason)] if reason else []
        match found:
            case Layout():
                self._policy.settle(live.plan, now_s)
                return [LogReason(text=reason)], found
            case SearchJob():
                return [*notes, Search(job=found)], None
            case None:
                return notes, None
