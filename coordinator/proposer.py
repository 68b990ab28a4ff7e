"""Extends the chain: drafts plans, runs one ballot at a time, and announces the plan that goes live. Pure.

A ballot requests the term, if we do not hold it yet, and then the votes for a plan. A pre-vote (`role`) only asks
whether the term would be granted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.coordinator.allocate.interface import Beginning, Layout
from shoal.coordinator.chain import PlanChain, link_flaw
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
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.coordinator.search_schedule import SearchJob
from shoal.coordinator.voting import APART_MAX
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX, ENVELOPE_BYTES_MAX
from shoal.protocol.messages import Done, Holding, PlanLive, PlanOffer, PlanVote, Refusal, Reset, TermGrant, TermRequest
from shoal.protocol.plan import Mandate, Plan, PlanProof, SignedPlan, Stage, is_quorum, vote_body
from shoal.protocol.statement import VerifySignature

PROPOSAL_HEARTBEATS = 5.0
"""How long members may take to answer a ballot. After that a new proposal is made, from the view at that time."""
PRE_VOTE_HEARTBEATS = 3.0
"""Duration of a pre-vote, enough for a member that backs the coordinator at first to check for itself."""
ASK_AGAIN_HEARTBEATS = 0.5
"""A message of a pre-vote without an answer counts as lost after this time."""
REST_HEARTBEATS = 0.125
"""A member that has refused in a pre-vote is asked again after this time."""


@dataclass(slots=True, kw_only=True)
class Ballot:
    """One ballot for the successor of `base`. `plan` is None while the term is being requested, and in a pre-vote."""

    base: SignedPlan
    term: int
    owner: PeerID
    expires_at_s: float
    permit: bytes = b""
    """The coordinator's signature that transfers the role to us; empty: we have none."""
    prevote: bool = False
    again_s: float = math.inf
    """Seconds after which a message without an answer counts as lost; inf: only a failed call counts."""
    rest_s: float = 0.0
    """Seconds until a member that has refused, or was not reached, is asked again."""
    plan: SignedPlan | None = None
    agreed: dict[PeerID, bytes] = field(default_factory=dict)
    """Member that has agreed -> the signature of its vote, or no bytes if it has only granted the term."""
    waiting: dict[PeerID, float] = field(init=False, default_factory=dict)
    """Members that have been asked -> the time until which they are not asked again."""
    promised: set[PeerID] = field(init=False, default_factory=set)
    """Members that have granted this term to another candidate."""
    refused: set[PeerID] = field(default_factory=set)
    """Members that are not asked any more: they refused our plan for a flaw, or were left out from the start."""
    voted: dict[PeerID, str] = field(init=False, default_factory=dict)
    """Member that has granted us the term -> digest of the plan that it had voted for before; empty: none."""
    learned: list[tuple[int, SignedPlan]] = field(init=False, default_factory=list)
    """(term of the vote, plan) of each plan for which a member reports its vote."""

    def question(self) -> TermRequest | PlanOffer:
        """Return the message that this ballot sends now. Answers to other messages do not count."""
        base = self.base.link
        if self.plan is None:
            return TermRequest(term=self.term, live=base, permit=self.permit, prevote=self.prevote)
        plan = self.plan.envelope
        fits = len(plan) + len(base) + ENVELOPE_BYTES_MAX <= CONTROL_BYTES_MAX
        return PlanOffer(term=self.term, plan=plan, predecessor=base if fits else b"")

    def ask(self, now_s: float) -> list[Command]:
        """Send the question to the electors and, if a plan is offered, to its newcomers, so that these learn it early.
        Skip members that have answered, or still have time to answer."""
        base = self.base.plan
        newcomers = (peer for peer in self.plan.plan.members if not base.has(peer)) if self.plan else ()
        everyone = dict.fromkeys((*base.electors, *newcomers))
        left_out = {*self.agreed, *self.refused, *(p for p, until_s in self.waiting.items() if now_s < until_s)}
        peers = [peer for peer in everyone if peer not in left_out]
        self.waiting.update(dict.fromkeys(peers, now_s + self.again_s))
        question = self.question()
        return [Ask(peer=peer, message=question) for peer in peers]

    def is_answered_by(self, event: Answered | Unanswered) -> bool:
        """True if `event` answers our present question, not a question from before the pre-vote raised its term."""
        asked = event.asked
        if self.prevote and isinstance(asked, TermRequest):
            asked = msgspec.structs.replace(asked, term=self.term)
        return asked == self.question()

    def learn(self, term: int, plan: SignedPlan) -> None:
        """Record that a member has voted for `plan` in `term`, unless no honest member can have done so."""
        if plan.plan.term <= term <= self.term and not link_flaw(plan, self.base):
            self.learned.append((term, plan))

    @property
    def found(self) -> SignedPlan | None:
        """The latest plan that may be live, of those for which members report votes. Remove from the electors those
        that granted us the term but did not vote for the plan: if no majority is left, the plan cannot be live. So one
        liar cannot force on us a plan that the others refused."""
        plan = self.base.plan
        for _, voted in sorted(self.learned, key=lambda each: (each[0], each[1].plan.order), reverse=True):
            others = {peer for peer, digest in self.voted.items() if digest != voted.digest}
            if is_quorum(set(plan.electors) - others, plan, self.owner):
                return voted
        return None

    @property
    def is_hopeless(self) -> bool:
        """True if no majority is left: too many members promised the term to another candidate or refused our plan."""
        plan = self.base.plan
        return not is_quorum(set(plan.electors) - self.promised - self.refused, plan, self.owner)

    @property
    def carried(self) -> bool:
        return is_quorum(self.agreed, self.base.plan, self.owner)

    def proven(self) -> SignedPlan:
        assert self.plan is not None
        votes = tuple((at, self.agreed[peer]) for at, peer in enumerate(self.base.plan.electors) if peer in self.agreed)
        return msgspec.structs.replace(self.plan, proof=PlanProof(self.term, votes))


