"""Runs one ballot at a time: it requests the term if we do not hold it yet, then the votes for a plan. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.coordinator.allocate.plan_layout import Beginning, Layout
from shoal.coordinator.certificates import Certificates
from shoal.coordinator.chain import PlanChain, link_flaw
from shoal.coordinator.chain_log import ENVELOPE_BYTES
from shoal.coordinator.coordination_events import Answered, Ask, Command, Persist, Unanswered
from shoal.coordinator.experts.groups import ExpertPlaces
from shoal.coordinator.judge import APART_MAX
from shoal.coordinator.roll import Roll
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import PlanOffer, PlanVote, TermGrant, TermRequest
from shoal.protocol.plan import Plan, PlanProof, SignedPlan, Stage, vote_body
from shoal.protocol.quorum import is_quorum
from shoal.protocol.statement import VerifySignature

PROPOSAL_HEARTBEATS = 5.0
"""How long members may take to answer. After that a new proposal is made, from the then current view."""


@dataclass(slots=True, kw_only=True)
class Ballot:
    """One ballot on one base plan. `plan` is None while the term is being requested."""

    base: SignedPlan
    term: int
    owner: PeerID
    expires_at_s: float
    permit: bytes = b""
    """The coordinator's, where it has handed the term over."""
    plan: SignedPlan | None = None
    agreed: dict[PeerID, bytes] = field(default_factory=dict)
    """Members that have agreed -> the signature of their vote; empty while the term is being requested."""
    waiting: set[PeerID] = field(default_factory=set)
    promised: set[PeerID] = field(default_factory=set)
    """Members that have granted this term to another candidate."""
    refused: set[PeerID] = field(default_factory=set)
    """Members that know something to be wrong with our plan."""
    voted: dict[PeerID, str] = field(default_factory=dict)
    """Member that has granted the term -> digest of the plan that it has voted for; empty: none."""
    learned: list[tuple[int, SignedPlan]] = field(default_factory=list)
    """(term of the vote, plan) of each plan that a member has voted for."""

    def message(self) -> TermRequest | PlanOffer:
        base = self.base.link
        if self.plan is None:
            return TermRequest(term=self.term, live=base, permit=self.permit)
        plan = self.plan.envelope
        fits = len(plan) + len(base) + ENVELOPE_BYTES <= CONTROL_BYTES_MAX
        return PlanOffer(term=self.term, plan=plan, predecessor=base if fits else b"")

    def is_about(self, asked: msgspec.Struct) -> bool:
        """True if `asked` is the question that this ballot is asking now."""
        match asked:
            case TermRequest():
                return self.plan is None and asked.term == self.term and asked.live == self.base.link
            case PlanOffer():
                return self.plan is not None and asked.term == self.term and asked.plan == self.plan.envelope
            case _:
                return False

    def audience(self) -> tuple[PeerID, ...]:
        """Return the peers to ask now: the electors and, with an offer, the newcomers, so that they learn it early."""
        base = self.base.plan
        newcomers = (peer for peer in self.plan.plan.members if not base.has(peer)) if self.plan else ()
        everyone = dict.fromkeys((*base.electors, *newcomers))
        return tuple(p for p in everyone if p not in self.agreed and p not in self.waiting and p not in self.refused)

    def learn(self, term: int, plan: SignedPlan) -> None:
        """Record that a member has voted for `plan` in `term`, unless that is a lie: no honest member can have."""
        if plan.plan.term <= term <= self.term and not link_flaw(plan, self.base):
            self.learned.append((term, plan))

    @property
    def found(self) -> SignedPlan | None:
        """The latest plan that has votes and may be live; only the latest can be. A plan cannot be live if the members
        that granted us the term without a vote for it leave no majority of others. So one liar cannot force on us a
        plan that the others refused."""
        plan = self.base.plan
        for _, voted in sorted(self.learned, key=lambda each: (each[0], each[1].plan.order), reverse=True):
            others = {peer for peer, digest in self.voted.items() if digest != voted.digest}
            if is_quorum(set(plan.electors) - others, plan, self.owner):
                return voted
        return None

    def offer(self, plan: SignedPlan, expires_at_s: float) -> None:
        self.plan, self.expires_at_s = plan, expires_at_s
        self.agreed.clear()
        self.waiting.clear()
        self.refused.clear()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAdopted:
    """A majority of the electors among `voters` has voted for `plan`, maybe another's; it contains their votes."""

    plan: SignedPlan
    voters: tuple[PeerID, ...]
    term: int
    permit: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The proposal has failed. `outbid`: a member has promised a higher term than ours."""

    reason: str
    outbid: bool


Progress = tuple[list[Command], PlanAdopted | GivenUp | None]
"""(what to do next, result). None: the proposal continues, or there is none."""


class Proposer:
    """Requests terms and votes in this peer's name.

    Args:
        chain: this peer's own. Its vote is the first for each proposal, unless it alone would decide.
        sign: signs a plan in our name; deterministic.
        sign_vote: signs the body of a vote in our name.
        verify: checks the signature of another peer's vote.
        is_fresh: True if nothing has been committed in the era of this base plan.
        roll: makes a plan's roll from the previous plan.
    """

    def __init__(
        self,
        *,
        me: PeerID,
        owner: PeerID,
        chain: PlanChain,
        sign: Callable[[Plan], SignedPlan],
        sign_vote: Callable[[bytes], bytes],
        verify: VerifySignature,
        is_fresh: Callable[[SignedPlan], bool],
        experts: ExpertPlaces,
        certificates: Certificates,
        roll: Callable[[Plan | None, Plan, float], Roll],
        heartbeat_s: float,
    ) -> None:
        self._me, self._owner, self._chain = me, owner, chain
        self._sign_vote, self._verify = sign_vote, verify
        self._sign, self._is_fresh, self._experts, self._roll = sign, is_fresh, experts, roll
        self._certificates = certificates
        self._patience_s = PROPOSAL_HEARTBEATS * heartbeat_s
        self._ballot: Ballot | None = None
        self._sequence_max = 0
        self._term_max = 0

    @property
    def is_busy(self) -> bool:
        return self._ballot is not None

    def offered(self, asked: msgspec.Struct) -> Plan | None:
        """The plan that `asked` offers, if the offer is still open."""
        ballot = self._ballot
        return ballot.plan.plan if ballot is not None and ballot.plan is not None and ballot.is_about(asked) else None

    def drop(self) -> bool:
        """End the proposal, because a plan above its base is live. Returns: whether there was one."""
        dropped, self._ballot = self._ballot is not None, None
        return dropped

    def campaign(self, base: SignedPlan, now_s: float, *, permit: bytes = b"", term: int = 0) -> Progress:
        """Request `term`, or the next possible term, and propose the base's layout in it."""
        term = term or max(self._chain.granted_term, base.plan.term, self._term_max) + 1
        if self._chain.grant(self._me, term, base):
            return [], None
        self._ballot = Ballot(
            base=base,
            term=term,
            owner=self._owner,
            expires_at_s=now_s + self._patience_s,
            permit=permit,
            agreed=self._own_vote(base),
        )
        if self._chain.accepted is not None:
            self._ballot.learn(self._chain.accepted_term, self._chain.accepted)
        if self._ballot.agreed:
            self._ballot.voted[self._me] = self._chain.accepted.digest if self._chain.accepted else ""
        return self._begun(now_s)

    def propose(self, base: SignedPlan, layout: Layout, now_s: float) -> Progress:
        """Propose a layout in our own term, which needs votes only. We coordinate."""
        assert base.plan.coordinator == self._me
        self._ballot = Ballot(base=base, term=base.plan.term, owner=self._owner, expires_at_s=0.0)
        return self._offer(self.make(base, base.plan.term, layout, now_s), now_s)

    def count(self, event: Answered, reply: TermGrant | PlanVote, now_s: float) -> Progress:
        """Count a member's answer."""
        ballot = self._ballot
        if ballot is None or not ballot.is_about(event.asked):
            return [], None
        ballot.waiting.discard(event.peer)
        term = reply.term  # the highest that the member has promised
        if not self._chain.takes_term(term + 1):
            return [], None  # no peer would believe the next term, which we would have to request
        if event.accepted is not None and isinstance(reply, TermGrant):
            ballot.learn(reply.accepted_term, event.accepted)
        agreed = reply.granted if isinstance(reply, TermGrant) else reply.accepted
        if agreed:
            if ballot.plan is None:
                ballot.voted[event.peer] = event.accepted.digest if event.accepted is not None else ""
            signature = reply.signature if isinstance(reply, PlanVote) else b""
            plan = ballot.plan
            if plan is not None and not self._verify(event.peer, signature, vote_body(ballot.term, plan.digest)):
                return [], None  # such a vote would make the plan's proof invalid
            ballot.agreed[event.peer] = signature
            return self._advance(now_s)
        if term == ballot.term and ballot.permit and ballot.plan is None:
            # The term was promised to an earlier heir, which has failed; otherwise the coordinator would not have asked
            # us.
            return self.campaign(ballot.base, now_s, permit=ballot.permit, term=term + 1)
        if term == ballot.term and ballot.plan is None:
            ballot.promised.add(event.peer)
            if ballot.is_hopeless:
                return [], self._given_up(f"{len(ballot.promised)} have promised it to another candidate", outbid=True)
        if isinstance(reply, PlanVote) and reply.unfit:
            ballot.refused.add(event.peer)
            if ballot.is_hopeless:
                return [], self._given_up(f"{len(ballot.refused)} have refused the plan: {reply.reason}", outbid=False)
        if term > ballot.term:
            self._term_max = max(self._term_max, term)
            return [], self._given_up(f"{event.peer[-8:]} {reply.reason}", outbid=True)
        return [], None

    def unanswered(self, event: Unanswered) -> None:
        if self._ballot is not None and self._ballot.is_about(event.asked):
            self._ballot.waiting.discard(event.peer)

    def press(self, now_s: float) -> Progress:
        """Ask silent members again, or give up after the deadline."""
        ballot = self._ballot
        assert ballot is not None
        if now_s < ballot.expires_at_s:
            return self._ask(), None
        text = f"{len(ballot.agreed)} of {len(ballot.base.plan.electors)} agreed in time"
        return [], self._given_up(text, outbid=False)

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
        """Sign a plan with this layout, on `base`. Args: override_epoch: None: the base's."""
        sequence = self.next_sequence(base)
        self._sequence_max = sequence
        before, begins = base.plan if base else None, layout.beginning
        era = begins.era if begins else before.era if before else 0
        goes_on = before if before and before.era == era else None
        ended = before if before and begins and _ends_with(before, begins) else None
        stages = _since(tuple(map(_sane, layout.stages)), goes_on, sequence)
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
            rollbacks=_rollbacks(before, begins),
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
            experts=self._experts.place(stages, goes_on or ended, sequence=sequence, begins=goes_on is None),
            foreseen=layout.foreseen,
            formats=layout.formats,
            certified=self._certificates.for_plan(restored),
        )
        return self._sign(msgspec.structs.replace(plan, roll=self._roll(before, plan, now_s)))

    def next_sequence(self, base: SignedPlan | None) -> int:
        """Return a sequence above all that we have offered or voted for: one (term, sequence) never names two plans."""
        voted = self._chain.accepted.plan.sequence if self._chain.accepted else 0
        return max(base.plan.sequence if base else 0, voted, self._sequence_max) + 1

    def _ask(self) -> list[Command]:
        ballot = self._ballot
        if ballot is None:
            return []
        peers, message = ballot.audience(), ballot.message()
        ballot.waiting.update(peers)
        return [Ask(peer=peer, message=message) for peer in peers]

    def _offer(self, plan: SignedPlan, now_s: float) -> Progress:
        ballot = self._ballot
        assert ballot is not None
        ballot.offer(plan, now_s + self._patience_s)
        # We judge another peer's plan that we finish like any offered plan: we are asked for our vote, too.
        is_ours = plan.plan.coordinator == self._me
        if is_ours and not self._chain.vote(self._me, ballot.term, plan, ballot.base):
            ballot.agreed |= self._own_vote(ballot.base, vote_body(ballot.term, plan.digest))
        return self._begun(now_s)

    def _begun(self, now_s: float) -> Progress:
        commands: list[Command] = [Persist(record=self._chain.record()), *self._ask()]
        more, outcome = self._advance(now_s)
        return commands + more, outcome

    def _own_vote(self, base: SignedPlan, body: bytes = b"") -> dict[PeerID, bytes]:
        """Return our own vote, signed if there is a `body`, unless it alone is a majority. Such a vote must be on disk
        before the plan goes live; then we ask ourselves like any other peer."""
        if is_quorum({self._me}, base.plan, self._owner):
            return {}
        return {self._me: self._sign_vote(body) if body else b""}

    def _advance(self, now_s: float) -> Progress:
        """Advance from the term to the votes, or from the votes to a live plan, if a majority agrees."""
        ballot = self._ballot
        if ballot is None or not ballot.carried:
            return [], None
        base = ballot.base.plan
        if ballot.plan is not None:
            self._ballot = None
            return [], PlanAdopted(plan=ballot.proven(), voters=base.members, term=ballot.term, permit=ballot.permit)
        if (found := ballot.found) is not None:
            return self._offer(found, now_s)
        how = "hand-over" if ballot.permit else "take-over"
        layout = Layout.of(base, f"term {ballot.term}: {how} from {base.coordinator[-8:]}")
        return self._offer(self.make(ballot.base, ballot.term, layout, now_s), now_s)

    def _given_up(self, reason: str, *, outbid: bool) -> GivenUp:
        ballot, self._ballot = self._ballot, None
        assert ballot is not None
        what = "a plan" if ballot.plan else f"term {ballot.term}"
        return GivenUp(reason=f"gave up on {what}: {reason}", outbid=outbid)


