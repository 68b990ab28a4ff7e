"""Who has contributed what to a step, and who brings which of it to the reduction. Pure.

A microbatch that runs a second time may end up in the sums of two members: its first run was only doubted, not dead. So
what runs again is kept apart from the sum until the step is committed, and whoever opens the round says who leaves it
out. Then a repair changes nothing but the time. Only what ran twice without anyone knowing is counted twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import IndexSet
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Progress, RoundMember, RoundStart


@dataclass(slots=True)
class Tally:
    """One member's contribution to one step, as far as we know."""

    indices: IndexSet = field(default_factory=IndexSet)
    loss_sum: float = 0.0
    staleness_sum: int = 0
    apart: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Those of the indices that can be left out, with their loss and staleness."""

    @property
    def firm(self) -> IndexSet:
        """What cannot be taken out of the sum any more."""
        return self.indices.without(self.apart)

    def may_bring(self, indices: IndexSet) -> bool:
        """Whether a round that wants exactly these of us can have them."""
        return indices.without(self.apart) == self.firm and len(indices | self.indices) == len(self.indices)


@dataclass(frozen=True, slots=True)
class Shares:
    """What each member brings to a round."""

    brought: Mapping[PeerID, IndexSet]
    union: IndexSet
    duplicates: int
    loss_sum: float
    staleness_sum: int

    def round(
        self,
        ranked: Sequence[PeerID],
        bandwidths: Mapping[PeerID, float],
        *,
        stage: int,
        step: int,
        attempt: int,
        of: int,
    ) -> RoundStart:
        """Args:
        ranked: its members. Who is in no plan any more has no bandwidth: it reduces no more than the one with least.
        of: microbatches that a step has.
        """
        least = min(bandwidths.values())
        members = tuple(
            RoundMember(
                peer=peer,
                bandwidth=bandwidths.get(peer, least),
                indices=self.brought.get(peer, IndexSet()).to_bytes(),
            )
            for peer in ranked
        )
        return RoundStart(
            stage=stage,
            step=step,
            attempt=attempt,
            members=members,
            duplicates=self.duplicates,
            given_up=of - len(self.union),
            loss_sum=self.loss_sum,
            staleness_sum=self.staleness_sum,
        )


def share_out(ranked: Sequence[PeerID], tallies: Mapping[PeerID, Tally]) -> Shares:
    """Everything firm, and of what is kept apart each index once, from the first by rank that has it."""
    present = [(peer, tallies[peer]) for peer in ranked if peer in tallies]
    union = IndexSet()
    for _, tally in present:
        union = union | tally.firm
    brought: dict[PeerID, IndexSet] = {}
    loss_sum, staleness_sum = 0.0, 0
    for peer, tally in present:
        left_out = {index: values for index, values in tally.apart.items() if index in union}
        brought[peer] = tally.indices.without(left_out)
        union = union | brought[peer]
        loss_sum += tally.loss_sum - sum(loss for loss, _ in left_out.values())
        staleness_sum += tally.staleness_sum - sum(steps for _, steps in left_out.values())
    duplicates = sum(len(indices) for indices in brought.values()) - len(union)
    return Shares(brought, union, duplicates, loss_sum, staleness_sum)


@dataclass(kw_only=True, slots=True)
class Tallies:
    """What every member has said of every open step, ourselves included.

    Args:
        microbatches: M, per step.
    """

    me: PeerID
    microbatches: int
    _by_step: dict[int, dict[PeerID, Tally]] = field(default_factory=dict)
    _claimed: dict[int, IndexSet] = field(default_factory=dict)

    def of(self, step: int) -> Mapping[PeerID, Tally]:
        return self._by_step.get(step, {})

    def tally(self, step: int, peer: PeerID) -> Tally:
        tallies = self._by_step.setdefault(step, {})
        found = tallies.get(peer)
        if found is None:
            found = tallies[peer] = Tally()
        return found

    def indices(self, bitmap: bytes) -> IndexSet:
        return IndexSet.from_bytes(bitmap, count=self.microbatches)

    def may_bring(self, peer: PeerID, step: int, bitmap: bytes) -> bool:
        """Whether a round that wants exactly these of `peer` can have them."""
        return self.tally(step, peer).may_bring(self.indices(bitmap))

    def num_held(self, step: int, by: Iterable[PeerID]) -> int:
        """How many microbatches these have contributed together."""
        tallies, union = self.of(step), IndexSet()
        for peer in by:
            if peer in tallies:
                union = union | tallies[peer].indices
        return len(union)

    def is_held(self, step: int, index: int) -> bool:
        """Somebody has contributed it."""
        return bool([tally for tally in self._by_step.get(step, {}).values() if index in tally.indices])

    @property
    def has_own(self) -> bool:
        """Something of ours is not committed yet."""
        return any(len(tallies[self.me].indices) for tallies in self._by_step.values() if self.me in tallies)

    @property
    def steps(self) -> set[int]:
        """About which there is something to say."""
        return {*self._by_step, *self._claimed}

    def claim(self, step: int, index: int) -> None:
        """We have been granted it."""
        self._claimed.setdefault(step, IndexSet()).add(index)

    def add(self, step: int, index: int, *, loss: float, staleness_steps: int, apart: bool) -> bool:
        """We contribute it. Returns: False: we had before."""
        tally = self.tally(step, self.me)
        if index in tally.indices:
            return False
        tally.indices.add(index)
        if apart:
            tally.apart[index] = (loss, staleness_steps)
        tally.loss_sum += loss
        tally.staleness_sum += staleness_steps
        return True

    def take(self, source: PeerID, message: Progress) -> bool:
        """A mate's word on a step. Returns: whether it has contributed more."""
        tally, indices = self.tally(message.step, source), self.indices(message.indices)
        grown = len(indices) > len(tally.indices)
        if len(indices) >= len(tally.indices):  # Calls may overtake each other; a contribution only grows.
            tally.indices, tally.loss_sum, tally.staleness_sum = indices, message.loss_sum, message.staleness_sum
            tally.apart = {index: (loss, steps) for index, loss, steps in message.apart if index in indices}
        return grown

    def lose(self, peer: PeerID, step: int) -> IndexSet:
        """It died. Returns: what it had contributed to `step`."""
        return self._by_step.get(step, {}).pop(peer, Tally()).indices

    def forget_before(self, version: int) -> None:
        for table in (self._by_step, self._claimed):
            for step in [s for s in table if s < version]:
                del table[step]

    def word(self, step: int, *, stage: int, lead: PeerID, incarnation: int, count: int) -> Progress:
        """Ours on a step."""
        mine = self.tally(step, self.me)
        return Progress(
            stage=stage,
            step=step,
            lead=lead,
            indices=mine.indices.to_bytes(),
            claimed=self._claimed.get(step, IndexSet()).to_bytes(),
            loss_sum=mine.loss_sum,
            staleness_sum=mine.staleness_sum,
            apart=tuple((index, loss, steps) for index, (loss, steps) in sorted(mine.apart.items())),
            incarnation=incarnation,
            count=count,
        )
