"""Where chunks of state arrive: each is expected by somebody, or dropped."""

import asyncio

from torch import Tensor

from shoal.peer.vectors import VECTORS, Vectors
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import StateChunk
from shoal.protocol.ports import Compute, Payload

GRADIENT = 3
"""The tensor of a layer that is no part of its state: the reduced gradient with which it stepped to a version."""

_Key = tuple[PeerID, int, int, str, int, int]
"""Sender, stored era, version, layer key, tensor, first element."""


class ChunkInbox:
    """One a peer: several fetches may be under way, of several states."""

    def __init__(self, endpoint: Endpoint, *, compute: Compute, vectors: Vectors = VECTORS) -> None:
        self._vectors = vectors
        self._compute = compute
        self._expected: dict[_Key, tuple[Tensor, int, asyncio.Event]] = {}
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
    ) -> asyncio.Event:
        """The event is set when elements [start, start + chunk) have been filled in; call `forget` in any case.

        Args: into_N: the tensor, or of a tensor that is not wanted as a whole what begins with element `first`.
        """
        event = asyncio.Event()
        self._expected[peer, stored_era, version, layer, tensor, start] = (into_N, first, event)
        return event

    def forget(self, peer: PeerID, stored_era: int, version: int, layer: str, tensor: int, start: int) -> None:
        self._expected.pop((peer, stored_era, version, layer, tensor, start), None)

    async def _on_chunk(self, source: PeerID, meta: StateChunk, payload: Payload) -> None:
        key = (source, meta.stored_era, meta.version, meta.layer, meta.tensor, meta.start)
        into_N, first, event = self._expected.get(key, (None, 0, None))
        if into_N is None or event is None:
            return  # late, or never asked for
        is_gradient = meta.tensor == GRADIENT
        values_C = self._vectors.gradient_of(payload) if is_gradient else self._vectors.values_of(payload)
        at = meta.start - first
        if values_C.numel() != min(self._vectors.chunk, into_N.numel() - at):
            raise RemoteError(source, f"sent {values_C.numel()} numbers at {meta.start} of {meta.layer}")

        def take() -> None:
            into_N[at : at + values_C.numel()] = values_C

        await self._compute.run_on_host(take)
        event.set()
