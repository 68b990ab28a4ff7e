"""The two worlds that every port lives in, behind one face: make some peers, run a coroutine among them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from open_gate import everybody

from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.compute import ThreadCompute
from shoal.protocol.live.directory import LiveDirectory
from shoal.protocol.live.loop import LoopClock
from shoal.protocol.live.loop import run as run_live
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.ports import Clock, Compute, Directory, Transport
from shoal.protocol.sim.loop import run as run_sim
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """One peer: all that a driver ever sees of it."""

    identity: Identity
    transport: Transport
    directory: Directory
    compute: Compute
    clock: Clock

    @property
    def peer_id(self) -> PeerID:
        return self.identity.peer_id


Main = Callable[..., Awaitable[None]]


class AnyWorld(ABC):
    @abstractmethod
    def run(self, num_peers: int, main: Main, *, introduced: bool = True) -> None:
        """`main(*peers)` among fresh peers, who know each other's addresses if `introduced`."""


async def introduce_all(peers: list[Ports]) -> None:
    for peer in peers:
        for other in peers:
            if other is not peer:
                await peer.transport.introduce(other.peer_id, other.transport.addresses())


class LiveWorld(AnyWorld):
    """Real daemons on loopback, one a peer, all in this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, num_peers: int, main: Main, *, introduced: bool = True) -> None:
        run_live(self._run(num_peers, main, introduced))

    async def _run(self, num_peers: int, main: Main, introduced: bool) -> None:
        async with AsyncExitStack() as stack:
            peers = list(await asyncio.gather(*(self._start(stack, number) for number in range(num_peers))))
            if introduced:
                await introduce_all(peers)
                for peer in peers:
                    assert isinstance(peer.directory, LiveDirectory)
                    await peer.directory.join()
            await main(*peers)

    async def _start(self, stack: AsyncExitStack, number: int) -> Ports:
        identity = Identity.generate()
        transport = await LiveTransport.start(
            identity, members=everybody("contract"), state_dir=self._folder / str(number), use_relay=False
        )
        stack.push_async_callback(transport.close)
        directory = await LiveDirectory.start(transport)
        stack.push_async_callback(directory.close)
        compute = ThreadCompute()
        stack.callback(compute.close)
        return Ports(identity=identity, transport=transport, directory=directory, compute=compute, clock=LoopClock())


class SimWorld(AnyWorld):
    """Virtual time, 5 ms and 1 GiB/s between any two peers."""

    def run(self, num_peers: int, main: Main, *, introduced: bool = True) -> None:
        run_sim(self._run(num_peers, main, introduced))

    async def _run(self, num_peers: int, main: Main, introduced: bool) -> None:
        world = World(1, uniform(0.005, 2.0**30))
        made = [world.add_peer(f"peer {number}") for number in range(num_peers)]
        peers = [
            Ports(
                identity=peer.identity,
                transport=peer.transport,
                directory=peer.directory,
                compute=peer.compute,
                clock=peer.clock,
            )
            for peer in made
        ]
        if introduced:
            await introduce_all(peers)
        await main(*peers)
        for peer in peers:
            await peer.transport.close()


@pytest.fixture(params=["sim", pytest.param("live", marks=pytest.mark.process)])
def any_world(request: pytest.FixtureRequest, tmp_path: Path) -> AnyWorld:
    return SimWorld() if request.param == "sim" else LiveWorld(tmp_path)
