"""Shares the received ranges of one fetch with peers that fetch the same layers at the same time.

When a layout begins, all members of a stage lack the same layers, and one plan often gives several newcomers a place in
one group. If each of n peers fetched everything from a sole holder, that holder's line would carry the state n times.
So each range has an **owner** among the fetching peers; every fetching peer computes the same owners, without a
message. A peer fetches its own ranges from a holder, and every other range from the range's owner, which answers once
it has the range. If an owner is slow, or fetches another version, its ranges are fetched from a holder after all.

Ranges are not checked here: each fetching peer checks whole layers against their digests.
"""

import asyncio
from collections.abc import Collection

from torch import Tensor

from shoal.peer.encoding.vectors import Vectors
from shoal.peer.handoff.inbox import RANGE_CHUNKS, ranges
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunkRequest


class Relay:
    """The received ranges of one fetch, which lasts as long as the relay's `with` block.

    Args: group_peers: the other peers that fetch some of the same layers.
    """

    def __init__(self, group_peers: Collection[PeerID] = (), *, vectors: Vectors) -> None:
        self.group_peers = frozenset(group_peers)
        self.at: tuple[int, int] | None = None
        """(stored era, version) of the fetch; None: no version has been chosen yet."""
        self.until_s = 0.0
        """Time after which the server may drop the relay, if the fetch is done."""
        self.is_done = False
        self._is_void = False
        self._vectors = vectors
        self.tensors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """Layer -> parameters and moments at full length, of which only the ranges in `here` are filled."""
        self.here: dict[str, set[tuple[int, int]]] = {}
        """Layer -> (tensor, first element) of each range that has arrived; tensor 0: parameters, 1 and 2: moments."""
        self._came = asyncio.Event()

    # --- calls of the fetch ---

    def begin(self, key: str, tensors: tuple[Tensor, Tensor, Tensor], *, whole: bool = False) -> None:
        """Begin to receive the layer `key` into `tensors`. Args: whole: the tensors are complete already."""
        self.tensors[key], self.here[key] = tensors, set()
        if whole:
            self.here[key].update((index, start) for index, start, _ in self.ranges_of(key))
        self._tell()

    def came(self, key: str, tensor: int, start: int) -> None:
        """Record that the range that begins at element `start` has arrived."""
        self.here[key].add((tensor, start))
        self._tell()

    def ranges_of(self, key: str) -> list[tuple[int, int, int]]:
        """Return (tensor, first element, end) of each range of a layer."""
        tensors = enumerate(self.tensors[key])
        return [(index, *span) for index, tensor in tensors for span in ranges(tensor.numel(), self._vectors)]

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        self.done(void=failure is not None)

    def done(self, *, void: bool = False) -> None:
        """End the fetch. Args: void: the fetch has failed; none of its ranges is sent any more."""
        self.is_done = True
        if void:
            self._is_void, self.until_s = True, 0.0
        self._tell()

    def _tell(self) -> None:
        self._came.set()
        self._came = asyncio.Event()

    # --- calls of group peers ---

    def is_asked(self, source: PeerID, request: StateChunkRequest) -> bool:
        """True if `source` fetches the same state, and the requested layer is part of this fetch."""
        at = request.stored_era, request.version
        return source in self.group_peers and at == self.at and request.layer in self.tensors and not self._is_void

    async def read(self, request: StateChunkRequest, *, patience_s: float) -> Tensor | None:
        """Return the requested tensor once the range is in it; None: the fetch failed or `patience_s` is over."""
        try:
            async with asyncio.timeout(patience_s):
                while not self._is_void and not self._has(request):
                    await self._came.wait()
        except TimeoutError:
            return None
        return None if self._is_void else self.tensors[request.layer][request.tensor]

    def _has(self, request: StateChunkRequest) -> bool:
        first = request.start - request.start % (RANGE_CHUNKS * self._vectors.chunk)
        return (request.tensor, first) in self.here[request.layer]
