"""The butterfly: reduce-scatter and all-gather among the members of one round, added in fp32, chunk by chunk.

The stage's gradient [N] is cut into one part a member, sized by bandwidth. Every contributor sends each part to its
owner; the owner adds them **in rank order** (so that nobody's arrival time changes a bit), divides by the number of
microbatches and sends the same bytes to all. So all members end with equal bits, each has sent and received about 2 N
numbers whatever the group's size, and a chunk is on its way back before the next one has arrived. A light member, which
holds weights alone, owns no part: it contributes, and gets the mean. On the wire numbers
have the format that whoever opens the round says (`RoundStart.form`, by the run's spec and the plan). Narrower than
fp32, the owner rounds the mean before it sends it, and steps with that itself. In few bits (`kernels/codec`) sums and
means are rounded by chance, so that they are right in the mean: nobody keeps what rounding has left over, and nothing
is lost with a member.

Each piece is looked at before it is added. A contribution with NaN, infinity or a number beyond `CONTRIBUTION_MAX` is
left out of its chunk, and the mean is that of the others: the owner of the part alone decides so, and all members get
the same bytes. A finished chunk with such a number is not taken. If another member got a good one, it gives us the
mean; else the round stands still, and is made again without that sender (`peer/tenures.py`).

A `Reduction` is used by two threads. The event loop keeps the books: it takes what arrives and says what to send. What
it gets back as a function touches tensors, and runs elsewhere; then the loop books that it is done.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from shoal.peer.pipeline.microbatch import indices_from
from shoal.peer.vectors import CONTRIBUTION_MAX, REDUCED_MAX, VECTORS, Vectors
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundStart
from shoal.protocol.ports import Payload
from shoal.protocol.wire_format import WireFormat, is_in_few_bits, tensor_bytes


@dataclass(frozen=True, slots=True)
class MeanPiece:
    """Elements [start, start + size) of a reduced gradient, as they travel."""

    start: int
    size: int
    form: WireFormat
    payload: Payload | None = None
    """None: it is made when it is sent."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Elements [start, start + len(values_C)) for `target`."""

    target: PeerID
    start: int
    values_C: Tensor
    form: WireFormat = "fp32"
    """The format in which they travel."""
    key: tuple[int, int] = (0, 0)
    """The seed of their stochastic rounding (`Vectors.piece_payload`)."""
    payload: Payload | None = None
    """Their bytes, where they are made already."""


def part_bounds(bandwidths: list[float], size: int) -> list[int]:
    """Where each member's part begins, and the end: `len(bandwidths) + 1` integers from 0 to `size`. At least one
    bandwidth is more than 0; whose is 0 has an empty part."""
    total = sum(bandwidths)
    bounds, reached = [0], 0.0
    for bandwidth in bandwidths[:-1]:
        reached += bandwidth
        bounds.append(round(size * reached / total))
    return [*bounds, size]