class Proposer:
    """Requests terms and votes in this peer's name.

    Args:
        chain: this peer's chain. This peer votes first for its own proposal, unless its vote alone is a majority.
        policy: chooses layouts; its view knows electors, experts and certificates.
        sign: signs a plan in our name; deterministic.
        sign_vote: signs the body of a vote in our name.
        verify: checks the signature of another peer's vote.
        is_fresh: returns True if nothing has been committed in the era of the given plan.
        adopt: obeys a plan if it is above ours.
        lost: called after a failed ballot with the time, and True if another candidate holds this or a later term.
    """

    def __init__(
        self,
        *,
        me: PeerID,
        owner: PeerID,
        chain: PlanChain,
        policy: ReplanPolicy,
        sign: Callable[[Plan], SignedPlan],
        sign_vote: Callable[[bytes], bytes],
        verify: VerifySignature,
        is_fresh: Callable[[SignedPlan], bool],
        adopt: Callable[[SignedPlan, float], list[Command]],
        lost: Callable[[float, bool], None],
    ) -> None:
        self._me, self._owner, self._chain, self._policy = me, owner, chain, policy
        self._sign, self._sign_vote, self._verify = sign, sign_vote, verify
        self._is_fresh, self._adopt, self._lost = is_fresh, adopt, lost
        self._heartbeat_s = policy.view.spec.swarm.heartbeat_s
        self._patience_s = PROPOSAL_HEARTBEATS * self._heartbeat_s
        self._unfit = ""
        """Digest of the last plan that too many members refused for a flaw."""
        self._ballot: Ballot | None = None
        self._sequence_max = 0
        self._term_max = 0

    @property
    def is_busy(self) -> bool:
        return self._ballot is not None and not self._ballot.prevote

    @property
    def is_sounding(self) -> bool:
        """True during a pre-vote."""
        return self._ballot is not None and self._ballot.prevote

    def drop(self) -> bool:
        """End the ballot, because a plan above its base is live. Returns: False if it was only a pre-vote, or none."""
        dropped, self._ballot = self.is_busy, None
        return dropped

    def drop_pre_vote(self) -> None:
        if self.is_sounding:
            self._ballot = None

    # --- plans without a ballot ---

    def found_run(self, own: Sequence[Holding], now_s: float) -> list[Command]:
        """Make the first plan if it is time. Only the owner may, without votes. Args: own: snapshots on our disk."""
        found, reason = self._policy.first_plan(now_s, own=own)
        commands: list[Command] = [LogReason(text=reason)]
        match found:
            case Layout():
                plan = self.make(None, 1, self._policy.foreseen(found, now_s), now_s)
                commands += self._went_live(plan, (), now_s)
            case SearchJob():
                commands.append(Search(job=found))
        return commands

    def reset(self, reset: Reset, base: SignedPlan, mandate: Mandate, now_s: float) -> list[Command]:
        """Make the successor of `base` without votes, by the owner's mandate."""
        commands = self._adopt(base, now_s)
        live = self._chain.live
        if live is None:
            return [*commands, Reply(message=Refusal(reason="obeys no plan of the run yet: look again"))]
        if live.plan.mandate == reset.mandate:
            return [*commands, Reply(message=Done())]  # asked twice
        is_next = live.digest == base.digest == mandate.previous
        if not is_next or mandate.override_epoch <= live.plan.override_epoch:
            reason = f"obeys plan {self._chain.order} of override epoch {live.plan.override_epoch}: look again"
            return [*commands, Reply(message=Refusal(reason=reason))]
        sequence = self.next_sequence(live)
        layout, reason = self._policy.reset_plan(live, reset, mandate, now_s, sequence=sequence)
        if layout is None:
            return [*commands, Reply(message=Refusal(reason=reason))]
        layout = self._policy.foreseen(layout, now_s)
        plan = self.make(
            live, mandate.term, layout, now_s, mandate=reset.mandate, override_epoch=mandate.override_epoch
        )
        commands.append(Introduce(peers=reset.roster))
        commands += self._went_live(plan, tuple(peer for peer, _ in reset.roster), now_s)
        return [*commands, LogReason(text=layout.reason), Reply(message=Done())]

    # --- ballots ---

    def pre_vote(self, base: SignedPlan, now_s: float, *, round_trip_s: float) -> list[Command]:
        """Ask members whether they would grant the next possible term; request it if a majority says so."""
        self._ballot = Ballot(
            base=base,
            term=self._next_term(base),
            owner=self._owner,
            expires_at_s=now_s + PRE_VOTE_HEARTBEATS * self._heartbeat_s,
            prevote=True,
            again_s=max(ASK_AGAIN_HEARTBEATS * self._heartbeat_s, 2 * round_trip_s),
            rest_s=REST_HEARTBEATS * self._heartbeat_s,
            agreed={self._me: b""},
            refused={base.plan.coordinator},
        )
        return self._ballot.ask(now_s) + self._advance(now_s)

    def campaign(self, base: SignedPlan, now_s: float, *, permit: bytes = b"", term: int = 0) -> list[Command]:
        """Request `term` (0: the next possible one), and then propose the layout of `base` in it."""
        term = term or self._next_term(base)
        if self._chain.grant(self._me, term, base):
            return []
        accepted = self._chain.accepted
        self._ballot = Ballot(
            base=base,
            term=term,
            owner=self._owner,
            expires_at_s=now_s + self._patience_s,
            permit=permit,
            agreed=self._own_vote(base),
        )
        if accepted is not None:
            self._ballot.learn(self._chain.accepted_term, accepted)
        if self._ballot.agreed:
            self._ballot.voted[self._me] = accepted.digest if accepted is not None else ""
        return self._begun(self._ballot, now_s)

    def propose(self, base: SignedPlan, layout: Layout, now_s: float) -> list[Command]:
        """Propose a layout as the coordinator of `base`: in our own term, so that we only need votes."""
        assert base.plan.coordinator == self._me
        self._ballot = Ballot(base=base, term=base.plan.term, owner=self._owner, expires_at_s=0.0)
        return self._offer(self._ballot, self.make(base, base.plan.term, layout, now_s), now_s)

    def count(self, event: Answered, now_s: float) -> list[Command]:
        """Count a member's answer to the question of the ballot."""
        ballot, reply = self._ballot, event.reply
        if not isinstance(reply, TermGrant | PlanVote) or ballot is None or not ballot.is_answered_by(event):
            return []
        if isinstance(reply, TermGrant) is not (ballot.plan is None):
            return []  # it answers another question
        ballot.waiting[event.peer] = now_s + ballot.rest_s
        is_unfit = isinstance(reply, PlanVote) and reply.unfit
        notes = self._note_refusal(ballot, event.peer, reply.reason, now_s) if is_unfit else []
        term = reply.term  # the highest that the member has promised
        if not self._chain.takes_term(term + 1):
            return notes  # no peer would believe the next term, which we would have to request
        if isinstance(reply, TermGrant):
            if event.accepted is not None:
                ballot.learn(reply.accepted_term, event.accepted)
            if reply.granted:
                ballot.voted[event.peer] = event.accepted.digest if event.accepted is not None else ""
                ballot.agreed[event.peer] = b""
                return self._advance(now_s)
            if ballot.prevote:
                if term >= ballot.term:
                    self._term_max, ballot.term = term, term + 1  # consent to a lower term covers this one
                return []
            if term == ballot.term and ballot.permit:
                # The term was promised to an earlier heir, which has failed; otherwise the coordinator would not have
                # asked us.
                return self.campaign(ballot.base, now_s, permit=ballot.permit, term=term + 1)
            if term == ballot.term:
                ballot.promised.add(event.peer)
                if ballot.is_hopeless:
                    why = f"{len(ballot.promised)} have promised it to another candidate"
                    return self._give_up(ballot, why, now_s, outbid=True)
        elif reply.accepted:
            plan = ballot.plan
            if plan is None or not self._verify(event.peer, reply.signature, vote_body(ballot.term, plan.digest)):
                return notes  # such a vote would make the plan's proof invalid
            ballot.agreed[event.peer] = reply.signature
            return notes + self._advance(now_s)
        elif reply.unfit:
            ballot.refused.add(event.peer)
            if ballot.is_hopeless:
                self._unfit = ballot.plan.digest if ballot.plan is not None else ""
                why = f"{len(ballot.refused)} have refused the plan: {reply.reason}"
                return notes + self._give_up(ballot, why, now_s, outbid=False)
        if term > ballot.term:
            self._term_max = max(self._term_max, term)
            return notes + self._give_up(ballot, f"{event.peer[-8:]} {reply.reason}", now_s, outbid=True)
        return notes

    def unanswered(self, event: Unanswered, now_s: float) -> None:
        if self._ballot is not None and self._ballot.is_answered_by(event):
            self._ballot.waiting[event.peer] = now_s + self._ballot.rest_s

    def press(self, now_s: float) -> list[Command]:
        """Ask silent members again, or give up after the deadline."""
        ballot = self._ballot
        if ballot is None:
            return []
        if now_s < ballot.expires_at_s:
            return ballot.ask(now_s)
        if ballot.plan is None and not ballot.prevote and ballot.carried:
            return self._advance(now_s)
        why = f"{len(ballot.agreed)} of {len(ballot.base.plan.electors)} agreed in time"
        return self._give_up(ballot, why, now_s, outbid=False)

    def _begun(self, ballot: Ballot, now_s: float) -> list[Command]:
        return [Persist(record=self._chain.record()), *ballot.ask(now_s), *self._advance(now_s)]

    def _next_term(self, base: SignedPlan) -> int:
        return max(self._chain.granted_term, base.plan.term, self._term_max) + 1

    def _own_vote(self, base: SignedPlan, body: bytes = b"") -> dict[PeerID, bytes]:
        """Return {this peer: its vote}, signed if there is a `body`; empty if our vote alone is a majority. Such a vote
        must be on disk before the plan goes live, so we ask ourselves for it as we ask other peers."""
        if is_quorum({self._me}, base.plan, self._owner):
            return {}
        return {self._me: self._sign_vote(body) if body else b""}

    def _advance(self, now_s: float) -> list[Command]:
        """Advance from the term to the votes, or from the votes to a live plan, if a majority agrees. If the plan that
        we would have to finish was refused before, wait for more grants, which may show that it cannot be live."""
        ballot = self._ballot
        if ballot is None or not ballot.carried:
            return []
        base = ballot.base.plan
        if ballot.prevote:
            text = f"a majority misses coordinator {base.coordinator[-8:]}, asking for term {ballot.term}"
            return [LogReason(text=text), *self.campaign(ballot.base, now_s, term=ballot.term)]
        if ballot.plan is not None:
            self._ballot, won = None, ballot.proven()
            commands = self._went_live(won, base.members, now_s)
            if won.plan.coordinator != self._me and self._chain.live is won:
                # This finishes a dead coordinator's plan; our own plan follows in the same term.
                commands += self.campaign(won, now_s, permit=ballot.permit, term=ballot.term)
            return commands
        plan = ballot.found
        if plan is not None and plan.digest == self._unfit and now_s < ballot.expires_at_s:
            return []
        if plan is None:
            how = "hand-over" if ballot.permit else "take-over"
            layout = Layout.of(base, f"term {ballot.term}: {how} from {base.coordinator[-8:]}")
            plan = self.make(ballot.base, ballot.term, layout, now_s)
        return self._offer(ballot, plan, now_s)

    def _offer(self, ballot: Ballot, plan: SignedPlan, now_s: float) -> list[Command]:
        ballot.plan, ballot.expires_at_s = plan, now_s + self._patience_s
        ballot.agreed.clear()
        ballot.waiting.clear()
        # If we finish another peer's plan, we judge it like any offered plan: we ask ourselves for our vote, too.
        is_ours = plan.plan.coordinator == self._me
        if is_ours and not self._chain.vote(self._me, ballot.term, plan, ballot.base):
            ballot.agreed |= self._own_vote(ballot.base, vote_body(ballot.term, plan.digest))
        return self._begun(ballot, now_s)

    def _note_refusal(self, ballot: Ballot, voter: PeerID, reason: str, now_s: float) -> list[Command]:
        view, plan = self._policy.view, ballot.plan
        if plan is None:
            return []
        view.electorate.refused(ballot.base.plan, plan.plan)
        text = view.refusals.note(voter, view.roster.name_of(voter), plan.plan.sequence, reason, now_s)
        return [LogReason(text=text)] if text else []

    def _give_up(self, ballot: Ballot, reason: str, now_s: float, *, outbid: bool) -> list[Command]:
        self._ballot = None
        self._lost(now_s, outbid)
        what = "a plan" if ballot.plan else f"{'a pre-vote on ' if ballot.prevote else ''}term {ballot.term}"
        return [LogReason(text=f"gave up on {what}: {reason}"), LookUp()]

    def _went_live(self, plan: SignedPlan, voters: tuple[PeerID, ...], now_s: float) -> list[Command]:
        commands = self._adopt(plan, now_s)
        news = PlanLive(plan=plan.link)
        audience = dict.fromkeys((*voters, *plan.plan.members))
        commands += [Ask(peer=peer, message=news) for peer in audience if peer != self._me]
        return [*commands, Publish(plan=plan)] if plan.plan.coordinator == self._me else commands

    # --- drafts ---

    def make(
        self,
        base: SignedPlan | None,
        term: int,
        layout: Layout,
        now_s: float,
        *,
        mandate: bytes = b"",
        override_epoch: int | None = None,
    ) -> SignedPlan:
        """Draft and sign the successor of `base` (None: the first plan) with this layout. Args: mandate: the owner's
        permission for a plan without votes; empty: none. override_epoch: that of the new plan; None: as in `base`."""
        view = self._policy.view
        sequence = self._sequence_max = self.next_sequence(base)
        before, begins = base.plan if base else None, layout.beginning
        era = begins.era if begins else before.era if before else 0
        goes_on = before if before and before.era == era else None
        ended = before if before and begins and _ends_with(before, begins) else None
        # A new era is no roll-back if the layout before has ended as planned, or if all peers had stopped.
        goes_back = begins is not None and begins.loses and ended is None
        stages = _placed(layout.stages, goes_on, sequence)
        restored = (before.restore_era, before.restore_version) if before else (0, 0)
        restored = (begins.from_era, begins.version) if begins else restored
        plan = Plan(
            run=self._chain.run,
            term=term,
            sequence=sequence,
            previous=base.digest if base else "",
            coordinator=self._me,
            stages=stages,
            spares=layout.spares,
            era=era,
            rollbacks=(before.rollbacks if before else 0) + goes_back,
            restore_version=restored[1],
            restore_era=restored[0],
            not_started=base is None or begins is not None or self._is_fresh(base),
            seed=sequence,
            reason=layout.reason,
            mandate=mandate,
            override_epoch=override_epoch if override_epoch is not None else before.override_epoch if before else 0,
            exclusions=self._chain.exclusions.orders,
            cutover_version=layout.cutover_version,
            next_layout=layout.next_layout,
            experts=view.experts.place(stages, goes_on or ended, sequence=sequence, begins=goes_on is None),
            foreseen=layout.foreseen,
            formats=layout.formats,
            certified=view.certificates.for_plan(restored),
        )
        return self._sign(msgspec.structs.replace(plan, roll=view.electorate.roll(before, plan, now_s)))

    def next_sequence(self, base: SignedPlan | None) -> int:
        """Return a sequence above all that we have offered or voted for: one (term, sequence) never names two plans."""
        voted = self._chain.accepted.plan.sequence if self._chain.accepted else 0
        return max(base.plan.sequence if base else 0, voted, self._sequence_max) + 1


