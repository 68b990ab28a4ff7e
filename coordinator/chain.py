"""Fencing: which plans one peer votes for and obeys. Pure; the driver makes its record durable before it answers.

Theory of operation. Plans form one chain, and each link of it (the successor of plan L) is settled by one instance of
Paxos (Lamport, "Paxos made simple", 2001) among the members of L. The ballot is the term, with its one coordinator:

| Paxos            | here                                                                                  |
|------------------|---------------------------------------------------------------------------------------|
| ballot           | term; a peer grants a term to one candidate                                           |
| prepare, promise | `TermRequest`, `TermGrant`, when a term changes hands                                 |
| accept, accepted | `PlanOffer`, `PlanVote`                                                               |
| chosen           | live: a majority of L's members voted for it in one term; `PlanLive` spreads the news |

L's own coordinator needs no prepare in L's term: whoever is a member of the instance obeys L, hence has granted that
term. A candidate that is told of a voted plan finishes that one before it makes its own; without this a plan that was
live when its coordinator died, with nobody told, would be bypassed and the chain would fork. Within a term a
coordinator may replace an offer that is not live by a later one: it alone could have declared the first one live, and
never will.

Hence live plans of a run are totally ordered, and (term, sequence) grows along the chain. A peer obeys a live plan
above its own and nothing else, so a coordinator that wakes up after its term is refused by everybody who moved on.

When half of a plan's members are gone for good nobody has a majority. Then the run's owner may let one peer make the
successor without votes (`Plan.mandate`), of a term so high that nothing which the missing may have agreed on among
themselves comes after it. That is a decision between two histories, and a person's.

What this does not defend against: a peer that lies. `PlanLive` carries no proof of the votes. But two plans of one
order are an alarm wherever they meet, and nobody is talked into a promise that no honest candidate could outbid: a
term far above all we know of is believed of who insists only, a step with each message.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.plan import SignedPlan

TIE_BREAK_PEERS_MAX = 4
"""In swarms up to this size the owner's vote decides a tie, so that one of two peers can go on alone."""
OBEYED_MAX = 256
"""Plans whose hashes are remembered: four hours of terms in a swarm that nobody joins or leaves."""
TERM_JUMP_MAX = 1 << 20
"""How much higher a term may be at once: two years of terms, of a minute each. From here to where a record cannot hold
it (2^64) are 2^44 messages, five hundred years of a thousand a second."""
SEQUENCE_JUMP_MAX = 1 << 32
"""How many sequences a plan may skip: offers that did not go live, of which there are a few a minute at worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Whether a candidate may have a term, and what it must know. `accepted` is what we voted for after `live`."""

    granted: bool
    reason: str = ""
    accepted: SignedPlan | None = None
    accepted_term: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    accepted: bool
    reason: str = ""


class ChainRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must survive a restart. Plans are their envelopes; empty if there is none."""

    run: str
    granted_term: int = 0
    granted_to: PeerID | None = None
    live: bytes = b""
    accepted: bytes = b""
    accepted_term: int = 0


class PlanChain:
    """One peer's end of the chain: what it obeys (`live`), what it voted for after that, what it has promised."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.live: SignedPlan | None = None
        self.granted_term = 0
        self.granted_to: PeerID | None = None
        self.accepted: SignedPlan | None = None
        self.accepted_term = 0
        self.num_forks = 0
        """How often we met another plan of an order that we had obeyed a plan of. It must stay 0."""
        self._obeyed: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._term_heard = 0
        """As far as those have brought us who insist on a term that we did not believe."""

    @property
    def order(self) -> tuple[int, int]:
        """Of the live plan; (0, 0) before there is one."""
        return self.live.plan.order if self.live else (0, 0)

    def takes_term(self, term: int) -> bool:
        """Whether to take seriously what somebody says of `term`; if not, a little more of it the next time.

        Without steps honest peers could be led so far apart that they never believe each other again.
        """
        limit = max(self._term_heard, self.granted_term, self.order[0]) + TERM_JUMP_MAX
        if term > limit:
            self._term_heard = limit
        return term <= limit

    def grant(self, candidate: PeerID, term: int, base: SignedPlan) -> Grant:
        """Promise `term` to `candidate`, whose live plan is `base`. Adopts `base` if it is above ours."""
        self.adopt(base)
        assert self.live is not None
        if base.digest != self.live.digest:
            return Grant(granted=False, reason=f"obeys plan {self.order}, above {base.plan.order}")
        if not base.plan.has(candidate):
            return Grant(granted=False, reason=f"plan {base.plan.order} does not know the candidate")
        if term <= base.plan.term and candidate != base.plan.coordinator:
            return Grant(granted=False, reason=f"term {term} is not above the live plan's {base.plan.term}")
        if not self.takes_term(term):
            return Grant(granted=False, reason=f"no honest candidate is at term {term}")
        refusal = self._claim(candidate, term)
        if refusal:
            return Grant(granted=False, reason=refusal)
        return Grant(granted=True, accepted=self.accepted, accepted_term=self.accepted_term)

    def vote(self, source: PeerID, term: int, plan: SignedPlan, base: SignedPlan | None) -> Vote:
        """Vote for `plan`, which `source` offers in `term` as successor of `base` (adopted first if above ours)."""
        if base is not None:
            self.adopt(base)
        if self.live is None:
            return Vote(accepted=False, reason="knows no plan before it")
        if plan.digest == self.live.digest:
            return Vote(accepted=True)
        if plan.plan.order <= self.order:
            return Vote(accepted=False, reason=f"obeys plan {self.order}, not below {plan.plan.order}")
        flaw = link_flaw(plan, self.live)
        if flaw:
            return Vote(accepted=False, reason=flaw)
        if plan.plan.term > term or (plan.plan.term == term and plan.plan.coordinator != source):
            return Vote(accepted=False, reason=f"plan {plan.plan.order} is not the offerer's in term {term}")
        voted = self.accepted
        if voted is not None and self.accepted_term == term and voted.digest != plan.digest:
            if voted.plan.order == plan.plan.order:
                return Vote(accepted=False, reason=f"voted for another plan {plan.plan.order}")
            if voted.plan.order > plan.plan.order:
                return Vote(accepted=False, reason=f"voted for plan {voted.plan.order}, above {plan.plan.order}")
        if not self.takes_term(term):
            return Vote(accepted=False, reason=f"no honest coordinator is at term {term}")
        refusal = self._claim(source, term)
        if refusal:
            return Vote(accepted=False, reason=refusal)
        self.accepted, self.accepted_term = plan, term
        return Vote(accepted=True)

    def adopt(self, plan: SignedPlan) -> tuple[bool, str]:
        """Obey a live plan. Returns: (whether it is new to us, why not); counts a fork in `num_forks`."""
        known = self._obeyed.get(plan.plan.order, plan.digest)
        if known != plan.digest:
            self.num_forks += 1
            return False, f"two plans of order {plan.plan.order} are live: {known}, which we obeyed, and {plan.digest}"
        if self.live is not None:
            if plan.digest == self.live.digest:
                return False, "obeyed already"
            if plan.plan.order <= self.order:
                return False, f"obeys plan {self.order}, not below {plan.plan.order}"
        before = self.order
        self.live = plan
        self._remember(plan)
        self.accepted, self.accepted_term = None, 0
        if plan.plan.term >= self.granted_term:
            # A grant of this very term to somebody else is void: that candidate cannot have a majority any more.
            self.granted_term, self.granted_to = plan.plan.term, plan.plan.coordinator
        assert self.order > before, "two plans of one order obeyed"
        return True, ""

    def record(self) -> ChainRecord:
        return ChainRecord(
            run=self.run,
            granted_term=self.granted_term,
            granted_to=self.granted_to,
            live=self.live.envelope if self.live else b"",
            accepted=self.accepted.envelope if self.accepted else b"",
            accepted_term=self.accepted_term,
        )

    def restore(self, record: ChainRecord, *, live: SignedPlan | None, accepted: SignedPlan | None) -> None:
        """Take up where `record` ended; `live` and `accepted` are its envelopes, opened."""
        assert record.run == self.run
        self.live, self.accepted, self.accepted_term = live, accepted, record.accepted_term
        self.granted_term, self.granted_to = record.granted_term, record.granted_to
        if live is not None:
            self._remember(live)

    def _remember(self, plan: SignedPlan) -> None:
        self._obeyed[plan.plan.order] = plan.digest
        if len(self._obeyed) > OBEYED_MAX:
            self._obeyed.popitem(last=False)

    def _claim(self, candidate: PeerID, term: int) -> str:
        """Bind `term` to `candidate`, or say why not."""
        if term < self.granted_term:
            return f"granted term {self.granted_term}, above {term}"
        if term == self.granted_term and self.granted_to != candidate:
            return f"granted term {term} to another candidate"
        self.granted_term, self.granted_to = term, candidate
        return ""


def link_flaw(plan: SignedPlan, base: SignedPlan) -> str:
    """Why `plan` cannot be the successor of `base`, or an empty string."""
    if plan.plan.previous != base.digest:
        return f"plan {plan.plan.order} does not follow our plan {base.plan.order}"
    if plan.plan.sequence <= base.plan.sequence:
        return f"sequence {plan.plan.sequence} does not follow {base.plan.sequence}"
    if plan.plan.sequence > base.plan.sequence + SEQUENCE_JUMP_MAX:
        return f"sequence {plan.plan.sequence} is too far from {base.plan.sequence}"
    if plan.plan.term < base.plan.term:
        return f"term {plan.plan.term} is below {base.plan.term}"
    if plan.plan.term == base.plan.term and plan.plan.coordinator != base.plan.coordinator:
        return f"term {plan.plan.term} has another coordinator"
    return ""


def is_quorum(voters: Collection[PeerID], members: Sequence[PeerID], owner: PeerID) -> bool:
    """Whether `voters` are a majority of `members`; two disjoint sets never are both."""
    votes = sum(1 for member in members if member in voters)
    if 2 * votes == len(members) and len(members) <= TIE_BREAK_PEERS_MAX:
        return owner in voters and owner in members
    return 2 * votes > len(members)
