"""Pretend services of a peer, for tests that build one of its parts."""

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, cast

from shoal.peer.encoding.vectors import VECTORS, Vectors
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.server import StateServer
from shoal.peer.links.meter import LinkMeter
from shoal.peer.model.state import StageState
from shoal.peer.presence.parts import Parts
from shoal.peer.presence.ports import Ports
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Clock, Compute


class Trained(Parts):
    """Parts of which only the state counts; no other peer is a newcomer to them."""

    def __init__(
        self,
        current: Callable[[Collection[str]], StageState | None],
        is_stepping: Callable[[Collection[str]], bool] = lambda keys: False,
    ) -> None:
        super().__init__()
        self._current, self._is_stepping = current, is_stepping

    def state_of(self, keys: Collection[str]) -> StageState | None:
        return self._current(keys)

    def is_stepping(self, keys: Collection[str]) -> bool:
        return self._is_stepping(keys)


def ports_of(endpoint: Endpoint, compute: Compute, clock: Clock) -> Ports:
    return Ports(endpoint=endpoint, compute=compute, clock=clock, meter=LinkMeter(clock))


def server_of(
    ports: Ports,
    parts: Parts,
    *,
    stored: Callable[..., Any],
    knows: Callable[[PeerID], bool] = lambda peer: True,
    inbox: ChunkInbox | None = None,
    vectors: Vectors = VECTORS,
) -> StateServer:
    """Args: stored: (era, version, layer keys) -> those of the layers that are in a snapshot here."""
    return StateServer(
        ports,
        plans=cast(Any, SimpleNamespace(knows=knows)),
        parts=parts,
        archive=cast(Any, SimpleNamespace(read=stored)),
        retained=cast(Any, SimpleNamespace(read=lambda era, version: {})),
        inbox=inbox or ChunkInbox(ports.endpoint, compute=ports.compute, vectors=vectors),
    )
