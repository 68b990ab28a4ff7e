"""Decides which plans one peer votes for and obeys, so that a run has one history. Pure; the driver makes the chain's
record durable before it answers.

Theory of operation. Plans form one chain. One instance of Paxos (Lamport, "Paxos made simple", 2001) among the electors
of plan L decides L's successor. The ballot number is the term, which has one coordinator:

| Paxos            | here                                                                                  |
|------------------|---------------------------------------------------------------------------------------|
| ballot           | term; a peer grants a term to one candidate                                           |
| prepare, promise | `TermRequest`, `TermGrant`, when a term changes hands                                 |
| accept, accepted | `PlanOffer`, `PlanVote`                                                               |
| chosen           | live: a majority of L's electors voted for it in one term; `PlanLive` spreads it      |

L's own coordinator needs no prepare phase in L's term: every elector obeys L, and so has granted that term already. A
candidate that learns of a plan with a vote must finish that plan before it makes its own, unless so many members deny
a vote for it that it cannot have a majority (`Ballot.found`). Without this rule the chain would fork if a plan became
live and its coordinator crashed before it told anybody. Within a term, a coordinator may replace an offer that is not
live by a later one: only this coordinator could have declared the first offer live, and it never will.

So the live plans of a run are totally ordered, and (term, sequence) grows along the chain. A member may refuse its vote
for any reason (`voting` has the reasons): in Paxos a missing vote does no harm. A peer obeys only a live plan above its
own, so every peer that has moved on refuses a coordinator that wakes up after its term.

When half of a plan's members are lost for good, the run's owner may let one peer make the successor without votes
(`Plan.mandate`). That plan raises the `override_epoch`, a number that is compared before the term. So the plan
overrides whatever the missing members agreed on. A person decides here between two histories.

A plan proves itself (`PlanProof`): it names its predecessor, and carries the signed votes of a majority of that plan's
electors in one ballot. So `adopt` takes a plan from any peer, and checks its predecessor, its votes, and bounded
increments of term, sequence and era. A peer that lacks earlier plans asks for these (`chain_sync`). Two valid plans of
one height (override_epoch, term, sequence) raise an alarm.

A lying majority of electors is outside the fault model. The model includes a liar that names a huge term, above which
no honest candidate could go. So a message raises the highest believable term by `TERM_JUMP_MAX` at most."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from shoal.coordinator.membership import Exclusions
from shoal.protocol.errors import RemoteError
from shoal.protocol.exclusion import open_exclusion
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import (
    CONTROL_BYTES_MAX,
    ENVELOPE_BYTES_MAX,
    ERA_JUMP_MAX,
    LINKS_KEPT_BYTES,
    LINKS_PER_REPLY_MAX,
    SEQUENCE_JUMP_MAX,
    TERM_JUMP_MAX,
    TERM_MAX,
)
from shoal.protocol.messages import Heartbeat, PlanVote, Standing, TermGrant, TermRequest
from shoal.protocol.plan import Plan, SignedPlan, is_quorum, vote_body
from shoal.protocol.statement import VerifySignature

OBEYED_MAX = 256
"""Number of obeyed plans that are remembered, to detect forks: four hours at one term a minute and one plan a term."""


class Adoption(NamedTuple):
    """The result of `adopt`. `lacks`: the offered plan may be live, but we lack a plan between our plan and it."""

    new: bool
    reason: str = ""
    lacks: bool = False


class ChainRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The promises and plans that must survive a restart. `live`, `before` and `mandated` are links (signed plans with
    their votes), `accepted` is the plan that this peer has voted for, without votes; empty: none."""

    run: str
    granted_term: int = 0
    granted_to: PeerID | None = None
    live: bytes = b""
    accepted: bytes = b""
    accepted_term: int = 0
    before: bytes = b""
    """The predecessor of `live`, with which other peers can check the votes of `live`."""
    mandated: bytes = b""
    """The last plan that the owner ordered by a signed mandate, and that is valid without votes; empty: none."""


