"""Fetch a committed step's reduced gradient from another member, after we missed the end of a round or joined.

The whole gradient in float32 has eight times the bytes of a round in 4 bits, and a member that is behind often only has
to wait for pieces that are on their way. So it first asks one member that owes it a piece, and waits if that member
answers. If the round stands still, the members that are behind may follow a later attempt than the finished one, and
wait for pieces from each other that never come. So each of them then asks all members that owe it pieces, and goes on
waiting only if one answers that its pieces have not left yet (on a slow line pieces stand behind activations for
minutes). Otherwise it fetches the gradient from a member past the step.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from shoal.peer.encoding.vectors import REDUCED_MAX
from shoal.peer.group.pieces import Pieces
from shoal.peer.group.reduce import MeanPiece
from shoal.peer.group.reductions import Reductions
from shoal.peer.pipeline.shard import Shard
from shoal.peer.replica.views import GroupView
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Digest, ReducedChunk, ReducedRequest
from shoal.protocol.ports import Compute, Payload
from shoal.protocol.wire_format import tensor_bytes

logger = logging.getLogger(__name__)


Answer = Literal["taken", "on its way", "nothing"]
"""The result of a request. Taken: the gradient has arrived. On its way: the round's own pieces are still being sent to
us. Nothing: the other member does not have the gradient yet."""


@dataclass(slots=True)
class _Fetch:
    mate: PeerID
    mean_N: Tensor
    pieces: dict[int, MeanPiece] = field(default_factory=dict)
    """First element of a received piece -> the piece."""
    num_taken: int = 0
    is_lost: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_whole(self) -> bool:
        return self.num_taken == self.mean_N.numel()

    @property
    def as_it_came(self) -> tuple[MeanPiece, ...]:
        """The received pieces, still encoded; empty if one came as exact numbers, since its bytes are not kept."""
        pieces = tuple(self.pieces.values())
        return pieces if all(piece.payload is not None for piece in pieces) else ()

    def overlaps(self, start: int, size: int) -> bool:
        return any(start < piece.start + piece.size and piece.start < start + size for piece in self.pieces.values())


class CatchingUp:
    """Ask for reduced gradients that this replica lacks, and answer such requests of other members.

    Args:
        kept: the reduced gradients that this replica keeps.
        wanted_from: returns the first step of which a part of our state still lacks the reduced gradient.
        on_mean: called with (step, whole gradient, its pieces as they travelled) for a step that we have not made.
        on_behind: called with a member from which we must fetch the state: it no longer has the gradient that we need.
    """

    def __init__(
        self,
        group: GroupView,
        runtime: Shard,
        *,
        endpoint: Endpoint,
        compute: Compute,
        pieces: Pieces,
        kept: Reductions,
        wanted_from: Callable[[], int],
        on_mean: Callable[[int, Tensor, tuple[MeanPiece, ...]], None],
        on_behind: Callable[[PeerID], None],
    ) -> None:
        self._group, self._stage = group, group.stage
        self._size, self._vectors = runtime.num_parameters, runtime.vectors
        self._endpoint, self._compute, self._pieces = endpoint, compute, pieces
        self._kept, self._wanted_from = kept, wanted_from
        self._on_mean, self._on_behind = on_mean, on_behind
        self._fetches: dict[int, _Fetch] = {}

    def install(self) -> None:
        self._endpoint.on(ReducedRequest, self._on_request, stage=self._stage)
        self._endpoint.on_frame(ReducedChunk, self._on_chunk, stage=self._stage)

    def mate_lost(self, peer: PeerID) -> None:
        """Give up the fetches from `peer`, which died or left the group."""
        for fetch in self._fetches.values():
            if fetch.mate == peer:
                fetch.is_lost = True
                fetch.over.set()

    async def catch_up(self, mate: PeerID, step: int, *, owing: Sequence[PeerID], is_still: bool) -> None:
        """Fetch the reduced gradient of `step` from `mate`, which is past `step`, unless our round's pieces are on
        their way.

        Args:
            owing: members that owe us a piece of our round of `step`: all are asked before `mate` if `is_still`, else
                one.
            is_still: we have no round of `step`; or no piece has come for long, although we sent our pieces again.
        """
        if step in self._fetches or not self._is_lacking(step):
            return
        for source in dict.fromkeys((*(owing if is_still else owing[:1]), mate)):
            try:
                answer = await self.fetch(source, step)
            except Unreachable as error:
                # Do not fetch the state then: if the member is dead, all members behind would discard theirs at once.
                logger.info("cannot catch up with step %d yet: %s", step, error)
            except (Refused, RemoteError) as error:
                if source == mate and self._is_lacking(step):
                    logger.warning("cannot catch up with step %d: %s; fetching the state instead", step, error)
                    self._on_behind(mate)
            else:
                if not is_still or answer != "nothing":
                    return

    def _is_lacking(self, step: int) -> bool:
        """True if `step` is our next step, and its gradient has not arrived."""
        return step == self._group.version and step not in self._kept.means

    async def fetch(self, mate: PeerID, step: int) -> Answer:
        """Fetch the reduced gradient of `step` from `mate`. Keep the gradient if a part of our state still lacks it
        when it arrives; step with it if `step` is our version.

        Raises: Unreachable; Refused: `mate` no longer has the gradient.
        """
        fetch = _Fetch(mate, self._vectors.empty(self._size))
        self._fetches[step] = fetch
        try:
            reply = await self._endpoint.ask(mate, ReducedRequest(stage=self._stage, step=step), Digest)
            if reply.version <= step:
                return "on its way" if reply.version == step else "nothing"
            await self._wait_for(fetch, step)  # the frames with the gradient travel apart from the reply
        finally:
            del self._fetches[step]
        if step >= min(self._group.version, self._wanted_from()):
            self._on_mean(step, fetch.mean_N, fetch.as_it_came)
        return "taken"

    async def _wait_for(self, fetch: _Fetch, step: int) -> None:
        """Wait for the whole gradient. Raises: Unreachable: no piece arrived for a minute, or the member is lost."""
        while not fetch.is_whole:
            before = fetch.num_taken
            try:
                async with asyncio.timeout(60.0):  # until the next piece
                    await fetch.over.wait()
            except TimeoutError:
                fetch.is_lost = fetch.num_taken == before
            if fetch.is_lost and not fetch.is_whole:
                raise Unreachable(fetch.mate, f"its gradient of step {step} did not arrive")

    async def _on_request(self, source: PeerID, message: ReducedRequest) -> Digest:
        if not self._group.has_place(source):
            raise Refused(self._endpoint.peer_id, f"does not know the sender as a member of group {self._stage}")
        version = self._group.version
        if self._pieces.may_arrive(source, message.step):
            return Digest(stage=self._stage, version=message.step, digest="")
        if message.step < version:
            mean_N = self._kept.means.get(message.step)
            if mean_N is None:
                raise Refused(self._endpoint.peer_id, f"the gradient of step {message.step} is no longer kept here")
            pieces = self._kept.pieces.get(message.step, ())
            self._pieces.send_mean(source, self._stage, message.step, mean_N, pieces)
            return Digest(stage=self._stage, version=version, digest="")
        return Digest(stage=self._stage, version=message.step - 1, digest="")

    async def _on_chunk(self, source: PeerID, meta: ReducedChunk, payload: Payload) -> None:
        fetch = self._fetches.get(meta.step)
        if fetch is None or fetch.mate != source or meta.start in fetch.pieces:
            return
        self._check(fetch, source, meta, payload)
        start, size = meta.start, meta.size
        is_exact = meta.form == self._vectors.mean_form  # an exact piece can be encoded again from the numbers
        fetch.pieces[start] = MeanPiece(start, size, meta.form, None if is_exact else payload)

        def take() -> bool:
            fetch.mean_N[start : start + size] = piece_C = self._vectors.piece_of(payload, meta.form, size)
            return self._vectors.is_within(piece_C, REDUCED_MAX)

        if not await self._compute.run_on_host(take):
            fetch.is_lost = True
            fetch.over.set()
            raise RemoteError(source, f"sent numbers that no gradient has, of step {meta.step}")
        fetch.num_taken += size
        if fetch.is_whole:
            fetch.over.set()

    def _check(self, fetch: _Fetch, source: PeerID, meta: ReducedChunk, payload: Payload) -> None:
        """Check a received piece of a gradient before it is kept.

        Raises: RemoteError: the piece has a wrong range, format or size, or repeats elements.
        """
        vectors, end = self._vectors, meta.start + meta.size
        is_here = 0 <= meta.start < end <= self._size and meta.size <= vectors.chunk
        if not is_here or meta.form not in (vectors.mean_form, *vectors.sums) or fetch.overlaps(meta.start, meta.size):
            raise RemoteError(source, f"sent elements {meta.start} to {end} of a gradient in {meta.form}")
        if len(payload) != tensor_bytes(meta.form, meta.size):
            raise RemoteError(source, f"sent {len(payload)} bytes for {meta.size} numbers of a gradient")
