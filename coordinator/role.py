"""Decides which role this peer has, and when the role changes. Pure.

| state        | what this peer does                                      | what ends the state                        |
|--------------|----------------------------------------------------------|--------------------------------------------|
| Stranger     | reports to the coordinator that it knows of, or else to  | a plan has a place for it                  |
|              | the owner; reads the directory                           |                                            |
| Follower     | watches the coordinator, and backs it against candidates | its silence, on our turn: PreCandidate     |
| PreCandidate | asks the members whether they miss the coordinator too   | a majority does: Candidate; else: Follower |
| Candidate    | requests the term, then the votes for a plan (proposer)  | a live plan: Leader; a failure: Follower   |
| Leader       | watches the members, and asks for the next layout        | the end of the term: Transferring          |
| Transferring | asks one heir after the other to take the role, and      | an heir's live plan: Follower; nobody      |
|              | makes no plan                                            | takes the role: Leader                     |

A live plan above ours ends every state: its coordinator is a leader, and its other members are followers.

The pre-vote promises nothing. So the side of a partition without a majority uses up no terms: the coordinator keeps the
members' votes and continues after the partition heals (Ongaro's thesis on Raft, section 9.6). A transfer needs no
pre-vote.

The rank (the order in which peers may take the role) promises nothing either: two peers that know different candidates
may both try, and `PlanChain` lets only one through."""

import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
from blake3 import blake3

from shoal.coordinator.allocate.interface import Layout
from shoal.coordinator.chain import PlanChain
from shoal.coordinator.chain_sync import LeaderHint
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.coordination_events import (
    Answered,
    Ask,
    Command,
    Introduce,
    LogReason,
    LookUp,
    Persist,
    Publish,
    Reply,
    Search,
    Unanswered,
)
from shoal.coordinator.failure_detector import CoordinatorWatch, FailureDetector
from shoal.coordinator.proposer import Proposer
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.search_schedule import SearchJob
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import (
    Done,
    Heartbeat,
    HeartbeatReply,
    Ping,
    PingRequest,
    Refusal,
    TermRequest,
    TransferLeadership,
)
from shoal.protocol.plan import Plan, SignedPlan, is_quorum
from shoal.protocol.spec import SwarmSpec

# --- follower ---

LOOK_UP_HEARTBEATS = 5.0
"""Interval at which a member without a coordinator reads the directory."""
UNTOLD_HEARTBEATS = 1.0
"""Interval at which a peer reads the directory if no message would tell it of a later plan: it is no member, or
coordinates and hears no majority."""
CLOSE_PEERS = 2
"""Number of peers, the next in rank, that ping the coordinator: two, in case the first fails together with it. With
more, the coordinator of a thousand peers would get thousands of calls a second."""
STAGGER_HEARTBEATS = 0.3
"""Each peer in rank tries to take the role this much, and three round trips, later than the peer before it."""
TERM_HEARTBEATS = 1.5
"""How long a peer that has granted a term waits before it becomes a candidate itself."""

# --- leader ---

HEAD_HEARTBEATS = 10.0
"""Interval at which the coordinator renews the directory's record of the chain."""
OVERTIME_HEARTBEATS = 6.0
"""A coordinator keeps its term up to this much longer while it checks a member, or searches after losing one."""
SEARCH_HEARTBEATS = 3.0
"""Time for the layout search after the loss of a member, and for the vote on its result."""
LEAST_TERM_HEARTBEATS = 5.0
"""A coordinator that cannot reach a member that others reach transfers the role, but not before this time. Otherwise
the role would never rest in a swarm where no peer reaches all others."""
PLAN_HEARTBEATS = 0.5
"""Interval at which the coordinator checks for a better plan; at once when a peer joins, is first heard, or fails."""
PATIENCE_HEARTBEATS = 1.25
"""Time for an heir (the next coordinator) to make its first plan, besides `ROUND_TRIPS`: the requests for the term and
for the votes take a round trip each."""
ROUND_TRIPS = 6.0
"""An heir (the next coordinator) also gets this many times the round trip between us and it, since its own round trips
to members may be longer than ours."""


