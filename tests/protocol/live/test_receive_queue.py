import asyncio
import gc
import logging
import weakref

import pytest
import uvloop

from shoal.protocol.frames import FrameType, encode_frame
from shoal.protocol.live.link import Link
from shoal.protocol.live.receive_queue import ReceiveQueues
from shoal.protocol.ports import Priority

LOOPS = [asyncio.run, uvloop.run]
LARGE_BYTES = 4_000_000


class Handler:
    """Notes what it gets; waits, then fails if told to."""

    def __init__(self) -> None:
        self.metas = []
        self.gate = asyncio.Event()
        self.fails = False

    async def __call__(self, source, meta, payload) -> None:
        self.metas.append(meta)
        await self.gate.wait()
        if self.fails:
            raise ValueError("cannot be handled")


async def connected(caller, listener, queues, handler):
    """(the sender's link, the receiver's)."""
    receiving = Link(caller.identity.peer_id, on_frame=queues.on_frame, on_lost=queues.on_lost)
    sending, _ = await asyncio.gather(
        caller.open(listener.identity.peer_id, calls=True),
        receiving.open(
            listener.reader,
            listener.writer,
            listener.greeter(),
            calls=False,
            on_open=lambda link, _: queues.attach(link, handler),
        ),
    )
    return sending, receiving


@pytest.mark.parametrize("run", LOOPS, ids=["asyncio", "uvloop"])
def test_a_stream_that_breaks_inside_a_frame_leaves_nothing_behind(socket_pair, run, eventually):
    async def half_a_frame(caller, listener, queues) -> weakref.ref:
        sending, receiving = await connected(caller, listener, queues, Handler())
        wire = b"".join(encode_frame(FrameType.DATA, 1, b"meta", bytes(LARGE_BYTES)))
        sending._transport.write(wire[: LARGE_BYTES // 2])
        await eventually(lambda: receiving._assembler._payload and receiving._assembler._filled > LARGE_BYTES // 4)
        assert len(queues._queues) == 1
        sending._transport.close()
        await receiving.lost.wait()
        return weakref.ref(receiving)

    def is_gone(link: weakref.ref) -> bool:
        gc.collect()
        return link() is None

    async def main():
        queues = ReceiveQueues()
        async with socket_pair() as (caller, listener):
            link = await half_a_frame(caller, listener, queues)
            await eventually(lambda: is_gone(link))
            assert len(queues._queues) == 0

    run(main())


def test_what_arrived_whole_is_handled_though_the_stream_is_gone(socket_pair, eventually):
    async def main():
        queues, handler = ReceiveQueues(), Handler()
        async with socket_pair() as (caller, listener):
            sending, receiving = await connected(caller, listener, queues, handler)
            for meta in (b"1", b"2"):
                await sending.write_frame(meta, b"", Priority.BULK)
            await eventually(lambda: receiving.window.outstanding_bytes > 0 and len(handler.metas) == 1)
            sending._transport.close()
            await receiving.lost.wait()
            assert len(queues._queues) == 1
            handler.gate.set()
            await eventually(lambda: len(queues._queues) == 0)
            assert handler.metas == [b"1", b"2"]

    asyncio.run(main())


def test_a_frame_that_cannot_be_handled_takes_those_behind_it_along(socket_pair, eventually, caplog):
    async def main():
        queues, handler = ReceiveQueues(), Handler()
        async with socket_pair() as (caller, listener):
            sending, receiving = await connected(caller, listener, queues, handler)
            for meta in (b"1", b"2"):
                await sending.write_frame(meta, b"", Priority.BULK)
            await eventually(lambda: len(handler.metas) == 1)
            sending._transport.close()
            await receiving.lost.wait()
            handler.fails = True
            handler.gate.set()
            await eventually(lambda: len(queues._queues) == 0)
            assert handler.metas == [b"1"]

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_closing_ends_whatever_is_being_handled(socket_pair, eventually):
    async def main():
        queues, handler = ReceiveQueues(), Handler()
        async with socket_pair() as (caller, listener):
            sending, receiving = await connected(caller, listener, queues, handler)
            await sending.write_frame(b"1", b"", Priority.BULK)
            await eventually(lambda: len(handler.metas) == 1)
            await queues.close()
            await receiving.lost.wait()
            assert len(queues._queues) == 0

    asyncio.run(main())
