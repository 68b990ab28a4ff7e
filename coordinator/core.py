"""Decides what one peer does in coordination, as coordinator or as follower. It holds no socket, clock or file.

Theory of operation. The live plan defines the role of this peer:

| a peer that is | does                                                                                            |
|----------------|-------------------------------------------------------------------------------------------------|
| anything       | sends heartbeats to the coordinator it knows; votes (`chain`); adopts live plans above its own  |
| a member       | watches the coordinator (`follower`); when it is its turn, replaces one that has failed         |
| coordinator    | watches the members, plans again when they change, transfers the role at the end (`leader`)     |
| the owner      | makes plan (1, 1) alone, once enough peers are present and no peer knows a plan of the run      |

The life of a plan:

- Before the first plan every peer reports to the owner.
- Within a term the coordinator offers a new plan whenever a peer joins, leaves, drains or falls silent. The plan is
  live when a majority of its predecessor's electors has voted for it; `PlanLive` and heartbeat replies spread it.
- At the term's end the coordinator sends `TransferLeadership` to the first peer in the next term's rank, which requests
  the term, then votes for a plan with the same layout. The old coordinator keeps the role until that plan is live.
- A silent coordinator is replaced by the first peer in rank that notices, after a pre-vote. A member that still hears
  the coordinator refuses, and checks it more closely from then on.
- A returning peer finds the chain through a heartbeat's reply, a refused offer, or the `PlanHead` in the directory.
- If half of a plan's members are lost for good, `shoal recover` signs a mandate with the owner's key, and one peer
  makes a plan without votes. It begins a reign, which is compared before term and sequence.

At most one `Ballot` is in flight. A tick drives all timeouts: sixteen times a heartbeat on peers that watch for
failures, otherwise twice.

The file is long because all events enter through one door."""

import random
from collections.abc import Callable
from functools import partial

import msgspec

from shoal.coordinator.certificates import certified_flaw, newest_whole
from shoal.coordinator.chain import ChainRecord, PlanChain
from shoal.coordinator.chain_sync import ChainSync
from shoal.coordinator.coordination_events import (
    Alarm,
    Answered,
    Ask,
    Beat,
    Command,
    CoordinationEvent,
    CoordinationTimerFired,
    ExclusionHeard,
    Expelled,
    HeadFound,
    Heard,
    Introduce,
    Leaving,
    LogReason,
    LookUp,
    Obey,
    Persist,
    PutOut,
    Received,
    Reply,
    ReportDue,
    Searched,
    SendHeartbeat,
    SpreadOrder,
    TellNode,
    Unanswered,
)
from shoal.coordinator.follower import Follower
from shoal.coordinator.leader import Leader, transfer_body
from shoal.coordinator.ledger import Ends, end_body, proves_end
from shoal.coordinator.proposer import Proposer
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.swarm_status import swarm_status
from shoal.coordinator.voting import Judge, goes_back
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import TOGETHER_MAX
from shoal.protocol.membership import Excluded
from shoal.protocol.messages import (
    Advert,
    ChainLinks,
    ChainRequest,
    Done,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Ping,
    PlanLive,
    PlanOffer,
    PlanVote,
    Refusal,
    Reset,
    Standing,
    StandingRequest,
    SwarmStatus,
    TermGrant,
    TermRequest,
    TransferLeadership,
)
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.quorum import is_quorum
from shoal.protocol.spec import RunSpec
from shoal.protocol.statement import Topic

SignStatement = Callable[[Topic, bytes], bytes]
"""(topic, body) -> our signature of this statement about this run."""
VerifyStatement = Callable[[Topic, PeerID, bytes, bytes], bool]
"""(topic, signer, signature, body) -> whether this is the signer's valid statement about this run."""

TICK_HEARTBEATS = 0.5
BRISK_HEARTBEATS = 1 / 16
"""Tick interval of peers that watch for failures: the coordinator, and followers that doubt it."""
JITTER = 0.1
"""Heartbeat intervals vary by this share: a thousand peers with one plan must not report in one millisecond."""
HEAD_HEARTBEATS = 5.0
"""Interval at which a member without a coordinator reads the directory."""
STRANGER_HEARTBEATS = 1.0
"""The same for a peer that is no member, because no message tells it of a coordinator's failure."""
TERM_HEARTBEATS = 1.5
"""How long a peer that has granted a term waits before it becomes a candidate itself."""
SOON_HEARTBEATS = 0.25
"""Members report to a new coordinator within this time."""
SLEPT_HEARTBEATS = 1.0
"""A tick that is this late means that this peer was suspended, so the silence of the others proves nothing."""


