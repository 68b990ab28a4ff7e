"""Track which microbatches each member has contributed to a step, and choose which of them enter the reduction. Pure.

A retried microbatch may end up in the sums of two members, if its first run was not lost. So its gradient is held out
of the sum until the commit, and the leader that opens the round says which members leave the gradient out. A repair
therefore costs time, but changes no result. Only a microbatch that ran twice without anyone knowing counts twice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Indices, bitmap_of, has_index, indices_from
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Progress, RoundMember, RoundStart
from shoal.protocol.wire_format import WireFormat


@dataclass(slots=True)
class Tally:
    """One member's contribution to one step, as far as we know: microbatches in its sum, or held out of it."""

    indices: Indices = 0
    loss_sum: float = 0.0
    staleness_sum: int = 0
    held_out: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Index of a microbatch that is kept apart, so that a round can omit it -> (its loss, its staleness in steps)."""

    @property
    def firm(self) -> Indices:
        """Indices of the microbatches in the member's sum itself, which no round can omit."""
        return self.indices & ~self._optional

    def may_bring(self, indices: Indices) -> bool:
        """True if this member can make a sum of exactly the microbatches `indices` for a round."""
        return indices & ~self._optional == self.firm and indices | self.indices == self.indices

    @property
    def _optional(self) -> Indices:
        return sum(1 << index for index in self.held_out)


def round_of(
    ranked: Sequence[PeerID],
    tallies: Mapping[PeerID, Tally],
    bandwidths: Mapping[PeerID, float],
    *,
    stage: int,
    step: int,
    attempt: int,
    microbatches: int,
    form: WireFormat,
    learners: Collection[PeerID] = (),
) -> RoundStart:
    """Return the message that opens a round. Each member brings the contributions in its sum; a contribution that is
    only held out of sums comes from the first member by rank that has it.

    Args:
        ranked: the round's members.
        bandwidths: a member missing from this dict (no plan names it any more) counts as the slowest.
        microbatches: number of microbatches per step.
        learners: the members that have weights alone.
    """
    present = [(peer, tallies[peer]) for peer in ranked if peer in tallies]
    union = 0
    for _, tally in present:
        union |= tally.firm
    brought: dict[PeerID, Indices] = {}
    loss_sum, staleness_sum = 0.0, 0
    for peer, tally in present:
        left_out = {index: values for index, values in tally.held_out.items() if union >> index & 1}
        brought[peer] = tally.indices & ~sum(1 << index for index in left_out)
        union |= brought[peer]
        loss_sum += tally.loss_sum - sum(loss for loss, _ in left_out.values())
        staleness_sum += tally.staleness_sum - sum(steps for _, steps in left_out.values())
    least = min(bandwidths.values())
    members = [RoundMember(peer, bandwidths.get(peer, least), bitmap_of(brought.get(peer, 0))) for peer in ranked]
    return RoundStart(
        stage=stage,
        step=step,
        attempt=attempt,
        members=tuple(members),
        duplicates=sum(indices.bit_count() for indices in brought.values()) - union.bit_count(),
        given_up=microbatches - union.bit_count(),
        loss_sum=loss_sum,
        staleness_sum=staleness_sum,
        form=form,
        learners=tuple(peer for peer in ranked if peer in learners),
    )


@dataclass(kw_only=True, slots=True)
class Tallies:
    """The contributions to each open step that each member, ourselves included, has reported."""

    me: PeerID
    microbatches: int
    _by_step: dict[int, dict[PeerID, Tally]] = field(default_factory=dict)
    _claimed: dict[int, Indices] = field(default_factory=dict)

    def of(self, step: int) -> Mapping[PeerID, Tally]:
        return self._by_step.get(step, {})

    def tally(self, step: int, peer: PeerID) -> Tally:
        tallies = self._by_step.setdefault(step, {})
        found = tallies.get(peer)
        if found is None:
            found = tallies[peer] = Tally()
        return found

    def may_bring(self, peer: PeerID, step: int, bitmap: bytes) -> bool:
        """True if `peer` can make a sum of exactly these microbatches (a bitmap) for a round."""
        return self.tally(step, peer).may_bring(indices_from(bitmap, count=self.microbatches))

    def held(self, step: int, by: Iterable[PeerID]) -> Indices:
        """Return the indices of the microbatches of `step` that at least one of these members has contributed."""
        tallies, union = self._by_step.get(step, {}), 0
        for peer in by:
            if peer in tallies:
                union |= tallies[peer].indices
        return union

    def is_held(self, step: int, index: int) -> bool:
        return has_index(self.held(step, self._by_step.get(step, ())), index)

    @property
    def has_own(self) -> bool:
        """True if a contribution of ours is not committed yet."""
        return any(tallies[self.me].indices for tallies in self._by_step.values() if self.me in tallies)

    @property
    def steps(self) -> set[int]:
        """The open steps of which a member has reported contributions, or of which microbatches were granted to us."""
        return {*self._by_step, *self._claimed}

    def claim(self, step: int, index: int) -> None:
        """Record that a microbatch was granted to us."""
        self._claimed[step] = self._claimed.get(step, 0) | 1 << index

    def add(self, step: int, index: int, *, loss: float, staleness_steps: int, held_out: bool) -> bool:
        """Record that we have contributed a microbatch. Return False if we had contributed it before."""
        tally = self.tally(step, self.me)
        if tally.indices >> index & 1:
            return False
        tally.indices |= 1 << index
        if held_out:
            tally.held_out[index] = (loss, staleness_steps)
        tally.loss_sum += loss
        tally.staleness_sum += staleness_steps
        return True

    def take(self, source: PeerID, message: Progress) -> bool:
        """Record a member's report on a step. Return True if the member's contribution has grown."""
        tally, indices = self.tally(message.step, source), indices_from(message.indices, count=self.microbatches)
        before, now = tally.indices.bit_count(), indices.bit_count()
        if now >= before:  # Reports may overtake each other; a contribution only grows.
            tally.indices, tally.loss_sum, tally.staleness_sum = indices, message.loss_sum, message.staleness_sum
            tally.held_out = {
                index: (loss, steps) for index, loss, steps in message.held_out if has_index(indices, index)
            }
        return now > before

    def lose(self, peer: PeerID, step: int) -> Indices:
        """Drop a dead member's contribution to `step`. Return the indices of its microbatches."""
        return self._by_step.get(step, {}).pop(peer, Tally()).indices

    def forget_before(self, version: int) -> None:
        for table in (self._by_step, self._claimed):
            for step in [s for s in table if s < version]:
                del table[step]

    def word(self, step: int, *, stage: int, leader: PeerID, incarnation: int, count: int) -> Progress:
        """Return our report on `step`: the microbatches that we have contributed, and our grants."""
        mine, claimed = self._by_step.get(step, {}).get(self.me) or Tally(), self._claimed.get(step, 0)
        return Progress(
            stage=stage,
            step=step,
            leader=leader,
            indices=bitmap_of(mine.indices),
            claimed=bitmap_of(claimed) if claimed else b"",
            loss_sum=mine.loss_sum,
            staleness_sum=mine.staleness_sum,
            held_out=tuple([(index, *mine.held_out[index]) for index in sorted(mine.held_out)])
            if mine.held_out
            else (),
            incarnation=incarnation,
            count=count,
        )
