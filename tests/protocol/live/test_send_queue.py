"""Frames of one peer to another, whatever links they take one after the other."""

import asyncio

from carried_wires import connected
from shoal.protocol.identity import Identity
from shoal.protocol.live.handshake import Greeter
from shoal.protocol.live.link import Link
from shoal.protocol.live.receive_queue import ReceiveQueues
from shoal.protocol.live.send_queue import SendQueue
from shoal.protocol.ports import Priority
from shoal.protocol.sim.trust import everybody

A, B = Identity.generate(), Identity.generate()


class World:
    """A sender, and a receiver that takes its time."""

    def __init__(self):
        self.handled, self.links = [], []
        self.gate = asyncio.Event()
        self.gate.set()
        self._received = ReceiveQueues()
        self.queue = SendQueue(B.peer_id, self._open)

    async def _handle(self, source, meta, payload):
        await self.gate.wait()
        await asyncio.sleep(0.001)
        self.handled.append(meta)

    async def _open(self, queue):
        here, there = await connected()
        sending = Link(B.peer_id, on_frame=queue.on_frame, on_lost=queue.on_lost, via=B.peer_id)
        receiving = Link(A.peer_id, on_frame=self._received.on_frame, on_lost=self._received.on_lost)
        await asyncio.gather(
            sending.open(*here, greeter(A), calls=True, on_open=lambda *_: None),
            receiving.open(
                *there, greeter(B), calls=False, on_open=lambda link, _: self._received.attach(link, self._handle)
            ),
        )
        self.links.append(sending)
        return sending

    async def end(self):
        await self.queue.close()
        await self._received.close()


def greeter(identity):
    return Greeter(identity=identity, members=everybody("run"), addresses=lambda: ())


def test_frames_that_move_to_another_link_all_arrive_once_and_in_order(eventually):
    async def main():
        world = World()
        payload = bytes(4 * 2**20)  # sixteen of them are the credit
        sends = [asyncio.create_task(world.queue.send(b"%d" % number, payload, Priority.BULK)) for number in range(40)]
        for count in (2, 20):
            await eventually(lambda count=count: len(world.handled) >= count)
            world.queue.move()
        await asyncio.gather(*sends)
        await eventually(lambda: len(world.handled) == 40)
        assert world.handled == [b"%d" % number for number in range(40)]
        assert len(world.links) > 1
        await world.end()

    asyncio.run(main())


def test_a_link_is_left_only_when_what_it_carried_is_handled(eventually):
    async def main():
        world = World()
        world.gate.clear()
        await world.queue.send(b"first", b"", Priority.BULK)
        world.queue.move()
        second = asyncio.create_task(world.queue.send(b"second", b"", Priority.BULK))
        await asyncio.sleep(0.1)
        assert not second.done()
        assert len(world.links) == 1
        world.gate.set()
        await second
        await eventually(lambda: world.handled == [b"first", b"second"])
        assert len(world.links) == 2
        assert world.links[0].lost.is_set()
        await world.end()

    asyncio.run(main())


def test_a_link_that_nothing_needs_is_closed_when_it_is_left(eventually):
    async def main():
        world = World()
        await world.queue.send(b"first", b"", Priority.BULK)
        world.queue.move()
        await eventually(lambda: world.links[0].lost.is_set())
        assert world.queue.via is None
        await world.queue.send(b"second", b"", Priority.BULK)
        await eventually(lambda: world.handled == [b"first", b"second"])
        await world.end()

    asyncio.run(main())
