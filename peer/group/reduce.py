"""The butterfly all-reduce of one round: reduce-scatter and all-gather, added in fp32, chunk by chunk.

The stage's gradient [N] is cut into one part per full member, sized by bandwidth. Every contributor sends each part of
its sum to that part's owner. The owner adds these **in rank order** (so that arrival times change no bit), divides by
the number of microbatches and sends the same bytes to all. So all members end with equal bits, each has sent and
received about 2 N numbers whatever the group's size, and the mean of a chunk returns before the next chunk has arrived.
A learner (a member with weights but no moments) contributes and receives the mean, but owns no part.

Numbers travel in the format `RoundStart.form`. If this format is narrower than fp32, the owner rounds the mean before
it sends the mean, and steps with the rounded mean itself. In formats of few bits (`kernels/codec`) rounding is
stochastic, so that it is unbiased without error feedback, and no residual is lost with a member.

A part's owner drops a contribution with NaN, infinity or a number beyond `CONTRIBUTION_MAX` from the chunk; all
members get the same bytes. Members refuse a finished chunk with a number that is not finite or beyond `REDUCED_MAX`. If
another member got a valid chunk, it gives us the mean; otherwise the round stands still and is made again without the
member that sent the chunk (`peer/membership/group_membership.py`).

Two threads use a `Reduction`. The event loop calls the methods. If a method returns a function that works on tensors,
this function runs on another thread, and afterwards the loop calls the method that records its end.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from shoal.peer.encoding.vectors import CONTRIBUTION_MAX, REDUCED_MAX, VECTORS, Vectors
from shoal.peer.pipeline.microbatch import indices_from
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundStart
from shoal.protocol.ports import Payload
from shoal.protocol.wire_format import WireFormat, is_in_few_bits, tensor_bytes


@dataclass(frozen=True, slots=True)
class MeanPiece:
    """Elements [start, start + size) of a reduced gradient, in the format in which they travel."""

    start: int
    size: int
    form: WireFormat
    payload: Payload | None = None
    """The encoded elements; None: they are encoded when they are sent."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Elements [start, start + len(values_C)) of a gradient, to be sent to `target`."""

    target: PeerID
    start: int
    values_C: Tensor
    form: WireFormat = "fp32"
    key: tuple[int, int] = (0, 0)
    """Seed of the stochastic rounding (`Vectors.piece_payload`)."""
    payload: Payload | None = None
    """The encoded elements; None: not encoded yet."""


def part_bounds(bandwidths: list[float], size: int) -> list[int]:
    """Return the first element of each member's part, and the end of the last part: `len(bandwidths) + 1` integers from
    0 to `size`. At least one bandwidth must be positive; a bandwidth of 0 gives an empty part."""
    total = sum(bandwidths)
    bounds, reached = [0], 0.0
    for bandwidth in bandwidths[:-1]:
        reached += bandwidth
        bounds.append(round(size * reached / total))
    return [*bounds, size]