def rank(run: str, term: int, candidates: Iterable[PeerID]) -> tuple[PeerID, ...]:
    """Return the candidates of `term`, first choice first: every peer computes the same order."""
    return tuple(sorted(set(candidates), key=lambda peer: _lot(run, term, peer)))


@lru_cache(maxsize=4096)
def _lot(run: str, term: int, peer: PeerID) -> tuple[bytes, PeerID]:
    """Return the sort key of a peer in `rank`; cached, because each tick ranks every member."""
    return blake3(f"{run}/{term}/{peer}".encode()).digest(length=16), peer


def standing(run: str, plan: Plan, peer: PeerID) -> int | None:
    """Return how many members rank before `peer` as successors of `plan`'s coordinator; None: it is no candidate."""
    order = [p for p in rank(run, plan.term, plan.members) if p != plan.coordinator]
    return order.index(peer) if peer in order else None


def heirs(view: ClusterView, plan: Plan, now_s: float, *, vouchers: Collection[PeerID] = ()) -> list[PeerID]:
    """Return the peers that may coordinate the next term, first choice first. Peers that members cannot reach come
    last, because a coordinator removes members that it cannot hear.
    Args: vouchers: peers that reach a member that we cannot reach; they are preferred."""
    order = rank(view.run, plan.term + 1, (peer for peer in plan.members if view.roster.may_coordinate(peer, now_s)))
    unreached = {peer: sum(map(plan.has, view.links.cannot_reach(peer, now_s))) for peer in order}
    return sorted(order, key=lambda peer: (unreached[peer], peer not in vouchers))


def transfer_body(term: int, heir: PeerID) -> bytes:
    """Return what the coordinator of `term` signs when it transfers the role to `heir`."""
    return msgspec.msgpack.encode((term, heir))


@dataclass(slots=True, kw_only=True)
class Tenure:
    """Our leadership term, from our first plan to the next coordinator's (the heir's)."""

    begun_s: float
    due_s: float
    """When to ask a peer to take the role: at the end of the term, or when the last peer asked has not taken it."""
    publish_at_s: float
    members: frozenset[PeerID]
    lost_s: float = -math.inf
    """When a plan last dropped a member."""
    heir: PeerID | None = None
    """The peer that has been asked to take the role. While that peer still has time to make a plan, we make none."""
    passed_over: set[PeerID] = field(default_factory=set)

    def hasten(self, due_s: float) -> None:
        """End the term at `due_s` if it would last longer and no heir has been asked yet."""
        if self.heir is None:
            self.due_s = min(self.due_s, due_s)

    def next_heir(self, order: Iterable[PeerID], due_s: float) -> PeerID | None:
        """Return the next peer of `order` to ask; None: all have been asked, and we keep the role until `due_s`."""
        self.heir, self.due_s = next((peer for peer in order if peer not in self.passed_over), None), due_s
        if self.heir is None:
            self.passed_over.clear()
        else:
            self.passed_over.add(self.heir)
        return self.heir


