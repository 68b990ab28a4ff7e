"""Judges a plan before this peer votes for it: is there anything in it that this peer knows to be wrong? Pure.

A plan need not be the best one; it must only not contradict what a voter knows. What a voter does not know is no
objection, or a run of strangers would stand still. So before it objects a voter asks the members that a plan leaves
out, or the holders of the state that a plan throws away, where they stand. Their answers count, and silence does not.

| a plan                                        | is refused if                                                        |
|-----------------------------------------------|----------------------------------------------------------------------|
| leaves this peer out                          | this peer does not leave                                             |
| leaves out a member that was heard just now   | the member answers that it stays                                     |
| throws the state of the live layout away      | every stage and every expert has a member that answers: I hold it    |
| has shares or bandwidths                      | one is two million times another of its stage                        |
| has many members that this peer has not met   | they are more than all others                                        |

Until the answers are here the voter says "not yet", and is asked again at the coordinator's next tick.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Heartbeat, Standing
from shoal.protocol.plan import Member, Plan, SignedPlan

HEARD_HEARTBEATS = 2.0
"""A member that was heard within this time is asked whether it is gone. A coordinator takes at least three for a
silence that means death, so most plans after a death need no question."""
ANSWER_HEARTBEATS = 0.5
"""A voter waits so long for the answers. A process that is not there refuses at once."""
ASKED_MAX = 64
"""A voter asks so many members about one plan."""
APART_MAX = 1e6
"""The largest share or bandwidth over the smallest within a stage: a data centre's card beside a single core. A
proposer keeps to it whatever its members claim, and a voter objects to twice as much."""
UNMET_MIN = 16
"""A voter need not have met so many members: a small run may grow all at once."""


class Acquaintance(msgspec.Struct, frozen=True):
    """What a driver knows of the peers that a plan names, or leaves out."""

    heard: frozenset[PeerID] = frozenset()
    """The members that the plan leaves out of which something came within `HEARD_HEARTBEATS`."""
    excluded: frozenset[PeerID] = frozenset()
    """The members that the plan's orders put out of the run."""
    unmet: frozenset[PeerID] = frozenset()
    """The newcomers of which this peer has neither heard nor seen a certificate."""


NOBODY = Acquaintance()


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """The questions about one plan."""

    digest: str
    waiting: set[PeerID]
    expires_at_s: float
    told: dict[PeerID, Standing] = field(default_factory=dict)


class Judge:
    """One voter's judgement of the plans that it is offered.

    Args:
        name_of: names a peer for people.
    """

    def __init__(self, *, me: PeerID, heartbeat_s: float, revision: int, name_of: Callable[[PeerID], str]) -> None:
        self._me, self._heartbeat_s, self._revision, self._name_of = me, heartbeat_s, revision, name_of
        self._inquiry: Inquiry | None = None

    def questions(self, offered: SignedPlan, live: Plan, knows: Acquaintance, now_s: float) -> tuple[PeerID, ...]:
        """Return the members to ask where they stand before `offered` is judged; each is asked once."""
        if self._inquiry is not None and self._inquiry.digest == offered.digest:
            return ()
        plan = offered.plan
        asks = [peer for peer in _left_out(plan, live, knows) if peer in knows.heard and peer != self._me]
        if _goes_back(plan, live):
            asks += [peer for peer in live.members if peer != self._me and live.groups_of(peer)]
        peers = tuple(dict.fromkeys(asks))[:ASKED_MAX]
        expires_at_s = now_s + ANSWER_HEARTBEATS * self._heartbeat_s
        self._inquiry = Inquiry(digest=offered.digest, waiting=set(peers), expires_at_s=expires_at_s)
        return peers

    def told(self, peer: PeerID, standing: Standing | None) -> None:
        """`peer` has said where it stands. None: it did not answer."""
        if self._inquiry is not None and peer in self._inquiry.waiting:
            self._inquiry.waiting.discard(peer)
            if standing is not None:
                self._inquiry.told[peer] = standing

    def is_waiting(self, now_s: float) -> bool:
        """Whether an answer may still come."""
        return self._inquiry is not None and bool(self._inquiry.waiting) and now_s < self._inquiry.expires_at_s

    def flaw(self, offered: SignedPlan, live: Plan, knows: Acquaintance, *, own: Heartbeat | None, leaves: bool) -> str:
        """Say what is wrong with `offered`; empty: nothing that we know of.

        Args:
            own: what we last said of ourselves.
            leaves: we are about to leave the run.
        """
        plan, told = offered.plan, self._inquiry.told if self._inquiry is not None else {}
        for peer in _left_out(plan, live, knows):
            if peer == self._me and not leaves:
                return f"it drops {self._name_of(peer)} itself"
            standing = told.get(peer)
            if standing is not None and not standing.leaves and standing.revision == self._revision:
                return f"it drops {self._name_of(peer)}, which {self._name_of(self._me)} hears"
        if _goes_back(plan, live):
            said: dict[PeerID, Standing | Heartbeat] = {**told}
            if own is not None:
                said[self._me] = own
            if _held(said, plan, live).issuperset(range(len(live.stages) + len(live.experts))):
                return f"it goes back to version {plan.restore_version}, and every stage still has its state"
        for index, stage in enumerate(plan.stages):
            if (apart := _apart(stage.members)) > 2 * APART_MAX:
                return f"the shares of stage {index} are {apart:.0e} times apart"
        if len(knows.unmet) > max(UNMET_MIN, len(plan.members) // 2):
            return f"{self._name_of(self._me)} has not met {len(knows.unmet)} of its {len(plan.members)} members"
        return ""


def _left_out(plan: Plan, live: Plan, knows: Acquaintance) -> list[PeerID]:
    return [peer for peer in live.members if not plan.has(peer) and peer not in knows.excluded]


def _goes_back(plan: Plan, live: Plan) -> bool:
    """Whether the plan throws away what the live layout has trained: it does not go on where that layout ends."""
    ended = live.ends_at > 0 and (plan.restore_era, plan.restore_version) == (live.era, live.ends_at)
    return plan.era != live.era and not ended


def _held(said: Mapping[PeerID, Standing | Heartbeat], plan: Plan, live: Plan) -> set[int]:
    """The groups of `live` whose state some peer says that it holds, at a version that counts."""
    held = [(peer, group, version) for peer, each in said.items() for group, version in _held_by(each, live)]
    # A holder that is behind the version at which the plan begins has nothing to lose. But a version that nobody has
    # reached, the coordinator aside, is no version of this run. What is certified is looked at beside this judgement.
    version_max = max((version for peer, _, version in held if peer != plan.coordinator), default=0)
    is_reached = plan.restore_era == live.era and plan.restore_version <= version_max
    floor = plan.restore_version if is_reached else 0
    return {group for _, group, version in held if version >= floor}


def _held_by(said: Standing | Heartbeat, live: Plan) -> list[tuple[int, int]]:
    if said.era != live.era:
        return []
    own = [(said.stage, said.version)] if said.synced and said.stage is not None else []
    return [*said.held, *own]


def _apart(members: tuple[Member, ...]) -> float:
    shares, bandwidths = [m.share for m in members], [m.bandwidth for m in members]
    return max(max(shares) / min(shares), max(bandwidths) / min(bandwidths))
