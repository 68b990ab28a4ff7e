"""Who has contributed what to a step, and who brings which of it to the reduction. Pure.

A microbatch that runs a second time may end up in the sums of two members: its first run was only doubted, not dead. So
what runs again is kept apart from the sum until the step is committed, and whoever opens the round says who leaves it
out. Then a repair changes nothing but the time. Only what ran twice without anyone knowing is counted twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import IndexSet
from shoal.protocol.identity import PeerID


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
