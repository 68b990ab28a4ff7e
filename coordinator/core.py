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
from shoal.coordinator.allocate.interface import Layout
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
from shoal.coordinator.proposal import Proposal
from shoal.coordinator.roster import Arrivals
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import (
    Done,
    HandOver,
    Heartbeat,
    HeartbeatReply,
    Leave,
    PlanHead,
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
PROPOSAL_HEARTBEATS = 5.0
HAND_OVER_HEARTBEATS = 4.0
HEAD_HEARTBEATS = 10.0
"""How often the coordinator renews the directory's record of the chain, and a peer without one looks for it."""
SLEPT_HEARTBEATS = 2.5
"""A tick that comes this late means that we were stopped: others' silence was ours."""


class CoordinationCore:
    """Args:
    me: this peer; owner: who makes the run's first plan.
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
        self._sign, self._rng = sign, rng
        self._heartbeat_s, self._term_s = spec.swarm.heartbeat_s, spec.swarm.term_s
        self._own: Heartbeat | None = None
        self._proposal: Proposal | None = None
        self._coordinator_beats = Arrivals(self._heartbeat_s, now_s)
        self._hint: tuple[tuple[int, int], PeerID] | None = None
        self._heir: tuple[PeerID, float] | None = None
        """To whom the role has been offered, and until when we wait for its plan."""
        self._passed_over: set[PeerID] = set()
        self._leaving = False
        self._head_known = False
        self._hand_over_at_s = now_s + self._term_s
        self._sequence_max = 0
        self._term_max = 0
        self._campaign_at_s = now_s
        self._heartbeat_at_s = now_s
        self._tick_at_s = self._ticked_s = now_s
        self._head_at_s = now_s

    # --- what the driver reads ---

    @property
    def live(self) -> SignedPlan | None:
        return self.chain.live

    @property
    def is_coordinator(self) -> bool:
        return self.chain.live is not None and self.chain.live.plan.coordinator == self.me

    @property
    def coordinator(self) -> PeerID:
        """To whom we report."""
        if self._hint is not None and self._hint[0] > self.chain.order:
            return self._hint[1]
        return self.chain.live.plan.coordinator if self.chain.live else self.owner

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
                return self._speak(event.heartbeat, now_s)
            case HeadFound():
                return self._head_found(event.head, now_s)
            case Leaving():
                self._leaving, self._hand_over_at_s = True, now_s
                return []
            case TimerFired():
                return self._timer_fired(now_s)

    def _speak(self, heartbeat: Heartbeat, now_s: float) -> list[Command]:
        if heartbeat.draining and not (self._own and self._own.draining):
            self._hand_over_at_s = now_s
        self._own = heartbeat
        return []

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
                return [Reply(message=Done())]
            case other:
                return [Reply(message=Refusal(reason=f"{type(other).__name__} is not answered here"))]

    def _hear(self, source: PeerID, heartbeat: Heartbeat, now_s: float) -> list[Command]:
        live = self.chain.live
        leads = self.is_coordinator or (live is None and self.me == self.owner)
        if leads and not self.governor.hear(source, heartbeat, now_s):
            return [Reply(message=Refusal(reason="this run has all the peers it can count"))]
        self.done = self.done or (leads and self.governor.ledger.done)
        outdated = live is not None and heartbeat.plan_sequence <= live.plan.sequence
        envelope = live.envelope if live and outdated and heartbeat.plan_digest != live.digest else b""
        reply = HeartbeatReply(
            coordinator=self.coordinator,
            term=self.chain.order[0],
            is_coordinator=leads,
            plan=envelope,
            done=self.done,
        )
        commands: list[Command] = [Reply(message=reply)]
        if live is not None and heartbeat.plan_sequence > live.plan.sequence:
            commands.append(LookUp())  # the chain has gone on without us
        return commands + (self._tell(now_s) if leads else [])

    def _grant(self, source: PeerID, request: TermRequest, base: SignedPlan, now_s: float) -> list[Command]:
        heard_lately = now_s < self._coordinator_beats.last_s + self._coordinator_beats.patience_s / 2
        commands = self._adopt(base, now_s)
        if not request.handed_over and (self.is_coordinator or heard_lately):
            # A peer that lost only its own way to the coordinator must not turn everybody else's over.
            reason = "coordinates itself" if self.is_coordinator else "still hears the coordinator"
            return [*commands, Reply(message=self._no_grant(reason, base))]
        grant = self.chain.grant(source, request.term, base)
        if not grant.granted:
            return [*commands, Reply(message=self._no_grant(grant.reason, base))]
        self._campaign_at_s = max(self._campaign_at_s, now_s + PROPOSAL_HEARTBEATS * self._heartbeat_s)
        reply = TermGrant(
            granted=True,
            term=self.chain.granted_term,
            accepted=grant.accepted.envelope if grant.accepted else b"",
            accepted_term=grant.accepted_term,
        )
        return [*commands, Persist(record=self.chain.record()), Reply(message=reply)]

    def _no_grant(self, reason: str, base: SignedPlan) -> TermGrant:
        live = self.chain.live
        newer = live.envelope if live and live.plan.order > base.plan.order else b""
        return TermGrant(granted=False, reason=reason, term=self.chain.granted_term, live=newer)

    def _vote(
        self, source: PeerID, offer: PlanOffer, plan: SignedPlan, base: SignedPlan | None, now_s: float
    ) -> list[Command]:
        commands = self._adopt(base, now_s) if base else []
        vote = self.chain.vote(source, offer.term, plan, base)
        live = self.chain.live
        newer = not vote.accepted and live is not None and live.plan.order > (base.plan.order if base else (0, 0))
        reply = PlanVote(
            accepted=vote.accepted,
            reason=vote.reason,
            term=self.chain.granted_term,
            live=live.envelope if live and newer else b"",
        )
        persist = [Persist(record=self.chain.record())] if vote.accepted else []
        return [*commands, *persist, Reply(message=reply)]

    def _take_over(self, source: PeerID, message: HandOver, plan: SignedPlan, now_s: float) -> list[Command]:
        commands = self._adopt(plan, now_s)
        live = self.chain.live
        if live is None or live.digest != plan.digest or live.plan.coordinator != source:
            return [*commands, Reply(message=Refusal(reason=f"obeys plan {self.chain.order}, not the sender's"))]
        if not self._eligible(live.plan):
            return [*commands, Reply(message=Refusal(reason="does not coordinate"))]
        self.governor.inherit(message)
        return [*commands, Reply(message=Done()), *self._campaign(live, now_s, handed_over=True)]

    # --- answers from others ---

    def _answered(self, event: Answered, now_s: float) -> list[Command]:
        commands = self._adopt(event.live, now_s) if event.live else []
        match event.reply:
            case HeartbeatReply() as reply:
                return commands + self._heard_coordinator(event.peer, reply, now_s)
            case TermGrant() as grant:
                return commands + self._counted(event, grant.granted, grant.term, grant.reason, now_s)
            case PlanVote() as vote:
                return commands + self._counted(event, vote.accepted, vote.term, vote.reason, now_s)
            case _:
                return commands

    def _heard_coordinator(self, peer: PeerID, reply: HeartbeatReply, now_s: float) -> list[Command]:
        self.done = self.done or reply.done
        live = self.chain.live
        if reply.is_coordinator and (live is None or peer == live.plan.coordinator):
            self._coordinator_beats.arrived(now_s)
        elif not reply.is_coordinator and reply.coordinator not in (self.me, peer) and reply.term > self.chain.order[0]:
            self._hint = (reply.term, 0), reply.coordinator
        return []

    def _counted(self, event: Answered, agreed: bool, term: int, reason: str, now_s: float) -> list[Command]:
        proposal = self._proposal
        if proposal is None or not proposal.is_about(event.asked):
            return []
        proposal.waiting.discard(event.peer)
        if event.accepted is not None and isinstance(event.reply, TermGrant):
            proposal.learn(event.reply.accepted_term, event.accepted)
        if agreed:
            proposal.agreed.add(event.peer)
            return self._advance(now_s)
        if term > proposal.term:
            # A majority may have promised away our term to somebody who then fell silent: only a later one helps.
            self._term_max = max(self._term_max, term)
            self._hand_over_at_s = min(self._hand_over_at_s, now_s + PROPOSAL_HEARTBEATS * self._heartbeat_s)
            return self._give_up(f"{event.peer[-8:]} {reason}", now_s)
        return []

    def _unanswered(self, event: Unanswered, now_s: float) -> list[Command]:
        if self._proposal is not None and self._proposal.is_about(event.asked):
            self._proposal.waiting.discard(event.peer)
        if isinstance(event.asked, HandOver) and self._heir is not None and self._heir[0] == event.peer:
            self._heir = event.peer, now_s  # do not wait for it; the next tick tries another
            return [Note(text=f"{event.peer[-8:]} does not take the role: {event.reason}")]
        return []

    def _head_found(self, head: PlanHead | None, now_s: float) -> list[Command]:
        self._head_known = True
        if head is None or (head.term, head.sequence) <= self.chain.order or head.coordinator == self.me:
            return []
        if self._hint is None or (head.term, head.sequence) > self._hint[0]:
            self._hint = (head.term, head.sequence), head.coordinator
            self._heartbeat_at_s = now_s
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
            self._coordinator_beats.excuse(now_s)
            return [*commands, LookUp()]
        if self._proposal is not None:
            return commands + self._press(now_s)
        if self.is_coordinator:
            return commands + self._govern(now_s)
        return commands + self._watch(now_s)

    def _govern(self, now_s: float) -> list[Command]:
        live = self.chain.live
        assert live is not None
        commands = self._tell(now_s)
        if now_s >= self._head_at_s:
            self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s
            commands += [LookUp(), Publish(plan=live)]
        if self._heir is not None:
            return commands + (self._hand_over(now_s) if now_s >= self._heir[1] else [])
        if now_s >= self._hand_over_at_s:
            commands += self._hand_over(now_s)
            if self._heir is not None or self._proposal is not None:
                return commands
        layout, reason = self.governor.next_layout(live.plan, now_s, sequence=self._next_sequence(live))
        if layout is None:
            return commands + ([Note(text=reason)] if reason else [])
        return commands + self._propose(live, layout, now_s)

    def _hand_over(self, now_s: float) -> list[Command]:
        live = self.chain.live
        assert live is not None
        order = [p for p in self.governor.successors(live.plan, now_s) if p not in self._passed_over]
        if not self._eligible(live.plan):
            order = [p for p in order if p != self.me]
        if not order:
            # Nobody wants it: we stay, and ask again after a while.
            self._heir, self._passed_over = None, set()
            self._hand_over_at_s = now_s + HAND_OVER_HEARTBEATS * self._heartbeat_s
            return []
        heir = order[0]
        self._passed_over.add(heir)
        if heir == self.me:
            self._heir = None
            return self._campaign(live, now_s, handed_over=True)
        self._heir = heir, now_s + HAND_OVER_HEARTBEATS * self._heartbeat_s
        return [
            Note(text=f"term {live.plan.term} ends, {heir[-8:]} is next"),
            Ask(peer=heir, message=self.governor.will(live, now_s)),
        ]

    def _watch(self, now_s: float) -> list[Command]:
        """As a follower: is the coordinator there, and if not, is it our turn?"""
        live = self.chain.live
        commands: list[Command] = []
        lost = now_s >= self._coordinator_beats.suspect_at_s
        if (lost or not self._head_known) and now_s >= self._head_at_s:
            self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s / 2
            commands.append(LookUp())
        if live is None:
            if self.me == self.owner and self._head_known and self._hint is None:
                commands += self._found_run(now_s)
            return commands
        if not lost or not self._eligible(live.plan):
            return commands
        turn = election.standing(self.run, live.plan.term, live.plan.coordinator, live.plan.members, self.me)
        if turn is None:
            return commands
        due_s = self._coordinator_beats.suspect_at_s + turn * STAGGER_HEARTBEATS * self._heartbeat_s
        if now_s < max(due_s, self._campaign_at_s):
            return commands
        commands.append(Note(text=f"coordinator {live.plan.coordinator[-8:]} is silent, asking for the next term"))
        return commands + self._campaign(live, now_s, handed_over=False)

    # --- proposals ---

    def _found_run(self, now_s: float) -> list[Command]:
        layout, reason = self.governor.first_layout(now_s)
        if layout is None:
            return [Note(text=reason)]
        signed = self._make(None, 1, layout)
        return [*self._went_live(signed, (), now_s), Note(text=layout.reason)]

    def _campaign(self, base: SignedPlan, now_s: float, *, handed_over: bool, term: int = 0) -> list[Command]:
        term = term or max(self.chain.granted_term, base.plan.term, self._term_max) + 1
        if not self.chain.grant(self.me, term, base).granted:
            return []
        proposal = Proposal(
            base=base,
            term=term,
            owner=self.owner,
            expires_at_s=now_s + PROPOSAL_HEARTBEATS * self._heartbeat_s,
            handed_over=handed_over,
            agreed={self.me},
        )
        if self.chain.accepted is not None:
            proposal.learn(self.chain.accepted_term, self.chain.accepted)
        self._proposal = proposal
        return [Persist(record=self.chain.record()), *self._ask(now_s), *self._advance(now_s)]

    def _propose(self, base: SignedPlan, layout: Layout, now_s: float) -> list[Command]:
        """As the coordinator, in our own term: straight to the votes."""
        self.governor.settle(now_s)
        plan = self._make(base, base.plan.term, layout)
        self._proposal = Proposal(base=base, term=base.plan.term, owner=self.owner, expires_at_s=0.0)
        return [Note(text=layout.reason), *self._offer(plan, now_s)]

    def _offer(self, plan: SignedPlan, now_s: float) -> list[Command]:
        proposal = self._proposal
        assert proposal is not None
        proposal.offer(plan, now_s + PROPOSAL_HEARTBEATS * self._heartbeat_s)
        if self.chain.vote(self.me, proposal.term, plan, proposal.base).accepted:
            proposal.agreed.add(self.me)
        return [Persist(record=self.chain.record()), *self._ask(now_s), *self._advance(now_s)]

    def _ask(self, now_s: float) -> list[Command]:
        proposal = self._proposal
        if proposal is None:
            return []
        peers, message = proposal.audience(self.me), proposal.message()
        proposal.waiting.update(peers)
        return [Ask(peer=peer, message=message) for peer in peers]

    def _advance(self, now_s: float) -> list[Command]:
        """Go from the term to the votes, or from the votes to a live plan, if a majority agrees."""
        proposal = self._proposal
        if proposal is None or not proposal.carried:
            return []
        if proposal.plan is not None:
            return self._went_live(proposal.plan, proposal.base.plan.members, now_s)
        if proposal.found is not None:
            return self._offer(proposal.found[1], now_s)
        base = proposal.base.plan
        how = "hand-over from" if proposal.handed_over else "take-over from"
        layout = Layout(
            stages=base.stages,
            spares=base.spares,
            reason=f"term {proposal.term}: {how} {base.coordinator[-8:]}",
        )
        return self._offer(self._make(proposal.base, proposal.term, layout), now_s)

    def _went_live(self, plan: SignedPlan, voters: tuple[PeerID, ...], now_s: float) -> list[Command]:
        proposal, self._proposal = self._proposal, None
        commands = self._adopt(plan, now_s)
        news = PlanLive(plan=plan.envelope)
        audience = dict.fromkeys((*voters, *plan.plan.members))
        commands += [Ask(peer=peer, message=news) for peer in audience if peer != self.me]
        if plan.plan.coordinator == self.me:
            return [*commands, Publish(plan=plan)]
        # A dead coordinator's plan is finished; ours in the same term comes on top of it.
        assert proposal is not None
        return commands + self._campaign(plan, now_s, handed_over=proposal.handed_over, term=proposal.term)

    def _press(self, now_s: float) -> list[Command]:
        """A proposal is in flight: ask again whoever did not answer, or give up."""
        proposal = self._proposal
        assert proposal is not None
        if now_s < proposal.expires_at_s:
            return self._ask(now_s)
        return self._give_up(f"{len(proposal.agreed)} of {len(proposal.base.plan.members)} agreed in time", now_s)

    def _give_up(self, reason: str, now_s: float) -> list[Command]:
        proposal, self._proposal = self._proposal, None
        assert proposal is not None
        self._campaign_at_s = now_s + (1 + 2 * self._rng.random()) * STAGGER_HEARTBEATS * self._heartbeat_s
        self.governor.unsettle()
        what = "a plan" if proposal.plan else f"term {proposal.term}"
        return [Note(text=f"gave up on {what}: {reason}"), LookUp()]

    # --- plans ---

    def _make(self, base: SignedPlan | None, term: int, layout: Layout) -> SignedPlan:
        sequence = self._next_sequence(base)
        self._sequence_max = sequence
        version = max(self.governor.version_max, self._own.version if self._own else 0)
        plan = Plan(
            run=self.run,
            term=term,
            sequence=sequence,
            previous=base.digest if base else "",
            coordinator=self.me,
            stages=layout.stages,
            spares=layout.spares,
            fresh=version == 0 and (base is None or base.plan.fresh),
            seed=sequence,
            reason=layout.reason,
        )
        return self._sign(plan)

    def _next_sequence(self, base: SignedPlan | None) -> int:
        """Above the base, and above all we have offered or voted for: one (term, sequence) never names two plans."""
        voted = self.chain.accepted.plan.sequence if self.chain.accepted else 0
        return max(base.plan.sequence if base else 0, voted, self._sequence_max) + 1

    def _adopt(self, plan: SignedPlan, now_s: float) -> list[Command]:
        was_coordinator, before = self.is_coordinator, self.chain.live
        new, _ = self.chain.adopt(plan)
        if not new:
            return []
        commands: list[Command] = [Persist(record=self.chain.record()), Obey(plan=plan)]
        if self._proposal is not None:
            self._proposal = None
            commands.append(Note(text=f"plan {plan.plan.order} overtook our proposal"))
        if before is None or before.plan.term != plan.plan.term:
            self._coordinator_beats = Arrivals(self._heartbeat_s, now_s)
            self._heir, self._passed_over = None, set()
        if self._hint is not None and self._hint[0] <= plan.plan.order:
            self._hint = None
        if was_coordinator and not self.is_coordinator:
            assert before is not None
            commands += [Tell(record=record) for record in self.governor.tell(before.plan, now_s, flush=True)]
        if self.is_coordinator and (not was_coordinator or before is None or before.plan.term != plan.plan.term):
            self._hand_over_at_s = now_s + self._term_s if not self._leaving else now_s
            self._head_at_s = now_s + HEAD_HEARTBEATS * self._heartbeat_s
            self.governor.begin_term(plan.plan, now_s, continuing=was_coordinator or before is None)
        return commands

    def _tell(self, now_s: float) -> list[Command]:
        live = self.chain.live
        if live is None:
            return []
        return [Tell(record=record) for record in self.governor.tell(live.plan, now_s, flush=self.done)]

    def _eligible(self, plan: Plan) -> bool:
        own = self._own
        return (
            self.me in plan.members
            and not self._leaving
            and (own is None or (own.advert.willing_to_coordinate and not own.draining))
        )
