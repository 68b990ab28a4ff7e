"""One table: which message may come from whom. `Endpoint` enforces it before any handler sees a message. Pure.

The handlers behind it take for granted that the sender stands where the table says, under one of the plans that this
peer has obeyed of late. What the table cannot know stays with them: whether this sender was asked for this very thing.

A role is held under a plan, and two peers never obey a new plan in the same moment. Hence the last few plans count,
and a member's message that no plan of ours explains yet waits for the next plan for a moment before it is refused. The
two need not have their places under one plan: whoever drains has left its group by the newest one, and finishes the
round that is open with a member that came by the very same plan.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Final

from shoal.protocol import messages as m
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PLANS_SERVED
from shoal.protocol.membership import AccessLevel, Members
from shoal.protocol.plan import Plan


class Role(Enum):
    """Says who may send a message. Each role but `OBSERVER` is a member, certified or the owner, and not excluded."""

    NOBODY = auto()
    """It is only ever an answer."""
    OBSERVER = auto()
    """Whoever has an invite, one that only lets look on included."""
    MEMBER = auto()
    """Whoever has an invite to train."""
    PLANNED = auto()
    """A member of a plan that we obey or obeyed of late, its spares included."""
    GROUP_MEMBER = auto()
    """The sender holds the same stage or the same experts as we."""
    NEAR = auto()
    """The sender is a group member, or holds the stage before ours or after it."""
    OWNER = auto()
    """The run's owner."""


WHO_MAY: Final[Mapping[type, Role]] = {
    # A peer and the coordinator. A plan, and the owner's mandate, prove themselves
    # wherever they come from: the sender need only be a member.
    m.Heartbeat: Role.MEMBER,
    m.HeartbeatReply: Role.NOBODY,
    m.TermRequest: Role.MEMBER,
    m.TermGrant: Role.NOBODY,
    m.PlanOffer: Role.MEMBER,
    m.PlanVote: Role.NOBODY,
    m.PlanLive: Role.MEMBER,
    m.ChainRequest: Role.MEMBER,
    m.ChainLinks: Role.NOBODY,
    m.Exclude: Role.MEMBER,
    m.HandOver: Role.MEMBER,
    m.Leave: Role.MEMBER,
    m.Reset: Role.MEMBER,
    m.Renew: Role.PLANNED,
    m.Renewed: Role.NOBODY,
    # Whoever looks on.
    m.StandingRequest: Role.OBSERVER,
    m.Standing: Role.NOBODY,
    m.StatusRequest: Role.OBSERVER,
    m.SwarmStatus: Role.NOBODY,
    m.HistoryRequest: Role.OBSERVER,
    m.History: Role.NOBODY,
    m.Ping: Role.OBSERVER,
    m.PingRequest: Role.PLANNED,
    m.ProbeTogether: Role.MEMBER,
    m.Probed: Role.NOBODY,
    m.Done: Role.NOBODY,
    m.Refusal: Role.NOBODY,
    # Stages and their neighbours.
    m.Hello: Role.PLANNED,
    m.Progress: Role.GROUP_MEMBER,
    m.RoundStart: Role.GROUP_MEMBER,
    m.RoundEnded: Role.GROUP_MEMBER,
    m.Digest: Role.GROUP_MEMBER,
    m.Attestation: Role.PLANNED,  # also from who drains to another place; the handler looks closer
    m.Claim: Role.GROUP_MEMBER,
    m.Grant: Role.NOBODY,
    m.Repair: Role.PLANNED,
    m.Again: Role.GROUP_MEMBER,
    m.HandBack: Role.NEAR,
    m.ExpertDone: Role.PLANNED,
    m.ValidationResult: Role.GROUP_MEMBER,
    m.Halt: Role.PLANNED,
    m.Halted: Role.NOBODY,
    m.Save: Role.PLANNED,
    m.Saved: Role.NOBODY,
    # State for newcomers, and copies of it.
    m.StateRequest: Role.PLANNED,
    m.StateOffer: Role.NOBODY,
    m.Keep: Role.PLANNED,
    m.StateChunkRequest: Role.PLANNED,
    m.ReducedRequest: Role.PLANNED,
    m.TiedRequest: Role.PLANNED,
    m.TiedOffer: Role.NOBODY,
    # What the model says. Its stages work for whoever asks, so an invite that only lets look on is not enough.
    m.InferenceRequest: Role.MEMBER,
    m.InferenceAnswer: Role.NOBODY,
    m.InferenceOutput: Role.PLANNED,
    # Frames.
    m.Activation: Role.NEAR,
    m.Gradient: Role.NEAR,
    m.ExpertTokens: Role.PLANNED,
    m.ExpertOutput: Role.PLANNED,
    m.ReducePart: Role.GROUP_MEMBER,
    m.GatherPart: Role.GROUP_MEMBER,
    m.StateChunk: Role.PLANNED,
    m.ReducedChunk: Role.PLANNED,
    m.TiedChunk: Role.PLANNED,
    m.InferenceInput: Role.PLANNED,
    m.ProbeChunk: Role.MEMBER,
    # Records on the directory, by who signed them.
    m.SpecRecord: Role.OWNER,
    m.AdvertRecord: Role.MEMBER,
    m.PlanHead: Role.MEMBER,
}

