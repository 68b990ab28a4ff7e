"""The butterfly: reduce-scatter and all-gather among the members of one round, added in fp32, chunk by chunk.

The stage's gradient [N] is cut into one part a member, sized by bandwidth. Every contributor sends each part to its
owner; the owner adds them **in rank order** (so that nobody's arrival time changes a bit), divides by the number of
microbatches and sends the same bytes to all. So all members end with equal bits, each has sent and received about 2 N
numbers whatever the group's size, and a chunk is on its way back before the next one has arrived. On the wire numbers
are as the run's spec says (`WireSpec.gradients`); narrower than fp32, the owner rounds the mean before it sends it, and
steps with that itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shoal.peer.pipeline.microbatch import IndexSet
from shoal.peer.vectors import VECTORS, Vectors
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundStart
from shoal.protocol.ports import Payload


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Elements [start, start + len(values_C)) for `target`."""

    target: PeerID
    start: int
    values_C: Tensor


def part_bounds(bandwidths: list[float], size: int) -> list[int]:
    """Where each member's part begins, and the end: `len(bandwidths) + 1` integers from 0 to `size`."""
    total = sum(bandwidths)
    bounds, reached = [0], 0.0
    for bandwidth in bandwidths[:-1]:
        reached += bandwidth
        bounds.append(round(size * reached / total))
    return [*bounds, size]


class Reduction:
    """One member's side of one round. Says what to send; takes what arrives.

    Args:
        sum_N: our gradient sum, float32 [N] on the host.
        microbatches: M.
    """

    def __init__(
        self, me: PeerID, start: RoundStart, sum_N: Tensor, *, microbatches: int, vectors: Vectors = VECTORS
    ) -> None:
        self.start = start
        self.mean_N = vectors.empty(sum_N.numel())
        self._vectors = vectors
        self._me = me
        self._sum_N = sum_N
        self._peers = [member.peer for member in start.members]
        self._rank = self._peers.index(me)
        counts = [len(IndexSet.from_bytes(member.indices, count=microbatches)) for member in start.members]
        self._contributors = [peer for peer, count in zip(self._peers, counts, strict=True) if count]
        self._scale = 1.0 / max(1, sum(counts))
        self._bounds = part_bounds([member.bandwidth for member in start.members], sum_N.numel())
        self._arrived: dict[int, dict[PeerID, Tensor]] = {}
        self.num_taken = 0
        """Pieces of others that were new."""
        self._missing = {c for rank in range(len(self._peers)) for c in self._chunks(rank)}

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def others(self) -> list[PeerID]:
        return [peer for peer in self._peers if peer != self._me]

    def missing_from(self) -> set[PeerID]:
        """Whom we still wait for."""
        waiting = {self._peers[self._owner(chunk)] for chunk in self._missing} - {self._me}
        for chunk in self._missing & set(self._chunks(self._rank)):
            waiting |= set(self._contributors) - set(self._arrived.get(chunk, ())) - {self._me}
        return waiting

    def scatter(self) -> Iterator[Outgoing]:
        """Our contribution to each other member's part. Part after part, beginning behind our own rank, so that the
        members do not all send to the first one at once."""
        for step in range(1, len(self._peers)):
            yield from self.scatter_to(self._peers[(self._rank + step) % len(self._peers)])

    def scatter_to(self, peer: PeerID) -> Iterator[Outgoing]:
        """Of that, what goes to one of them."""
        if self._me not in self._contributors:
            return
        rank = self._peers.index(peer)
        for chunk in self._chunks(rank):
            yield Outgoing(peer, chunk, self._sum_N[chunk : self._end(rank, chunk)])

    def own_chunks(self) -> list[Outgoing]:
        """Chunks of our part that need nothing from others (a lone contributor, or a group of one)."""
        return [out for chunk in self._chunks(self._rank) for out in self._finish(chunk)]

    def finished(self) -> list[Outgoing]:
        """What others have of us so far, unless it was lost on the way: the finished chunks of our part."""
        chunks = [chunk for chunk in self._chunks(self._rank) if chunk not in self._missing]
        return [
            Outgoing(peer, chunk, self.mean_N[chunk : self._end(self._rank, chunk)])
            for peer in self.others
            for chunk in chunks
        ]

    def part_arrived(self, source: PeerID, start: int, payload: Payload) -> list[Outgoing]:
        """A contribution to our part. Returns: the finished chunk for every other member, once all are there.

        Raises: RemoteError: not a chunk of this round, or not from a contributor.
        """
        if source not in self._contributors or start not in self._chunks(self._rank):
            raise RemoteError(source, f"sent a part at {start} that round {self.start.step} has not")
        values_C = self._values(payload, self._end(self._rank, start) - start, source)
        if start not in self._missing:
            return []  # It came twice.
        self.num_taken += source not in self._arrived.get(start, ())
        self._arrived.setdefault(start, {})[source] = values_C
        return self._finish(start)

    def result_arrived(self, source: PeerID, start: int, payload: Payload) -> None:
        """A finished chunk of another member's part. Raises: RemoteError."""
        rank = self._peers.index(source) if source in self._peers else -1
        if rank < 0 or rank == self._rank or start not in self._chunks(rank):
            raise RemoteError(source, f"sent a result at {start} that is not its part of round {self.start.step}")
        end = self._end(rank, start)
        values_C = self._values(payload, end - start, source)
        if start in self._missing:  # else it came twice, and the optimizer may be reading what came first
            self.mean_N[start:end] = values_C
            self._missing.discard(start)
            self.num_taken += 1

    def _finish(self, start: int) -> list[Outgoing]:
        others = [peer for peer in self._contributors if peer != self._me]
        arrived = self._arrived.get(start, {})
        if start not in self._missing or any(peer not in arrived for peer in others):
            return []
        end = self._end(self._rank, start)
        mean_C = self.mean_N[start:end].zero_()
        for peer in self._contributors:
            mean_C += self._sum_N[start:end] if peer == self._me else arrived[peer]
        mean_C *= self._scale
        self._vectors.round_gradient(mean_C)  # we step with what the others get
        self._arrived.pop(start, None)
        self._missing.discard(start)
        return [Outgoing(peer, start, mean_C) for peer in self.others]

    def _chunks(self, rank: int) -> range:
        return range(self._bounds[rank], self._bounds[rank + 1], self._vectors.chunk)

    def _end(self, rank: int, start: int) -> int:
        return min(start + self._vectors.chunk, self._bounds[rank + 1])

    def _owner(self, start: int) -> int:
        return next(rank for rank in range(len(self._peers)) if start in self._chunks(rank))

    def _values(self, payload: Payload, size: int, source: PeerID) -> Tensor:
        if len(payload) != self._vectors.gradient_bytes * size:
            raise RemoteError(source, f"sent {len(payload)} bytes for {size} numbers")
        return self._vectors.gradient_of(payload)