def _since(stages: Sequence[Stage], before: Plan | None, sequence: int) -> tuple[Stage, ...]:
    """Set `since` of each member: as in `before` if its place is the same there, else `sequence`."""
    held = {
        (index, stage.first_layer, stage.last_layer, member.peer): member.since
        for index, stage in enumerate(before.stages if before else ())
        for member in stage.members
    }
    replace = msgspec.structs.replace
    return tuple(
        replace(
            stage,
            members=tuple(
                replace(m, since=held.get((index, stage.first_layer, stage.last_layer, m.peer), sequence))
                for m in stage.members
            ),
        )
        for index, stage in enumerate(stages)
    )


def _sane(stage: Stage) -> Stage:
    """Raise very small shares and bandwidths relative to the stage's largest: a member may claim any speed."""
    share = max(m.share for m in stage.members) / APART_MAX
    bandwidth = max(m.bandwidth for m in stage.members) / APART_MAX
    if all(m.share >= share and m.bandwidth >= bandwidth for m in stage.members):
        return stage
    raised = (
        msgspec.structs.replace(m, share=max(m.share, share), bandwidth=max(m.bandwidth, bandwidth))
        for m in stage.members
    )
    return msgspec.structs.replace(stage, members=tuple(raised))


def _rollbacks(before: Plan | None, begins: Beginning | None) -> int:
    """Count the run's roll-backs. A new era is none after the end of its layout, or if all peers had stopped."""
    told = before.rollbacks if before else 0
    goes_back = begins is not None and begins.loses and not (before and _ends_with(before, begins))
    return told + goes_back


def _ends_with(before: Plan, begins: Beginning) -> bool:
    """True if the era that `begins` continues where the layout of `before` ends."""
    return before.cutover_version > 0 and (begins.from_era, begins.version) == (before.era, before.cutover_version)
