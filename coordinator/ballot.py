"""One attempt to extend the chain: ask for the term if it is not ours yet, then for votes. Pure."""

from dataclasses import dataclass, field

import msgspec

from shoal.coordinator.chain import is_quorum, link_flaw
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import CONTROL_BYTES_MAX
from shoal.protocol.messages import PlanOffer, TermRequest
from shoal.protocol.plan import PlanProof, SignedPlan

ENVELOPE_BYTES = 1024
"""What an envelope and a message's own fields take of a control message, generously."""


@dataclass(slots=True, kw_only=True)
class Ballot:
    """`plan` is None while the term is being asked for."""

    base: SignedPlan
    term: int
    owner: PeerID
    expires_at_s: float
    handed_over: bool = False
    plan: SignedPlan | None = None
    agreed: dict[PeerID, bytes] = field(default_factory=dict)
    """Who has, and once there is a plan the signature of the vote for it."""
    waiting: set[PeerID] = field(default_factory=set)
    promised: set[PeerID] = field(default_factory=set)
    """Who has granted this very term to somebody else."""
    found: tuple[int, SignedPlan] | None = None
    """(term of the vote, plan): the latest that a member has voted for and that may be live."""

    def message(self) -> TermRequest | PlanOffer:
        base = self.base.link
        if self.plan is None:
            return TermRequest(term=self.term, live=base, handed_over=self.handed_over)
        plan = self.plan.envelope
        fits = len(plan) + len(base) + ENVELOPE_BYTES <= CONTROL_BYTES_MAX
        return PlanOffer(term=self.term, plan=plan, predecessor=base if fits else b"")

    def is_about(self, asked: msgspec.Struct) -> bool:
        """Whether an answer to `asked` is one to what is being asked now."""
        match asked:
            case TermRequest():
                return self.plan is None and asked.term == self.term and asked.live == self.base.link
            case PlanOffer():
                return self.plan is not None and asked.term == self.term and asked.plan == self.plan.envelope
            case _:
                return False

    def audience(self) -> tuple[PeerID, ...]:
        """Whom to ask (again): electors, and with an offer also newcomers, who so learn early what comes."""
        base = self.base.plan
        newcomers = (peer for peer in self.plan.plan.members if not base.has(peer)) if self.plan else ()
        everyone = dict.fromkeys((*base.electors, *newcomers))
        return tuple(p for p in everyone if p not in self.agreed and p not in self.waiting)

    def learn(self, term: int, plan: SignedPlan) -> None:
        """A member has voted for `plan` in `term`; only the latest of those can be live.

        What could never be live, as nobody would vote for it, is a lie.
        """
        possible = plan.plan.term <= term <= self.term and not link_flaw(plan, self.base)
        if possible and (self.found is None or (term, plan.plan.order) > (self.found[0], self.found[1].plan.order)):
            self.found = (term, plan)

    def offer(self, plan: SignedPlan, expires_at_s: float) -> None:
        """Go on to the votes."""
        self.plan, self.expires_at_s = plan, expires_at_s
        self.agreed.clear()
        self.waiting.clear()

    @property
    def is_hopeless(self) -> bool:
        """Those who have not promised the term to another are no majority."""
        electors = self.base.plan.electors
        return not is_quorum(set(electors) - self.promised, electors, self.owner)

    @property
    def carried(self) -> bool:
        return is_quorum(self.agreed, self.base.plan.electors, self.owner)

    def proven(self) -> SignedPlan:
        """The plan with the votes for it, which a majority has cast."""
        assert self.plan is not None
        votes = tuple((at, self.agreed[peer]) for at, peer in enumerate(self.base.plan.electors) if peer in self.agreed)
        return msgspec.structs.replace(self.plan, proof=PlanProof(self.term, votes))