class ChainLog:
    """Keeps the last live plans with their votes, bounded in bytes, so that returning peers can catch up. A peer that
    was away for longer takes a plan on trust (`chain_sync`)."""

    def __init__(self) -> None:
        self._links: deque[SignedPlan] = deque()
        """The newest live plans with their votes (links), oldest first; the last one is in force."""
        self.mandated: SignedPlan | None = None
        """The last plan that the owner mandated. It has no votes, so it is kept at any age."""

    @property
    def before_last(self) -> SignedPlan | None:
        """The predecessor of the live plan, if known. Members that the live plan has dropped may still be draining."""
        return self._links[-2] if len(self._links) > 1 else None

    def add(self, plan: SignedPlan) -> None:
        if self._links and plan.plan.previous != self._links[-1].digest:
            self._links.clear()  # a peer at an earlier plan could not continue across this gap
        self._links.append(plan)
        while len(self._links) > 2 and sum(len(kept.link) for kept in self._links) > LINKS_KEPT_BYTES:
            self._links.popleft()
        if plan.plan.mandate:
            self.mandated = plan

    def find(self, digest: str) -> SignedPlan | None:
        return next((plan for plan in self._links if plan.digest == digest), None)

    def after(self, digest: str, override_epoch: int) -> tuple[bytes, ...]:
        """Return the links (plans with votes) after the plan with this digest, oldest first, as many as fit in a
        message. If we do not have that plan, start with the live plan's predecessor. Prepend the plan that the owner
        mandated if the asking peer's `override_epoch` is lower."""
        links = list(self._links)
        at = next((at for at, plan in enumerate(links) if plan.digest == digest), None)
        wanted = links[at + 1 :] if at is not None else links[-2:]
        mandated = self.mandated
        if mandated is not None and mandated.plan.override_epoch > override_epoch and mandated not in wanted:
            wanted.insert(0, mandated)
        fitting: list[bytes] = []
        spare_bytes = CONTROL_BYTES_MAX - ENVELOPE_BYTES_MAX
        for plan in wanted[:LINKS_PER_REPLY_MAX]:
            spare_bytes -= len(plan.link) + 8
            if spare_bytes < 0:
                break
            fitting.append(plan.link)
        return tuple(fitting)


