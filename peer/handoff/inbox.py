"""Receive chunks of state that a fetch expects, and drop all others.

Two fetches may expect the same chunk of the same sender: one for a layer that we are to hold, one for a copy that we
keep. The first copy of the chunk that arrives serves both.
"""

import asyncio
import math
from dataclasses import dataclass, field

from torch import Tensor

from shoal.peer.encoding.vectors import VECTORS, Vectors
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunk
from shoal.protocol.ports import Compute, Payload

WEIGHTS = -3
"""Stands for a stored era: the parameters that are trained now, rounded to bf16, without moments (`learner.py`)."""

GRADIENT = 3
"""Stands for a tensor of the state: the reduced gradient with which a layer stepped to a version."""

_Key = tuple[PeerID, int, int, str, int, int]
"""Sender, stored era, version, layer key, tensor, first element."""


@dataclass(frozen=True, slots=True)
class _Expected:
    into_N: Tensor
    first: int
    """First element of the tensor that `into_N` holds."""
    event: asyncio.Event
    before_N: Tensor | None = None
    """The tensor at version `base`, to which a difference is expected."""
    base: int = -1
    parts: set[int] = field(default_factory=set)
    """First elements of the parts that have arrived (`Vectors.background_chunk`)."""

    def size(self, start: int, chunk: int) -> int:
        """Number of elements of the chunk that begins at `start`."""
        return min(chunk, self.into_N.numel() - (start - self.first))


class ChunkInbox:
    """The chunks that this peer's fetches expect; one inbox per peer."""

    def __init__(self, endpoint: Endpoint, *, compute: Compute, vectors: Vectors = VECTORS) -> None:
        self.endpoint, self.compute = endpoint, compute
        self._vectors = vectors
        self._expected: dict[_Key, list[_Expected]] = {}
        endpoint.on_frame(StateChunk, self._on_chunk)

    def expect(
        self,
        peer: PeerID,
        stored_era: int,
        version: int,
        layer: str,
        tensor: int,
        start: int,
        into_N: Tensor,
        *,
        first: int = 0,
        before_N: Tensor | None = None,
        base: int = -1,
    ) -> asyncio.Event:
        """Return an event that is set when elements [start, start + chunk) have been filled in. Call `forget` in any
        case.

        Args:
            start: a multiple of the chunk. The chunk comes whole or in parts (`Vectors.background_chunk`).
            into_N: the tensor, from element `first` on.
            before_N: the whole tensor at version `base`, if the difference to it has been asked for.
        """
        event = asyncio.Event()
        key = (peer, stored_era, version, layer, tensor, start)
        self._expected.setdefault(key, []).append(_Expected(into_N, first, event, before_N, base))
        return event

    def forget(
        self, peer: PeerID, stored_era: int, version: int, layer: str, tensor: int, start: int, event: asyncio.Event
    ) -> None:
        """Stop expecting a chunk. Args: event: from `expect`."""
        key = (peer, stored_era, version, layer, tensor, start)
        self._expected[key] = [expected for expected in self._expected[key] if expected.event is not event]
        if not self._expected[key]:
            del self._expected[key]

    async def _on_chunk(self, source: PeerID, meta: StateChunk, payload: Payload) -> None:
        chunk, part = self._vectors.chunk, self._vectors.background_chunk
        begin = meta.start - meta.start % chunk
        key = (source, meta.stored_era, meta.version, meta.layer, meta.tensor, begin)
        expected = tuple(each for each in self._expected.get(key, ()) if each.base == meta.base)
        if meta.base >= 0:
            await self._take_difference(source, meta, payload, expected)
            return
        if not expected:
            return  # late, or never asked for
        values_C = self._read(source, meta, payload)
        count = values_C.numel()
        for each in expected:
            size = each.size(begin, chunk)
            is_whole = meta.start == begin and count == size
            is_part = (meta.start - begin) % part == 0 and 0 < count == min(part, begin + size - meta.start)
            if not is_whole and not is_part:
                raise RemoteError(source, f"sent {count} numbers at {meta.start} of {meta.layer}")

        def take() -> None:
            for each in expected:
                at = meta.start - each.first
                each.into_N[at : at + values_C.numel()] = values_C

        await self.compute.run_on_host(take)
        for each in expected:
            each.parts.update(range(meta.start, meta.start + count, part))
            if len(each.parts) == math.ceil(each.size(begin, chunk) / part):
                each.event.set()

    def _read(self, source: PeerID, meta: StateChunk, payload: Payload) -> Tensor:
        vectors = self._vectors
        if meta.tensor == GRADIENT:
            size, read = vectors.mean_bytes, vectors.mean_of
        elif meta.stored_era == WEIGHTS:
            size, read = 2, vectors.rounded_of
        else:
            size, read = 4, vectors.values_of
        if len(payload) == 0 or len(payload) % size:
            raise RemoteError(source, f"sent {len(payload)} bytes as numbers of {size} bytes of {meta.layer}")
        return read(payload)

    async def _take_difference(
        self, source: PeerID, meta: StateChunk, payload: Payload, expected: tuple[_Expected, ...]
    ) -> None:
        """Take a whole chunk as the difference to `before_N`."""
        for each in expected:
            size, before_N = each.size(meta.start, self._vectors.chunk), each.before_N
            if meta.start % self._vectors.chunk or before_N is None or not size <= len(payload) <= 3 * size:
                raise RemoteError(source, f"sent {len(payload)} bytes as a difference at {meta.start} of {meta.layer}")

            def take(each: _Expected = each, before_N: Tensor = before_N, size: int = size) -> None:
                before_C = before_N[meta.start : meta.start + size]
                each.into_N[meta.start : meta.start + size] = self._vectors.changed(before_C, payload)

            try:
                await self.compute.run_on_host(take)
            except ValueError as error:
                raise RemoteError(source, str(error)) from error
            each.event.set()