def _placed(stages: Sequence[Stage], before: Plan | None, sequence: int) -> tuple[Stage, ...]:
    """Return `stages` with each member's `since`: as in `before` if the member was in the same stage with the same
    layers there, else `sequence`. Raise shares and bandwidths to at least the stage's largest / `APART_MAX`, since a
    member may claim anything."""
    replace, held = msgspec.structs.replace, dict[tuple[int, int, int, PeerID], int]()
    for index, stage in enumerate(before.stages if before else ()):
        held |= {(index, *stage.layers, member.peer): member.since for member in stage.members}
    placed = []
    for index, stage in enumerate(stages):
        share = max(m.share for m in stage.members) / APART_MAX
        bandwidth = max(m.bandwidth for m in stage.members) / APART_MAX
        members = tuple(
            replace(
                m,
                share=max(m.share, share),
                bandwidth=max(m.bandwidth, bandwidth),
                since=held.get((index, *stage.layers, m.peer), sequence),
            )
            for m in stage.members
        )
        placed.append(replace(stage, members=members))
    return tuple(placed)


def _ends_with(before: Plan, begins: Beginning) -> bool:
    """True if the era that starts with `begins` continues at the version at which the layout of `before` ends."""
    return before.cutover_version > 0 and (begins.from_era, begins.version) == (before.era, before.cutover_version)
