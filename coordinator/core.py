"""One peer's part in coordination, and the coordinator's while the role is here. Holds no socket, clock or file.

Theory of operation. What we are follows from the live plan: its coordinator, one of its members, or a stranger.

| we are      | we do                                                                                              |
|-------------|----------------------------------------------------------------------------------------------------|
| anyone      | heartbeat to the coordinator we know; vote (`chain`); adopt live plans above ours                  |
| a member    | silence of the coordinator beyond its patience: after `standing` x STAGGER ask for the next term   |
| coordinator | re-plan when the swarm changes (`governor`); at the term's end hand over to the next in turn       |
| the owner   | make plan (1, 1) alone, once enough peers are here and the directory knows no plan of the run      |

A `Proposal` is in flight or not. It goes from asking for the term (only when the term changes) to asking for votes, and
ends live, expired, or overtaken by a plan above its base. One tick twice a heartbeat drives everything that waits.
"""

import random
from collections.abc import Callable

from shoal.coordinator import election
from shoal.coordinator.chain import PlanChain
from shoal.coordinator.events import (
    Answered,
    Ask,
    Beat,
    Command,
    Event,
    HeadFound,
    Leaving,
    LookUp,
    Note,
    Obey,
    Persist,
    Publish,
    Received,
    Reply,
    SendHeartbeat,
    Tell,
    TimerFired,
    Unanswered,
)
from shoal.coordinator.governor import Governor
from shoal.coordinator.proposer import PROPOSAL_HEARTBEATS, Carried, GivenUp, Proposer
from shoal.coordinator.succession import Succession
from shoal.coordinator.voter import answer_heartbeat, answer_offer, answer_request, no_grant
from shoal.coordinator.watch import CoordinatorWatch
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import (
    Done,
    HandOver,
    Heartbeat,
    HeartbeatReply,
    Leave,
    PlanLive,
    PlanOffer,
    PlanVote,
    Refusal,
    TermGrant,
    TermRequest,
)
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.spec import RunSpec

TICKS_PER_HEARTBEAT = 2
JITTER = 0.1
"""Heartbeats vary by this share, so that a thousand peers that got one plan do not report in one millisecond."""
STAGGER_HEARTBEATS = 3.0
"""How much longer each next in rank waits before it tries: two round trips and a tick fit in it."""
HEAD_HEARTBEATS = 10.0
"""How often the coordinator renews the directory's record of the chain, and a peer without one looks for it."""
SLEPT_HEARTBEATS = 2.5
"""A tick that comes this late means that we were stopped: others' silence was ours."""


