"""One scenario with something of everything. `python scenario.py SEED` prints its trace hash and end state."""

import asyncio
import random
import sys

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.phantom import Phantom
from shoal.protocol.sim.world import SimPeer, World


class Driver:
    """Calls, sends, computes and publishes at random; walks sets, as a careless driver would."""

    def __init__(self, peer: SimPeer, everyone: list[SimPeer], rng: random.Random) -> None:
        self.peer = peer
        self.everyone = everyone
        self.rng = rng
        self.got = 0
        peer.transport.serve(on_call=self.on_call, on_frame=self.on_frame)

    async def on_call(self, source: PeerID, request: bytes) -> bytes:
        await asyncio.sleep(self.rng.random() * 0.01)
        return request[::-1]

    async def on_frame(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        self.got += len(payload)
        await self.peer.compute.run("forward", lambda: len(meta), flop=1e10 * self.rng.random())

    async def run(self) -> None:
        for peer in self.everyone:
            await self.peer.transport.introduce(peer.peer_id, peer.transport.addresses())
        while True:
            other = self.rng.choice([peer for peer in self.everyone if peer is not self.peer])
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.peer.transport.call(other.peer_id, self.rng.randbytes(40), timeout_s=2.0))
                    for priority in Priority:
                        size = self.rng.randrange(100_000)
                        payload = Phantom(size) if priority is Priority.BULK else self.rng.randbytes(size // 100)
                        group.create_task(self.peer.transport.send(other.peer_id, b"m", payload, priority=priority))
            except* Unreachable:
                await asyncio.sleep(0.5)
            await self.peer.directory.store("swarm", self.peer.name, self.rng.randbytes(8), expires_in_s=5.0)
            waits = {asyncio.create_task(asyncio.sleep(self.rng.random())) for _ in range(3)}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()


async def main(seed: int) -> str:
    world = World(seed, uniform(0.02, 2e6, jitter_s=0.01, loss=0.02), stall_s=3.0)
    peers = [world.add_peer(f"peer {i}", up_bytes_per_s=1e6, down_bytes_per_s=3e6) for i in range(6)]
    drivers = [Driver(peer, peers, world.rng(peer.name)) for peer in peers]
    for driver in drivers:
        driver.peer.spawn(driver.run())
    await asyncio.sleep(5.0)
    world.partition(peers[:3], peers[3:])
    await asyncio.sleep(4.0)
    world.heal()
    world.pause(peers[1])
    world.crash(peers[0])
    await asyncio.sleep(3.0)
    world.resume(peers[1])
    back = world.add_peer("peer 0")
    peers[0] = back
    drivers.append(Driver(back, peers, world.rng("peer 0 again")))
    back.spawn(drivers[-1].run())
    world.partition([peers[5]], peers[:5], one_way=True)
    await asyncio.sleep(8.0)
    records = await peers[2].directory.get("swarm")
    assert not world.failures, world.failures
    got = [driver.got for driver in drivers]
    return f"{world.trace_hash()} {world.num_events} {got} {sorted(records.items())}"


if __name__ == "__main__":
    sys.stdout.write(run(main(int(sys.argv[1]))))
