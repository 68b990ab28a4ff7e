"""Decides which plans one peer votes for and obeys, so that no two histories of a run go on. Pure; the driver makes the
chain's record durable before it answers.

Theory of operation. Plans form one chain, and each link of it (the successor of plan L) is settled by one instance of
Paxos (Lamport, "Paxos made simple", 2001) among the electors of L. The ballot is the term, with its one coordinator:

| Paxos            | here                                                                                  |
|------------------|---------------------------------------------------------------------------------------|
| ballot           | term; a peer grants a term to one candidate                                           |
| prepare, promise | `TermRequest`, `TermGrant`, when a term changes hands                                 |
| accept, accepted | `PlanOffer`, `PlanVote`                                                               |
| chosen           | live: a majority of L's electors voted for it in one term; `PlanLive` spreads it      |

L's own coordinator needs no prepare in L's term: every member of the instance obeys L, and has therefore granted that
term. A candidate that is told of a voted plan finishes that plan before it makes its own, if the members that say that
they have not voted for it leave a majority that may have (`Ballot.found`). Without this rule a plan that was live when
its coordinator died, with nobody told, would be bypassed and the chain would fork. Within a term a coordinator may
replace an offer that is not live by a later one: it alone could have declared the first one live, and never will.

A member may always refuse its vote. It does so for plans that contradict what it knows (`judge`), before this module is
asked.

Hence the live plans of a run are totally ordered, and (term, sequence) grows along the chain. A peer obeys a live plan
above its own and nothing else, so a coordinator that wakes up after its term is refused by every peer that has moved
on.

When half of a plan's members are gone for good, nobody has a majority. Then the run's owner may let one peer make the
successor without votes (`Plan.mandate`). That plan begins a new reign, which counts before the term, so nothing that
the missing members may have agreed on among themselves comes after it. This is a decision between two histories, and a
person makes it.

A plan proves itself (`PlanProof`): it names its predecessor, and carries the signed votes of a majority of that plan's
electors, all of one ballot. So `adopt` takes a plan from any peer, and checks the link, the votes, and bounded steps of
term, sequence and era against the plan that we obey. A peer that lacks links in between asks for them (`chain_sync`).
Two plans of one height that both prove themselves would raise an alarm; a plan that does not prove itself is only
refused.

This does not defend against a majority of electors that lies. It does defend against promises that no honest candidate
could outbid: a term far above all that we know of is believed only of a peer that insists, one step with each message.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from shoal.coordinator.chain_log import ChainLog
from shoal.coordinator.exclusions import Exclusions
from shoal.protocol.errors import RemoteError
from shoal.protocol.exclusion import open_exclusion
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import ERA_JUMP_MAX, SEQUENCE_JUMP_MAX, TERM_JUMP_MAX, TERM_MAX
from shoal.protocol.plan import Plan, SignedPlan, vote_body
from shoal.protocol.quorum import is_quorum

Holds = Callable[[PeerID, bytes, bytes], bool]
"""(signer, signature, body of a `vote` statement) -> whether the signer has said so."""

OBEYED_MAX = 256
"""The hashes of so many plans are remembered: four hours of terms in a swarm that nobody joins or leaves."""


class Adoption(NamedTuple):
    """Whether a plan is obeyed from now on. `lacks`: it may well be live, but a link between ours and it is missing."""

    new: bool
    reason: str = ""
    lacks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Whether a candidate may have a term, and what it must know. `accepted` is the plan that we voted for after
    `live`."""

    granted: bool
    reason: str = ""
    accepted: SignedPlan | None = None
    accepted_term: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Whether we vote for a plan, or why not."""

    accepted: bool
    reason: str = ""


class ChainRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The promises that must survive a restart. Live plans are kept as links and the plan voted for as an envelope;
    empty: there is none."""

    run: str
    granted_term: int = 0
    granted_to: PeerID | None = None
    live: bytes = b""
    accepted: bytes = b""
    accepted_term: int = 0
    before: bytes = b""
    """The plan before `live`, with which others can check its votes."""
    mandated: bytes = b""
    """The plan that began the reign of `live`, if an owner's mandate did."""


