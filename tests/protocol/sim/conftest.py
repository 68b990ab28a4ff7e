import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.protocol.frames import wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.sim.world import SimPeer, World


@dataclass(slots=True)
class Ear:
    """Serves a peer: answers calls with their own bytes, notes frames, and handles each for `handle_s`."""

    peer: SimPeer
    handle_s: float = 0.0
    frames: list[tuple[float, str]] = field(default_factory=list)
    """(virtual second of arrival at the handler, meta)."""
    payloads: list[Payload] = field(default_factory=list)
    calls: list[tuple[float, bytes]] = field(default_factory=list)

    async def on_call(self, source: PeerID, request: bytes) -> bytes:
        self.calls.append((self.peer.clock.now_s(), request))
        return request

    async def on_frame(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        self.frames.append((self.peer.clock.now_s(), meta.decode()))
        self.payloads.append(payload)
        await asyncio.sleep(self.handle_s)


@pytest.fixture
def listen() -> Callable[..., Coroutine[Any, Any, list[Ear]]]:
    """Serve all peers of a world and introduce everyone to everyone."""

    async def listen(world: World, *, handle_s: float = 0.0) -> list[Ear]:
        ears = [Ear(peer, handle_s) for peer in world.peers.values()]
        for ear in ears:
            ear.peer.transport.serve(on_call=ear.on_call, on_frame=ear.on_frame)
            for other in world.peers.values():
                await ear.peer.transport.introduce(other.peer_id, other.transport.addresses())
        return ears

    return listen


@pytest.fixture
def send() -> Callable[..., Coroutine[Any, Any, None]]:
    """Send a frame of exactly `nbytes` on the wire, without content."""

    async def send(
        source: SimPeer, destination: SimPeer, meta: str, nbytes: int, priority: Priority = Priority.ACTIVATION
    ) -> None:
        payload = Phantom(nbytes - wire_bytes(len(meta), 0))
        await source.transport.send(destination.peer_id, meta.encode(), payload, priority=priority)

    return send