class Reduction:
    """One member's side of one round. Args: size: N, numbers in the gradient; microbatches: M, number per step."""

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
        """Contributing peer -> number of microbatches in its sum, in rank order."""
        # A learner owns no part: the owner of a part must make the step itself, since the others rely on that.
        owning = [0.0 if member.peer in start.learners else member.bandwidth for member in start.members]
        self._bounds = part_bounds(owning, size)
        self._arrived: dict[int, dict[PeerID, Payload]] = {}
        self._under_way: set[int] = set()
        """Chunks that another thread is adding up or copying."""
        self._is_narrow = is_in_few_bits(start.form)
        self._rounded: dict[int, Payload] = {}
        """First element of a finished chunk -> its bytes in few bits, since encoding it again would round it again."""
        self.refused_from: set[PeerID] = set()
        """Members that sent finished chunks with invalid numbers."""
        self.num_taken = 0
        """Number of pieces received from other members, without repeats."""
        self._missing = {c for rank in range(len(self._peers)) for c in self._chunks(rank)}

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def pieces(self) -> tuple[MeanPiece, ...]:
        """The encoded pieces of the mean; empty in fp32 and bf16, where encoding it again gives the same bytes."""
        form, rounded = self.start.form, sorted(self._rounded.items())
        sizes = {start: self._end(self._owner(start), start) - start for start, _ in rounded}
        return tuple(MeanPiece(start, sizes[start], form, payload) for start, payload in rounded)

    @property
    def others(self) -> list[PeerID]:
        return [peer for peer in self._peers if peer != self._me]

    def missing_from(self) -> set[PeerID]:
        """Return the members from which contributions or finished chunks are still missing here."""
        waiting = {self._peers[self._owner(chunk)] for chunk in self._missing - self._under_way} - {self._me}
        for chunk in (self._missing - self._under_way) & set(self._chunks(self._rank)):
            waiting |= set(self._contributors) - set(self._arrived.get(chunk, ())) - {self._me}
        return waiting

    def begin(self, sum_N: Tensor) -> list[int]:
        """Use `sum_N`, float32 [N] on the host, as our own gradient sum. Return the chunks that can be added up now."""
        self._sum_N = sum_N if self._missing else None
        return [chunk for chunk in self._chunks(self._rank) if self._is_due(chunk)]

    def scatter_to(self, peer: PeerID) -> Iterator[Outgoing]:
        """Yield our contribution to the part that `peer` owns; nothing before our sum is made."""
        if self._me not in self._contributors or self._sum_N is None:
            return
        rank = self._peers.index(peer)
        for chunk in self._chunks(rank):
            values_C = self._sum_N[chunk : self._end(rank, chunk)]
            yield Outgoing(peer, chunk, values_C, self.start.form, self._key(chunk, self._me))

    def finished(self) -> list[Outgoing]:
        """Return the finished chunks of our part, to be sent again to all other members: chunks may have been lost."""
        return self._for_all(chunk for chunk in self._chunks(self._rank) if chunk not in self._missing)

    def part_arrived(self, source: PeerID, start: int, payload: Payload) -> bool:
        """Take a contribution to our part. Return True if its chunk can be added up now.

        Raises: RemoteError: `payload` is no chunk of our part, or `source` is no contributor.
        """
        if source not in self._contributors or start not in self._chunks(self._rank):
            raise RemoteError(source, f"sent a part at {start} that is not in round {self.start.step}")
        self._check(payload, self._end(self._rank, start) - start, source)
        if start not in self._missing or start in self._under_way:
            return False  # The contribution came twice.
        self.num_taken += source not in self._arrived.get(start, ())
        self._arrived.setdefault(start, {})[source] = payload
        return self._is_due(start)

    def adding(self, chunks: Iterable[int]) -> Callable[[], set[PeerID]]:
        """Return a function that adds up these chunks, without contributions that have invalid numbers, and returns the
        peers that sent such contributions. Call `added` after the function has run."""
        work = [(chunk, self._arrived.pop(chunk, {})) for chunk in chunks]
        self._under_way.update(chunk for chunk, _ in work)

        def add() -> set[PeerID]:
            return {peer for chunk, arrived in work for peer in self._add_up(chunk, arrived)}

        return add

    def added(self, chunks: Iterable[int]) -> list[Outgoing]:
        """Record that `chunks` are added up. Return their means as messages, one for each chunk and other member."""
        for chunk in chunks:
            self._done_with(chunk)
        return self._for_all(chunks)

    def result_arrived(self, source: PeerID, start: int, payload: Payload) -> Callable[[], bool] | None:
        """Take a finished chunk of another member's part. Return a function that copies the chunk into the mean; call
        `taken` if it returns True, or `refused` if it returns False (a number is invalid). Return None for a repeat:
        the optimizer may be reading the first copy. Raises: RemoteError: not a chunk of the sender's part."""
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
        """Record that a finished chunk from `source` was invalid; the chunk is still missing."""
        self._under_way.discard(start)
        self.refused_from.add(source)

    def taken(self, start: int) -> None:
        self._done_with(start)
        self.num_taken += 1

    def _is_due(self, chunk: int) -> bool:
        """True if all contributions to a chunk of our part are here and the chunk is not added up yet."""
        if self._sum_N is None or chunk not in self._missing or chunk in self._under_way:
            return False
        arrived = self._arrived.get(chunk, {})
        return all(peer in arrived for peer in self._contributors if peer != self._me)

    def _done_with(self, chunk: int) -> None:
        self._under_way.discard(chunk)
        self._missing.discard(chunk)
        if not self._missing:
            self._sum_N = None  # nobody needs it: each owner that finished its part already has our contribution

    def _for_all(self, chunks: Iterable[int]) -> list[Outgoing]:
        ready = [(chunk, self.mean_N[chunk : self._end(self._rank, chunk)]) for chunk in chunks]
        return [
            Outgoing(peer, chunk, mean_C, self.start.form, self._key(chunk), self._rounded.get(chunk))
            for peer in self.others
            for chunk, mean_C in ready
        ]

    def _add_up(self, chunk: int, arrived: dict[PeerID, Payload]) -> set[PeerID]:
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
        rounded = self._vectors.round_mean(
            mean_C, self.start.form, self._key(chunk)
        )  # we step with the same rounded numbers as the others
        if rounded is not None:
            self._rounded[chunk] = rounded
        return left_out

    def _key(self, chunk: int, contributor: PeerID | None = None) -> tuple[int, int]:
        """Return the seed for rounding a contribution to `chunk` or, if `contributor` is None, the chunk's mean."""
        words = f"{self.start.stage} {self.start.step} {chunk} {contributor or 'mean'}"
        digest = blake3(words.encode()).digest(length=8)
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def _chunks(self, rank: int) -> range:
        return range(self._bounds[rank], self._bounds[rank + 1], self._vectors.chunk)

    def _end(self, rank: int, start: int) -> int:
        return min(start + self._vectors.chunk, self._bounds[rank + 1])

    def _owner(self, start: int) -> int:
        return next(rank for rank in range(len(self._peers)) if start in self._chunks(rank))

    def _check(self, payload: Payload, size: int, source: PeerID) -> None:
        if len(payload) != tensor_bytes(self.start.form, size):
            raise RemoteError(source, f"sent {len(payload)} bytes for {size} numbers")