class PlanChain:
    """One peer's end of the chain: the plan that it obeys (`live`), the plan that it voted for after that, and what it
    has promised.

    Args:
        owner: the peer that makes plan (1, 1) alone.
        holds: checks the signature of a vote.
        holds_order: checks a signature under an order of exclusion.
    """

    def __init__(self, run: str, *, owner: PeerID, holds: Holds, holds_order: Holds) -> None:
        self.run, self._owner, self._holds = run, owner, holds
        self.exclusions = Exclusions(owner=owner, holds=holds_order, plans=self._recent)
        self.links = ChainLog()
        self.live: SignedPlan | None = None
        self.granted_term = 0
        self.granted_to: PeerID | None = None
        self.accepted: SignedPlan | None = None
        self.accepted_term = 0
        self.num_forks = 0
        """How often we met another plan, with votes, of a height at which we had obeyed a plan. It must stay 0."""
        self._obeyed: OrderedDict[tuple[int, int, int], SignedPlan] = OrderedDict()
        self._term_heard = 0
        """The highest term to which peers have brought us that insist on a term that we did not believe."""

    @property
    def order(self) -> tuple[int, int]:
        """The (term, sequence) of the live plan; (0, 0) before there is one."""
        return self.live.plan.order if self.live else (0, 0)

    @property
    def height(self) -> tuple[int, int, int]:
        """The (reign, term, sequence) of the live plan; zeros before there is one."""
        return self.live.plan.height if self.live else (0, 0, 0)

    def takes_term(self, term: int) -> bool:
        """Whether to take seriously what a peer says of `term`. If not, a somewhat higher term is believed the next
        time.

        Without these steps honest peers could be led so far apart that they never believe each other again.
        """
        limit = min(max(self._term_heard, self.granted_term, self.order[0]) + TERM_JUMP_MAX, TERM_MAX)
        if term > limit:
            self._term_heard = limit
        return term <= limit

    def grant(self, candidate: PeerID, term: int, base: SignedPlan) -> Grant:
        """Promise `term` to `candidate`, whose live plan is `base`. `base` is adopted first if it is above ours."""
        self.adopt(base)
        if self.live is None or base.digest != self.live.digest:
            return Grant(granted=False, reason=f"obeys plan {self.order}, not {base.plan.order}")
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

    def must_judge(self, plan: SignedPlan) -> bool:
        """Whether this peer has not voted for `plan` yet, and `plan` may follow the live plan."""
        live, voted = self.live, self.accepted
        is_known = voted is not None and voted.digest == plan.digest
        return live is not None and not is_known and not link_flaw(plan, live)

    def vote(self, source: PeerID, term: int, plan: SignedPlan, base: SignedPlan | None) -> Vote:
        """Vote for `plan`, which `source` offers in `term` as the successor of `base`. `base` is adopted first if it is
        above ours."""
        if base is not None:
            self.adopt(base)
        if self.live is None:
            return Vote(accepted=False, reason="knows no plan before it")
        if plan.digest == self.live.digest:
            return Vote(accepted=True)
        if plan.plan.height <= self.height:
            return Vote(accepted=False, reason=f"obeys plan {self.order}, not below {plan.plan.order}")
        flaw = link_flaw(plan, self.live)
        if flaw:
            return Vote(accepted=False, reason=flaw)
        known = set(self.live.plan.exclusions)
        if not all(self.exclusions.proves(order) for order in plan.plan.exclusions if order not in known):
            return Vote(accepted=False, reason=f"plan {plan.plan.order} excludes somebody without an order that holds")
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

    def adopt(self, plan: SignedPlan, *, after: SignedPlan | None = None) -> Adoption:
        """Obey a live plan if it proves itself; a fork is counted in `num_forks`.

        Args: after: a plan that we do not obey and are to take on trust, as the one before `plan`. A peer needs it that
            knows no plan of the run, or has been away for longer than links are kept.
        """
        known = self._obeyed.get(plan.plan.height)
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
        before, reign = self.height, self.live.plan.reign if self.live else 0
        if after is not None:
            self.links.add(after)
        self.live = plan
        self.links.add(plan)
        self._remember(plan)
        self.exclusions.obeyed(plan.plan)
        self.accepted, self.accepted_term = None, 0
        if plan.plan.term >= self.granted_term or plan.plan.reign > reign:
            # A grant of this very term to somebody else is void: that candidate cannot have a majority any more. And
            # what was promised on a plan that the owner overruled binds nobody.
            self.granted_term, self.granted_to = plan.plan.term, plan.plan.coordinator
            self._term_heard = 0 if plan.plan.reign > reign else self._term_heard
        assert self.height > before, "two plans of one height obeyed"
        return Adoption(True)

    def _flaw(self, plan: SignedPlan, after: SignedPlan | None) -> tuple[str, bool]:
        """Say why not to obey `plan`, which is above ours. Returns: (the reason, whether that is only for want of
        links)."""
        if plan.plan.mandate:
            if self.live is not None and plan.plan.reign <= self.live.plan.reign:
                return f"the mandate of reign {plan.plan.reign} has been used", False
            return "", False  # whoever opened it has checked the owner's signature
        if not plan.plan.previous:
            is_first = plan.plan.height == (0, 1, 1) and plan.plan.coordinator == self._owner
            return ("" if is_first else "only the owner makes a first plan"), False
        base = after or self.live
        if base is None or plan.plan.previous != base.digest:
            return f"plan {plan.plan.order} does not follow our plan {self.order}", True
        return link_flaw(plan, base) or proof_flaw(plan, base, owner=self._owner, holds=self._holds), False

    def _other_of_one_height(self, known: SignedPlan, plan: SignedPlan) -> Adoption:
        """Another plan has the height of one that we obeyed. Votes for both would mean that electors have voted twice;
        a plan without votes is anybody's invention."""
        height = plan.plan.height
        base = self.links.find(plan.plan.previous)
        proven = base is not None and not proof_flaw(plan, base, owner=self._owner, holds=self._holds)
        owners = bool(plan.plan.mandate) or (not plan.plan.previous and plan.plan.coordinator == self._owner)
        if not proven and not owners:
            return Adoption(False, f"plan {plan.plan.order} has no votes, and we obeyed another of that order")
        self.num_forks += 1
        digests = f"{known.digest}, which we obeyed, and {plan.digest}"
        return Adoption(False, f"two plans of order {height[1:]} are live: {digests}")

    def _recent(self) -> tuple[SignedPlan, ...]:
        """The live plan and the one before it."""
        return tuple(plan for plan in (self.live, self.links.before_last) if plan is not None)

    def record(self) -> ChainRecord:
        """The record that must be durable before anything that rests on it is said."""
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

    def restore(
        self,
        record: ChainRecord,
        *,
        live: SignedPlan | None,
        accepted: SignedPlan | None,
        before: SignedPlan | None = None,
        mandated: SignedPlan | None = None,
    ) -> None:
        """Continue where `record` ended. The plans are the record's own, opened, and taken at our own word.

        A promise that no honest candidate could outbid is dropped: an older version could be talked into it.
        """
        assert record.run == self.run
        self.live, self.accepted, self.accepted_term = live, accepted, record.accepted_term
        if live is not None:
            self.exclusions.obeyed(live.plan)
        if record.granted_term < TERM_MAX:
            self.granted_term, self.granted_to = record.granted_term, record.granted_to
        for plan in (mandated, before, live):
            if plan is not None:
                self.links.add(plan)
        if live is not None:
            self._remember(live)

    def _remember(self, plan: SignedPlan) -> None:
        self._obeyed[plan.plan.height] = plan
        if len(self._obeyed) > OBEYED_MAX:
            self._obeyed.popitem(last=False)

    def _claim(self, candidate: PeerID, term: int) -> str:
        """Bind `term` to `candidate`. Returns: why not; empty: it is bound."""
        if term < self.granted_term:
            return f"granted term {self.granted_term}, above {term}"
        if term == self.granted_term and self.granted_to != candidate:
            return f"granted term {term} to another candidate"
        self.granted_term, self.granted_to = term, candidate
        return ""