class CoordinationRole:
    """Knows this peer's role in coordination, and does that role's work.

    Args:
        sign_transfer: signs `transfer_body` in our name.
        verify_transfer: (coordinator, permit, body) -> whether the permit is the coordinator's signature of the body.
    """

    def __init__(
        self,
        *,
        run: str,
        me: PeerID,
        owner: PeerID,
        swarm: SwarmSpec,
        chain: PlanChain,
        policy: ReplanPolicy,
        proposer: Proposer,
        sign_transfer: Callable[[bytes], bytes],
        verify_transfer: Callable[[PeerID, bytes, bytes], bool],
        rng: random.Random,
        now_s: float,
    ) -> None:
        self._run, self._me, self._owner = run, me, owner
        self._heartbeat_s, self._term_s = swarm.heartbeat_s, swarm.term_s
        self._chain, self._policy, self._proposer, self._rng = chain, policy, proposer, rng
        self._sign_transfer, self._verify_transfer = sign_transfer, verify_transfer
        self.watch = CoordinatorWatch(heartbeat_s=swarm.heartbeat_s, now_s=now_s)
        self.hint = LeaderHint(me=me, owner=owner, chain=chain, heartbeat_s=swarm.heartbeat_s, now_s=now_s)
        self._detector = FailureDetector(me=me, roster=policy.view.roster)
        self.own: Heartbeat | None = None
        self._leaving = False
        self._is_asking = False
        """True from our first pre-vote until the coordinator answers, a ballot of ours fails or a new term begins:
        meanwhile a pre-vote need not wait for our turn."""
        self._not_before_s = now_s
        self._turn: tuple[Plan | None, int | None] = None, None
        self._look_up_at_s = now_s
        self._tenure = Tenure(begun_s=now_s, due_s=now_s + swarm.term_s, publish_at_s=now_s, members=frozenset())
        self._plan_at_s = now_s
        self._known: tuple[tuple[PeerID, ...], bool] = (), False
        """(live peers at the last look, whether all of them had been heard)."""

    @property
    def plan(self) -> Plan | None:
        return self._chain.live.plan if self._chain.live else None

    @property
    def is_coordinator(self) -> bool:
        return self.plan is not None and self.plan.coordinator == self._me

    @property
    def leaves(self) -> bool:
        return self._leaving or (self.own is not None and self.own.draining)

    def _is_eligible(self, plan: Plan) -> bool:
        able = self.own is None or self.own.advert.willing_to_coordinate
        return able and plan.has(self._me) and not self.leaves

    def is_fast_tick(self, now_s: float) -> bool:
        """True if our checks of other peers need the short interval between ticks (`BRISK_HEARTBEATS`)."""
        return self.is_coordinator or self._proposer.is_sounding or self.watch.is_fast_tick(now_s)

    def is_out_of_touch(self, now_s: float) -> bool:
        """True if we may have missed later plans: we have no plan, coordinate without a majority, or obey a coordinator
        that is silent or has obeyed another plan."""
        if self.plan is None:
            return True
        if self.is_coordinator:
            return not is_quorum({self._me, *self._policy.view.roster.followers(now_s)}, self.plan, self._owner)
        return now_s >= self.watch.suspect_at_s or self.hint.has_gone_on(now_s)

    # --- changes of role ---

    def beat(self, own: Heartbeat, now_s: float) -> None:
        self.own = own
        if own.draining:
            self._tenure.hasten(now_s)

    def leave(self, now_s: float) -> None:
        """Transfer the role now, because we leave."""
        self._leaving = True
        self._tenure.hasten(now_s)

    def excuse(self, now_s: float) -> None:
        """Restart all timeouts, because this peer was suspended."""
        self._policy.view.roster.excuse_all(now_s)
        self._detector.begin((), now_s)
        self.watch.excuse(now_s)
        self.hint.excuse(now_s)

    def obeys(self, before: Plan | None, *, new_term: bool, now_s: float) -> PeerID | None:
        """Follow the new live plan, which replaces `before`. Returns: that plan's coordinator if silent, else None."""
        silent = before.coordinator if before and now_s >= self.watch.suspect_at_s else None
        self._is_asking = self._is_asking and not new_term
        if new_term:
            self.watch.obeys(replaced=silent, now_s=now_s)
        self.hint.obeyed()
        return silent

    def begin_term(self, plan: Plan, now_s: float, *, continuing: bool, silent: PeerID | None) -> None:
        """Begin a term of ours. Args: silent: the coordinator that failed and so caused the term, if any."""
        self._tenure = Tenure(
            begun_s=now_s,
            due_s=now_s + self._term_s,
            publish_at_s=now_s + HEAD_HEARTBEATS * self._heartbeat_s,
            members=frozenset(plan.members),
        )
        self._policy.begin_term(plan, now_s, continuing=continuing, silent=silent)
        # A dead coordinator outside the plan, as after a reset, needs no check.
        self._detector.begin((silent,) if silent in plan.members else (), now_s)
        if not self._is_eligible(plan):
            self._tenure.hasten(now_s)

    def failed(self, now_s: float, *, outbid: bool) -> None:
        """Record that a ballot of ours failed. Wait for a random time, so that two candidates collide only once.
        Args: outbid: True if another candidate holds the term that we requested, or a later one."""
        self._is_asking = False
        self._hold_off(now_s + (0.5 + self._rng.random()) * self._heartbeat_s)
        self._policy.unsettle()
        if outbid:
            # A majority may have promised our term to a candidate that then failed: only a later term helps.
            self._tenure.hasten(now_s + self._heartbeat_s)

    def _hold_off(self, until_s: float) -> None:
        """Request no term before `until_s`, because another peer has the term, or our proposal has failed."""
        self._not_before_s = max(self._not_before_s, until_s)

    # --- calls from others ---

    def backs_coordinator(self, now_s: float) -> bool:
        """True if the coordinator should keep its term: it is us, or we have just heard it."""
        return self.is_coordinator or self.watch.heard_lately(now_s)

    def grant(
        self, source: PeerID, request: TermRequest, base: SignedPlan, now_s: float, *, backs: bool
    ) -> list[Command]:
        """Answer a peer that asks for a leadership term. Args: backs: True if, before we adopted `base`, we backed the
        coordinator: it was this peer, or we had just heard it."""
        if backs and source != self._me and not self._may_succeed(source, request.permit, base.plan):
            # A peer that has only lost its own connection to the coordinator must not depose it for all.
            self.watch.alarm(now_s)
            return [Reply(message=self._chain.no_grant(base, "still hears the coordinator"))]
        if request.prevote:
            opinion = self._chain.answer_pre_vote(source, request, base)
            if opinion.granted:
                self._give_way(source, base.plan, now_s)
            return [Reply(message=opinion)]
        reply = self._chain.answer_request(source, request, base)
        if reply.granted:
            self._hold_off(now_s + TERM_HEARTBEATS * self._heartbeat_s)
        return [Persist(record=self._chain.record()), Reply(message=reply)]

    def _give_way(self, candidate: PeerID, plan: Plan, now_s: float) -> None:
        """Let `candidate` try first if it ranks before us, so that the two of us do not split the members' promises."""
        theirs, ours = standing(self._run, plan, candidate), self._standing(plan)
        if theirs is not None and ours is not None and theirs < ours:
            self._proposer.drop_pre_vote()
            self._hold_off(now_s + 0.4 * self._heartbeat_s)

    def take_over(self, source: PeerID, message: TransferLeadership, plan: SignedPlan, now_s: float) -> list[Command]:
        """Accept the role from the coordinator, which transfers it to us, and request the next term."""
        live = self._chain.live
        if live is None or live.digest != plan.digest or live.plan.coordinator != source:
            return [Reply(message=Refusal(reason=f"obeys plan {self._chain.order}, not the sender's"))]
        if not self._may_succeed(self._me, message.permit, live.plan):
            return [Reply(message=Refusal(reason="gets no permit to succeed the sender"))]
        if not self._is_eligible(live.plan):
            return [Reply(message=Refusal(reason="does not coordinate"))]
        commands: list[Command] = [Introduce(peers=message.roster), Reply(message=Done())]
        if self._proposer.is_busy:
            return commands  # asked twice, or already a candidate
        self._policy.view.inherit(message)
        return commands + self._proposer.campaign(live, now_s, permit=message.permit)

    def _may_succeed(self, heir: PeerID, permit: bytes, plan: Plan) -> bool:
        """True if the coordinator of `plan`, or of its predecessor, has signed in `permit` that `heir` takes the role:
        an heir may finish the plan of an earlier heir that has failed."""
        before = self._chain.links.before_last
        plans = (plan, before.plan) if before is not None else (plan,)
        return any(self._verify_transfer(p.coordinator, permit, transfer_body(p.term, heir)) for p in plans)

    def hear(self, peer: PeerID, heartbeat: Heartbeat, plan: Plan, now_s: float) -> None:
        """Handle a member's heartbeat that the view has recorded. We coordinate `plan`."""
        if heartbeat.attested or (plan.cutover_version and heartbeat.carried is not None):
            self._plan_at_s = now_s
        self._detector.heard(peer)
        self._detector.report(peer, heartbeat.silent, plan, now_s)

    # --- answers from others ---

    def replied(self, peer: PeerID, reply: HeartbeatReply, *, took_s: float, now_s: float) -> None:
        """Record the answer to a heartbeat of ours."""
        live = self.plan
        if reply.is_coordinator and (live is None or peer == live.coordinator):
            self.watch.heard(took_s, now_s)
        if live is not None and peer != live.coordinator:
            self.watch.was_wronged(peer, now_s)
        self.hint.replied(peer, reply, now_s)

    def answered(self, event: Answered, now_s: float) -> list[Command]:
        """Handle an answer to a ping of ours, or to a question that we asked as coordinator."""
        commands: list[Command] = []
        if self.is_coordinator:
            match event.asked:
                case TransferLeadership() if event.peer == self._tenure.heir:
                    patience_s = PATIENCE_HEARTBEATS * self._heartbeat_s + ROUND_TRIPS * event.took_s
                    self._tenure.due_s = now_s + patience_s
                case Ping():
                    commands = self._detector.answered(event.peer, now_s)
                case PingRequest(peer):
                    commands = self._detector.vouched(event.peer, peer, now_s)
        if isinstance(event.reply, Ping):
            if self.plan is not None and event.peer == self.plan.coordinator:
                self.watch.answered(event.took_s, now_s)
            else:
                self.watch.was_wronged(event.peer, now_s)
        return commands

    def unanswered(self, event: Unanswered, now_s: float) -> list[Command]:
        plan = self.plan
        if plan is None:
            return []
        if event.refused and event.peer == plan.coordinator:
            self.watch.refused(event.took_s, now_s)
        if not self.is_coordinator:
            return []
        if isinstance(event.asked, TransferLeadership):
            if event.peer == self._tenure.heir:
                self._tenure.due_s = now_s
            return [LogReason(text=f"{event.peer[-8:]} does not take the role: {event.reason}")]
        if isinstance(event.asked, Ping) and event.refused:
            return self._detector.refused(
                event.peer,
                plan,
                irreplaceable=self._policy.is_irreplaceable(event.peer, plan, now_s),
                took_s=event.took_s,
                now_s=now_s,
            )
        return []

    def work(self, live: SignedPlan, now_s: float, *, done: bool) -> list[Command]:
        """Do what our role under the plan `live` requires now.
        Args: done: the run is complete. The coordinator then proposes nothing and keeps the role, because an heir might
        not know that."""
        return self._govern(live, now_s, done=done) if self.is_coordinator else self._follow(live, now_s)

    # --- the follower's part ---

    def look_up(self, now_s: float) -> list[Command]:
        """Read the directory if no coordinator answers us. Call this only if we do not coordinate."""
        plan = self.plan
        is_member = plan is not None and plan.has(self._me)
        lost = now_s >= self.watch.suspect_at_s or not (is_member or self.watch.heard_lately(now_s))
        lost = lost or not self.hint.head_known or (plan is None and self.hint.run_exists(now_s))
        if not lost or now_s < self._look_up_at_s:
            return []
        interval = LOOK_UP_HEARTBEATS if is_member else UNTOLD_HEARTBEATS
        self._look_up_at_s = now_s + interval * self._heartbeat_s
        return [LookUp()]

    def _follow(self, live: SignedPlan, now_s: float) -> list[Command]:
        """Ping the coordinator if that is our task; hold a pre-vote if it is silent and our turn in rank has come."""
        plan = live.plan
        turn = self._standing(plan) if self._is_eligible(plan) else None
        self.watch.keep_close(turn is not None and turn < CLOSE_PEERS, now_s)
        commands: list[Command] = []
        if self.watch.takes_ping(now_s):
            commands.append(Ask(peer=plan.coordinator, message=Ping()))
        suspect_at_s = self.watch.suspect_at_s
        if turn is None or now_s < suspect_at_s:
            self._proposer.drop_pre_vote()
            self._is_asking = False
            return commands
        # A peer that has begun to ask continues under a later plan of the same coordinator, whatever its rank there.
        stagger_s = STAGGER_HEARTBEATS * self._heartbeat_s + 3.0 * self.watch.round_trip_s
        due_s = suspect_at_s + (0 if self._is_asking else turn) * stagger_s
        occupied = self._proposer.is_busy or self._proposer.is_sounding
        if occupied or now_s < max(due_s, self._not_before_s):
            return commands
        self._is_asking = True
        text = f"coordinator {plan.coordinator[-8:]} is silent: asking the other members"
        asks = self._proposer.pre_vote(live, now_s, round_trip_s=self.watch.round_trip_s)
        return [*commands, LogReason(text=text), *asks]

    def _standing(self, plan: Plan) -> int | None:
        if self._turn[0] is not plan:
            self._turn = plan, standing(self._run, plan, self._me)
        return self._turn[1]

    # --- the leader's part ---

    def _govern(self, live: SignedPlan, now_s: float, *, done: bool) -> list[Command]:
        """Watch the members; transfer the role if the term is over, else ask for the next layout."""
        plan, tenure, roster = live.plan, self._tenure, self._policy.view.roster
        members = frozenset(plan.members)
        if members < tenure.members:
            tenure.lost_s = now_s
        tenure.members = members
        commands = self._detector.look(plan, now_s, awaited=self._policy.awaited)
        alive = roster.alive(now_s)
        hears = is_quorum({self._me, *alive}, plan, self._owner)
        alone = not hears or self.hint.coordinator != self._me
        if now_s >= tenure.publish_at_s:
            tenure.publish_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s
            commands += [LookUp()] if alone else [LookUp(), Publish(plan=live)]
        if alone:
            tenure.publish_at_s = min(tenure.publish_at_s, now_s + UNTOLD_HEARTBEATS * self._heartbeat_s)
            why = "there is another coordinator" if hears else "hears no majority of the plan's electors"
            return [*commands, LogReason(text=f"makes no plans: {why}")]
        if done or self._proposer.is_busy:
            return commands
        vouchers = self._detector.vouchers(now_s)
        if vouchers:
            tenure.hasten(tenure.begun_s + LEAST_TERM_HEARTBEATS * self._heartbeat_s)
        stays = self._is_eligible(plan) and not vouchers
        if now_s >= tenure.due_s and not (stays and self._finds_out(plan, tenure, now_s)):
            order = heirs(self._policy.view, plan, now_s, vouchers=vouchers)
            able = [peer for peer in order if peer != self._me or stays]
            heir = tenure.next_heir(able, now_s + PATIENCE_HEARTBEATS * self._heartbeat_s)
            permit = self._sign_transfer(transfer_body(plan.term, heir)) if heir is not None else b""
            if heir == self._me:
                return commands + self._proposer.campaign(live, now_s, permit=permit)
            if heir is not None:
                commands.append(LogReason(text=f"term {plan.term} ends, {heir[-8:]} is next"))
                commands.append(Ask(peer=heir, message=self._policy.hand_over(live, now_s, permit=permit)))
        if tenure.heir is not None:
            return commands
        return commands + self._next_plan(live, alive, now_s)

    def has_heirs(self, now_s: float) -> bool:
        """True if another peer may take the role."""
        return self.plan is not None and any(peer != self._me for peer in heirs(self._policy.view, self.plan, now_s))

    def _finds_out(self, plan: Plan, tenure: Tenure, now_s: float) -> bool:
        """True if we keep the role a while: we are about to learn things that an heir would have to find out again."""
        roster, heartbeat_s = self._policy.view.roster, self._heartbeat_s
        finds_out = (
            self._detector.are_open
            or now_s < tenure.lost_s + SEARCH_HEARTBEATS * heartbeat_s
            or any(roster.is_gone(peer, now_s) for peer in plan.members if peer != self._me)
        )
        may_wait = tenure.heir is None and now_s < tenure.due_s + OVERTIME_HEARTBEATS * heartbeat_s
        return (finds_out and may_wait) or self._policy.awaits_disks(now_s)

    def _next_plan(self, live: SignedPlan, alive: tuple[PeerID, ...], now_s: float) -> list[Command]:
        roster = self._policy.view.roster
        known = alive, roster.are_heard(alive)
        if now_s < self._plan_at_s and known == self._known:
            return []
        if not self._detector.is_settled(live.plan, now_s):
            return []
        self._plan_at_s, self._known = now_s + PLAN_HEARTBEATS * self._heartbeat_s, known
        sequence = self._proposer.next_sequence(live)
        found, reason = self._policy.next_plan(live.plan, now_s, sequence=sequence)
        commands: list[Command] = [LogReason(text=reason)] if reason else []
        match found:
            case Layout():
                self._policy.settle(live.plan, now_s)
                return commands + self._proposer.propose(live, self._policy.foreseen(found, now_s), now_s)
            case SearchJob():
                return [*commands, Search(job=found)]
            case None:
                return commands