class PlanChain:
    """One peer's knowledge of the chain: the plan that it obeys (`live`), its vote for the next plan, and its promises.

    Args:
        owner: the only peer that may make the first plan, (1, 1).
        verify: checks the signature of a vote.
        verify_order: checks the signature of an exclusion order.
    """

    def __init__(self, run: str, *, owner: PeerID, verify: VerifySignature, verify_order: VerifySignature) -> None:
        self.run, self._owner, self._verify = run, owner, verify
        self.exclusions = Exclusions(owner=owner, verify=verify_order, plans=self._recent)
        self.links = ChainLog()
        self.live: SignedPlan | None = None
        self.granted_term = 0
        self.granted_to: PeerID | None = None
        self.accepted: SignedPlan | None = None
        self.accepted_term = 0
        self.num_forks = 0
        """Number of proven plans with the height (`height`) of another plan that we obeyed. It must stay 0."""
        self._obeyed: deque[SignedPlan] = deque(maxlen=OBEYED_MAX)
        self._term_heard = 0
        """The highest term that messages have made us believe; each raises it by `TERM_JUMP_MAX` at most."""

    @property
    def order(self) -> tuple[int, int]:
        """(term, sequence) of the live plan; (0, 0) before the first plan."""
        return self.live.plan.order if self.live else (0, 0)

    @property
    def height(self) -> tuple[int, int, int]:
        """(override_epoch, term, sequence) of the live plan: the order of plans. Zeros if no plan is live yet."""
        return self.live.plan.height if self.live else (0, 0, 0)

    def takes_term(self, term: int) -> bool:
        """True if `term` is at most `TERM_JUMP_MAX` above the highest believed term, which otherwise rises by that
        much. A fixed bound would let liars lead honest peers so far apart that they never believe each other again."""
        limit = min(max(self._term_heard, self.granted_term, self.order[0]) + TERM_JUMP_MAX, TERM_MAX)
        if term > limit:
            self._term_heard = limit
        return term <= limit

    def grant(self, candidate: PeerID, term: int, base: SignedPlan) -> str:
        """Promise `term` to `candidate`, which obeys the plan `base`. Adopt `base` first if it is above our plan.
        Returns: why the term is refused; empty: it is promised."""
        self.adopt(base)
        if self.live is None or base.digest != self.live.digest:
            return f"obeys plan {self.order}, not {base.plan.order}"
        if not base.plan.has(candidate):
            return f"plan {base.plan.order} does not know the candidate"
        if term <= base.plan.term and candidate != base.plan.coordinator:
            return f"term {term} is not above the live plan's {base.plan.term}"
        if not self.takes_term(term):
            return f"no honest candidate is at term {term}"
        return self._claim(candidate, term)

    def must_judge(self, plan: SignedPlan) -> bool:
        """True if `plan` may follow the live plan and this peer has not voted for it yet."""
        live, voted = self.live, self.accepted
        is_known = voted is not None and voted.digest == plan.digest
        return live is not None and not is_known and not link_flaw(plan, live)

    def vote(self, source: PeerID, term: int, plan: SignedPlan, base: SignedPlan | None) -> str:
        """Vote for `plan`, which `source` offers in `term` as the successor of `base`. Adopt `base` first if it is
        above our plan. Returns: why we refuse; empty: we have voted for `plan`."""
        if base is not None:
            self.adopt(base)
        if self.live is None:
            return "obeys no plan yet"
        if plan.digest == self.live.digest:
            return ""
        if plan.plan.height <= self.height:
            return f"obeys plan {self.order}, not below {plan.plan.order}"
        if flaw := link_flaw(plan, self.live):
            return flaw
        known = set(self.live.plan.exclusions)
        if not all(self.exclusions.proves(order) for order in plan.plan.exclusions if order not in known):
            return f"plan {plan.plan.order} excludes a peer without a valid order"
        if plan.plan.term > term or (plan.plan.term == term and plan.plan.coordinator != source):
            return f"plan {plan.plan.order} is not the offering peer's in term {term}"
        voted = self.accepted
        if voted is not None and self.accepted_term == term and voted.digest != plan.digest:
            if voted.plan.order == plan.plan.order:
                return f"voted for another plan {plan.plan.order}"
            if voted.plan.order > plan.plan.order:
                return f"voted for plan {voted.plan.order}, above {plan.plan.order}"
        if not self.takes_term(term):
            return f"no honest coordinator is at term {term}"
        if refusal := self._claim(source, term):
            return refusal
        self.accepted, self.accepted_term = plan, term
        return ""

    def adopt(self, plan: SignedPlan, *, after: SignedPlan | None = None) -> Adoption:
        """Obey a live plan if its proof is valid; count a fork in `num_forks`.
        Args: after: `plan`'s predecessor, if we trust it without a check, because this peer knows no plan, or was away
        for longer than peers keep old plans."""
        known = next((known for known in self._obeyed if known.plan.height == plan.plan.height), None)
        if known is not None and known.digest != plan.digest:
            return self._other_of_one_height(known, plan)
        if self.live is not None:
            if plan.digest == self.live.digest:
                return Adoption(False, "obeyed already")
            if plan.plan.height <= self.height:
                return Adoption(False, f"obeys plan {self.order}, not below {plan.plan.order}")
        flaw, lacks = self._flaw(plan, after)
        if flaw:
            return Adoption(False, flaw, lacks)
        before, override_epoch = self.height, self.live.plan.override_epoch if self.live else 0
        if after is not None:
            self.links.add(after)
        self.live = plan
        self.links.add(plan)
        self._obeyed.append(plan)
        self.exclusions.obeyed(plan.plan)
        self.accepted, self.accepted_term = None, 0
        if plan.plan.term >= self.granted_term or plan.plan.override_epoch > override_epoch:
            # This plan voids a grant of the same term to another candidate, which cannot have a majority any more. And
            # promises under a plan that the owner overruled bind no peer.
            self.granted_term, self.granted_to = plan.plan.term, plan.plan.coordinator
            self._term_heard = 0 if plan.plan.override_epoch > override_epoch else self._term_heard
        assert self.height > before, "two plans of one height obeyed"
        return Adoption(True)

    def _flaw(self, plan: SignedPlan, after: SignedPlan | None) -> tuple[str, bool]:
        """Check `plan`, which is above ours. Returns: (why not to obey it, or ""; are plans missing)."""
        if plan.plan.mandate:
            if self.live is not None and plan.plan.override_epoch <= self.live.plan.override_epoch:
                return f"the mandate of override epoch {plan.plan.override_epoch} has been used", False
            return "", False  # its owner's signature was checked when it was opened
        if not plan.plan.previous:
            is_first = plan.plan.height == (0, 1, 1) and plan.plan.coordinator == self._owner
            return ("" if is_first else "only the owner makes a first plan"), False
        base = after or self.live
        if base is None or plan.plan.previous != base.digest:
            return f"plan {plan.plan.order} does not follow our plan {self.order}", True
        return link_flaw(plan, base) or proof_flaw(plan, base, owner=self._owner, verify=self._verify), False

    def _other_of_one_height(self, known: SignedPlan, plan: SignedPlan) -> Adoption:
        """Handle a `plan` with the height of `known`, which we obeyed. If a majority voted for `plan`, or the owner
        made it without votes (the first plan, or a mandate's), this is a fork. Any other plan proves nothing."""
        height = plan.plan.height
        base = self.links.find(plan.plan.previous)
        proven = base is not None and not proof_flaw(plan, base, owner=self._owner, verify=self._verify)
        owners = bool(plan.plan.mandate) or (not plan.plan.previous and plan.plan.coordinator == self._owner)
        if not proven and not owners:
            return Adoption(False, f"plan {plan.plan.order} has no votes, and we obeyed another of that order")
        self.num_forks += 1
        digests = f"{known.digest}, which we obeyed, and {plan.digest}"
        return Adoption(False, f"two plans of order {height[1:]} are live: {digests}")

    def _recent(self) -> tuple[SignedPlan, ...]:
        return tuple(plan for plan in (self.live, self.links.before_last) if plan is not None)

    def record(self) -> ChainRecord:
        return ChainRecord(
            run=self.run,
            granted_term=self.granted_term,
            granted_to=self.granted_to,
            live=self.live.link if self.live else b"",
            accepted=self.accepted.envelope if self.accepted else b"",
            accepted_term=self.accepted_term,
            before=before.link if (before := self.links.before_last) else b"",
            mandated=mandated.link if (mandated := self.links.mandated) else b"",
        )

    def restore(self, record: ChainRecord, opened: Callable[[bytes], SignedPlan | None]) -> None:
        """Continue from `record`. Its plans are trusted, because we wrote them. Drop a granted term that is too high
        for any candidate to exceed: older releases could be tricked into granting one.
        Args: opened: decodes a plan; returns None if the bytes are empty, or no peer can follow that plan."""
        assert record.run == self.run
        live = opened(record.live)
        self.live, self.accepted_term = live, record.accepted_term
        self.accepted = opened(record.accepted) if live is not None else None
        if record.granted_term < TERM_MAX:
            self.granted_term, self.granted_to = record.granted_term, record.granted_to
        for plan in (opened(record.mandated), opened(record.before), live):
            if plan is not None:
                self.links.add(plan)
        if live is not None:
            self.exclusions.obeyed(live.plan)
            self._obeyed.append(live)

    def _claim(self, candidate: PeerID, term: int) -> str:
        """Promise `term` to `candidate`. Returns: why we may not; empty: it is promised."""
        if term < self.granted_term:
            return f"granted term {self.granted_term}, above {term}"
        if term == self.granted_term and self.granted_to != candidate:
            return f"granted term {term} to another candidate"
        self.granted_term, self.granted_to = term, candidate
        return ""

    # --- answers; make the record durable before sending one ---

    def answer_request(self, source: PeerID, request: TermRequest, base: SignedPlan) -> TermGrant:
        """Answer `source`, which requests a term and obeys `base`."""
        if refusal := self.grant(source, request.term, base):
            return self.no_grant(base, refusal)
        accepted = self.accepted.envelope if self.accepted else b""
        return TermGrant(granted=True, term=self.granted_term, accepted=accepted, accepted_term=self.accepted_term)

    def answer_pre_vote(self, source: PeerID, request: TermRequest, base: SignedPlan) -> TermGrant:
        """Answer a pre-vote: say whether the term would be granted, but promise nothing."""
        if self.live is None or self.live.digest != base.digest or not base.plan.has(source):
            return self.no_grant(base, f"obeys plan {self.order}")
        if request.term <= self.granted_term:
            return self.no_grant(base, f"granted term {self.granted_term}, not below {request.term}")
        if not self.takes_term(request.term):
            return self.no_grant(base, f"no honest candidate is at term {request.term}")
        return TermGrant(granted=True, term=self.granted_term)

    def no_grant(self, base: SignedPlan, reason: str) -> TermGrant:
        """Refuse a term to a candidate that obeys `base`."""
        return TermGrant(granted=False, reason=reason, term=self.granted_term, live=self._newer(base))

    def answer_offer(
        self, source: PeerID, term: int, plan: SignedPlan, base: SignedPlan | None, sign_vote: Callable[[bytes], bytes]
    ) -> PlanVote:
        """Answer `source`, which offers `plan` as the successor of `base` in `term`: vote for it, or refuse."""
        if refusal := self.vote(source, term, plan, base):
            newer = self._newer(base) if base is not None else b""
            return PlanVote(accepted=False, reason=refusal, term=self.granted_term, live=newer)
        return PlanVote(accepted=True, term=self.granted_term, signature=sign_vote(vote_body(term, plan.digest)))

    def answer_standing(self, own: Heartbeat | None, *, leaves: bool, revision: int) -> Standing:
        """Say which plan this peer obeys, which state it holds, and whether it leaves. The owner asks before a
        recovery, a voter before it refuses a plan. Args: own: this peer's last heartbeat."""
        return Standing(
            live=self.live.link if self.live else b"",
            term=max(self.granted_term, self.order[0]),
            era=own.era if own else 0,
            stage=own.stage if own else None,
            version=own.version if own else 0,
            synced=own is not None and own.synced,
            holdings=own.holdings if own else (),
            held=own.held if own else (),
            leaves=leaves,
            revision=revision,
        )

    def _newer(self, base: SignedPlan) -> bytes:
        """Return our live plan if it is above `base`, the asking peer's plan; else no bytes."""
        return self.live.link if self.live and self.height > base.plan.height else b""


