import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from open_gate import OpenGate

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.frames import wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Ping, ProbeChunk
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


@dataclass(slots=True)
class Voice:
    """An endpoint of a real peer in the world, and what it has heard."""

    peer: SimPeer
    endpoint: Endpoint
    answers_in_s: float = 0.0
    pings: list[tuple[float, bytes]] = field(default_factory=list)
    """(virtual second, pad)."""
    chunks: list[tuple[float, int, bytes]] = field(default_factory=list)
    """(virtual second, nonce, payload)."""

    async def ping(self, other: "Voice", pad: bytes = b"", *, timeout_s: float = 5.0) -> bytes:
        return (await self.endpoint.ask(other.peer.peer_id, Ping(pad=pad), Ping, timeout_s=timeout_s)).pad

    async def send(self, other: "Voice", nonce: int, payload: bytes = b"tensor") -> None:
        chunk = ProbeChunk(nonce=nonce, echo=False)
        await self.endpoint.send(other.peer.peer_id, chunk, payload, priority=Priority.ACTIVATION)

    async def on_ping(self, source: PeerID, message: Ping) -> Ping:
        self.pings.append((self.peer.clock.now_s(), message.pad))
        await asyncio.sleep(self.answers_in_s)
        return message

    async def on_chunk(self, source: PeerID, chunk: ProbeChunk, payload: Payload) -> None:
        self.chunks.append((self.peer.clock.now_s(), chunk.nonce, bytes(payload)))
        memoryview(payload)[:] = bytes(len(payload))  # a handler may

    @property
    def nonces(self) -> list[int]:
        return [nonce for _, nonce, _ in self.chunks]


@pytest.fixture
def speak() -> Callable[..., Coroutine[Any, Any, list[Voice]]]:
    """Give peers of a world (all that live, unless named) endpoints; they know everyone's addresses."""

    async def speak(world: World, *names: str) -> list[Voice]:
        voices = []
        for peer in [world.peers[name] for name in names or world.peers]:
            endpoint = Endpoint(
                peer.identity, peer.transport, run="run", gate=OpenGate(), first_sequence=int(1e6 * world.now_s())
            )
            voice = Voice(peer, endpoint)
            endpoint.on(Ping, voice.on_ping)
            endpoint.on_frame(ProbeChunk, voice.on_chunk)
            for other in world.peers.values():
                await peer.transport.introduce(other.peer_id, other.transport.addresses())
            voices.append(voice)
        return voices

    return speak