class CoordinationCore:
    """Decides what one peer does in coordination.

    Args:
        chain: possibly restored from disk.
        policy: chooses the next layout; its view is the swarm as this peer knows it.
        sign: signs a plan in our name; deterministic.
        sign_statement: signs a statement in our name.
        verify: checks another peer's statement.
    """

    def __init__(
        self,
        *,
        run: str,
        me: PeerID,
        owner: PeerID,
        spec: RunSpec,
        chain: PlanChain,
        policy: ReplanPolicy,
        sign: Callable[[Plan], SignedPlan],
        sign_statement: SignStatement,
        verify: VerifyStatement,
        rng: random.Random,
        now_s: float,
    ) -> None:
        self.run, self.me, self.owner = run, me, owner
        self.chain, self.policy, self.view = chain, policy, policy.view
        self.ends: Ends = ()
        """The proof that the run is done; empty: none known."""
        self._rng, self._model = rng, spec.model
        self._sign_vote = partial(sign_statement, "vote")
        self._verify_end, self._verify_state = partial(verify, "end"), partial(verify, "state")
        self._verify_transfer = partial(verify, "transfer")
        self._steps = spec.training.steps
        self.revision = self.newest_revision = spec.revision
        """The revision of our spec, and the highest revision that a peer has reported."""
        self._heartbeat_s = spec.swarm.heartbeat_s
        self._own: Heartbeat | None = None
        self._proposer = Proposer(
            me=me,
            owner=owner,
            chain=chain,
            policy=policy,
            sign=sign,
            sign_vote=self._sign_vote,
            verify=partial(verify, "vote"),
            is_fresh=lambda base: self.view.is_fresh(base.plan, self._own, leads=self.is_coordinator),
            adopt=lambda plan, now_s: self._adopt(plan, now_s, self.me),
            lost=self._lost,
        )
        self._follower = Follower(run=run, me=me, owner=owner, heartbeat_s=self._heartbeat_s, rng=rng, now_s=now_s)
        self._watch = self._follower.watch
        self.doubted = self._watch.doubted  # peers with the least trusted records in the directory
        self.judge = Judge(me=me, heartbeat_s=self._heartbeat_s, revision=spec.revision, name_of=self._name_of)
        self._chain_sync = ChainSync(me=me, chain=chain, heartbeat_s=self._heartbeat_s)
        self._leader = Leader(
            me=me,
            owner=owner,
            swarm=spec.swarm,
            policy=policy,
            sign_transfer=partial(sign_statement, "transfer"),
            now_s=now_s,
        )
        self._leaving = False
        self._heartbeat_at_s = self._head_at_s = self._tick_at_s = self._ticked_s = now_s

    def restore(self, record: ChainRecord, opened: Callable[[bytes], SignedPlan | None], now_s: float) -> None:
        """Continue after a restart, before any event. Args: opened: as in `PlanChain.restore`."""
        self.chain.restore(record, opened)
        live = self.chain.live
        if live is not None:
            self.policy.obey(live.plan, now_s)
            self.view.electorate.obey(live.plan, now_s, follows=False)
            if self.is_coordinator:
                self._leader.begin(live.plan, now_s, continuing=False, silent=None)

    # --- for the driver ---

    @property
    def live(self) -> SignedPlan | None:
        """The plan that this peer obeys, with its signatures."""
        return self.chain.live

    @property
    def plan(self) -> Plan | None:
        return self.chain.live.plan if self.chain.live else None

    @property
    def is_coordinator(self) -> bool:
        return self.plan is not None and self.plan.coordinator == self.me

    @property
    def coordinator(self) -> PeerID:
        """The peer to which this peer sends its heartbeats."""
        return self._watch.target(self.plan)

    @property
    def predecessor(self) -> SignedPlan | None:
        """The predecessor of the live plan, if known."""
        live = self.chain.live
        return self.chain.links.find(live.plan.previous) if live is not None else None

    @property
    def excluded(self) -> Excluded:
        """The peers and keys that known orders exclude."""
        return self.chain.exclusions.excluded

    @property
    def exclusions_told(self) -> tuple[str, ...]:
        """One sentence for each exclusion order."""
        return self.chain.exclusions.told(self.view.roster.own_name_of)

    def orders_lacking(self, plan: Plan) -> tuple[bytes, ...]:
        """Known exclusion orders that `plan` does not contain."""
        return self.chain.exclusions.lacks(plan)

    def record(self) -> ChainRecord:
        return self.chain.record()

    def known_peers(self) -> frozenset[PeerID]:
        """The peers that have been heard, and the members of the plan."""
        return frozenset((*self.view.roster.presences, *(self.plan.members if self.plan else ())))

    def present_peers(self) -> dict[PeerID, Advert | None]:
        """The peers that count when a newcomer wants to join -> their adverts, where known."""
        present = {peer: seen.advert for peer, seen in self.view.roster.presences.items() if not seen.left}
        return present | {peer: present.get(peer) for peer in (self.plan.members if self.plan else ())}

    def status(self, now_s: float) -> SwarmStatus | None:
        if self.plan is None or not self.is_coordinator:
            return None
        status = swarm_status(self.view, self.plan, now_s, owner=self.owner)
        return msgspec.structs.replace(status, risks=(*status.risks, *self.exclusions_told))

    def has_heirs(self, now_s: float) -> bool:
        """True if another peer may take the role."""
        plan = self.plan
        return plan is not None and any(peer != self.me for peer in self.view.successors(plan, now_s))

    def next_timer_s(self) -> float:
        return min(self._heartbeat_at_s, self._tick_at_s)

    def handle(self, event: CoordinationEvent, *, now_s: float) -> list[Command]:
        commands = self._handle(event, now_s)
        if self.is_coordinator or self._follower.is_fast_tick(now_s):
            self._tick_at_s = min(self._tick_at_s, now_s + BRISK_HEARTBEATS * self._heartbeat_s)
        return commands

    def _handle(self, event: CoordinationEvent, now_s: float) -> list[Command]:
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
                    self._leader.hasten(now_s)
            case Heard():
                if self.is_coordinator:
                    self.view.roster.heard_otherwise(event.peer, now_s)
            case ReportDue():
                self._heartbeat_at_s = now_s
            case HeadFound():
                if self._watch.found(event.head, self.plan, me=self.me, now_s=now_s):
                    self._heartbeat_at_s = now_s  # the coordinator of a plan above ours will answer with that plan
            case Searched():
                self._tick_at_s = now_s  # act on the result at once, if it still fits
                wanted = self.policy.searched(event)
                if event.is_bug:
                    return [Alarm(text=event.reason)]
                return [LogReason(text=event.reason)] if wanted else []
            case Leaving():
                self._leaving = True
                self._leader.hasten(now_s)
            case ExclusionHeard():
                return self._heard_exclusion(event)
            case Expelled():
                for peer in event.peers:
                    self.view.roster.leave(peer)
                self._tick_at_s = now_s
            case CoordinationTimerFired():
                return self._timer_fired(now_s)
        return []

    def _heard_exclusion(self, event: ExclusionHeard) -> list[Command]:
        if self.chain.exclusions.note(event.order):
            return [PutOut(order=event.order, is_ours=event.is_ours)]
        return [SpreadOrder(order=event.order)] if event.is_ours else []

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
                return self._vote(event, offer, event.plan, now_s)
            case PlanLive():
                assert event.plan is not None
                return [*self._adopt(event.plan, now_s, event.source), Reply(message=Done())]
            case ChainRequest() as request:
                links = self.chain.links.after(request.after, request.override_epoch)
                return [Reply(message=ChainLinks(links=links))]
            case TransferLeadership() as message:
                assert event.plan is not None
                return self._take_over(event.source, message, event.plan, now_s)
            case Leave():
                self.view.roster.leave(event.source)
                return [Reply(message=Done() if self.is_coordinator else Refusal(reason="does not coordinate"))]
            case Ping() as ping:
                return [Reply(message=ping)]
            case StandingRequest():
                standing = self.chain.answer_standing(self._own, leaves=self._leaves, revision=self.revision)
                return [Reply(message=standing)]
            case Reset() as reset:
                assert event.base is not None
                assert event.mandate is not None
                return self._proposer.reset(reset, event.base, event.mandate, now_s)
            case other:
                return [Reply(message=Refusal(reason=f"{type(other).__name__} is not answered here"))]

    def _hear(self, source: PeerID, heartbeat: Heartbeat, now_s: float) -> list[Command]:
        if heartbeat.revision != self.revision:
            # This peer trains by another spec: no plan may contain both of us.
            self.newest_revision = max(self.newest_revision, heartbeat.revision)
            self.view.roster.lose(source)
            return [Reply(message=self._answer(source, heartbeat, now_s, leads=self.is_coordinator, ends=()))]
        live = self.chain.live
        leads = self.is_coordinator or (live is None and self.me == self.owner and heartbeat.plan_sequence == 0)
        flaws: list[str] = []
        if leads:
            if not self.view.roster.has_room_for(source):
                return [Reply(message=Refusal(reason="this run is full"))]
            flaws = self.view.hear(source, heartbeat, now_s)
            self._hear_end(source, heartbeat)
            self.view.certificates.hear(source, heartbeat.attested, verify=self._verify_state)
        commands: list[Command] = [Reply(message=self._answer(source, heartbeat, now_s, leads=leads, ends=self.ends))]
        if heartbeat.plan_sequence > (live.plan.sequence if live else 0):
            self._watch.is_behind(now_s)
            commands.append(LookUp())  # the chain has grown without us
        commands += [Alarm(text=text) for text in flaws]
        if self.is_coordinator and live is not None:
            self._leader.heard(source, heartbeat, live.plan, now_s)
        return commands + (self._tell(now_s) if leads else [])

    def _hear_end(self, source: PeerID, heartbeat: Heartbeat) -> None:
        """Collect signatures of the run's end; only the coordinator calls this."""
        witnesses = self.view.confirmations
        if heartbeat.end and not witnesses.knows_end_of(source):
            witnesses.note_ends(self._true_ends(((source, heartbeat.end),)))
        self.ends = self.ends or self.view.ends or self._proof(heartbeat.ends)

    def end_body(self) -> bytes:
        """Return the bytes that members sign at the end of the run."""
        era = self.plan.era if self.plan else 0
        return end_body(era=era, steps=self._steps, revision=self.revision)

    def _true_ends(self, ends: Ends) -> Ends:
        plan, body = self.plan, self.end_body()
        return tuple((p, sign) for p, sign in ends if plan and plan.has(p) and self._verify_end(p, sign, body))

    def _proof(self, ends: Ends) -> Ends:
        """Return the valid signatures of members if they prove that the run is done, else nothing."""
        plan = self.plan
        if plan is None:
            return ()
        true = self._true_ends(tuple(dict(ends).items()))
        return true if proves_end(plan, dict(true)) else ()

    @property
    def done(self) -> bool:
        """True if the run has reached its last step."""
        return bool(self.ends)

    def _answer(self, source: PeerID, heartbeat: Heartbeat, now_s: float, *, leads: bool, ends: Ends) -> HeartbeatReply:
        """Answer a heartbeat, as the coordinator if this peer `leads`."""
        live = self.chain.live
        governed = live if self.is_coordinator and live is not None and heartbeat.era == live.plan.era else None
        probe = self.view.probe(source, live.plan if live is not None else None, now_s) if leads else ()
        return HeartbeatReply(
            coordinator=self.coordinator,
            term=self.chain.order[0],
            is_coordinator=leads,
            plan=live.link if live is not None and heartbeat.plan_digest != live.digest else b"",
            ends=ends,
            revision=self.revision,
            pace=self.view.ledger.pace.tell(now_s) if leads else (),
            save_at=self.view.save_at(governed.plan, now_s) if governed is not None else 0,
            safe=self.view.safe(governed.plan, now_s) if governed is not None else (0, 0),
            probe=probe,
            beside=self.view.links.mates(source, self.view.roster.alive(now_s))[:TOGETHER_MAX] if probe else (),
            in_doubt=governed is not None and self.view.calibration.is_unexplained,
        )

    def _grant(self, source: PeerID, request: TermRequest, base: SignedPlan, now_s: float) -> list[Command]:
        heard_lately = self.is_coordinator or self._watch.heard_lately(now_s)
        commands = self._adopt(base, now_s, source)
        if heard_lately and source != self.me and not self._may_succeed(source, request.permit, base.plan):
            # A peer that has only lost its own connection to the coordinator must not depose it for all.
            self._watch.alarm(now_s)
            return [*commands, Reply(message=self.chain.no_grant(base, "still hears the coordinator"))]
        if request.prevote:
            opinion = self.chain.answer_pre_vote(source, request, base)
            if opinion.granted:
                self._follower.gives_way(source, base.plan, now_s)
            return [*commands, Reply(message=opinion)]
        reply = self.chain.answer_request(source, request, base)
        if reply.granted:
            self._follower.hold_off(now_s + TERM_HEARTBEATS * self._heartbeat_s)
        return [*commands, Persist(record=self.chain.record()), Reply(message=reply)]

    def _vote(self, event: Received, offer: PlanOffer, plan: SignedPlan, now_s: float) -> list[Command]:
        commands = self._adopt(event.base, now_s, event.source) if event.base else []
        live = self.plan
        if live is not None and self.chain.must_judge(plan):
            asks = self.judge.questions(plan, live, event.knows, now_s)
            commands += [Ask(peer=peer, message=StandingRequest()) for peer in asks]
            if self.judge.is_waiting(now_s):
                return [*commands, Reply(message=Refusal(reason="asks members for their standing first"))]
            if self._own is None and goes_back(plan.plan, live):
                return [*commands, Reply(message=Refusal(reason="has just started, and looks at its disk first"))]
            newest, layers = newest_whole(live, self._model)
            flaw = self.judge.flaw(
                plan, live, event.knows, own=self._own, leaves=self._leaves, newest=newest, layers=layers
            )
            electorate = self.view.electorate
            flaw = flaw or electorate.flaw(plan.plan, live, now_s, self._name_of)
            flaw = flaw or certified_flaw(
                plan.plan, live, self._model, verify=self._verify_state, are_enough=electorate.are_enough
            )
            if flaw:
                text = self.view.refusals.note(self.me, self._name_of(self.me), plan.plan.sequence, flaw, now_s)
                # A coordinator that cannot hear us removes us; our vote does not reach it either, so a note is enough.
                is_ours = not plan.plan.has(self.me)
                commands += [LogReason(text=text) if is_ours else Alarm(text=text)] if text else []
                vote = PlanVote(accepted=False, reason=flaw, term=self.chain.granted_term, unfit=True)
                return [*commands, Reply(message=vote)]
        reply = self.chain.answer_offer(event.source, offer.term, plan, event.base, self._sign_vote)
        return [*commands, Persist(record=self.chain.record()), Reply(message=reply)]

    def _take_over(self, source: PeerID, message: TransferLeadership, plan: SignedPlan, now_s: float) -> list[Command]:
        commands = self._adopt(plan, now_s, source)
        live = self.chain.live
        if live is None or live.digest != plan.digest or live.plan.coordinator != source:
            return [*commands, Reply(message=Refusal(reason=f"obeys plan {self.chain.order}, not the sender's"))]
        if not self._may_succeed(self.me, message.permit, live.plan):
            return [*commands, Reply(message=Refusal(reason="gets no permit to succeed the sender"))]
        if not self._eligible(live.plan):
            return [*commands, Reply(message=Refusal(reason="does not coordinate"))]
        commands += [Introduce(peers=message.roster), Reply(message=Done())]
        if self._proposer.is_busy:
            return commands  # asked twice, or already a candidate
        self.view.inherit(message)
        return commands + self._proposer.campaign(live, now_s, permit=message.permit)

    def _may_succeed(self, heir: PeerID, permit: bytes, plan: Plan) -> bool:
        """True if the coordinator of `plan` has transferred its role to `heir`, or that of the plan before: an heir
        finishes the plan of an earlier heir that has failed."""
        before = self.chain.links.before_last
        plans = (plan, before.plan) if before is not None else (plan,)
        return any(self._verify_transfer(p.coordinator, permit, transfer_body(p.term, heir)) for p in plans)

    # --- answers from others ---

    def _answered(self, event: Answered, now_s: float) -> list[Command]:
        commands = self._adopt(event.live, now_s, event.peer) if event.live else []
        commands += self._leader.answered(event, now_s) if self.is_coordinator else []
        match event.reply:
            case HeartbeatReply() as reply:
                self.newest_revision = max(self.newest_revision, reply.revision)
                self.ends = self.ends or (self._proof(reply.ends) if reply.revision == self.revision else ())
                self._watch.replied(event.peer, reply, self.plan, me=self.me, took_s=event.took_s, now_s=now_s)
                if reply.is_coordinator and not self.is_coordinator and event.peer == self.coordinator:
                    self.view.ledger.pace.take_over(reply.pace, now_s)
                live = self.live
                if live and event.peer == live.plan.coordinator != self.me and reply.term < live.plan.term:
                    commands.append(Ask(peer=event.peer, message=PlanLive(plan=live.link)))  # it has lost its disk
                return commands
            case Ping():
                self._watch.answered(event.peer, self.plan, took_s=event.took_s, now_s=now_s)
                return commands
            case ChainLinks():
                return commands + self._catch_up(event, now_s)
            case Standing() as standing:
                self.judge.told(event.peer, standing)
                return commands
            case TermGrant() as grant if isinstance(event.asked, TermRequest) and event.asked.prevote:
                agreed = self._follower.count(event) if self.chain.takes_term(grant.term + 1) else None
                return commands + self._proposer.succeed(agreed, now_s)
            case _:
                return commands + self._proposer.count(event, now_s)

    def _unanswered(self, event: Unanswered, now_s: float) -> list[Command]:
        match event.asked:
            case TermRequest(prevote=True):
                self._follower.unanswered(event.peer, event.asked)
            case TermRequest() | PlanOffer():
                self._proposer.unanswered(event)
            case ChainRequest():
                self._chain_sync.unanswered(event.peer)
            case StandingRequest():
                self.judge.told(event.peer, None)
        if event.refused:
            self._watch.refused(event.peer, self.plan, took_s=event.took_s, now_s=now_s)
        plan = self.plan
        return self._leader.unanswered(event, plan, now_s) if plan and self.is_coordinator else []

    # --- time ---

    def _timer_fired(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if now_s >= self._heartbeat_at_s:
            self._heartbeat_at_s = now_s + self._heartbeat_s * (1 + JITTER * (self._rng.random() - 0.5))
            commands.append(SendHeartbeat(target=self.coordinator))
        if now_s < self._tick_at_s:
            return commands
        slept = now_s - self._ticked_s > SLEPT_HEARTBEATS * self._heartbeat_s
        self._ticked_s, self._tick_at_s = now_s, now_s + TICK_HEARTBEATS * self._heartbeat_s
        if slept:
            self._leader.excuse(now_s)
            self._watch.excuse(now_s)
            commands.append(LookUp())
        self._watch.weigh_hint(now_s)
        commands += self._proposer.press(now_s)
        return commands + (self._govern(now_s) if self.is_coordinator else self._follow(now_s))

    def _govern(self, now_s: float) -> list[Command]:
        live = self.chain.live
        assert live is not None
        commands, want = self._leader.work(
            live,
            now_s,
            eligible=self._eligible(live.plan),
            busy=self._proposer.is_busy or self.done,  # done: no other peer could know that the run is
            outranked=self.coordinator != self.me,
            sequence=self._proposer.next_sequence(live),
        )
        return self._tell(now_s) + commands + self._proposer.pursue(want, live, now_s)

    def _follow(self, now_s: float) -> list[Command]:
        live = self.chain.live
        commands: list[Command] = []
        known = live is not None and live.plan.has(self.me)
        lost = now_s >= self._watch.suspect_at_s or not (known or self._watch.heard_lately(now_s))
        lost = lost or (live is None and self._watch.run_exists(now_s))
        if (lost or not self._watch.head_known) and now_s >= self._head_at_s:
            self._head_at_s = now_s + (HEAD_HEARTBEATS if known else STRANGER_HEARTBEATS) * self._heartbeat_s
            commands.append(LookUp())
        if live is None:
            if self.me != self.owner or not self._watch.head_known:
                return commands
            if self._watch.run_exists(now_s):
                return [*commands, LogReason(text="waiting for the plan of this run")]
            own = self._own.holdings if self._own is not None else ()
            return commands + self._proposer.found_run(own, now_s)
        eligible = self._eligible(live.plan)
        term = max(self.chain.granted_term, live.plan.term) + 1
        asked, agreed = self._follower.work(live, now_s, eligible=eligible, busy=self._proposer.is_busy, term=term)
        return commands + asked + self._proposer.succeed(agreed, now_s)

    # --- plans ---

    def _lost(self, now_s: float, outbid: bool) -> None:
        """Wait after a failed ballot of ours. Args: outbid: a member has promised a higher term than ours."""
        self._follower.back_off(now_s)
        self._leader.lost(now_s, outbid=outbid)

    def _catch_up(self, event: Answered, now_s: float) -> list[Command]:
        lost = self.chain.live is None or self._is_out_of_touch(self.chain.live.plan, now_s)
        links, commands = self._chain_sync.learn(event.peer, event.links, now_s, may_trust=lost)
        for plan, after in links:
            commands += self._adopt(plan, now_s, self.me, after=after)
        return commands

    def _is_out_of_touch(self, plan: Plan, now_s: float) -> bool:
        """True if no peer that obeys our plan answers us: all of them may have adopted later plans."""
        if self.is_coordinator:
            return not is_quorum({self.me, *self.view.roster.alive(now_s)}, plan, self.owner)
        return now_s >= self._watch.suspect_at_s or self._watch.has_gone_on(now_s)

    def _adopt(
        self, plan: SignedPlan, now_s: float, source: PeerID, *, after: SignedPlan | None = None
    ) -> list[Command]:
        """Obey a live plan from `source` if it proves itself. Args: after: as in `PlanChain.adopt`."""
        was_coordinator, before, num_forks = self.is_coordinator, self.chain.live, self.chain.num_forks
        new, reason, lacks = self.chain.adopt(plan, after=after)
        if lacks:
            return self._chain_sync.ask(source, now_s)
        if not new:
            return [Alarm(text=reason)] if self.chain.num_forks > num_forks else []
        commands: list[Command] = [Persist(record=self.chain.record()), Obey(plan=plan)]
        if overtaken := self._proposer.drop():
            commands.append(LogReason(text=f"plan {plan.plan.order} overtook our proposal"))
        new_term = before is None or before.plan.height[:2] != plan.plan.height[:2]
        silent = before.plan.coordinator if before and now_s >= self._watch.suspect_at_s else None
        self._follower.obeys(plan.plan, new_term=new_term, replaced=silent, now_s=now_s)
        if before is not None and before.plan.era != plan.plan.era:
            self.ends = ()  # the run rolls back, though it may have been done
        self.policy.obey(plan.plan, now_s, leads=was_coordinator and not new_term)
        self.view.electorate.obey(plan.plan, now_s, follows=before is not None and plan.plan.previous == before.digest)
        if before is not None and was_coordinator and not self.is_coordinator:
            commands += [
                TellNode(record=record) for record in self.view.completed_steps(before.plan, now_s, flush=True)
            ]
        if new_term:
            # A new coordinator plans once it has heard every member, so report at once.
            soon_s = 0.0 if self.is_coordinator else SOON_HEARTBEATS * self._heartbeat_s * self._rng.random()
            self._heartbeat_at_s = min(self._heartbeat_at_s, now_s + soon_s)
        if self.is_coordinator and new_term:
            continuing = was_coordinator or before is None
            self._leader.begin(plan.plan, now_s, continuing=continuing, silent=None if continuing else silent)
            if not self._eligible(plan.plan):
                self._leader.hasten(now_s)
        elif not self.is_coordinator and (overtaken or new_term):
            self.view.stand_by()
        return commands

    def _tell(self, now_s: float) -> list[Command]:
        records = self.view.completed_steps(self.plan, now_s, flush=self.done) if self.plan else []
        return [TellNode(record=record) for record in records]

    def _eligible(self, plan: Plan) -> bool:
        able = self._own is None or self._own.advert.willing_to_coordinate
        return able and plan.has(self.me) and not self._leaves

    @property
    def _leaves(self) -> bool:
        return self._leaving or (self._own is not None and self._own.draining)

    def _name_of(self, peer: PeerID) -> str:
        own = self._own.advert.name if peer == self.me and self._own is not None else ""
        return own or self.view.roster.name_of(peer)