class Reduction:
    """One member's side of one round. It says what to send and what to add up, and takes what arrives.

    Args:
        size: N.
        microbatches: M.
    """

    def __init__(
        self, me: PeerID, start: RoundStart, size: int, *, microbatches: int, vectors: Vectors = VECTORS
    ) -> None:
        self.start = start
        self.mean_N = vectors.empty(size)
        self._vectors = vectors
        self._me = me
        self._sum_N: Tensor | None = None
        self._peers = [member.peer for member in start.members]
        self._rank = self._peers.index(me)
        counts = [indices_from(member.indices, count=microbatches).bit_count() for member in start.members]
        self._contributors = {peer: count for peer, count in zip(self._peers, counts, strict=True) if count}
        """Peer -> its microbatches, by rank."""
        # Who holds weights alone owns no part: whoever owns one steps with it, and others count on that.
        owning = [0.0 if member.peer in start.light else member.bandwidth for member in start.members]
        self._bounds = part_bounds(owning, size)
        self._arrived: dict[int, dict[PeerID, Payload]] = {}
        self._under_way: set[int] = set()
        """Chunks whose numbers are being added up or copied on another thread."""
        self._is_narrow = is_in_few_bits(start.form)
        self._rounded: dict[int, Payload] = {}
        """Finished chunks as bytes, where they cannot be made again from the mean: in few bits."""
        self.refused_from: set[PeerID] = set()
        """The members whose finished chunks were no part of a mean."""
        self.num_taken = 0
        """Pieces of others that were new."""
        self._missing = {c for rank in range(len(self._peers)) for c in self._chunks(rank)}

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def pieces(self) -> tuple[MeanPiece, ...]:
        """The whole mean, once it is complete, as it has travelled. In fp32 and bf16 none: what is made of the mean
        itself has as many bytes."""
        form, rounded = self.start.form, sorted(self._rounded.items())
        return tuple(MeanPiece(start, self._size_of(start), form, payload) for start, payload in rounded)

    @property
    def others(self) -> list[PeerID]:
        return [peer for peer in self._peers if peer != self._me]

    def missing_from(self) -> set[PeerID]:
        """Whom we still wait for."""
        waiting = {self._peers[self._owner(chunk)] for chunk in self._missing - self._under_way} - {self._me}
        for chunk in (self._missing - self._under_way) & set(self._chunks(self._rank)):
            waiting |= set(self._contributors) - set(self._arrived.get(chunk, ())) - {self._me}
        return waiting

    def begin(self, sum_N: Tensor) -> list[int]:
        """Our own gradient sum is made, float32 [N] on the host. Returns: the chunks that can be added up now."""
        self._sum_N = sum_N if self._missing else None
        return [chunk for chunk in self._chunks(self._rank) if self._is_due(chunk)]

    def scatter(self) -> Iterator[Outgoing]:
        """Our contribution to each other member's part. Part after part, beginning behind our own rank, so that the
        members do not all send to the first one at once."""
        for step in range(1, len(self._peers)):
            yield from self.scatter_to(self._peers[(self._rank + step) % len(self._peers)])

    def scatter_to(self, peer: PeerID) -> Iterator[Outgoing]:
        """Of that, what goes to one of them; nothing before our sum is made."""
        if self._me not in self._contributors or self._sum_N is None:
            return
        rank = self._peers.index(peer)
        for chunk in self._chunks(rank):
            values_C = self._sum_N[chunk : self._end(rank, chunk)]
            yield Outgoing(peer, chunk, values_C, self.start.form, self._key(chunk, self._me))

    def finished(self) -> list[Outgoing]:
        """What others have of us so far, unless it was lost on the way: the finished chunks of our part."""
        return self._for_all(chunk for chunk in self._chunks(self._rank) if chunk not in self._missing)

    def part_arrived(self, source: PeerID, start: int, payload: Payload) -> bool:
        """A contribution to our part. Returns: whether the chunk can be added up now.

        Raises: RemoteError: not a chunk of this round, or not from a contributor.
        """
        if source not in self._contributors or start not in self._chunks(self._rank):
            raise RemoteError(source, f"sent a part at {start} that round {self.start.step} has not")
        self._check(payload, self._end(self._rank, start) - start, source)
        if start not in self._missing or start in self._under_way:
            return False  # It came twice.
        self.num_taken += source not in self._arrived.get(start, ())
        self._arrived.setdefault(start, {})[source] = payload
        return self._is_due(start)

    def adding(self, chunks: Iterable[int]) -> Callable[[], set[PeerID]]:
        """Returns: what adds up these chunks of our part, and says whose contributions it has left out. Then they are
        `added`."""
        work = [(chunk, self._arrived.pop(chunk, {})) for chunk in chunks]
        self._under_way.update(chunk for chunk, _ in work)

        def add() -> set[PeerID]:
            return {peer for chunk, arrived in work for peer in self._add_up(chunk, arrived)}

        return add

    def added(self, chunks: Iterable[int]) -> list[Outgoing]:
        """Returns: the finished chunks, for every other member."""
        for chunk in chunks:
            self._done_with(chunk)
        return self._for_all(chunks)

    def result_arrived(self, source: PeerID, start: int, payload: Payload) -> Callable[[], bool] | None:
        """A finished chunk of another member's part. Returns: what copies it into the mean, after which it is `taken`,
        or finds a number in it that no mean has: then it is `refused`; None if it came twice, since the optimizer may
        be reading what came first. Raises: RemoteError."""
        rank = self._peers.index(source) if source in self._peers else -1
        if rank < 0 or rank == self._rank or start not in self._chunks(rank):
            raise RemoteError(source, f"sent a result at {start} that is not its part of round {self.start.step}")
        end = self._end(rank, start)
        self._check(payload, end - start, source)
        if start not in self._missing or start in self._under_way:
            return None
        self._under_way.add(start)

        def take() -> bool:
            mean_C = self._vectors.piece_of(payload, self.start.form, end - start)
            if not self._vectors.is_within(mean_C, REDUCED_MAX):
                return False
            self.mean_N[start:end] = mean_C
            if self._is_narrow:
                self._rounded[start] = payload
            return True

        return take

    def refused(self, source: PeerID, start: int) -> None:
        """It is still missing."""
        self._under_way.discard(start)
        self.refused_from.add(source)

    def taken(self, start: int) -> None:
        self._done_with(start)
        self.num_taken += 1

    def _is_due(self, chunk: int) -> bool:
        """Whether all that a chunk of our part is the sum of is here, and nobody has added it up."""
        if self._sum_N is None or chunk not in self._missing or chunk in self._under_way:
            return False
        arrived = self._arrived.get(chunk, {})
        return all(peer in arrived for peer in self._contributors if peer != self._me)

    def _done_with(self, chunk: int) -> None:
        self._under_way.discard(chunk)
        self._missing.discard(chunk)
        if not self._missing:
            self._sum_N = None  # whoever has sent us its part of the mean had ours of the sum

    def _for_all(self, chunks: Iterable[int]) -> list[Outgoing]:
        ready = [(chunk, self.mean_N[chunk : self._end(self._rank, chunk)]) for chunk in chunks]
        return [
            Outgoing(peer, chunk, mean_C, self.start.form, self._key(chunk), self._rounded.get(chunk))
            for peer in self.others
            for chunk, mean_C in ready
        ]

    def _add_up(self, chunk: int, arrived: dict[PeerID, Payload]) -> set[PeerID]:
        """Returns: the contributors of which it has added nothing."""
        assert self._sum_N is not None, "a chunk is added up before our own sum is made"
        end = self._end(self._rank, chunk)
        mean_C = self.mean_N[chunk:end].zero_()
        left_out: set[PeerID] = set()
        for peer in self._contributors:
            if peer == self._me:
                values_C = self._sum_N[chunk:end]
            else:
                values_C = self._vectors.piece_of(arrived[peer], self.start.form, end - chunk)
            if self._vectors.is_within(values_C, CONTRIBUTION_MAX):
                mean_C += values_C
            else:
                left_out.add(peer)
        mean_C *= 1.0 / max(1, sum(count for peer, count in self._contributors.items() if peer not in left_out))
        rounded = self._vectors.round_mean(mean_C, self.start.form, self._key(chunk))  # we step with what others get
        if rounded is not None:
            self._rounded[chunk] = rounded
        return left_out

    def _key(self, chunk: int, contributor: PeerID | None = None) -> tuple[int, int]:
        """The seed for the stochastic rounding of one piece: of what `contributor` sends of this chunk, or, if None, of
        the chunk's mean. It is another one for each stage, step, chunk and sender."""
        words = f"{self.start.stage} {self.start.step} {chunk} {contributor or 'mean'}"
        digest = blake3(words.encode()).digest(length=8)
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def _chunks(self, rank: int) -> range:
        return range(self._bounds[rank], self._bounds[rank + 1], self._vectors.chunk)

    def _end(self, rank: int, start: int) -> int:
        return min(start + self._vectors.chunk, self._bounds[rank + 1])

    def _size_of(self, start: int) -> int:
        return self._end(self._owner(start), start) - start

    def _owner(self, start: int) -> int:
        return next(rank for rank in range(len(self._peers)) if start in self._chunks(rank))

    def _check(self, payload: Payload, size: int, source: PeerID) -> None:
        if len(payload) != tensor_bytes(self.start.form, size):
            raise RemoteError(source, f"sent {len(payload)} bytes for {size} numbers")
