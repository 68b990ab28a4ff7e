"""One attempt to extend the chain: it asks for the term if that is not ours yet, and then for votes. Pure."""

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
    """One ballot on one base. `plan` is None while the term is being asked for."""

    base: SignedPlan
    term: int
    owner: PeerID
    expires_at_s: float
    handed_over: bool = False
    plan: SignedPlan | None = None
    agreed: dict[PeerID, bytes] = field(default_factory=dict)
    """The members that have agreed, and once there is a plan the signature under each one's vote."""
    waiting: set[PeerID] = field(default_factory=set)
    promised: set[PeerID] = field(default_factory=set)
    """The members that have granted this very term to another candidate."""
    found: tuple[int, SignedPlan] | None = None
    """(term of the vote, plan): the latest plan that a member has voted for and that may be live."""

    def message(self) -> TermRequest | PlanOffer:
        base = self.base.link
        if self.plan is None:
            return TermRequest(term=self.term, live=base, handed_over=self.handed_over)
        plan = self.plan.envelope
        fits = len(plan) + len(base) + ENVELOPE_BYTES <= CONTROL_BYTES_MAX
        return PlanOffer(term=self.term, plan=plan, predecessor=base if fits else b"")

    def is_about(self, asked: msgspec.Struct) -> bool:
        """Whether an answer to `asked` is an answer to what is being asked now."""
        match asked:
            case TermRequest():
                return self.plan is None and asked.term == self.term and asked.live == self.base.link
            case PlanOffer():
                return self.plan is not None and asked.term == self.term and asked.plan == self.plan.envelope
            case _:
                return False

    def audience(self) -> tuple[PeerID, ...]:
        """The peers to ask, or to ask again: the electors, and with an offer also the newcomers, which so learn early
        what comes."""
        base = self.base.plan
        newcomers = (peer for peer in self.plan.plan.members if not base.has(peer)) if self.plan else ()
        everyone = dict.fromkeys((*base.electors, *newcomers))
        return tuple(p for p in everyone if p not in self.agreed and p not in self.waiting)

    def learn(self, term: int, plan: SignedPlan) -> None:
        """A member has voted for `plan` in `term`. Only the latest of such plans can be live.

        A plan that could never be live, since nobody would vote for it, is a lie and is ignored.
        """
        possible = plan.plan.term <= term <= self.term and not link_flaw(plan, self.base)
        if possible and (self.found is None or (term, plan.plan.order) > (self.found[0], self.found[1].plan.order)):
            self.found = (term, plan)

    def offer(self, plan: SignedPlan, expires_at_s: float) -> None:
        """Go on to the votes for `plan`."""
        self.plan, self.expires_at_s = plan, expires_at_s
        self.agreed.clear()
        self.waiting.clear()

    @property
    def is_hopeless(self) -> bool:
        """Whether the members that have not promised the term to another are no majority."""
        plan = self.base.plan
        return not is_quorum(set(plan.electors) - self.promised, plan, self.owner)

    @property
    def carried(self) -> bool:
        return is_quorum(self.agreed, self.base.plan, self.owner)

    def proven(self) -> SignedPlan:
        """The plan with the votes that a majority has cast for it."""
        assert self.plan is not None
        votes = tuple((at, self.agreed[peer]) for at, peer in enumerate(self.base.plan.electors) if peer in self.agreed)
        return msgspec.structs.replace(self.plan, proof=PlanProof(self.term, votes))
