"""Who opens streams and says nothing keeps nobody else from opening one."""

import asyncio
import contextlib
import os

import pytest

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import WAITING_STREAMS_MAX, WAITING_STREAMS_OF_ONE_MAX
from shoal.protocol.live.doorway import Doorway
from shoal.protocol.live.loop import run
from shoal.protocol.ports import Priority

A = PeerID("a")


def test_a_peer_with_too_many_loses_its_own_oldest() -> None:
    doorway, ended = Doorway(), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(doorway.waits(PeerID("b"), lambda: ended.append("b")))
        for number in range(WAITING_STREAMS_OF_ONE_MAX + 2):
            stack.enter_context(doorway.waits(A, lambda number=number: ended.append(number)))
        assert ended == [0, 1]
        assert len(doorway._waiting) == WAITING_STREAMS_OF_ONE_MAX + 1
    assert len(doorway._waiting) == 0


def test_peers_without_number_drive_out_who_waited_longest() -> None:
    doorway, ended = Doorway(), []
    with contextlib.ExitStack() as stack:
        for number in range(2 * WAITING_STREAMS_MAX):
            stack.enter_context(doorway.waits(PeerID(f"{number}"), lambda number=number: ended.append(number)))
        assert ended == list(range(WAITING_STREAMS_MAX))
        assert len(doorway._waiting) == WAITING_STREAMS_MAX


@pytest.mark.process
def test_two_hundred_silent_streams_are_four_and_others_still_send(live_peer, eventually) -> None:
    """Two hundred files of the peer before, each for ten seconds."""

    async def main() -> None:
        flooded, heard = await live_peer("flooded")
        silent, _ = await live_peer("silent")
        sender, _ = await live_peer("sender")
        for one in (silent, sender):
            await one.introduce(flooded.peer_id, flooded.addresses())
        before = len(os.listdir("/proc/self/fd"))
        opened = []
        for _ in range(10):
            opened += await asyncio.gather(
                *(silent._open_stream_of(silent._frames_name, flooded.peer_id) for _ in range(20))
            )
        await eventually(lambda: len(flooded._doorway._waiting) == WAITING_STREAMS_OF_ONE_MAX)
        # 200 ends are the attacker's, in this process too.
        await eventually(lambda: len(os.listdir("/proc/self/fd")) - before <= 200 + WAITING_STREAMS_OF_ONE_MAX + 20)
        await sender.send(flooded.peer_id, b"meta", b"payload", priority=Priority.BULK)
        await eventually(lambda: len(heard.frames) == 1)
        for _, writer in opened:
            writer.close()
        await eventually(lambda: len(flooded._doorway._waiting) == 0)
        for one in (sender, silent, flooded):
            await one.close()

    run(main())
