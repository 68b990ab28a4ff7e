"""Frames of one peer to another, whatever links they take one after the other."""

import asyncio

import pytest
from open_gate import everybody

from carried_wires import connected
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity
from shoal.protocol.live import send_queue
from shoal.protocol.live.handshake import Greeter
from shoal.protocol.live.link import Link
from shoal.protocol.live.receive_queue import ReceiveQueues
from shoal.protocol.live.send_queue import SendQueue
from shoal.protocol.ports import Priority

A, B = Identity.generate(), Identity.generate()


class World:
    """A sender, and a receiver that takes its time and can be out of reach."""

    def __init__(self):
        self.handled, self.links = [], []
        self.is_reachable, self.why, self.num_tries = True, "no route to host", 0
        self.gate, self.opens = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self._received = ReceiveQueues()
        self.queue = SendQueue(B.peer_id, self._open)

    async def _handle(self, source, meta, payload):
        await self.gate.wait()
        await asyncio.sleep(0.001)
        self.handled.append(meta)

    async def _open(self, queue):
        self.num_tries += 1
        self.opens.set()
        if not self.is_reachable:
            raise Unreachable(B.peer_id, self.why)
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


def test_a_link_on_which_nothing_arrives_any_more_is_left_all_the_same(eventually, monkeypatch):
    monkeypatch.setattr(send_queue, "_MOVES_S", 0.2)

    async def main():
        world = World()
        world.gate.clear()
        await world.queue.send(b"gradient", b"", Priority.GRADIENT, again=b"gradient once more")
        await world.queue.send(b"sum", b"", Priority.REDUCTION)
        world.queue.move()
        await asyncio.wait([asyncio.create_task(world.queue.send(b"next", b"", Priority.BULK))], timeout=5.0)
        world.gate.set()
        await eventually(lambda: b"gradient once more" in world.handled)
        assert len(world.links) == 2
        await world.end()

    asyncio.run(main())


def test_a_better_way_that_comes_while_a_stream_opens_is_taken_as_well(eventually):
    async def main():
        world = World()
        sent = asyncio.create_task(world.queue.send(b"first", b"", Priority.BULK))
        await world.opens.wait()
        assert not world.links
        world.queue.move()
        await sent
        await eventually(lambda: len(world.links) == 2 or world.links[0].lost.is_set())
        await world.queue.send(b"second", b"", Priority.BULK)
        await eventually(lambda: world.handled == [b"first", b"second"])
        await world.end()

    asyncio.run(main())


# --- a stream that breaks ---


async def three_on_the_way(world, eventually):
    """The first is handled, the others are at the receiver or on their way."""
    await world.queue.send(b"handled", b"", Priority.GRADIENT, again=b"handled once more")
    await eventually(lambda: world.handled == [b"handled"])
    await eventually(lambda: not world.links[0].window.outstanding_bytes)
    world.gate.clear()
    await world.queue.send(b"activation", b"a", Priority.ACTIVATION, again=b"activation once more")
    await world.queue.send(b"state", b"s", Priority.STATE)
    await world.queue.send(b"gradient", b"g", Priority.GRADIENT, again=b"gradient once more")


def test_what_was_on_its_way_in_a_stream_that_breaks_goes_once_more_over_the_next_one(eventually):
    async def main():
        world = World()
        await three_on_the_way(world, eventually)
        world.links[0].abort("the network has changed")
        await eventually(lambda: len(world.links) == 2)
        world.gate.set()
        await eventually(lambda: world.handled[-1:] == [b"activation once more"])
        again = [meta for meta in world.handled if meta.endswith(b"more")]
        assert again == [b"gradient once more", b"activation once more"], "what may come twice, and once"
        await world.end()

    asyncio.run(main())


def test_it_goes_as_soon_as_there_is_a_way_again(eventually):
    async def main():
        world = World()
        await three_on_the_way(world, eventually)
        world.is_reachable = False
        world.links[0].abort("the network has changed")
        world.gate.set()
        await asyncio.sleep(0.1)
        with pytest.raises(Unreachable):
            await world.queue.send(b"another", b"", Priority.BULK)
        world.is_reachable = True
        await eventually(lambda: b"activation once more" in world.handled)
        assert b"gradient once more" in world.handled
        assert b"another" not in world.handled
        await world.end()

    asyncio.run(main())


def test_whose_process_has_ended_gets_nothing_once_more(eventually):
    async def main():
        world = World()
        await three_on_the_way(world, eventually)
        world.is_reachable, world.why = False, "failed to dial: connect: connection refused"
        world.links[0].abort("the stream ended")
        await eventually(lambda: world.num_tries == 2)
        world.is_reachable = True
        world.gate.set()
        await asyncio.sleep(0.7)
        assert len(world.links) == 1
        await world.end()

    asyncio.run(main())


def test_where_one_activation_is_known_not_to_go_the_others_are_not_sent_once_more(eventually):
    """Its sender gives all of them to others."""

    async def main():
        world = World()
        await three_on_the_way(world, eventually)
        payload = bytes(70 * 2**20)  # more than all credit
        waits = asyncio.create_task(world.queue.send(b"waits", payload, Priority.ACTIVATION, again=b"waits once more"))
        await asyncio.sleep(0.1)
        world.links[0].abort("the network has changed")
        with pytest.raises(Unreachable):
            await waits
        world.gate.set()
        await eventually(lambda: b"gradient once more" in world.handled)
        await asyncio.sleep(0.1)
        assert not {b"activation once more", b"waits once more"}.intersection(world.handled)
        await world.end()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cut", "close"])
def test_who_is_cut_off_or_closes_sends_nothing_once_more(eventually, how):
    async def main():
        world = World()
        await three_on_the_way(world, eventually)
        if how == "cut":
            world.queue.cut("excluded from the run")
        else:
            await world.queue.close()
        world.gate.set()
        await asyncio.sleep(0.7)
        assert len(world.links) == 1
        await world.end()

    asyncio.run(main())
