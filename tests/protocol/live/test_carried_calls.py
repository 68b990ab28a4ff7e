"""Calls over one carried stream: many at a time, both ways, and none waits for ever."""

import asyncio

import pytest

from carried_wires import connected
from shoal.protocol.errors import RemoteError, Unreachable
from shoal.protocol.identity import Identity
from shoal.protocol.limits import CARRIED_CALLS_MAX
from shoal.protocol.live import carried_calls
from shoal.protocol.live.carried_calls import CallStream, CarriedCalls

A, B = Identity.generate().peer_id, Identity.generate().peer_id


class Answerer:
    def __init__(self):
        self.asked, self.gate = [], asyncio.Event()

    async def __call__(self, source, request):
        self.asked.append((source, request))
        if request == b"fail":
            raise ValueError("it says nothing about us")
        if request == b"wait":
            await self.gate.wait()
        return b"re: " + request


async def pair():
    (a, b), answers = await connected(), (Answerer(), Answerer())
    streams = CallStream(B, a, answers[0]), CallStream(A, b, answers[1])
    return streams, answers, [asyncio.create_task(stream.serve()) for stream in streams]


def test_both_ends_ask_and_answers_find_their_questions():
    async def main():
        (a, b), (at_a, at_b), serving = await pair()
        waiting = asyncio.create_task(a.call(b"wait"))
        replies = await asyncio.gather(*(a.call(b"%d" % number) for number in range(50)), b.call(b"back"))
        assert replies == [*(b"re: %d" % number for number in range(50)), b"re: back"]
        assert not waiting.done()
        at_b.gate.set()
        assert await waiting == b"re: wait"
        assert at_a.asked == [(B, b"back")]
        a.end()
        await asyncio.gather(*serving)

    asyncio.run(main())


def test_who_fails_says_so_and_not_why():
    async def main():
        (a, _), _, serving = await pair()
        with pytest.raises(Unreachable, match=r"it failed to answer$"):
            await a.call(b"fail")
        assert await a.call(b"again") == b"re: again"
        a.end()
        await asyncio.gather(*serving)

    asyncio.run(main())


def test_nobody_waits_for_a_stream_that_ended(eventually):
    async def main():
        (a, b), (_, at_b), serving = await pair()
        waiting = asyncio.create_task(a.call(b"wait"))
        await eventually(lambda: bool(at_b.asked))
        b.end()
        with pytest.raises(Unreachable, match="ended"):
            await waiting
        await asyncio.gather(*serving)
        with pytest.raises(Unreachable, match="ended"):
            await a.call(b"later")

    asyncio.run(main())


def test_a_peer_is_not_read_further_while_so_many_of_its_calls_wait(eventually):
    async def main():
        (a, _), (_, at_b), serving = await pair()
        calls = [asyncio.create_task(a.call(b"wait")) for _ in range(CARRIED_CALLS_MAX + 10)]
        await eventually(lambda: len(at_b.asked) == CARRIED_CALLS_MAX)
        await asyncio.sleep(0.1)
        assert len(at_b.asked) == CARRIED_CALLS_MAX
        at_b.gate.set()
        assert await asyncio.gather(*calls) == [b"re: wait"] * len(calls)
        a.end()
        await asyncio.gather(*serving)

    asyncio.run(main())


@pytest.mark.parametrize("said", [b"\x00" + b"\xff" * 8, b"\x03" + bytes(8)], ids=["too long", "of no kind"])
def test_what_no_honest_peer_says_ends_the_stream(said):
    async def main():
        a, b = await connected()
        stream = CallStream(A, b, Answerer())
        a[1].write(said)
        with pytest.raises(RemoteError, match="where calls belong"):
            await stream.serve()
        assert await a[0].read() == b""

    asyncio.run(main())


def test_a_stream_without_calls_ends_and_one_with_a_long_call_does_not(monkeypatch):
    monkeypatch.setattr(carried_calls, "_IDLE_S", 0.1)

    async def main():
        (a, _), (_, at_b), serving = await pair()
        waiting = asyncio.create_task(a.call(b"wait"))
        await asyncio.sleep(0.5)
        at_b.gate.set()
        assert await waiting == b"re: wait"
        await asyncio.gather(*serving)
        assert a.is_over

    asyncio.run(main())


def test_one_stream_is_opened_for_all_who_ask_at_once_and_another_when_it_broke(eventually):
    async def main():
        opened, serving, at_b = [], [], Answerer()

        async def open_stream(peer):
            assert peer == B
            a, b = await connected()
            opened.append(CallStream(A, b, at_b))
            serving.append(asyncio.create_task(opened[-1].serve()))
            await asyncio.sleep(0.05)
            return a

        calls = CarriedCalls(open_stream, Answerer())
        assert await asyncio.gather(*(calls.call(B, b"hi") for _ in range(5))) == [b"re: hi"] * 5
        assert len(opened) == 1
        opened[0].end()
        await eventually(lambda: not calls._streams)
        assert await calls.call(B, b"again") == b"re: again"
        assert len(opened) == 2
        await calls.close()
        await asyncio.gather(*serving)

    asyncio.run(main())


def test_who_cannot_open_tells_all_who_wait_and_tries_again_for_the_next():
    async def main():
        tries = []

        async def open_stream(peer):
            tries.append(peer)
            await asyncio.sleep(0.01)
            raise Unreachable(peer, "nobody carries")

        calls = CarriedCalls(open_stream, Answerer())
        failed = await asyncio.gather(*(calls.call(B, b"hi") for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in failed] == [Unreachable] * 3
        with pytest.raises(Unreachable, match="nobody carries"):
            await calls.call(B, b"hi")
        assert len(tries) == 2
        await calls.close()

    asyncio.run(main())
