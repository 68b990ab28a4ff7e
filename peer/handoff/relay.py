"""What one fetch has got so far, for those who fetch the same layers at the same time.

When a layout ends all members of a stage of the next one lack the same layers, and one peer may be all that has them.
If each of n members got all of its ranges from there, the state would leave that peer n times, over a line that may be
the very reason for the change. So every range has an **owner** among those who fetch, the same in everybody's eyes
without a word between them. Each gets its own ranges from a holder, and the others' from their owners, which are asked
to wait with the answer until the range is there. What an owner is slow to get anybody takes from a holder after all.

Nothing here has been compared with a digest: whoever fetches does that itself, layer by layer.
"""

import asyncio
import zlib
from collections.abc import Collection, Sequence

from torch import Tensor

from shoal.peer.handoff.ranges import RANGE_CHUNKS
from shoal.peer.vectors import Vectors
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunkRequest


class Relay:
    """Of one fetch, of one version of one era's state.

    Args: mates: the others who fetch some of the same layers.
    """

    def __init__(self, stored_era: int, version: int, mates: Collection[PeerID], *, vectors: Vectors) -> None:
        self.mates = frozenset(mates)
        self.until_s = 0.0
        """When the server may forget it, if it is done."""
        self.is_done = False
        """All has come, or the fetch came to nothing."""
        self._is_void = False
        self._at = stored_era, version
        self._width = RANGE_CHUNKS * vectors.chunk
        self._tensors: dict[str, Sequence[Tensor]] = {}
        self._whole: set[str] = set()
        self._here: dict[str, set[tuple[int, int]]] = {}
        """Layer -> (tensor, first element) of the ranges that are here."""
        self._came = asyncio.Event()

    # --- what the fetch says ---

    def begin(self, key: str, tensors: Sequence[Tensor], *, whole: bool = False) -> None:
        """A layer is to be filled into these tensors, from the first range on; or it is `whole` already."""
        self._tensors[key], self._here[key] = tensors, set()
        (self._whole.add if whole else self._whole.discard)(key)
        self._tell()

    def came(self, key: str, tensor: int, start: int) -> None:
        """A range is here."""
        self._here[key].add((tensor, start))
        self._tell()

    def done(self, *, void: bool = False) -> None:
        """The fetch is over. Args: void: it came to nothing, and nobody is given anything of it any more."""
        self.is_done = True
        if void:
            self._is_void, self.until_s = True, 0.0
        self._tell()

    def _tell(self) -> None:
        self._came.set()
        self._came = asyncio.Event()

    # --- who asks ---

    def is_asked(self, source: PeerID, request: StateChunkRequest) -> bool:
        """Whether `source` may ask here for that layer of that state."""
        at = request.stored_era, request.version
        return source in self.mates and at == self._at and request.layer in self._tensors and not self._is_void

    async def read(self, request: StateChunkRequest, *, patience_s: float) -> Tensor | None:
        """The tensor, of which the range asked for is here; None: it has not come within `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                while not self._is_void and not self._has(request):
                    await self._came.wait()
        except TimeoutError:
            return None
        return None if self._is_void else self._tensors[request.layer][request.tensor]

    def _has(self, request: StateChunkRequest) -> bool:
        at = request.tensor, request.start - request.start % self._width
        return request.layer in self._whole or at in self._here[request.layer]


def owner_of(key: str, tensor: int, number: int, fetching: Sequence[PeerID]) -> PeerID:
    """Who of those who fetch a layer gets a range of it from a holder.

    Args:
        number: the range's place among those of the tensor.
        fetching: in an order that is the same for all.
    """
    return fetching[(zlib.crc32(f"{key}/{tensor}".encode()) + number) % len(fetching)]
