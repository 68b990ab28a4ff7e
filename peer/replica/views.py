"""What others may read of the parts of a replica's core. Only `core.py` and `member.py` give them events."""

from dataclasses import dataclass, field
from typing import Protocol

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.agreement import Agreement
from shoal.peer.replica.attestations import voters
from shoal.peer.replica.flow import Control, Window
from shoal.peer.replica.job import Job
from shoal.peer.replica.members import MembershipView
from shoal.peer.replica.rounds import Rounds
from shoal.peer.replica.standstill import standstill
from shoal.peer.replica.tally import Tallies
from shoal.protocol.identity import PeerID
from shoal.protocol.wire_format import WireFormat


@dataclass(kw_only=True, slots=True)
class GroupView:
    """One member's view of its group. `GroupCore` changes it.

    Args: microbatches: M, per step. sums: formats of the group's rounds.
    """

    me: PeerID
    stage: int
    steps: int
    microbatches: int
    tokens_per_microbatch: int
    has_loss: bool
    version: int = 0
    sums: tuple[WireFormat, ...] = ("fp32",)
    _members: MembershipView = field(init=False)
    _tallies: Tallies = field(init=False)
    _rounds: Rounds = field(init=False)
    _agreement: Agreement = field(init=False)

    def __post_init__(self) -> None:
        self._members = MembershipView(me=self.me)
        self._rounds = Rounds(members=self._members, forms=self.sums)
        self._tallies = Tallies(me=self.me, microbatches=self.microbatches)
        self._agreement = Agreement(
            me=self.me,
            stage=self.stage,
            microbatches=self.microbatches,
            tokens_per_microbatch=self.tokens_per_microbatch,
            has_loss=self.has_loss,
        )

    # --- members ---

    @property
    def ready(self) -> bool:
        return self._members.ready

    @property
    def group_peers(self) -> tuple[PeerID, ...]:
        """The other members of the group by the plan, ready or not, in rank order."""
        return self._members.group_peers

    @property
    def ready_members(self) -> tuple[PeerID, ...]:
        return self._members.ready_members

    @property
    def full_members(self) -> tuple[PeerID, ...]:
        """The ready others that hold the state, not weights alone."""
        return self._members.full_members

    @property
    def is_learner(self) -> bool:
        """True while we take part with weights alone."""
        return self._members.is_learner

    @property
    def open_members(self) -> tuple[PeerID, ...]:
        """The ready others that take traffic."""
        return self._members.open_members

    @property
    def draining(self) -> tuple[PeerID, ...]:
        """Ready peers that are no longer in the plan: they drain."""
        return self._members.draining

    @property
    def holders(self) -> tuple[PeerID, ...]:
        """The other holders of the stage's state; draining ones come last."""
        learners = self._members.learners
        return (*self.full_members, *(peer for peer in self.draining if peer not in learners))

    @property
    def leader(self) -> PeerID | None:
        """The first ready and open member by rank that holds the state; if all drain, the first that holds it."""
        return self._members.leader

    @property
    def standing(self) -> tuple[int, int]:
        """(Our rank, counted from 0, among the members that hold the state; their number)."""
        return self._members.standing

    @property
    def is_leader(self) -> bool:
        """True if we are the leader and every member that could name another has named us."""
        return self._members.is_leader

    def share_of(self, peer: PeerID) -> float:
        """Return the peer's share of the traffic among the ready members, in [0, 1]."""
        members = self._members
        shares = {member.peer: member.share for member in members.planned if member.peer in members.ranked}
        return shares.get(peer, 0.0) / sum(shares.values()) if shares else 0.0

    def has_place(self, peer: PeerID) -> bool:
        """True for ourselves, the members by the plan, and draining peers."""
        return peer == self.me or self._members.is_near(peer)

    def is_gone(self, peer: PeerID) -> bool:
        """True if nothing more will come from the peer: it died, is unreachable and not ready, or has left."""
        return self._members.is_gone(peer)

    def lacks(self, step: int, index: int) -> bool:
        """True if no member here has contributed the microbatch, as far as we know."""
        return step >= self.version and not self._tallies.is_held(step, index)

    def voters(self, newcomer: PeerID) -> tuple[PeerID, ...]:
        """Return the voters for a state that `newcomer` fetches: more than half of them must have signed it."""
        members = self._members
        leaving = tuple(peer for peer in self.draining if peer not in members.learners)
        if self.ready and not members.in_plan and not members.is_learner:
            leaving = (*leaving, self.me)
        return voters(members.planned, newcomer, reported_empty=members.reported_empty, draining=leaving)

    def has_round(self, step: int) -> bool:
        """True if a round of `step` is open."""
        return step in self._rounds.open

    def are_past(self, step: int) -> bool:
        """True if all others are ready and past `step`: its gradient helps no peer."""
        is_whole = len(self.ready_members) == len(self.group_peers)
        return is_whole and self._agreement.are_past(step, (*self.group_peers, *self.draining))

    def most_are_past(self, version: int) -> bool:
        """True if more than half of the members that hold the state say that they are past `version`."""
        return 2 * self._agreement.num_past(version, self.full_members) > len(self.full_members)

    def waits_for(self) -> str:
        """Return what keeps us at this version, for the log."""
        missing = [index for index in range(self.microbatches) if self.lacks(self.version, index)]
        return standstill(self._members, self._rounds.open.get(self.version), missing)

    @property
    def owes(self) -> bool:
        """True while others need us: for our contributions, for a round, or for a version that no other has reached."""
        alone = not self.is_learner and self._agreement.is_alone_at(self.version, self.full_members)
        return alone or self._tallies.has_own or self.me in self._rounds.named

    @property
    def round_peers(self) -> tuple[PeerID, ...]:
        """The other members of rounds with results that are not compared yet."""
        return tuple(sorted(self._rounds.named - {self.me}))


class PipelineView(Protocol):
    """The microbatches in flight at one replica; `Schedule` documents it."""

    stage: int
    version: int
    window: Window | None
    control: Control | None

    @property
    def room(self) -> int: ...

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    def holds(self, microbatch: Microbatch) -> bool: ...

    def takes_from(self, source: PeerID) -> bool: ...

    def awaits(self, microbatch: Microbatch, source: PeerID) -> bool: ...

    def goes_on(self, job: Job) -> bool: ...

    def whereabouts(self, now_s: float) -> str: ...