def link_flaw(plan: SignedPlan, base: SignedPlan) -> str:
    """Say why `plan` cannot be the successor of `base`; empty: it can."""
    new, old = plan.plan, base.plan
    if new.previous != base.digest:
        return f"plan {new.order} does not follow our plan {old.order}"
    if new.override_epoch != old.override_epoch:
        return f"override epoch {new.override_epoch} begins without a mandate"
    if new.sequence <= old.sequence:
        return f"sequence {new.sequence} does not follow {old.sequence}"
    if new.sequence > old.sequence + SEQUENCE_JUMP_MAX:
        return f"sequence {new.sequence} is too far from {old.sequence}"
    if new.term < old.term:
        return f"term {new.term} is below {old.term}"
    if new.term > old.term + TERM_JUMP_MAX:
        return f"term {new.term} is too far from {old.term}"
    if new.term == old.term and new.coordinator != old.coordinator:
        return f"term {new.term} has another coordinator"
    if not old.era <= new.era <= old.era + ERA_JUMP_MAX:
        return f"era {new.era} does not follow {old.era}"
    if new.era == old.era and (new.restore_era, new.restore_version) != (old.restore_era, old.restore_version):
        return f"era {new.era} has begun elsewhere"
    if new.era == old.era and [stage.layers for stage in new.stages] != [stage.layers for stage in old.stages]:
        return f"era {new.era} has other stages"
    if new.exclusions != old.exclusions and not _keys_of(new) >= _keys_of(old):
        return f"plan {new.order} readmits an excluded peer"
    return ""


