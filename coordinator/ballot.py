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
    refused: set[PeerID] = field(default_factory=set)
    """The members that know something to be wrong with our plan."""
    voted: dict[PeerID, str] = field(default_factory=dict)
    """Map each member that has granted the term to the digest of the plan that it has voted for; empty: none."""
    learned: list[tuple[int, SignedPlan]] = field(default_factory=list)
    """(term of the vote, plan) of the plans that members have voted for."""

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
        return tuple(p for p in everyone if p not in self.agreed and p not in self.waiting and p not in self.refused)

    def learn(self, term: int, plan: SignedPlan) -> None:
        """A member says that it has voted for `plan` in `term`.

        A plan that could never be live, since nobody would vote for it, is a lie and is ignored.
        """
        if plan.plan.term <= term <= self.term and not link_flaw(plan, self.base):
            self.learned.append((term, plan))

    @property
    def found(self) -> SignedPlan | None:
        """The latest plan that members have voted for and that may be live. Only the latest can be.

        A plan is not live if the members that grant us the term without having voted for it leave no majority that can
        have done so, and none can any more. So one liar forces no plan on us that the others have refused.
        """
        plan = self.base.plan
        for _, voted in sorted(self.learned, key=lambda each: (each[0], each[1].plan.order), reverse=True):
            others = {peer for peer, digest in self.voted.items() if digest != voted.digest}
            if is_quorum(set(plan.electors) - others, plan, self.owner):
                return voted
        return None

    def offer(self, plan: SignedPlan, expires_at_s: float) -> None:
        """Go on to the votes for `plan`."""
        self.plan, self.expires_at_s = plan, expires_at_s
        self.agreed.clear()
        self.waiting.clear()
        self.refused.clear()

    @property
    def is_hopeless(self) -> bool:
        """Whether the members that have neither promised the term to another nor refused our plan are no majority."""
        plan = self.base.plan
        return not is_quorum(set(plan.electors) - self.promised - self.refused, plan, self.owner)

    @property
    def carried(self) -> bool:
        return is_quorum(self.agreed, self.base.plan, self.owner)

    def proven(self) -> SignedPlan:
        """The plan with the votes that a majority has cast for it."""
        assert self.plan is not None
        votes = tuple((at, self.agreed[peer]) for at, peer in enumerate(self.base.plan.electors) if peer in self.agreed)
        return msgspec.structs.replace(self.plan, proof=PlanProof(self.term, votes))
