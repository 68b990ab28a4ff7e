"""Carries one proposal at a time from the question for its term to a majority of votes. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from shoal.coordinator.allocate.interface import Layout
from shoal.coordinator.ballot import Ballot, Draft
from shoal.coordinator.chain import Holds, PlanChain, is_quorum
from shoal.coordinator.coordination_events import Answered, Ask, Command, Persist, Unanswered
from shoal.coordinator.experts.expert_groups import ExpertPlaces
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PlanVote, TermGrant
from shoal.protocol.plan import Plan, SignedPlan, Stage, vote_body

PROPOSAL_HEARTBEATS = 5.0
"""How long members have to answer; then it is tried anew, with the swarm as it is by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A majority of the electors among `voters` voted for `plan`: it is live, and carries their votes. It need not be
    ours."""

    plan: SignedPlan
    voters: tuple[PeerID, ...]
    term: int
    handed_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """`outbid`: somebody has promised a higher term than ours."""

    reason: str
    outbid: bool


class Proposer:
    """Args:
    chain: this peer's own, whose vote is the first that each proposal gets, unless it would be the last as well.
    sign: signs a plan in our name; deterministic.
    vouch: signs the body of a vote in our name.
    holds: checks what others have signed so.
    is_fresh: whether a plan on this base is made before anything was committed in its era.
    experts: who is to hold them.
    """

    def __init__(
        self,
        *,
        me: PeerID,
        owner: PeerID,
        chain: PlanChain,
        sign: Callable[[Plan], SignedPlan],
        vouch: Callable[[bytes], bytes],
        holds: Holds,
        is_fresh: Callable[[SignedPlan], bool],
        experts: ExpertPlaces,
        heartbeat_s: float,
    ) -> None:
        self._me, self._owner, self._chain = me, owner, chain
        self._vouch, self._holds = vouch, holds
        self._sign, self._is_fresh, self._experts = sign, is_fresh, experts
        self._patience_s = PROPOSAL_HEARTBEATS * heartbeat_s
        self._proposal: Ballot | None = None
        self._outcome: Carried | GivenUp | None = None
        self._sequence_max = 0
        self._term_max = 0

    @property
    def is_busy(self) -> bool:
        return self._proposal is not None

    def take_outcome(self) -> Carried | GivenUp | None:
        """How the proposal ended, once."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def drop(self) -> bool:
        """A plan above its base is live. Returns: whether there was a proposal."""
        dropped, self._proposal = self._proposal is not None, None
        return dropped

    def campaign(self, base: SignedPlan, now_s: float, *, handed_over: bool, term: int = 0) -> list[Command]:
        """Ask for `term`, or for the next that may be had, and propose the base's layout in it."""
        term = term or max(self._chain.granted_term, base.plan.term, self._term_max) + 1
        if not self._chain.grant(self._me, term, base).granted:
            return []
        self._proposal = Ballot(
            base=base,
            term=term,
            owner=self._owner,
            expires_at_s=now_s + self._patience_s,
            handed_over=handed_over,
            agreed=self._own_vote(base),
        )
        if self._chain.accepted is not None:
            self._proposal.learn(self._chain.accepted_term, self._chain.accepted)
        return [Persist(record=self._chain.record()), *self._ask(), *self._advance(now_s)]

    def propose(self, base: SignedPlan, draft: Draft, now_s: float) -> list[Command]:
        """As the coordinator, in our own term: straight to the votes."""
        assert base.plan.coordinator == self._me
        self._proposal = Ballot(base=base, term=base.plan.term, owner=self._owner, expires_at_s=0.0)
        return self._offer(self.make(base, base.plan.term, draft), now_s)

    def count(self, event: Answered, agreed: bool, term: int, reason: str, now_s: float) -> list[Command]:
        """An answer; `term` is the highest that the other has promised."""
        proposal = self._proposal
        if proposal is None or not proposal.is_about(event.asked):
            return []
        proposal.waiting.discard(event.peer)
        if not self._chain.takes_term(term + 1):
            return []  # nobody would believe the one above it, which we should have to ask for
        if event.accepted is not None and isinstance(event.reply, TermGrant):
            proposal.learn(event.reply.accepted_term, event.accepted)
        if agreed:
            signature = event.reply.signature if isinstance(event.reply, PlanVote) else b""
            plan = proposal.plan
            if plan is not None and not self._holds(event.peer, signature, vote_body(proposal.term, plan.digest)):
                return []  # with it nobody would believe that the plan is live
            proposal.agreed[event.peer] = signature
            return self._advance(now_s)
        if term == proposal.term and proposal.handed_over and proposal.plan is None:
            # Promised to an heir before us, of whom the coordinator says by asking us that he did not make it.
            return self.campaign(proposal.base, now_s, handed_over=True, term=term + 1)
        if term == proposal.term and proposal.plan is None:
            proposal.promised.add(event.peer)
            if proposal.is_hopeless:
                self._give_up(f"{len(proposal.promised)} have promised it to another", outbid=True)
                return []
        if term > proposal.term:
            self._term_max = max(self._term_max, term)
            self._give_up(f"{event.peer[-8:]} {reason}", outbid=True)
        return []

    def unanswered(self, event: Unanswered) -> None:
        if self._proposal is not None and self._proposal.is_about(event.asked):
            self._proposal.waiting.discard(event.peer)

    def press(self, now_s: float) -> list[Command]:
        """Time has passed: ask again whoever did not answer, or give up."""
        proposal = self._proposal
        assert proposal is not None
        if now_s < proposal.expires_at_s:
            return self._ask()
        self._give_up(f"{len(proposal.agreed)} of {len(proposal.base.plan.electors)} agreed in time", outbid=False)
        return []

    def make(
        self, base: SignedPlan | None, term: int, draft: Draft, *, mandate: bytes = b"", reign: int | None = None
    ) -> SignedPlan:
        """Args: reign: that begins with a mandate; None: it is the base's."""
        sequence = self.next_sequence(base)
        self._sequence_max = sequence
        before, begins = base.plan if base else None, draft.beginning
        era = begins.era if begins else before.era if before else 0
        goes_on = before if before and before.era == era else None
        stages = _since(draft.layout.stages, goes_on, sequence)
        plan = Plan(
            run=self._chain.run,
            term=term,
            sequence=sequence,
            previous=base.digest if base else "",
            coordinator=self._me,
            stages=stages,
            spares=draft.layout.spares,
            era=era,
            restore_version=begins.version if begins else before.restore_version if before else 0,
            restore_era=begins.from_era if begins else before.restore_era if before else 0,
            fresh=base is None or begins is not None or self._is_fresh(base),
            seed=sequence,
            reason=draft.layout.reason,
            mandate=mandate,
            reign=reign if reign is not None else before.reign if before else 0,
            exclusions=self._chain.exclusions.orders,
            experts=self._experts.place(stages, goes_on, sequence=sequence),
        )
        return self._sign(plan)

    def next_sequence(self, base: SignedPlan | None) -> int:
        """Above the base, and above all we have offered or voted for: one (term, sequence) never names two plans."""
        voted = self._chain.accepted.plan.sequence if self._chain.accepted else 0
        return max(base.plan.sequence if base else 0, voted, self._sequence_max) + 1

    def _ask(self) -> list[Command]:
        proposal = self._proposal
        if proposal is None:
            return []
        peers, message = proposal.audience(), proposal.message()
        proposal.waiting.update(peers)
        return [Ask(peer=peer, message=message) for peer in peers]

    def _offer(self, plan: SignedPlan, now_s: float) -> list[Command]:
        proposal = self._proposal
        assert proposal is not None
        proposal.offer(plan, now_s + self._patience_s)
        if self._chain.vote(self._me, proposal.term, plan, proposal.base).accepted:
            proposal.agreed |= self._own_vote(proposal.base, vote_body(proposal.term, plan.digest))
        return [Persist(record=self._chain.record()), *self._ask(), *self._advance(now_s)]

    def _own_vote(self, base: SignedPlan, body: bytes = b"") -> dict[PeerID, bytes]:
        """Ours, if it is not enough, signed if there is a `body` to sign. If it alone carries a plan it must be on disk
        before that goes live: then we ask ourselves like everybody else, and have an answer once it is."""
        if is_quorum({self._me}, base.plan.electors, self._owner):
            return {}
        return {self._me: self._vouch(body) if body else b""}

    def _advance(self, now_s: float) -> list[Command]:
        """Go from the term to the votes, or from the votes to a live plan, if a majority agrees."""
        proposal = self._proposal
        if proposal is None or not proposal.carried:
            return []
        base = proposal.base.plan
        if proposal.plan is not None:
            self._proposal = None
            self._outcome = Carried(
                plan=proposal.proven(), voters=base.members, term=proposal.term, handed_over=proposal.handed_over
            )
            return []
        if proposal.found is not None:
            return self._offer(proposal.found[1], now_s)
        how = "hand-over" if proposal.handed_over else "take-over"
        reason = f"term {proposal.term}: {how} from {base.coordinator[-8:]}"
        draft = Draft(layout=Layout(stages=base.stages, spares=base.spares, reason=reason))
        return self._offer(self.make(proposal.base, proposal.term, draft), now_s)

    def _give_up(self, reason: str, *, outbid: bool) -> None:
        proposal, self._proposal = self._proposal, None
        assert proposal is not None
        what = "a plan" if proposal.plan else f"term {proposal.term}"
        self._outcome = GivenUp(reason=f"gave up on {what}: {reason}", outbid=outbid)


def _since(stages: Sequence[Stage], before: Plan | None, sequence: int) -> tuple[Stage, ...]:
    """`stages` with each member's `since`: as in `before`, a plan of this era, if it has the same place there."""
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
