"""Judges a plan before this peer votes for it: does it contradict what this peer knows? Pure.

A plan need not be the best one. What a voter does not know is no objection, otherwise a run of strangers would stand
still. Before it objects, a voter asks the removed members, or the holders of the state that a plan discards, for their
standing. Their answers count; silence does not.

| a plan                                        | is refused if                                                        |
|-----------------------------------------------|----------------------------------------------------------------------|
| leaves this peer out                          | this peer does not leave                                             |
| leaves out a member that was heard just now   | the member answers that it stays                                     |
| discards the state of the live layout         | every stage and every expert has a member that holds its state       |
| begins before the newest certified version    | its layers are on the disks of those who answer                      |
| has shares or bandwidths                      | one is two million times another of its stage                        |
| has many members that this peer has not met   | they are more than all others                                        |

Until the answers arrive the voter replies "not yet", and the coordinator asks again at its next tick."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Heartbeat, Standing
from shoal.protocol.plan import Member, Plan, SignedPlan

HEARD_HEARTBEATS = 2.0
"""A removed member that was heard within this time is asked whether it is gone. A coordinator's timeout is at least
three heartbeats, so most plans after a failure need no question."""
ANSWER_HEARTBEATS = 0.5
"""How long a voter waits for the answers. A missing process refuses at once."""
ASKED_MAX = 64
"""Maximum number of members that a voter asks about one plan."""
APART_MAX = 1e6
"""The largest share or bandwidth over the smallest within a stage: a data centre's card beside a single core. A
proposer stays within it for any claims, and a voter objects to twice as much."""
UNMET_MIN = 16
"""A plan may always have this many members that a voter has not met: a small run may grow at once."""


class Acquaintance(msgspec.Struct, frozen=True):
    """A driver's knowledge of the peers that a plan adds or drops."""

    heard: frozenset[PeerID] = frozenset()
    """Dropped members of which a message arrived within `HEARD_HEARTBEATS`."""
    excluded: frozenset[PeerID] = frozenset()
    """Members that the plan's orders exclude."""
    unmet: frozenset[PeerID] = frozenset()
    """Newcomers of which this peer has neither heard nor seen a certificate."""


NOBODY = Acquaintance()


@dataclass(slots=True, kw_only=True)
class PlanInquiry:
    digest: str
    waiting: set[PeerID]
    expires_at_s: float
    told: dict[PeerID, Standing] = field(default_factory=dict)


