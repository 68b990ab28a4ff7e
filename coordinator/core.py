"""Routes the events of one peer's coordination to the parts that decide. It holds no socket, clock or file.

The live plan defines the role of this peer (`role`). A peer of any role sends heartbeats to the coordinator that it
knows, votes (`chain`), and adopts live plans above its own.

The life of a plan:

- Before the first plan every peer reports to the run's owner. The owner makes plan (1, 1), which is (term, sequence),
  alone, once enough peers are present and no peer knows a plan of the run.
- Within a term the coordinator offers a new plan whenever a peer joins, leaves, drains or falls silent. The plan is
  live when a majority of its predecessor's electors has voted for it; `PlanLive` and heartbeat replies spread it.
- At the term's end the coordinator sends `TransferLeadership` to the first peer in the rank (order) of the next term.
  That peer requests the term, and then the members' votes for a plan with the same layout. The old coordinator keeps
  the role until that plan is live.
- A silent coordinator is replaced by the first peer in rank that notices, after a pre-vote. A member that still hears
  the coordinator refuses its consent, and pings the coordinator more often from then on.
- A returning peer finds the chain through a heartbeat's reply, a refused offer, or the `PlanHead` in the directory.
- If half of a plan's members are lost for good, `shoal recover` signs a mandate with the owner's key, and one peer
  makes a plan without votes. That plan raises the `override_epoch`, which is compared before term and sequence.

At most one `Ballot` (the voting on a plan or term) is in flight. A tick drives all timeouts: sixteen times a heartbeat
on peers that watch for failures, otherwise twice."""

import random
from collections.abc import Callable
from functools import partial

import msgspec

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
    Leaving,
    LogReason,
    LookUp,
    Obey,
    Persist,
    Received,
    Reply,
    ReportDue,
    Searched,
    SendHeartbeat,
    SpreadOrder,
    TellNode,
    Unanswered,
)
from shoal.coordinator.era import certified_flaw, newest_whole
from shoal.coordinator.ledger import Ends, end_body, proves_end
from shoal.coordinator.proposer import Proposer
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.role import CoordinationRole
from shoal.coordinator.swarm_status import swarm_status
from shoal.coordinator.voting import Judge, goes_back
from shoal.protocol import messages
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import TOGETHER_MAX
from shoal.protocol.membership import Excluded
from shoal.protocol.messages import Done, Heartbeat, HeartbeatReply, Refusal, TermRequest
from shoal.protocol.plan import Plan, SignedPlan
from shoal.protocol.spec import RunSpec
from shoal.protocol.statement import Topic

SignStatement = Callable[[Topic, bytes], bytes]
"""(topic, body) -> our signature of this statement about this run."""
VerifyStatement = Callable[[Topic, PeerID, bytes, bytes], bool]
"""(topic, signer, signature, body) -> True if the signer has signed this statement about this run."""

TICK_HEARTBEATS = 0.5
BRISK_HEARTBEATS = 1 / 16
"""Tick interval of peers that watch for failures: the coordinator, and followers that doubt the coordinator."""
JITTER = 0.1
"""Heartbeat intervals vary by this share: a thousand peers with one plan must not report in one millisecond."""
SOON_HEARTBEATS = 0.25
"""Members report to a new coordinator within this time."""
SLEPT_HEARTBEATS = 1.0
"""A tick that is this late means that this peer was suspended, so the silence of the others proves nothing."""