class CoordinationCore:
    """Args:
    me: this peer.
    owner: who makes the run's first plan.
    chain: possibly restored from disk.
    sign: signs a plan in our name; deterministic.
    """

    def __init__(
        self,
        *,
        run: str,
        me: PeerID,
        owner: PeerID,
        spec: RunSpec,
        chain: PlanChain,
        governor: Governor,
        sign: Callable[[Plan], SignedPlan],
        rng: random.Random,
        now_s: float,
    ) -> None:
        self.run, self.me, self.owner = run, me, owner
        self.chain, self.governor = chain, governor
        self.done = False
        self._rng = rng
        self._heartbeat_s = spec.swarm.heartbeat_s
        self._own: Heartbeat | None = None
        self._proposer = Proposer(
            me=me, owner=owner, chain=chain, sign=sign, is_fresh=self._is_fresh, heartbeat_s=spec.swarm.heartbeat_s
        )
        self._watch = CoordinatorWatch(owner=owner, heartbeat_s=self._heartbeat_s, now_s=now_s)
        self._succession = Succession(term_s=spec.swarm.term_s, heartbeat_s=self._heartbeat_s, now_s=now_s)
        self._leaving = False
        self._campaign_at_s = now_s
        self._heartbeat_at_s = now_s
        self._tick_at_s = self._ticked_s = now_s
        self._head_at_s = now_s

    # --- what the driver reads ---

    @property
    def plan(self) -> Plan | None:
        """What we obey."""
        return self.chain.live.plan if self.chain.live else None

    @property
    def is_coordinator(self) -> bool:
        return self.plan is not None and self.plan.coordinator == self.me

    @property
    def coordinator(self) -> PeerID:
        """To whom we report."""
        return self._watch.target(self.plan)

    def has_heirs(self, now_s: float) -> bool:
        """Whether anybody else may take the role."""
        plan = self.plan
        return plan is not None and any(peer != self.me for peer in self.governor.successors(plan, now_s))

    def next_timer_s(self) -> float:
        return min(self._heartbeat_at_s, self._tick_at_s)

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        match event:
            case Received():
                return self._received(event, now_s)
            case Answered():
                return self._answered(event, now_s)
            case Unanswered():
                return self._unanswered(event, now_s)
            case Beat():
                self._own = event.heartbeat
                if event.heartbeat.draining:
                    self._succession.hasten(now_s)
                return []
            case HeadFound():
                if self._watch.found(event.head, self.plan, me=self.me):
                    self._heartbeat_at_s = now_s  # who coordinates a plan above ours answers with it
                return []
            case Leaving():
                self._leaving = True
                self._succession.hasten(now_s)
                return []
            case TimerFired():
                return self._timer_fired(now_s)

    # --- calls from others ---

    def _received(self, event: Received, now_s: float) -> list[Command]:
        match event.message:
            case Heartbeat() as heartbeat:
                return self._hear(event.source, heartbeat, now_s)
            case TermRequest() as request:
                assert event.base is not None
                return self._grant(event.source, request, event.base, now_s)
            case PlanOffer() as offer:
                assert event.plan is not None
                return self._vote(event.source, offer, event.plan, event.base, now_s)
            case PlanLive():
                assert event.plan is not None
                return [*self._adopt(event.plan, now_s), Reply(message=Done())]
            case HandOver() as message:
                assert event.plan is not None
                return self._take_over(event.source, message, event.plan, now_s)
            case Leave():
                self.governor.roster.leave(event.source)
                return [Reply(message=Done() if self.is_coordinator else Refusal(reason="does not coordinate"))]
            case other:
                return [Reply(message=Refusal(reason=f"{type(other).__name__} is not answered here"))]

    def _hear(self, source: PeerID, heartbeat: Heartbeat, now_s: float) -> list[Command]:
        live = self.chain.live
        leads = self.is_coordinator or (live is None and self.me == self.owner)
        if leads and not self.governor.hear(source, heartbeat, now_s):
            return [Reply(message=Refusal(reason="this run has all the peers it can count"))]
        ledger = self.governor.ledger
        self.done = self.done or (leads and (ledger.done or (heartbeat.done and ledger.is_near_the_end)))
        reply = answer_heartbeat(self.chain, heartbeat, coordinator=self.coordinator, leads=leads, done=self.done)
        commands: list[Command] = [Reply(message=reply)]
        if live is not None and heartbeat.plan_sequence > live.plan.sequence:
            commands.append(LookUp())  # the chain has gone on without us
        return commands + (self._tell(now_s) if leads else [])

    def _grant(self, source: PeerID, request: TermRequest, base: SignedPlan, now_s: float) -> list[Command]:
        heard_lately = self.is_coordinator or self._watch.heard_lately(now_s)
        commands = self._adopt(base, now_s)
        if heard_lately and not request.handed_over:
            # A peer that lost only its own way to the coordinator must not turn everybody else's over.
            return [*commands, Reply(message=no_grant(self.chain, base, "still hears the coordinator"))]
        reply = answer_request(self.chain, source, request, base)
        if reply.granted:
            self._campaign_at_s = max(self._campaign_at_s, now_s + PROPOSAL_HEARTBEATS * self._heartbeat_s)
        return [*commands, Persist(record=self.chain.record()), Reply(message=reply)]

    def _vote(
        self, source: PeerID, offer: PlanOffer, plan: SignedPlan, base: SignedPlan | None, now_s: float
    ) -> list[Command]:
        commands = self._adopt(base, now_s) if base else []
        reply = answer_offer(self.chain, source, offer, plan, base)
        return [*commands, Persist(record=self.chain.record()), Reply(message=reply)]

    def _take_over(self, source: PeerID, message: HandOver, plan: SignedPlan, now_s: float) -> list[Command]:
        commands = self._adopt(plan, now_s)
        live = self.chain.live
        if live is None or live.digest != plan.digest or live.plan.coordinator != source:
            return [*commands, Reply(message=Refusal(reason=f"obeys plan {self.chain.order}, not the sender's"))]
        if not self._eligible(live.plan):
            return [*commands, Reply(message=Refusal(reason="does not coordinate"))]
        commands.append(Reply(message=Done()))
        if self._proposer.is_busy:
            return commands  # asked twice, or it was our turn anyway
        self.governor.inherit(message)
        return commands + self._campaign(live, now_s, handed_over=True)

    # --- answers from others ---

    def _answered(self, event: Answered, now_s: float) -> list[Command]:
        commands = self._adopt(event.live, now_s) if event.live else []
        match event.reply:
            case HeartbeatReply() as reply:
                self.done = self.done or reply.done
                self._watch.replied(event.peer, reply, self.plan, me=self.me, now_s=now_s)
                return commands
            case TermGrant() as grant:
                count = self._proposer.count(event, grant.granted, grant.term, grant.reason, now_s)
                return commands + self._conclude(count, now_s)
            case PlanVote() as vote:
                count = self._proposer.count(event, vote.accepted, vote.term, vote.reason, now_s)
                return commands + self._conclude(count, now_s)
            case _:
                return commands

    def _unanswered(self, event: Unanswered, now_s: float) -> list[Command]:
        self._proposer.unanswered(event)
        if isinstance(event.asked, HandOver):
            self._succession.declined(event.peer, now_s)
            return [Note(text=f"{event.peer[-8:]} does not take the role: {event.reason}")]
        return []

    # --- time ---

    def _timer_fired(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if now_s >= self._heartbeat_at_s:
            self._heartbeat_at_s = now_s + self._heartbeat_s * (1 + JITTER * (self._rng.random() - 0.5))
            commands.append(SendHeartbeat(target=self.coordinator))
        if now_s < self._tick_at_s:
            return commands
        slept = now_s - self._ticked_s > SLEPT_HEARTBEATS * self._heartbeat_s
        self._ticked_s, self._tick_at_s = now_s, now_s + self._heartbeat_s / TICKS_PER_HEARTBEAT
        if slept:
            self.governor.roster.excuse_all(now_s)
            self._watch.excuse(now_s)
            commands.append(LookUp())
        if self._proposer.is_busy:
            return commands + self._conclude(self._proposer.press(now_s), now_s)
        if self.is_coordinator:
            return commands + self._govern(now_s)
        return commands + self._follow(now_s)

    def _govern(self, now_s: float) -> list[Command]:
        live = self.chain.live
        assert live is not None
        commands = self._tell(now_s)
        if now_s >= self._head_at_s:
            self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s
            commands += [LookUp(), Publish(plan=live)]
        if self._succession.is_due(now_s) and not self.done:  # nobody else could know that it is
            commands += self._hand_over(live, now_s)
        if self._succession.is_waiting or self._proposer.is_busy or self.done:
            return commands
        layout, reason = self.governor.next_layout(live.plan, now_s, sequence=self._proposer.next_sequence(live))
        if layout is None:
            return commands + ([Note(text=reason)] if reason else [])
        self.governor.settle(now_s)
        return [*commands, Note(text=reason), *self._conclude(self._proposer.propose(live, layout, now_s), now_s)]

    def _hand_over(self, live: SignedPlan, now_s: float) -> list[Command]:
        order = self.governor.successors(live.plan, now_s)
        heir = self._succession.next([p for p in order if p != self.me or self._eligible(live.plan)], now_s)
        if heir is None:
            return []
        if heir == self.me:
            return self._campaign(live, now_s, handed_over=True)
        reason = f"term {live.plan.term} ends, {heir[-8:]} is next"
        return [Note(text=reason), Ask(peer=heir, message=self.governor.will(live, now_s))]

    def _follow(self, now_s: float) -> list[Command]:
        """As a follower: is the coordinator there, and if not, is it our turn?"""
        live = self.chain.live
        commands: list[Command] = []
        lost = now_s >= self._watch.suspect_at_s
        if (lost or not self._watch.head_known) and now_s >= self._head_at_s:
            self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s / 2
            commands.append(LookUp())
        if live is None:
            if self.me == self.owner and self._watch.head_known and not self._watch.run_exists:
                commands += self._found_run(now_s)
            return commands
        if not lost or not self._eligible(live.plan):
            return commands
        turn = election.standing(self.run, live.plan.term, live.plan.coordinator, live.plan.members, self.me)
        if turn is None:
            return commands
        due_s = self._watch.suspect_at_s + turn * STAGGER_HEARTBEATS * self._heartbeat_s
        if now_s < max(due_s, self._campaign_at_s):
            return commands
        commands.append(Note(text=f"coordinator {live.plan.coordinator[-8:]} is silent, asking for the next term"))
        return commands + self._campaign(live, now_s, handed_over=False)

    # --- plans ---

    def _found_run(self, now_s: float) -> list[Command]:
        layout, reason = self.governor.first_layout(now_s)
        if layout is None:
            return [Note(text=reason)]
        signed = self._proposer.make(None, 1, layout)
        return [Note(text=reason), *self._went_live(signed, (), now_s)]

    def _conclude(self, commands: list[Command], now_s: float) -> list[Command]:
        """`commands` are the proposer's; see whether it came to an end with them."""
        match self._proposer.take_outcome():
            case Carried() as won:
                commands = commands + self._went_live(won.plan, won.voters, now_s)
                if won.plan.plan.coordinator != self.me and self.chain.live is won.plan:
                    # A dead coordinator's plan is finished; ours in the same term comes on top of it.
                    ask = self._proposer.campaign(won.plan, now_s, handed_over=won.handed_over, term=won.term)
                    return commands + self._conclude(ask, now_s)
                return commands
            case GivenUp() as lost:
                self._campaign_at_s = now_s + (1 + 2 * self._rng.random()) * STAGGER_HEARTBEATS * self._heartbeat_s
                self.governor.unsettle()
                if lost.outbid:
                    # A majority may have promised our term away to somebody who then fell silent: only a later helps.
                    self._succession.hasten(now_s + PROPOSAL_HEARTBEATS * self._heartbeat_s)
                return [*commands, Note(text=lost.reason), LookUp()]
            case None:
                return commands

    def _campaign(self, base: SignedPlan, now_s: float, *, handed_over: bool) -> list[Command]:
        return self._conclude(self._proposer.campaign(base, now_s, handed_over=handed_over), now_s)

    def _went_live(self, plan: SignedPlan, voters: tuple[PeerID, ...], now_s: float) -> list[Command]:
        commands = self._adopt(plan, now_s)
        news = PlanLive(plan=plan.envelope)
        audience = dict.fromkeys((*voters, *plan.plan.members))
        commands += [Ask(peer=peer, message=news) for peer in audience if peer != self.me]
        return [*commands, Publish(plan=plan)] if plan.plan.coordinator == self.me else commands

    def _is_fresh(self, base: SignedPlan | None) -> bool:
        version = max(self.governor.version_max, self._own.version if self._own else 0)
        return version == 0 and (base is None or base.plan.fresh)

    def _adopt(self, plan: SignedPlan, now_s: float) -> list[Command]:
        was_coordinator, before = self.is_coordinator, self.chain.live
        new, _ = self.chain.adopt(plan)
        if not new:
            return []
        commands: list[Command] = [Persist(record=self.chain.record()), Obey(plan=plan)]
        if self._proposer.drop():
            commands.append(Note(text=f"plan {plan.plan.order} overtook our proposal"))
        new_term = before is None or before.plan.term != plan.plan.term
        silent = before.plan.coordinator if before and now_s >= self._watch.suspect_at_s else None
        self._watch.obeys(plan.plan, new_term=new_term, now_s=now_s)
        self.governor.obey(now_s)
        if was_coordinator and not self.is_coordinator:
            assert before is not None
            commands += [Tell(record=record) for record in self.governor.tell(before.plan, now_s, flush=True)]
        if self.is_coordinator and new_term:
            self._succession.begin(now_s)
            if not self._eligible(plan.plan):
                self._succession.hasten(now_s)
            self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s
            continuing = was_coordinator or before is None
            self.governor.begin_term(plan.plan, now_s, continuing=continuing, silent=None if continuing else silent)
        return commands

    def _tell(self, now_s: float) -> list[Command]:
        records = self.governor.tell(self.plan, now_s, flush=self.done) if self.plan else []
        return [Tell(record=record) for record in records]

    def _eligible(self, plan: Plan) -> bool:
        own = self._own
        return (
            self.me in plan.members
            and not self._leaving
            and (own is None or (own.advert.willing_to_coordinate and not own.draining))
        )
