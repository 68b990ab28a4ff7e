"""The part of one member's view of its group that other modules may read; the core changes it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.peer.replica.agreement import Agreement
from shoal.peer.replica.attestations import voters
from shoal.peer.replica.members import MembershipView
from shoal.peer.replica.rounds import Rounds
from shoal.peer.replica.tally import Tallies
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundStart
from shoal.protocol.wire_format import WireFormat


@dataclass(kw_only=True, slots=True)
class GroupView(MembershipView):
    """One member's view of its group: members, contributions, rounds and digests. `GroupCore` changes it.

    Args: microbatches: M, number per step; sums: number formats in which the group's rounds may send gradients.
    """

    stage: int
    steps: int
    microbatches: int
    tokens_per_microbatch: int
    has_loss: bool
    version: int = 0
    sums: tuple[WireFormat, ...] = ("fp32",)
    _tallies: Tallies = field(init=False)
    _rounds: Rounds = field(init=False)
    _agreement: Agreement = field(init=False)

    def __post_init__(self) -> None:
        self._rounds = Rounds(members=self, forms=self.sums)
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
    def holders(self) -> tuple[PeerID, ...]:
        """The other members that hold the stage's state; draining members come last."""
        return (*self.full_members, *(peer for peer in self.draining if peer not in self.learners))

    @property
    def joining(self) -> tuple[PeerID, ...]:
        """The other members that lack the stage's state, learners among them."""
        return tuple(peer for peer in self.group_peers if peer not in self.full_members)

    def share_of(self, peer: PeerID) -> float:
        """Return the peer's share of the traffic among the ready members, in [0, 1]."""
        shares = {member.peer: member.share for member in self.planned if member.peer in self.ranked}
        return shares.get(peer, 0.0) / sum(shares.values()) if shares else 0.0

    def has_place(self, peer: PeerID) -> bool:
        """True if the peer is this peer itself, a member by the plan, or draining."""
        return peer == self.me or self.is_near(peer)

    def lacks(self, step: int, index: int) -> bool:
        """True if `step` is still open and no member of our group is known to have contributed the microbatch."""
        return step >= self.version and not self._tallies.is_held(step, index)

    def voters(self, newcomer: PeerID) -> tuple[PeerID, ...]:
        """Return the voters: more than half of these holders must have signed a state before `newcomer` accepts it."""
        leaving = tuple(peer for peer in self.draining if peer not in self.learners)
        if self.ready and not self.in_plan and not self.is_learner:
            leaving = (*leaving, self.me)
        return voters(self.planned, newcomer, reported_empty=self.reported_empty, draining=leaving)

    def has_round(self, step: int) -> bool:
        return step in self._rounds.open

    def are_past(self, step: int) -> bool:
        """True if all other members are ready and past `step`, so that none needs the step's gradient from us."""
        others = (*self.group_peers, *self.draining)
        is_whole = len(self.ready_members) == len(self.group_peers)
        return is_whole and self._agreement.num_past(step, others) == len(others)

    def most_are_past(self, version: int) -> bool:
        """True if more than half of the other full members report a later version than `version`."""
        return 2 * self._agreement.num_past(version, self.full_members) > len(self.full_members)

    def waits_for(self) -> str:
        """Describe for the log why the group stays at our version."""
        missing = [index for index in range(self.microbatches) if self.lacks(self.version, index)]
        return standstill(self, self._rounds.open.get(self.version), missing)

    @property
    def owes(self) -> bool:
        """True while others need our contributions or our part in a round, or no other full member has our version."""
        has_mates = bool(self.full_members) and not self.is_learner
        alone = has_mates and not self._agreement.num_past(self.version - 1, self.full_members)
        return alone or self._tallies.has_own or self.me in self._rounds.named

    @property
    def round_peers(self) -> tuple[PeerID, ...]:
        """The other members of our rounds that are in progress, or have digests that are not compared yet."""
        return tuple(sorted(self._rounds.named - {self.me}))


def standstill(members: MembershipView, open_round: RoundStart | None, missing: Sequence[int]) -> str:
    """Describe what a group waits for. Args: missing: microbatches of the step that no member has contributed."""
    if open_round is not None:
        return "the round of " + ", ".join(member.peer[-8:] for member in open_round.members)
    what = f"microbatches {list(missing)}" if missing else "a round"
    if members.leader is None:
        return f"{what}, and a leader"
    if members.leader != members.me:
        return f"{what}, from the leader, {members.leader[-8:]}"
    others = ", ".join(peer[-8:] for peer in members.doubtful)
    return f"{what}; we lead, but these have not confirmed it: {others}" if others else f"{what}; we lead"
