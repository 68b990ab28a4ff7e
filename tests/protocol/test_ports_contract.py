"""What drivers may rely on, whichever world they live in: every test here runs in both.

This file is long because a contract that is spread over several files is one that nobody reads whole.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from shoal.protocol.errors import LocalError, RemoteError, Unreachable
from shoal.protocol.identity import Identity
from shoal.protocol.limits import (
    CONTROL_BYTES_MAX,
    FRAME_META_BYTES_MAX,
    RECORD_BYTES_MAX,
    RECORD_EXPIRES_S_MAX,
    STREAM_CREDIT_BYTES,
)
from shoal.protocol.ports import Priority

MIB = 1024 * 1024
PATIENCE_S = 30.0


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions are about lists, which wake nobody
            await asyncio.sleep(0.005)


class Ear:
    """What a peer hears. Frames wait at the gate; calls are answered by `answer`."""

    def __init__(self, ports, *, answer: Callable[[bytes], Awaitable[bytes]] | None = None, open_gate: bool = True):
        self.calls = []
        self.metas = []
        self.payloads = []
        self.refuse: set[bytes] = set()
        self.gate = asyncio.Event()
        if open_gate:
            self.gate.set()
        self.num_inside = 0
        self.most_inside = 0
        self._answer = answer
        ports.transport.serve(on_call=self._on_call, on_frame=self._on_frame)

    async def _on_call(self, source, request):
        self.calls.append((source, request))
        return await self._answer(request) if self._answer is not None else b"re: " + request

    async def _on_frame(self, source, meta, payload):
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if meta in self.refuse:
                raise RemoteError(source, "sent what the test refuses")
            self.metas.append((source, meta))
            self.payloads.append(payload)
        finally:
            self.num_inside -= 1


def deaf(*peers) -> None:
    for peer in peers:
        Ear(peer)


def some_bytes(count: int) -> bytes:
    return (bytes(range(251)) * (count // 251 + 1))[:count]


# Calls


def test_a_call_reaches_its_peer_and_brings_the_answer_back(any_world):
    async def main(a, b):
        deaf(a)
        ear = Ear(b)
        assert await a.transport.call(b.peer_id, b"hello", timeout_s=PATIENCE_S) == b"re: hello"
        assert ear.calls == [(a.peer_id, b"hello")]

    any_world.run(2, main)


def test_many_calls_at_once_get_each_its_own_answer(any_world):
    async def main(a, b):
        deaf(a, b)
        requests = [b"%d" % number for number in range(50)]
        answers = await asyncio.gather(*(a.transport.call(b.peer_id, each, timeout_s=PATIENCE_S) for each in requests))
        assert answers == [b"re: " + each for each in requests]

    any_world.run(2, main)


def test_the_largest_call_and_answer_pass_and_a_larger_one_is_our_mistake(any_world):
    async def echo(request):
        return request

    async def main(a, b):
        deaf(a)
        Ear(b, answer=echo)
        large = some_bytes(CONTROL_BYTES_MAX)
        assert await a.transport.call(b.peer_id, large, timeout_s=PATIENCE_S) == large
        with pytest.raises(ValueError, match="larger than any peer accepts"):
            await a.transport.call(b.peer_id, large + b"!", timeout_s=PATIENCE_S)

    any_world.run(2, main)


def test_an_answer_that_is_too_large_is_not_sent(any_world):
    async def too_much(request):
        return bytes(CONTROL_BYTES_MAX + 1)

    async def main(a, b):
        deaf(a)
        Ear(b, answer=too_much)
        with pytest.raises(Unreachable):
            await a.transport.call(b.peer_id, b"", timeout_s=PATIENCE_S)

    any_world.run(2, main)


def test_a_peer_that_nobody_knows_is_unreachable(any_world):
    async def main(a, b):
        deaf(a, b)
        unknown = Identity.generate().peer_id
        with pytest.raises(Unreachable) as caught:
            await a.transport.call(unknown, b"hello", timeout_s=PATIENCE_S)
        assert caught.value.peer_id == unknown
        with pytest.raises(Unreachable):
            await a.transport.send(unknown, b"", b"", priority=Priority.BULK)

    any_world.run(2, main)


def test_a_peer_that_has_closed_is_unreachable(any_world):
    async def main(a, b):
        deaf(a, b)
        await a.transport.call(b.peer_id, b"hello", timeout_s=PATIENCE_S)
        await a.transport.send(b.peer_id, b"", b"", priority=Priority.BULK)
        await b.transport.close()
        with pytest.raises(Unreachable):
            await a.transport.call(b.peer_id, b"hello", timeout_s=PATIENCE_S)

        async def send_until_it_fails():
            # a frame may still leave before the end of the stream is known
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await a.transport.send(b.peer_id, b"", b"", priority=Priority.BULK)
                    await asyncio.sleep(0.005)

        with pytest.raises(Unreachable):
            await send_until_it_fails()

    any_world.run(2, main)


def test_a_closed_transport_reaches_nobody_and_may_be_closed_again(any_world):
    async def main(a, b):
        deaf(a, b)
        await a.transport.close()
        await a.transport.close()
        with pytest.raises(Unreachable):
            await a.transport.call(b.peer_id, b"hello", timeout_s=PATIENCE_S)
        with pytest.raises(Unreachable):
            await a.transport.send(b.peer_id, b"", b"", priority=Priority.BULK)

    any_world.run(2, main)


def test_a_handler_that_fails_is_unreachable_and_the_next_call_works(any_world):
    async def fail(request):
        if request == b"fail":
            raise KeyError("a detail of this machine")
        return b"fine"

    async def main(a, b):
        deaf(a)
        Ear(b, answer=fail)
        with pytest.raises(Unreachable) as caught:
            await a.transport.call(b.peer_id, b"fail", timeout_s=PATIENCE_S)
        assert "detail" not in str(caught.value)
        assert await a.transport.call(b.peer_id, b"again", timeout_s=PATIENCE_S) == b"fine"

    any_world.run(2, main)


def test_a_call_that_is_not_answered_ends_in_time(any_world):
    async def never(request):
        await asyncio.Event().wait()
        return b""

    async def main(a, b):
        deaf(a)
        Ear(b, answer=never)
        began_s = a.clock.now_s()
        with pytest.raises(Unreachable, match="no answer"):
            await a.transport.call(b.peer_id, b"hello", timeout_s=0.3)
        assert a.clock.now_s() - began_s >= 0.29

    any_world.run(2, main)


def test_a_peer_does_not_dial_itself(any_world):
    async def main(a):
        deaf(a)
        with pytest.raises(Unreachable):
            await a.transport.call(a.peer_id, b"hello", timeout_s=PATIENCE_S)
        with pytest.raises(Unreachable):
            await a.transport.send(a.peer_id, b"", b"", priority=Priority.BULK)

    any_world.run(1, main)


def test_an_introduction_never_raises_and_a_good_one_is_enough(any_world):
    async def main(a, b):
        deaf(a, b)
        with pytest.raises(Unreachable):
            await a.transport.call(b.peer_id, b"hello", timeout_s=1)
        await a.transport.introduce(b.peer_id, ())
        await a.transport.introduce(b.peer_id, ("nonsense", "/ip4/300.0.0.1/tcp/x", ""))
        await a.transport.introduce(a.peer_id, a.transport.addresses())
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        assert await a.transport.call(b.peer_id, b"hello", timeout_s=PATIENCE_S) == b"re: hello"

    any_world.run(2, main, introduced=False)


def test_whoever_was_called_can_call_back(any_world):
    async def main(a, b):
        deaf(a, b)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        await a.transport.call(b.peer_id, b"hello", timeout_s=PATIENCE_S)
        assert await b.transport.call(a.peer_id, b"hello", timeout_s=PATIENCE_S) == b"re: hello"

    any_world.run(2, main, introduced=False)


def test_a_call_before_serve_waits_for_it(any_world):
    async def main(a, b):
        deaf(a)
        call = asyncio.create_task(a.transport.call(b.peer_id, b"early", timeout_s=PATIENCE_S))
        await asyncio.sleep(0.05)
        assert not call.done()
        Ear(b)
        assert await call == b"re: early"

    any_world.run(2, main)


def test_a_transport_serves_once(any_world):
    async def main(a):
        deaf(a)
        with pytest.raises(LocalError):
            Ear(a)

    any_world.run(1, main)


def test_addresses_name_the_peer(any_world):
    async def main(a):
        deaf(a)
        assert a.transport.peer_id == a.peer_id
        assert a.transport.addresses()
        assert all(address.endswith(f"/p2p/{a.peer_id}") for address in a.transport.addresses())

    any_world.run(1, main)


# Frames


def test_frames_of_all_sizes_arrive_in_order_and_intact(any_world):
    sizes = [0, 1, 7, 4096, 65_537, 5 * MIB, 0, STREAM_CREDIT_BYTES + 3, 1]

    async def main(a, b):
        deaf(a)
        ear = Ear(b)
        for number, size in enumerate(sizes):
            await a.transport.send(b.peer_id, b"%d" % number, some_bytes(size), priority=Priority.ACTIVATION)
        await eventually(lambda: len(ear.metas) == len(sizes))
        assert ear.metas == [(a.peer_id, b"%d" % number) for number in range(len(sizes))]
        assert [len(payload) for payload in ear.payloads] == sizes
        assert all(payload == some_bytes(len(payload)) for payload in ear.payloads)

    any_world.run(2, main)


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda raw: memoryview(bytearray(raw)).cast("d")])
def test_any_buffer_is_a_payload_and_the_receiver_owns_what_it_gets(any_world, kind):
    async def main(a, b):
        deaf(a)
        ear = Ear(b)
        payload = kind(some_bytes(800))
        await a.transport.send(b.peer_id, b"", payload, priority=Priority.BULK)
        await eventually(lambda: len(ear.payloads) == 1)
        got = memoryview(ear.payloads[0]).cast("B")
        assert bytes(got) == some_bytes(800)
        got[:] = bytes(800)
        assert bytes(memoryview(payload).cast("B")) == some_bytes(800)

    any_world.run(2, main)


def test_frames_of_one_priority_stay_in_order_when_sent_together(any_world):
    async def main(a, b):
        deaf(a)
        ear = Ear(b)
        metas = [b"%d" % number for number in range(100)]
        await asyncio.gather(*(a.transport.send(b.peer_id, m, m * 100, priority=Priority.GRADIENT) for m in metas))
        await eventually(lambda: len(ear.metas) == len(metas))
        assert [meta for _, meta in ear.metas] == metas

    any_world.run(2, main)


def test_what_waits_leaves_by_priority(any_world):
    async def main(a, b):
        deaf(a)
        ear = Ear(b, open_gate=False)
        await a.transport.send(b.peer_id, b"full", bytes(STREAM_CREDIT_BYTES), priority=Priority.BULK)
        order = [(b"bulk 1", Priority.BULK), (b"activation", Priority.ACTIVATION), (b"bulk 2", Priority.BULK)]
        order += [(b"gradient 1", Priority.GRADIENT), (b"gradient 2", Priority.GRADIENT)]
        sends = [asyncio.create_task(a.transport.send(b.peer_id, m, b"x", priority=p)) for m, p in order]
        await eventually(lambda: ear.num_inside == 1)
        assert not any(send.done() for send in sends)
        ear.gate.set()
        await asyncio.gather(*sends)
        await eventually(lambda: len(ear.metas) == 6)
        assert [meta for _, meta in ear.metas] == [
            b"full",
            b"gradient 1",
            b"gradient 2",
            b"activation",
            b"bulk 1",
            b"bulk 2",
        ]

    any_world.run(2, main)


def test_a_sender_waits_when_its_credit_is_used_up(any_world):
    frame = bytes(STREAM_CREDIT_BYTES // 4)

    async def main(a, b):
        deaf(a)
        ear = Ear(b, open_gate=False)
        sends = [
            asyncio.create_task(a.transport.send(b.peer_id, b"%d" % number, frame, priority=Priority.BULK))
            for number in range(5)
        ]
        # four payloads would fit, their headers are what is too much
        await eventually(lambda: sum(send.done() for send in sends) == 3 and ear.num_inside == 1)
        await asyncio.sleep(0.1)
        assert [send.done() for send in sends] == [True, True, True, False, False]
        ear.gate.set()
        await asyncio.gather(*sends)
        await eventually(lambda: len(ear.metas) == 5)

    any_world.run(2, main)


def test_frames_of_one_peer_are_handled_one_at_a_time_and_peers_beside_each_other(any_world):
    async def main(a, b, c):
        deaf(a, b)
        ear = Ear(c, open_gate=False)
        for sender in (a, b):
            for _ in range(3):
                await sender.transport.send(c.peer_id, b"", b"", priority=Priority.BULK)
        await eventually(lambda: ear.num_inside == 2)
        ear.gate.set()
        await eventually(lambda: len(ear.metas) == 6)
        assert ear.most_inside == 2

    any_world.run(3, main)


def test_a_refused_frame_breaks_the_stream_and_the_next_send_opens_another(any_world):
    async def main(a, b):
        deaf(a)
        ear = Ear(b, open_gate=False)
        ear.refuse.add(b"bad")
        await a.transport.send(b.peer_id, b"good", bytes(STREAM_CREDIT_BYTES // 2), priority=Priority.GRADIENT)
        await a.transport.send(b.peer_id, b"bad", bytes(STREAM_CREDIT_BYTES // 4), priority=Priority.GRADIENT)
        waiting = [
            asyncio.create_task(
                a.transport.send(b.peer_id, b"lost", bytes(STREAM_CREDIT_BYTES), priority=Priority.GRADIENT)
            )
            for _ in range(2)
        ]
        await eventually(lambda: ear.num_inside == 1)
        ear.gate.set()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, Unreachable)
            assert outcome.peer_id == b.peer_id
        await a.transport.send(b.peer_id, b"after", b"x", priority=Priority.BULK)
        await eventually(lambda: len(ear.metas) == 2)
        assert [meta for _, meta in ear.metas] == [b"good", b"after"]

    any_world.run(2, main)


def test_a_cancelled_send_is_forgotten(any_world):
    async def main(a, b):
        deaf(a)
        ear = Ear(b, open_gate=False)
        await a.transport.send(b.peer_id, b"full", bytes(STREAM_CREDIT_BYTES), priority=Priority.BULK)
        given_up = asyncio.create_task(a.transport.send(b.peer_id, b"given up", b"", priority=Priority.GRADIENT))
        kept = asyncio.create_task(a.transport.send(b.peer_id, b"kept", b"", priority=Priority.BULK))
        await eventually(lambda: ear.num_inside == 1)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        ear.gate.set()
        await kept
        await eventually(lambda: len(ear.metas) == 2)
        assert [meta for _, meta in ear.metas] == [b"full", b"kept"]

    any_world.run(2, main)


def test_what_has_left_arrives_although_the_sender_closes(any_world):
    async def main(a, b):
        deaf(a)
        ear = Ear(b)
        await a.transport.send(b.peer_id, b"last", bytes(5 * MIB), priority=Priority.BULK)
        await a.transport.close()
        assert [meta for _, meta in ear.metas] == [b"last"]

    any_world.run(2, main)


def test_a_frame_larger_than_any_receiver_accepts_is_our_mistake(any_world):
    async def main(a, b):
        deaf(a, b)
        with pytest.raises(ValueError, match="larger than any peer accepts"):
            await a.transport.send(b.peer_id, bytes(FRAME_META_BYTES_MAX + 1), b"", priority=Priority.BULK)
        await a.transport.send(b.peer_id, bytes(FRAME_META_BYTES_MAX), b"", priority=Priority.BULK)

    any_world.run(2, main)


# Directory


def test_a_record_stored_by_one_peer_is_found_by_all(any_world):
    async def main(a, b, c):
        assert await a.directory.store("adverts", "a", b"\x00\xff from a", expires_in_s=60)
        for peer in (a, b, c):
            assert await peer.directory.get("adverts") == {"a": b"\x00\xff from a"}

    any_world.run(3, main)


def test_subkeys_of_one_key_stand_beside_each_other(any_world):
    async def main(*peers):
        for number, peer in enumerate(peers):
            assert await peer.directory.store("adverts", f"peer {number}", b"%d" % number, expires_in_s=60)
        assert await peers[0].directory.store("other", "x", b"y", expires_in_s=60)
        expected = {f"peer {number}": b"%d" % number for number in range(len(peers))}
        for peer in peers:
            assert await peer.directory.get("adverts") == expected

    any_world.run(3, main)


def test_a_key_without_records_is_empty(any_world):
    async def main(a, b):
        assert await a.directory.get("nothing here") == {}

    any_world.run(2, main)


def test_a_later_record_replaces_an_earlier_one_and_not_the_reverse(any_world):
    async def main(a, b):
        await a.directory.store("key", "sub", b"old", expires_in_s=30)
        await b.directory.store("key", "sub", b"new", expires_in_s=60)
        assert await a.directory.get("key") == {"sub": b"new"}
        await a.directory.store("key", "sub", b"stale", expires_in_s=10)
        assert await b.directory.get("key") == {"sub": b"new"}

    any_world.run(2, main)


def test_a_record_lapses_and_its_neighbours_stay(any_world):
    async def main(a, b):
        assert await a.directory.store("key", "short", b"1", expires_in_s=2.0)
        assert await a.directory.store("key", "long", b"2", expires_in_s=60)
        assert "short" in await b.directory.get("key")
        await asyncio.sleep(2.1)  # not a wait for something: the time itself is what is tested
        assert await b.directory.get("key") == {"long": b"2"}
        assert await a.directory.get("key") == {"long": b"2"}

    any_world.run(2, main)


def test_the_largest_record_fits_and_no_larger_one(any_world):
    async def main(a, b):
        large = some_bytes(RECORD_BYTES_MAX)
        assert await a.directory.store("key", "sub", large, expires_in_s=60)
        assert await b.directory.get("key") == {"sub": large}
        with pytest.raises(ValueError, match="larger than"):
            await a.directory.store("key", "sub", large + b"!", expires_in_s=60)

    any_world.run(2, main)


@pytest.mark.parametrize("expires_in_s", [0.0, -1.0, RECORD_EXPIRES_S_MAX + 1.0, float("nan"), float("inf")])
def test_an_impossible_expiry_is_our_mistake(any_world, expires_in_s):
    async def main(a):
        with pytest.raises(ValueError, match="cannot expire in"):
            await a.directory.store("key", "sub", b"", expires_in_s=expires_in_s)

    any_world.run(1, main)


# Compute


def test_jobs_run_in_order_one_at_a_time_and_say_when(any_world):
    async def main(a):
        ran = []

        def job(number):
            ran.append(number)
            return number * 10

        began_s = a.clock.now_s()
        jobs = [a.compute.run("forward", lambda number=number: job(number), flop=1e9) for number in range(5)]
        results = await asyncio.gather(*jobs)
        ended_s = a.clock.now_s()
        assert ran == [0, 1, 2, 3, 4]
        assert [result.value for result in results] == [0, 10, 20, 30, 40]
        times = [began_s, *(t for result in results for t in (result.started_s, result.ended_s)), ended_s]
        assert times == sorted(times)

    any_world.run(1, main)


def test_the_loop_is_free_while_a_job_runs(any_world):
    async def main(a):
        job = asyncio.create_task(a.compute.run("step", lambda: time.sleep(0.2), flop=2e11))
        turns = 0
        while not job.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10

    any_world.run(1, main)


def test_a_failing_job_raises_where_it_was_asked_for_and_the_next_one_runs(any_world):
    def fail():
        raise ArithmeticError("overflow")

    async def main(a):
        with pytest.raises(ArithmeticError, match="overflow"):
            await a.compute.run("backward", fail, flop=1.0)
        assert (await a.compute.run("backward", lambda: "fine", flop=1.0)).value == "fine"

    any_world.run(1, main)


def test_a_closed_device_refuses_jobs(any_world):
    async def main(a):
        a.compute.close()
        a.compute.close()
        with pytest.raises(LocalError):
            await a.compute.run("probe", lambda: 1, flop=1.0)

    any_world.run(1, main)


def test_a_cancelled_job_that_has_not_begun_never_runs(any_world):
    async def main(a):
        ran = []
        first = asyncio.create_task(a.compute.run("forward", lambda: time.sleep(0.1), flop=1e11))
        second = asyncio.create_task(a.compute.run("forward", lambda: ran.append("second"), flop=1.0))
        await asyncio.sleep(0)
        second.cancel()
        await first
        await a.compute.run("forward", lambda: ran.append("third"), flop=1.0)
        assert ran == ["third"]

    any_world.run(1, main)


# Clock


def test_the_clock_is_the_loops_and_goes_forward(any_world):
    def both_times(clock):
        """The loop's time between two looks at the clock; uvloop cuts its own to whole milliseconds."""
        before_s, loop_s, after_s = clock.now_s(), asyncio.get_running_loop().time(), clock.now_s()
        assert before_s - 0.001 <= loop_s <= after_s
        return before_s

    async def main(a):
        began_s = both_times(a.clock)
        await asyncio.sleep(0.1)
        assert both_times(a.clock) - began_s >= 0.098
        assert a.clock.wall_s() > 0

    any_world.run(1, main)