class Judge:
    """One voter's judgement of the plans that it is offered."""

    def __init__(self, *, me: PeerID, heartbeat_s: float, revision: int, name_of: Callable[[PeerID], str]) -> None:
        self._me, self._heartbeat_s, self._revision, self._name_of = me, heartbeat_s, revision, name_of
        self._inquiry: PlanInquiry | None = None

    def questions(self, offered: SignedPlan, live: Plan, knows: Acquaintance, now_s: float) -> tuple[PeerID, ...]:
        """Return the members to ask for their standing before `offered` is judged; each is asked once."""
        if self._inquiry is not None and self._inquiry.digest == offered.digest:
            return ()
        plan = offered.plan
        asks = [peer for peer in _left_out(plan, live, knows) if peer in knows.heard and peer != self._me]
        if goes_back(plan, live):
            asks += [peer for peer in live.members if peer != self._me and live.groups_of(peer)]
        peers = tuple(dict.fromkeys(asks))[:ASKED_MAX]
        expires_at_s = now_s + ANSWER_HEARTBEATS * self._heartbeat_s
        self._inquiry = PlanInquiry(digest=offered.digest, waiting=set(peers), expires_at_s=expires_at_s)
        return peers

    def told(self, peer: PeerID, standing: Standing | None) -> None:
        """Record the standing of `peer`. None: it did not answer."""
        if self._inquiry is not None and peer in self._inquiry.waiting:
            self._inquiry.waiting.discard(peer)
            if standing is not None:
                self._inquiry.told[peer] = standing

    def is_waiting(self, now_s: float) -> bool:
        return self._inquiry is not None and bool(self._inquiry.waiting) and now_s < self._inquiry.expires_at_s

    def flaw(
        self,
        offered: SignedPlan,
        live: Plan,
        knows: Acquaintance,
        *,
        own: Heartbeat | None,
        leaves: bool,
        newest: tuple[int, int] = (0, 0),
        layers: frozenset[str] = frozenset(),
    ) -> str:
        """Say what is wrong with `offered`; empty: nothing that we know of.

        Args:
            own: our last heartbeat.
            leaves: we are about to leave the run.
            newest: (era, version) of the newest complete version that `live` certifies.
            layers: its layers.
        """
        plan, told = offered.plan, self._inquiry.told if self._inquiry is not None else {}
        for peer in _left_out(plan, live, knows):
            if peer == self._me and not leaves:
                return f"it drops {self._name_of(peer)} itself"
            standing = told.get(peer)
            if standing is not None and not standing.leaves and standing.revision == self._revision:
                return f"it drops {self._name_of(peer)}, which {self._name_of(self._me)} hears"
        if goes_back(plan, live):
            said: dict[PeerID, Standing | Heartbeat] = {**told}
            if own is not None:
                said[self._me] = own
            if _held(said, plan, live).issuperset(range(len(live.stages) + len(live.experts))):
                return f"it goes back to version {plan.restore_version}, and every stage still has its state"
            if (plan.restore_era, plan.restore_version) < newest and _stored(said, newest) >= layers:
                return f"it goes back to version {plan.restore_version}, and version {newest[1]} is on the disks"
        for index, stage in enumerate(plan.stages):
            if (apart := _apart(stage.members)) > 2 * APART_MAX:
                return f"the shares of stage {index} are {apart:.0e} times apart"
        if len(knows.unmet) > max(UNMET_MIN, len(plan.members) // 2):
            return f"{self._name_of(self._me)} has not met {len(knows.unmet)} of its {len(plan.members)} members"
        return ""


def _left_out(plan: Plan, live: Plan, knows: Acquaintance) -> list[PeerID]:
    return [peer for peer in live.members if not plan.has(peer) and peer not in knows.excluded]


def goes_back(plan: Plan, live: Plan) -> bool:
    """True if the plan discards what the live layout has trained, instead of continuing where that layout ends."""
    ended = live.cutover_version > 0 and (plan.restore_era, plan.restore_version) == (live.era, live.cutover_version)
    return plan.era != live.era and not ended


def _held(said: Mapping[PeerID, Standing | Heartbeat], plan: Plan, live: Plan) -> set[int]:
    """Return the groups of `live` with a state that a peer reports, at a version that counts."""
    held = [(peer, group, version) for peer, each in said.items() for group, version in _held_by(each, live)]
    # A holder behind the version at which the plan begins loses nothing. But a version that no peer except the
    # coordinator has reached is no version of this run. Certificates are checked elsewhere.
    version_max = max((version for peer, _, version in held if peer != plan.coordinator), default=0)
    is_reached = plan.restore_era == live.era and plan.restore_version <= version_max
    floor = plan.restore_version if is_reached else 0
    return {group for _, group, version in held if version >= floor}


def _stored(said: Mapping[PeerID, Standing | Heartbeat], age: tuple[int, int]) -> frozenset[str]:
    """Return the layers of the snapshot (era, version) that are on a disk of these peers."""
    held = (holding for each in said.values() for holding in each.holdings)
    return frozenset(key for holding in held if (holding.era, holding.version) == age for key in holding.layers)


def _held_by(said: Standing | Heartbeat, live: Plan) -> list[tuple[int, int]]:
    if said.era != live.era:
        return []
    own = [(said.stage, said.version)] if said.synced and said.stage is not None else []
    return [*said.held, *own]


def _apart(members: tuple[Member, ...]) -> float:
    shares, bandwidths = [m.share for m in members], [m.bandwidth for m in members]
    return max(max(shares) / min(shares), max(bandwidths) / min(bandwidths))