def link_flaw(plan: SignedPlan, base: SignedPlan) -> str:
    """Say why `plan` cannot be the successor of `base`; empty: it can."""
    new, old = plan.plan, base.plan
    if new.previous != base.digest:
        return f"plan {new.order} does not follow our plan {old.order}"
    if new.reign != old.reign:
        return f"reign {new.reign} begins without a mandate"
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
        return f"plan {new.order} lets somebody back in who is excluded"
    return ""


def _keys_of(plan: Plan) -> frozenset[bytes]:
    """The keys that the plan's orders name. An order that cannot be read names none."""
    keys: set[bytes] = set()
    for order in plan.exclusions:
        with suppress(RemoteError):
            keys.update(open_exclusion(order, plan.coordinator).keys)
    return frozenset(keys)


def proof_flaw(plan: SignedPlan, base: SignedPlan, *, owner: PeerID, holds: Holds) -> str:
    """Say why the votes that `plan` carries do not make it the live successor of `base`; empty: they do."""
    proof, electors = plan.proof, base.plan.electors
    if proof is None:
        return f"plan {plan.plan.order} carries no votes"
    if not plan.plan.term <= proof.ballot <= min(plan.plan.term + TERM_JUMP_MAX, TERM_MAX):
        return f"no honest coordinator offers plan {plan.plan.order} in term {proof.ballot}"
    votes = {electors[at]: signature for at, signature in proof.votes if 0 <= at < len(electors)}
    if len(proof.votes) > len(electors) or not is_quorum(votes, base.plan, owner):
        return f"{len(votes)} of {len(electors)} have voted for plan {plan.plan.order}, which is no majority"
    body = vote_body(proof.ballot, plan.digest)
    forged = next((peer for peer, signature in votes.items() if not holds(peer, signature, body)), None)
    return f"the vote of {forged[-8:]} for plan {plan.plan.order} is forged" if forged is not None else ""