_UNDER_A_PLAN: Final = (Role.PLANNED, Role.GROUP_MEMBER, Role.NEAR)

for _kind in (*m.Message.__args__, *m.FrameMeta.__args__, *m.Record.__args__):
    if _kind not in WHO_MAY:
        raise TypeError(f"{_kind.__name__} does not say who may send it: give it an entry in WHO_MAY")


class Verdict(Enum):
    ALLOWED = auto()
    REFUSED = auto()
    WAIT = auto()
    """Refused as long as we know no plan that gives the sender the role."""


class Gate:
    """Applies the table on behalf of one peer.

    Args:
        me: this peer.
    """

    def __init__(self, members: Members, me: PeerID) -> None:
        self.members, self._me = members, me
        self._plans: deque[Plan] = deque(maxlen=PLANS_SERVED)
        self._held: set[tuple[PeerID, Role]] = set()
        """What these plans were found to give."""

    def obey(self, plan: Plan) -> None:
        """`plan` is the one to go by from now on; those before it give places for a while longer."""
        self._plans.appendleft(plan)
        self._held.clear()
        self.members.planned = frozenset(peer for known in self._plans for peer in known.members)

    def verdict(self, source: PeerID, kind: type) -> Verdict:
        """Whether `source` may send us a message of `kind`."""
        role = WHO_MAY[kind]
        if source == self._me:
            return Verdict.ALLOWED
        level = self.members.access_level(source)
        if role is Role.OBSERVER:
            return _verdict(level >= AccessLevel.OBSERVER)
        if role is Role.OWNER:
            return _verdict(source == self.members.owner)
        if level < AccessLevel.MEMBER or role is Role.NOBODY:
            return Verdict.REFUSED
        if role is Role.MEMBER:
            return Verdict.ALLOWED
        return Verdict.ALLOWED if self._holds(source, role) else Verdict.WAIT

    @property
    def has_plan(self) -> bool:
        return bool(self._plans)

    def is_planned(self, peer: PeerID) -> bool:
        """Whether one of the plans obeyed of late has `peer` as a member."""
        return peer in (self.members.planned or ())

    def may_sign(self, signer: PeerID, kind: type) -> bool:
        """Whether a record of `kind` counts that `signer` put on the directory."""
        return self.verdict(signer, kind) is Verdict.ALLOWED

    def _holds(self, source: PeerID, role: Role) -> bool:
        if (source, role) not in self._held:
            if not _HOLDS[role](self._plans, self._me, source):
                return False
            self._held.add((source, role))
        return True


def _verdict(allowed: bool) -> Verdict:
    return Verdict.ALLOWED if allowed else Verdict.REFUSED


def _is_planned(plans: Collection[Plan], me: PeerID, source: PeerID) -> bool:
    return any(plan.has(source) for plan in plans)


def _is_group_member(plans: Collection[Plan], me: PeerID, source: PeerID) -> bool:
    ours = {group for plan in plans for group in plan.groups_of(me)}
    return any(not ours.isdisjoint(plan.groups_of(source)) for plan in plans)


def _is_near(plans: Collection[Plan], me: PeerID, source: PeerID) -> bool:
    ours, theirs = ({plan.stage_of(peer) for plan in plans} - {None} for peer in (me, source))
    return any(abs(here - there) <= 1 for here in ours for there in theirs if here is not None and there is not None)


_HOLDS: Final[Mapping[Role, Callable[[Collection[Plan], PeerID, PeerID], bool]]] = {
    Role.PLANNED: _is_planned,
    Role.GROUP_MEMBER: _is_group_member,
    Role.NEAR: _is_near,
}
assert set(_HOLDS) == set(_UNDER_A_PLAN)
