"""Send pieces of gradients to other members, at a priority below pipeline traffic and above states."""

import asyncio
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from torch import Tensor

from shoal.peer.base.tasks import Tasks
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.group.reduce import MeanPiece, Outgoing
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import GatherPart, ReducedChunk, ReducePart, RoundStart
from shoal.protocol.ports import Clock, Compute, Payload, Priority

logger = logging.getLogger(__name__)

_FORGETS: Final = 0.95
_ON_THE_WAY_S: Final = 2.0
"""Seconds for which a piece that has left, or a question about the piece, may still be travelling."""


class Pieces:
    """Sends the pieces of one replica: those of its rounds, and gradients for members that are behind."""

    def __init__(self, endpoint: Endpoint, vectors: Vectors, tasks: Tasks, clock: Clock, compute: Compute) -> None:
        self._endpoint = endpoint
        self._vectors, self._compute = vectors, compute
        self._tasks = tasks
        self._clock = clock
        self._unsent: Counter[tuple[PeerID, int]] = Counter()  # target, step
        self._slowest_s: dict[PeerID, float] = {}
        self._last: dict[PeerID, tuple[int, float]] = {}  # target -> step and time of what left last

    def is_sending_to(self, target: PeerID) -> bool:
        """True if a piece of a round has not left for `target` yet: then `target` waits for the network."""
        return any(peer == target for peer, _ in self._unsent)

    def slowest_s(self, target: PeerID) -> float:
        """Return about how many seconds the slowest recent piece took to leave for `target`."""
        return self._slowest_s.get(target, 0.0)

    def forget(self, target: PeerID) -> None:
        """Forget the send times of a peer that has gone: after a restart it may use another line."""
        self._slowest_s.pop(target, None)

    def may_arrive(self, target: PeerID, step: int) -> bool:
        """True if a piece of the round of `step` waits to leave for `target`, or has left a moment ago."""
        last_step, left_s = self._last.get(target, (-1, 0.0))
        is_fresh = last_step == step and self._clock.now_s() < left_s + _ON_THE_WAY_S
        return is_fresh or (target, step) in self._unsent

    def send(self, outgoing: Iterable[Outgoing], start: RoundStart, kind: type[ReducePart] | type[GatherPart]) -> None:
        """Send pieces in the background. Each target has its own queue, so that a stalled target delays no other."""
        by_target: dict[PeerID, list[Outgoing]] = {}
        for piece in outgoing:
            by_target.setdefault(piece.target, []).append(piece)
        encoded = _Encoded(self._piece, itertools.chain.from_iterable(by_target.values()))
        for target, pieces in by_target.items():
            self._unsent[target, start.step] += len(pieces)
            self._tasks.spawn(self._send(target, pieces, encoded, start, kind), f"{kind.__name__} of {start.step}")

    def send_mean(
        self, target: PeerID, stage: int, step: int, mean_N: Tensor, pieces: tuple[MeanPiece, ...] = ()
    ) -> None:
        """Send a reduced gradient, float32 [N], in the background. Args: pieces: the gradient as encoded by its round;
        if not empty, these bytes are sent, and the numbers are not encoded again."""
        self._tasks.spawn(self._send_mean(target, stage, step, mean_N, pieces), "catch-up")

    async def _send(
        self,
        target: PeerID,
        pieces: list[Outgoing],
        encoded: "_Encoded",
        start: RoundStart,
        kind: type[ReducePart] | type[GatherPart],
    ) -> None:
        is_lost = False
        for piece in pieces:
            if not is_lost:
                payload = piece.payload if piece.payload is not None else await encoded.of(piece)
                meta = kind(stage=start.stage, step=start.step, attempt=start.attempt, start=piece.start)
                began_s = self._clock.now_s()
                try:
                    await self._endpoint.send(target, meta, payload, priority=Priority.REDUCTION)
                    left_s = self._clock.now_s()
                    self._slowest_s[target] = max(left_s - began_s, _FORGETS * self.slowest_s(target))
                    self._last[target] = start.step, left_s
                except Unreachable as error:
                    logger.warning("reduction of step %d: %s", start.step, error)
                    is_lost = True
            encoded.done_with(piece)
            self._done_with(target, start.step)

    def _done_with(self, target: PeerID, step: int) -> None:
        self._unsent[target, step] -= 1
        if not self._unsent[target, step]:
            del self._unsent[target, step]

    async def _send_mean(
        self, target: PeerID, stage: int, step: int, mean_N: Tensor, pieces: tuple[MeanPiece, ...]
    ) -> None:
        for piece in pieces or self._cut(mean_N.numel()):
            meta = ReducedChunk(stage=stage, step=step, start=piece.start, size=piece.size, form=piece.form)
            payload = piece.payload
            if payload is None:
                mean_C = mean_N[piece.start : piece.start + piece.size]
                payload = await self._encoded(functools.partial(self._vectors.mean_payload, mean_C))
            try:
                await self._endpoint.send(target, meta, payload, priority=Priority.REDUCTION)
            except Unreachable as error:
                logger.warning("catch-up: %s", error)
                return

    async def _piece(self, piece: Outgoing) -> Payload:
        return await self._encoded(lambda: self._vectors.piece_payload(piece.values_C, piece.form, piece.key))

    async def _encoded(self, encode: Callable[[], Payload]) -> Payload:
        """Run `encode`; if it takes much computation (narrow formats), run it off the event loop."""
        return await self._compute.run_on_host(encode) if self._vectors.narrows else encode()

    def _cut(self, numel: int) -> list[MeanPiece]:
        chunk, form = self._vectors.chunk, self._vectors.mean_form
        return [MeanPiece(start, min(chunk, numel - start), form) for start in range(0, numel, chunk)]


class _Encoded:
    """Encodes each piece once for all its targets, and drops the bytes after their last use."""

    def __init__(self, encode: Callable[[Outgoing], Awaitable[Payload]], pieces: Iterable[Outgoing]) -> None:
        self._encode = encode
        self._uses = Counter(piece.start for piece in pieces)
        self._payloads: dict[int, Payload] = {}
        self._making = asyncio.Lock()

    async def of(self, piece: Outgoing) -> Payload:
        async with self._making:
            if piece.start not in self._payloads:
                self._payloads[piece.start] = await self._encode(piece)
        return self._payloads[piece.start]

    def done_with(self, piece: Outgoing) -> None:
        self._uses[piece.start] -= 1
        if not self._uses[piece.start]:
            self._payloads.pop(piece.start, None)