class CoordinationCore:
    """Decides what one peer does to choose the coordinator and to agree on plans.

    Args:
        chain: the run's chain of plans, empty; `restore` fills it.
        policy: chooses the next layout from what this peer knows of the swarm.
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
        self._steps = spec.training.steps
        self.revision = self.newest_revision = spec.revision
        """The revision of our run spec, and the highest revision that a peer has reported."""
        self._heartbeat_s = spec.swarm.heartbeat_s
        self._proposer = Proposer(
            me=me,
            owner=owner,
            chain=chain,
            policy=policy,
            sign=sign,
            sign_vote=self._sign_vote,
            verify=partial(verify, "vote"),
            is_fresh=lambda base: self.view.is_fresh(base.plan, self.role.own, leads=self.is_coordinator),
            adopt=lambda plan, now_s: self._adopt(plan, now_s, self.me),
            lost=lambda now_s, outbid: self.role.failed(now_s, outbid=outbid),
        )
        self.role = CoordinationRole(
            run=run,
            me=me,
            owner=owner,
            swarm=spec.swarm,
            chain=chain,
            policy=policy,
            proposer=self._proposer,
            sign_transfer=partial(sign_statement, "transfer"),
            verify_transfer=partial(verify, "transfer"),
            rng=rng,
            now_s=now_s,
        )
        self.judge = Judge(me=me, heartbeat_s=self._heartbeat_s, revision=spec.revision, name_of=self._name_of)
        self._chain_sync = ChainSync(me=me, chain=chain, heartbeat_s=self._heartbeat_s)
        self._heartbeat_at_s = self._tick_at_s = self._ticked_s = now_s

    def restore(self, record: ChainRecord, opened: Callable[[bytes], SignedPlan | None], now_s: float) -> None:
        """Continue from `record` after a restart, before any event. Args: opened: decodes a plan, or returns None."""
        self.chain.restore(record, opened)
        live = self.chain.live
        if live is not None:
            self.policy.obey(live.plan, now_s)
            self.view.electorate.obey(live.plan, now_s, follows=False)
            if self.is_coordinator:
                self.role.begin_term(live.plan, now_s, continuing=False, silent=None)

    # --- for the driver ---

    @property
    def plan(self) -> Plan | None:
        return self.chain.live.plan if self.chain.live else None

    @property
    def is_coordinator(self) -> bool:
        return self.role.is_coordinator

    @property
    def coordinator(self) -> PeerID:
        """The peer to which this peer sends its heartbeats."""
        return self.role.hint.coordinator

    @property
    def done(self) -> bool:
        """True if the run has reached its last step."""
        return bool(self.ends)

    @property
    def excluded(self) -> Excluded:
        """The peers and keys that known orders exclude."""
        return self.chain.exclusions.excluded

    @property
    def exclusions_told(self) -> tuple[str, ...]:
        """One sentence for each exclusion order."""
        return self.chain.exclusions.told(self.view.roster.own_name_of)

    def known_peers(self) -> frozenset[PeerID]:
        """The peers that have been heard, and the members of the plan."""
        return frozenset((*self.view.roster.presences, *(self.plan.members if self.plan else ())))

    def present_peers(self) -> dict[PeerID, messages.Advert | None]:
        """Return {peer: its advert, if known} of the peers that are present and the plan's members: a limit on
        newcomers counts these."""
        present = {peer: seen.advert for peer, seen in self.view.roster.presences.items() if not seen.left}
        return present | {peer: present.get(peer) for peer in (self.plan.members if self.plan else ())}

    def status(self, now_s: float) -> messages.SwarmStatus | None:
        if self.plan is None or not self.is_coordinator:
            return None
        status = swarm_status(self.view, self.plan, now_s, owner=self.owner)
        return msgspec.structs.replace(status, risks=(*status.risks, *self.exclusions_told))

    def next_timer_s(self) -> float:
        return min(self._heartbeat_at_s, self._tick_at_s)

    def handle(self, event: CoordinationEvent, *, now_s: float) -> list[Command]:
        commands = self._handle(event, now_s)
        if self.role.is_fast_tick(now_s):
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
                self.role.beat(event.heartbeat, now_s)
            case Heard():
                if self.is_coordinator:
                    self.view.roster.heard_otherwise(event.peer, now_s)
            case ReportDue():
                self._heartbeat_at_s = now_s
            case HeadFound():
                if self.role.hint.found(event.head, now_s):
                    self._heartbeat_at_s = now_s  # the coordinator of a plan above ours will answer with that plan
            case Searched():
                self._tick_at_s = now_s  # act on the result at once, if it still fits
                wanted = self.policy.searched(event)
                if event.is_bug:
                    return [Alarm(text=event.reason)]
                return [LogReason(text=event.reason)] if wanted else []
            case Leaving():
                self.role.leave(now_s)
            case ExclusionHeard():
                in_force = self.chain.exclusions.note(event.order)
                if in_force or event.is_ours:
                    return [SpreadOrder(order=event.order, in_force=in_force, is_ours=event.is_ours)]
            case Expelled():
                for peer in event.peers:
                    self.view.roster.leave(peer)
                self._tick_at_s = now_s
            case CoordinationTimerFired():
                return self._timer_fired(now_s)
        return []

    # --- calls from others ---

    def _received(self, event: Received, now_s: float) -> list[Command]:
        match event.message:
            case Heartbeat() as heartbeat:
                return self._hear(event.source, heartbeat, now_s)
            case TermRequest() as request:
                assert event.base is not None
                backs = self.role.backs_coordinator(now_s)
                commands = self._adopt(event.base, now_s, event.source)
                return commands + self.role.grant(event.source, request, event.base, now_s, backs=backs)
            case messages.PlanOffer() as offer:
                assert event.plan is not None
                return self._vote(event, offer, event.plan, now_s)
            case messages.PlanLive():
                assert event.plan is not None
                return [*self._adopt(event.plan, now_s, event.source), Reply(message=Done())]
            case messages.ChainRequest() as request:
                links = self.chain.links.after(request.after, request.override_epoch)
                return [Reply(message=messages.ChainLinks(links=links))]
            case messages.TransferLeadership() as message:
                assert event.plan is not None
                commands = self._adopt(event.plan, now_s, event.source)
                return commands + self.role.take_over(event.source, message, event.plan, now_s)
            case messages.Leave():
                self.view.roster.leave(event.source)
                return [Reply(message=Done() if self.is_coordinator else Refusal(reason="does not coordinate"))]
            case messages.Ping() as ping:
                return [Reply(message=ping)]
            case messages.StandingRequest():
                own, leaves = self.role.own, self.role.leaves
                return [Reply(message=self.chain.answer_standing(own, leaves=leaves, revision=self.revision))]
            case messages.Reset() as reset:
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
            self.role.hint.is_behind(now_s)
            commands.append(LookUp())  # the chain has grown without us
        commands += [Alarm(text=text) for text in flaws]
        if self.is_coordinator and live is not None:
            self.role.hear(source, heartbeat, live.plan, now_s)
        return commands + (self._tell(self.plan, now_s, flush=self.done) if leads else [])

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

    def _vote(self, event: Received, offer: messages.PlanOffer, plan: SignedPlan, now_s: float) -> list[Command]:
        commands = self._adopt(event.base, now_s, event.source) if event.base else []
        live, own, leaves = self.plan, self.role.own, self.role.leaves
        if live is not None and self.chain.must_judge(plan):
            asks = self.judge.questions(plan, live, event.knows, now_s)
            commands += [Ask(peer=peer, message=messages.StandingRequest()) for peer in asks]
            if self.judge.is_waiting(now_s):
                return [*commands, Reply(message=Refusal(reason="asks members for their standing first"))]
            if own is None and goes_back(plan.plan, live):
                return [*commands, Reply(message=Refusal(reason="has just started, and looks at its disk first"))]
            newest, layers = newest_whole(live, self._model)
            flaw = self.judge.flaw(plan, live, event.knows, own=own, leaves=leaves, newest=newest, layers=layers)
            electorate = self.view.electorate
            flaw = flaw or electorate.flaw(plan.plan, live, now_s, self._name_of)
            flaw = flaw or certified_flaw(
                plan.plan, live, self._model, verify=self._verify_state, are_enough=electorate.are_enough
            )
            if flaw:
                text = self.view.refusals.note(self.me, self._name_of(self.me), plan.plan.sequence, flaw, now_s)
                # A coordinator that cannot hear us removes us. Our refusal does not reach it either: log no error.
                is_ours = not plan.plan.has(self.me)
                commands += [LogReason(text=text) if is_ours else Alarm(text=text)] if text else []
                vote = messages.PlanVote(accepted=False, reason=flaw, term=self.chain.granted_term, unfit=True)
                return [*commands, Reply(message=vote)]
        reply = self.chain.answer_offer(event.source, offer.term, plan, event.base, self._sign_vote)
        return [*commands, Persist(record=self.chain.record()), Reply(message=reply)]

    # --- answers from others ---

    def _answered(self, event: Answered, now_s: float) -> list[Command]:
        commands = self._adopt(event.live, now_s, event.peer) if event.live else []
        commands += self.role.answered(event, now_s)
        match event.reply:
            case HeartbeatReply() as reply:
                self.newest_revision = max(self.newest_revision, reply.revision)
                self.ends = self.ends or (self._proof(reply.ends) if reply.revision == self.revision else ())
                self.role.replied(event.peer, reply, took_s=event.took_s, now_s=now_s)
                if reply.is_coordinator and not self.is_coordinator and event.peer == self.coordinator:
                    self.view.ledger.pace.take_over(reply.pace, now_s)
                live = self.chain.live
                if live and event.peer == live.plan.coordinator != self.me and reply.term < live.plan.term:
                    commands.append(
                        Ask(peer=event.peer, message=messages.PlanLive(plan=live.link))
                    )  # that coordinator has lost its disk
                return commands
            case messages.ChainLinks():
                lost = self.role.is_out_of_touch(now_s)
                links, questions = self._chain_sync.learn(event.peer, event.links, now_s, may_trust=lost)
                commands += questions
                for plan, after in links:
                    commands += self._adopt(plan, now_s, self.me, after=after)
                return commands
            case messages.Standing() as standing:
                self.judge.told(event.peer, standing)
                return commands
            case _:
                return commands + self._proposer.count(event, now_s)

    def _unanswered(self, event: Unanswered, now_s: float) -> list[Command]:
        match event.asked:
            case TermRequest() | messages.PlanOffer():
                self._proposer.unanswered(event, now_s)
            case messages.ChainRequest():
                self._chain_sync.unanswered(event.peer)
            case messages.StandingRequest():
                self.judge.told(event.peer, None)
        return self.role.unanswered(event, now_s)

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
            self.role.excuse(now_s)
            commands.append(LookUp())
        self.role.hint.weigh(now_s)
        commands += self._proposer.press(now_s)
        if self.is_coordinator:
            commands += self._tell(self.plan, now_s, flush=self.done)
        else:
            commands += self.role.look_up(now_s)
        if self.chain.live is None:
            return commands + self._found_run(now_s)
        return commands + self.role.work(self.chain.live, now_s, done=self.done)

    def _found_run(self, now_s: float) -> list[Command]:
        """Make the first plan if that is our task: we own the run, and no peer knows a plan of it."""
        if self.me != self.owner or not self.role.hint.head_known:
            return []
        if self.role.hint.run_exists(now_s):
            return [LogReason(text="waiting for the plan of this run")]
        return self._proposer.found_run(self.role.own.holdings if self.role.own is not None else (), now_s)

    # --- plans ---

    def _adopt(
        self, plan: SignedPlan, now_s: float, source: PeerID, *, after: SignedPlan | None = None
    ) -> list[Command]:
        """Obey a live plan from `source` if its proof is valid. Args: after: its predecessor, if we trust that one."""
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
        silent = self.role.obeys(before.plan if before else None, new_term=new_term, now_s=now_s)
        if before is not None and before.plan.era != plan.plan.era:
            self.ends = ()  # the run rolls back, though it may have been done
        self.policy.obey(plan.plan, now_s, leads=was_coordinator and not new_term)
        self.view.electorate.obey(plan.plan, now_s, follows=before is not None and plan.plan.previous == before.digest)
        if before is not None and was_coordinator and not self.is_coordinator:
            commands += self._tell(before.plan, now_s, flush=True)
        if new_term:
            # A new coordinator plans once it has heard every member, so report at once.
            soon_s = 0.0 if self.is_coordinator else SOON_HEARTBEATS * self._heartbeat_s * self._rng.random()
            self._heartbeat_at_s = min(self._heartbeat_at_s, now_s + soon_s)
        if self.is_coordinator and new_term:
            continuing = was_coordinator or before is None
            self.role.begin_term(plan.plan, now_s, continuing=continuing, silent=None if continuing else silent)
        elif not self.is_coordinator and (overtaken or new_term):
            self.view.stand_by()
        return commands

    def _tell(self, plan: Plan | None, now_s: float, *, flush: bool) -> list[Command]:
        """Return a command for each completed step that is news. Args: flush: include steps that lack some reports."""
        if plan is None:
            return []
        records = self.view.ledger.tell(now_s, term=plan.term, peers=len(plan.members), flush=flush)
        return [TellNode(record=record) for record in records]

    def _name_of(self, peer: PeerID) -> str:
        own = self.role.own.advert.name if peer == self.me and self.role.own is not None else ""
        return own or self.view.roster.name_of(peer)

    # --- the end of the run ---

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
