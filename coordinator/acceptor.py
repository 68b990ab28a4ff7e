"""Builds this peer's answers to a candidate, to a coordinator and to the run's owner. Pure."""

from collections.abc import Callable

from shoal.coordinator.chain import PlanChain
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Heartbeat, PlanOffer, PlanVote, Standing, TermGrant, TermRequest
from shoal.protocol.plan import SignedPlan, vote_body


def answer_request(chain: PlanChain, source: PeerID, request: TermRequest, base: SignedPlan) -> TermGrant:
    """Grant a term or refuse it. Make the chain's record durable before sending the answer."""
    if refusal := chain.grant(source, request.term, base):
        return no_grant(chain, base, refusal)
    accepted = chain.accepted.envelope if chain.accepted else b""
    return TermGrant(granted=True, term=chain.granted_term, accepted=accepted, accepted_term=chain.accepted_term)


def answer_pre_vote(chain: PlanChain, source: PeerID, request: TermRequest, base: SignedPlan) -> TermGrant:
    """Say whether the request would be granted, without a promise."""
    live = chain.live
    if live is None or live.digest != base.digest or not base.plan.has(source):
        return no_grant(chain, base, f"obeys plan {chain.order}")
    if request.term <= chain.granted_term:
        return no_grant(chain, base, f"granted term {chain.granted_term}, not below {request.term}")
    if not chain.takes_term(request.term):
        return no_grant(chain, base, f"no honest candidate is at term {request.term}")
    return TermGrant(granted=True, term=chain.granted_term)


def no_grant(chain: PlanChain, base: SignedPlan, reason: str) -> TermGrant:
    """Refuse a term; attach our live plan if the candidate's is older."""
    return TermGrant(granted=False, reason=reason, term=chain.granted_term, live=_newer(chain, base))


def answer_offer(
    chain: PlanChain,
    source: PeerID,
    offer: PlanOffer,
    plan: SignedPlan,
    base: SignedPlan | None,
    *,
    sign_vote: Callable[[bytes], bytes],
) -> PlanVote:
    """Vote for a plan or refuse it. Make the chain's record durable before sending the answer.
    Args: sign_vote: signs the body of a vote in our name."""
    if refusal := chain.vote(source, offer.term, plan, base):
        newer = b"" if base is None else _newer(chain, base)
        return PlanVote(accepted=False, reason=refusal, term=chain.granted_term, live=newer)
    signature = sign_vote(vote_body(offer.term, plan.digest))
    return PlanVote(accepted=True, term=chain.granted_term, signature=signature)


def answer_standing(chain: PlanChain, own: Heartbeat | None, *, leaves: bool, revision: int) -> Standing:
    """Say which plan this peer obeys, which state it holds, and whether it leaves. The owner asks before a recovery, a
    voter before it refuses a plan. Args: own: this peer's last heartbeat."""
    return Standing(
        live=chain.live.link if chain.live else b"",
        term=max(chain.granted_term, chain.order[0]),
        era=own.era if own else 0,
        stage=own.stage if own else None,
        version=own.version if own else 0,
        synced=own is not None and own.synced,
        holdings=own.holdings if own else (),
        held=own.held if own else (),
        leaves=leaves,
        revision=revision,
    )


def _newer(chain: PlanChain, base: SignedPlan) -> bytes:
    return chain.live.link if chain.live and chain.live.plan.height > base.plan.height else b""
