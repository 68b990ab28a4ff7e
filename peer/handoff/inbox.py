"""Fetches ranges of a tensor from peers. A range arrives as chunks, one frame each; a chunk that no fetch expects is
dropped.

Two fetches may expect the same chunk from the same sender, for a layer that we will hold and for a copy that we keep. A
chunk that arrives serves both fetches.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor

from shoal.peer.encoding.vectors import VECTORS, Vectors
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Done, StateChunk, StateChunkRequest
from shoal.protocol.ports import Compute, Payload

WEIGHTS = -3
"""Value of `stored_era`: the parameters that are trained now, rounded to bf16, without moments (`learner.py`)."""

GRADIENT = 3
"""Value of `StateChunkRequest.tensor`: the reduced gradient with which a layer stepped to a version."""

RANGE_CHUNKS = 4
"""Number of chunks in the longest range. It has 4 MiB, so that a round trip is short compared with the transfer."""
RANGE_TIMEOUT_S = 60.0
"""Seconds that a range may take by default. A fetch with more patience repeats its request after this time, since the
request or a chunk may be lost; a holder that is still sending the range does not send it twice."""

_Key = tuple[PeerID, int, int, str, int, int]
"""The name of an expected chunk: (sender, stored era, version, layer key, tensor, first element)."""


@dataclass(frozen=True, slots=True)
class _Expected:
    into_N: Tensor
    first: int
    """The element of the whole tensor at which `into_N` begins."""
    before_N: Tensor | None
    """The tensor at version `base`, from which a difference is expected; None: the numbers themselves are expected."""
    base: int
    event: asyncio.Event = field(default_factory=asyncio.Event)
    parts: set[int] = field(default_factory=set)
    """First elements of the parts that have arrived, if a chunk comes in parts (`Vectors.background_chunk`)."""

    def size(self, start: int, chunk: int) -> int:
        """Number of elements of the chunk that begins at `start`."""
        return min(chunk, self.into_N.numel() - (start - self.first))


def ranges(size: int, vectors: Vectors) -> list[tuple[int, int]]:
    """Cut a tensor into ranges (start, stop)."""
    width = RANGE_CHUNKS * vectors.chunk
    return [(start, min(start + width, size)) for start in range(0, size, width)]


class ChunkInbox:
    """Fetches ranges, and receives their chunks; one inbox per peer."""

    def __init__(self, endpoint: Endpoint, *, compute: Compute, vectors: Vectors = VECTORS) -> None:
        self.endpoint, self.compute, self.vectors = endpoint, compute, vectors
        self._expected: dict[_Key, list[_Expected]] = {}
        endpoint.on_frame(StateChunk, self._on_chunk)

    async def fetch(
        self,
        peer: PeerID,
        request: StateChunkRequest,
        into_N: Tensor,
        *,
        first: int = 0,
        before_N: Tensor | None = None,
        patience_s: float = RANGE_TIMEOUT_S,
    ) -> None:
        """Fetch a range, the elements [start, stop) of a tensor that `request` names, from `peer`.

        Args:
            into_N: receives the range; its element 0 is element `first` of the tensor.
            before_N: the same tensor at version `request.base`: then the difference from that version is sent.
        Raises: Unreachable, Refused, RemoteError.
        """
        try:
            with self.expecting(peer, request, into_N, first=first, before_N=before_N) as events:
                async with asyncio.timeout(patience_s):
                    await _ask_until_here(lambda: self.endpoint.ask(peer, request, Done, timeout_s=patience_s), events)
        except TimeoutError as error:
            raise Unreachable(peer, "state did not arrive in time") from error

    async def fetch_tensor(
        self,
        peer: PeerID,
        request: StateChunkRequest,
        into_N: Tensor,
        came: Callable[[int], None] = lambda num_elements: None,
    ) -> None:
        """Fetch the whole tensor that `request` names into `into_N`, range by range in order. When a range has arrived,
        call `came` with its number of elements."""
        todo = iter(ranges(into_N.numel(), self.vectors))

        async def work() -> None:
            for start, stop in todo:
                await self.fetch(peer, msgspec.structs.replace(request, start=start, stop=stop), into_N)
                came(stop - start)

        working = [asyncio.create_task(work()) for _ in range(2)]  # so that the line does not idle between two ranges
        try:
            await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()

    @contextlib.contextmanager
    def expecting(
        self,
        peer: PeerID,
        request: StateChunkRequest,
        into_N: Tensor,
        *,
        first: int = 0,
        before_N: Tensor | None = None,
    ) -> Iterator[list[asyncio.Event]]:
        """Receive the chunks of a range into `into_N` while the `with` block lasts. The range begins at a multiple of
        the chunk; a chunk comes whole or in parts (`Vectors.background_chunk`). Yields: an event for each chunk, set
        once the chunk has arrived."""
        what = (peer, request.stored_era, request.version, request.layer, request.tensor)
        expected = {
            (*what, start): _Expected(into_N, first, before_N, request.base)
            for start in range(request.start, request.stop, self.vectors.chunk)
        }
        for key, each in expected.items():
            self._expected.setdefault(key, []).append(each)
        try:
            yield [each.event for each in expected.values()]
        finally:
            for key, each in expected.items():
                self._expected[key] = [other for other in self._expected[key] if other is not each]
                if not self._expected[key]:
                    del self._expected[key]

    async def _on_chunk(self, source: PeerID, meta: StateChunk, payload: Payload) -> None:
        chunk, part = self.vectors.chunk, self.vectors.background_chunk
        begin = meta.start - meta.start % chunk
        key = (source, meta.stored_era, meta.version, meta.layer, meta.tensor, begin)
        expected = tuple(each for each in self._expected.get(key, ()) if each.base == meta.base)
        if meta.base >= 0:
            await self._take_difference(source, meta, payload, expected)
            return
        if not expected:
            return  # the chunk is late, or was never requested
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
        vectors = self.vectors
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
        """Store a whole chunk that was sent as the difference from `before_N`."""
        for each in expected:
            size, before_N = each.size(meta.start, self.vectors.chunk), each.before_N
            if meta.start % self.vectors.chunk or before_N is None or not size <= len(payload) <= 3 * size:
                raise RemoteError(source, f"sent {len(payload)} bytes as a difference at {meta.start} of {meta.layer}")

            def take(each: _Expected = each, before_N: Tensor = before_N, size: int = size) -> None:
                before_C = before_N[meta.start : meta.start + size]
                each.into_N[meta.start : meta.start + size] = self.vectors.changed(before_C, payload)

            try:
                await self.compute.run_on_host(take)
            except ValueError as error:
                raise RemoteError(source, str(error)) from error
            each.event.set()


async def _ask_until_here(ask: Callable[[], Awaitable[Done]], events: Sequence[asyncio.Event]) -> None:
    """Send the request, and repeat it every `RANGE_TIMEOUT_S`, until all events are set. Earlier requests stay open,
    because cancelling a request stops the transfer. Raises: the errors of `ask`."""
    loop, asking = asyncio.get_running_loop(), set[asyncio.Future[Done]]()
    here = asyncio.gather(*(event.wait() for event in events))
    try:
        while not here.done():
            asking.add(asyncio.ensure_future(ask()))
            again_s = loop.time() + RANGE_TIMEOUT_S
            while not here.done() and (left_s := again_s - loop.time()) > 0.0:
                waited: set[asyncio.Future[Any]] = {here, *asking}
                await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for answered in [each for each in asking if each.done()]:
                    asking.remove(answered)
                    answered.result()
    finally:
        here.cancel()
        for each in asking:
            each.cancel()
        await asyncio.gather(here, *asking, return_exceptions=True)