def _keys_of(plan: Plan) -> frozenset[bytes]:
    """Return the keys that the plan's exclusion orders name. An unreadable order names none."""
    keys: set[bytes] = set()
    for order in plan.exclusions:
        with suppress(RemoteError):
            keys.update(open_exclusion(order, plan.coordinator).keys)
    return frozenset(keys)


def proof_flaw(plan: SignedPlan, base: SignedPlan, *, owner: PeerID, verify: VerifySignature) -> str:
    """Say why the votes in `plan` do not make it the live successor of `base`; empty: they do."""
    proof, electors = plan.proof, base.plan.electors
    if proof is None:
        return f"plan {plan.plan.order} carries no votes"
    if not plan.plan.term <= proof.ballot <= min(plan.plan.term + TERM_JUMP_MAX, TERM_MAX):
        return f"no honest coordinator offers plan {plan.plan.order} in term {proof.ballot}"
    votes = {electors[at]: signature for at, signature in proof.votes if 0 <= at < len(electors)}
    if len(proof.votes) > len(electors) or not is_quorum(votes, base.plan, owner):
        return f"{len(votes)} of {len(electors)} have voted for plan {plan.plan.order}, which is no majority"
    body = vote_body(proof.ballot, plan.digest)
    forged = next((peer for peer, signature in votes.items() if not verify(peer, signature, body)), None)
    return f"the vote of {forged[-8:]} for plan {plan.plan.order} is forged" if forged is not None else ""
