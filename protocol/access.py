"""The access table: which role may send each message. `Endpoint` enforces it before any handler runs. Pure.

A handler can therefore rely on the sender's role. The handler itself checks what the table cannot know, such as whether
we requested the data that this sender sends.

A role follows from a plan (the signed layout of the swarm), and two peers never adopt a new plan at the same moment.
Hence a role under any of the last `PLANS_SERVED` plans counts. If no known plan permits a member's message, the message
waits briefly for the next plan before it is refused. Two members may have their roles under different plans: a draining
member, which the newest plan removed from its group, still finishes the current reduction with a newly added member.
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
    """The role that a sender needs. All but `OBSERVER` require a certified member (or the owner) that is not
    excluded."""

    NOBODY = auto()
    OBSERVER = auto()
    """Any holder of an invite, observer invites included."""
    MEMBER = auto()
    """Any holder of an invite that permits training."""
    PLANNED = auto()
    """A member (also a spare, which holds no layers) of one of the last `PLANS_SERVED` plans that this peer obeyed."""
    GROUP_MEMBER = auto()
    """A member with our stage or expert; its place and ours may be in different plans of the last `PLANS_SERVED`."""
    NEAR = auto()
    """A member with our stage or a neighbouring one, under these plans as well. Sharing an expert does not count."""
    OWNER = auto()


WHO_MAY: Final[Mapping[type, Role]] = {
    # A peer and the coordinator. A plan and the owner's mandate carry their own signatures, so any member may deliver
    # them.
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
    m.TransferLeadership: Role.MEMBER,
    m.Leave: Role.MEMBER,
    m.Reset: Role.MEMBER,
    m.Renew: Role.PLANNED,
    m.Renewed: Role.NOBODY,
    # Observers.
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
    m.PresenceUpdate: Role.PLANNED,
    m.Progress: Role.GROUP_MEMBER,
    m.RoundStart: Role.GROUP_MEMBER,
    m.RoundEnded: Role.GROUP_MEMBER,
    m.Digest: Role.GROUP_MEMBER,
    m.Attestation: Role.PLANNED,  # a draining member sends it, too; the handler checks the rest
    m.Claim: Role.GROUP_MEMBER,
    m.Grant: Role.NOBODY,
    m.Repair: Role.PLANNED,
    m.Again: Role.GROUP_MEMBER,
    m.Reject: Role.NEAR,
    m.ExpertDone: Role.PLANNED,
    m.ValidationResult: Role.GROUP_MEMBER,
    m.Halt: Role.PLANNED,
    m.Halted: Role.NOBODY,
    m.Save: Role.PLANNED,
    m.Saved: Role.NOBODY,
    # State for newcomers, and backup copies of state.
    m.StateRequest: Role.PLANNED,
    m.StateOffer: Role.NOBODY,
    m.Keep: Role.PLANNED,
    m.StateChunkRequest: Role.PLANNED,
    m.ReducedRequest: Role.PLANNED,
    m.TiedRequest: Role.PLANNED,
    m.TiedOffer: Role.NOBODY,
    # Inference costs the stages work, so an observer invite is not enough.
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
    # Directory records, by their signer.
    m.SpecRecord: Role.OWNER,
    m.AdvertRecord: Role.MEMBER,
    m.PlanHead: Role.MEMBER,
}

_UNDER_A_PLAN: Final = (Role.PLANNED, Role.GROUP_MEMBER, Role.NEAR)

for _kind in (*m.Message.__args__, *m.FrameMeta.__args__, *m.Record.__args__):
    if _kind not in WHO_MAY:
        raise TypeError(f"{_kind.__name__} has no role for its sender: give it an entry in WHO_MAY")


class Verdict(Enum):
    ALLOWED = auto()
    REFUSED = auto()
    WAIT = auto()
    """Let the message wait; refuse it unless a plan that gives its sender the role arrives in time."""


class Gate:
    """Applies the access table to messages that the peer `me` receives."""

    def __init__(self, members: Members, me: PeerID) -> None:
        self.members, self._me = members, me
        self._plans: deque[Plan] = deque(maxlen=PLANS_SERVED)
        self._held: set[tuple[PeerID, Role]] = set()
        """Cache of the (peer, role) pairs that the last `PLANS_SERVED` plans grant."""

    def obey(self, plan: Plan) -> None:
        """Take roles from `plan` from now on; roles under the preceding `PLANS_SERVED` - 1 plans stay valid."""
        self._plans.appendleft(plan)
        self._held.clear()
        self.members.planned = frozenset(peer for known in self._plans for peer in known.members)

    def verdict(self, source: PeerID, kind: type) -> Verdict:
        """Decide if `source` may send us a message of `kind`."""
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
        """True if `peer` is a member, or a spare, in one of the last `PLANS_SERVED` plans that we obeyed."""
        return peer in (self.members.planned or ())

    def may_sign(self, signer: PeerID, kind: type) -> bool:
        """True if `signer` may store a record of `kind` in the directory."""
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
