"""One attempt to extend the chain: it requests the term if we do not hold it yet, then the votes. Pure."""

from dataclasses import dataclass, field

import msgspec

from shoal.coordinator.chain import link_flaw
from shoal.coordinator.chain_log import ENVELOPE_BYTES
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import PlanOffer, TermRequest
from shoal.protocol.plan import PlanProof, SignedPlan
from shoal.protocol.quorum import is_quorum


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
    """Members that have agreed -> the signature of their vote; no signatures while the term is being requested."""
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
        """Record that a member has voted for `plan` in `term`. Ignore a plan that can never be live: no honest member
        votes for it, so the member lies."""
        if plan.plan.term <= term <= self.term and not link_flaw(plan, self.base):
            self.learned.append((term, plan))

    @property
    def found(self) -> SignedPlan | None:
        """The latest plan that has votes and may be live; only the latest can be. A plan cannot be live if the members
        that granted us the term without a vote for it leave no majority of other members. This check keeps one liar
        from forcing a plan on us that the others refused."""
        plan = self.base.plan
        for _, voted in sorted(self.learned, key=lambda each: (each[0], each[1].plan.order), reverse=True):
            others = {peer for peer, digest in self.voted.items() if digest != voted.digest}
            if is_quorum(set(plan.electors) - others, plan, self.owner):
                return voted
        return None

    def offer(self, plan: SignedPlan, expires_at_s: float) -> None:
        """Continue with the votes for `plan`."""
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
        """Return the plan with the votes of its majority."""
        assert self.plan is not None
        votes = tuple((at, self.agreed[peer]) for at, peer in enumerate(self.base.plan.electors) if peer in self.agreed)
        return msgspec.structs.replace(self.plan, proof=PlanProof(self.term, votes))
