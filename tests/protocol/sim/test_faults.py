import asyncio
from typing import Any

import pytest

from shoal.protocol.errors import LocalError, Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.ports import Payload
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

NEAR = pytest.approx


async def outcome_of(task: "asyncio.Task[Any]") -> str:
    try:
        await task
    except Unreachable as error:
        return error.why
    return "sent"


# Crash, pause, close ------------------------------------------------------------------------------------------------


def test_a_crash_breaks_the_stream_for_all_who_wait_on_it(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        tasks = [asyncio.create_task(send(a, b, str(i), 1_000_000)) for i in range(4)]
        await asyncio.sleep(1.5)
        world.crash(b)
        assert [await outcome_of(task) for task in tasks] == ["sent"] + ["its process ended"] * 3
        assert world.now_s() == NEAR(1.55)
        assert [meta for _, meta in ear.frames] == ["0"]

    run(main())


def test_a_crashed_peer_answers_nothing_and_new_frames_to_it_time_out(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05), stall_s=7.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        await send(a, b, "0", 1000)
        await asyncio.sleep(1.0)
        world.crash(b)
        await asyncio.sleep(1.0)
        began_s = world.now_s()
        with pytest.raises(Unreachable):
            await a.transport.call(b.peer_id, b"?", timeout_s=3.0)
        assert world.now_s() == NEAR(began_s + 3.0)
        with pytest.raises(Unreachable, match="nothing got through for 7 s"):
            await send(a, b, "1", 1000)
        assert world.now_s() == NEAR(began_s + 10.0)

    run(main())


def test_a_crash_runs_none_of_the_peers_code_any_more(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        b = world.add_peer("b")
        await listen(world)
        done: list[str] = []

        async def child() -> None:
            while True:
                await asyncio.sleep(1.0)
                done.append("child")

        async def work() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(child())
                    await b.compute.run("forward", lambda: done.append("first job"), flop=1e12)
                    await b.compute.run("forward", lambda: done.append("second job"), flop=10e12)
                    await b.compute.run("forward", lambda: done.append("third job"), flop=1e12)
            finally:
                done.append("cleanup")

        b.spawn(work())
        await asyncio.sleep(2.5)
        world.crash(b)
        before = list(done)
        await asyncio.sleep(100.0)
        assert before == ["first job", "second job", "child", "child"]
        assert done == before

    run(main())


def test_a_peer_comes_back_under_its_name_identity_and_address(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, former = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        with pytest.raises(LocalError, match="alive"):
            world.add_peer("b")
        world.crash(former)
        back = world.add_peer("b")
        assert back.peer_id == former.peer_id
        assert back.transport.addresses() == former.transport.addresses()
        back.transport.serve(on_call=echo, on_frame=never)
        assert await a.transport.call(back.peer_id, b"again", timeout_s=1.0) == b"again"
        with pytest.raises(LocalError, match="crashed"):
            world.resume(former)

    run(main())


def test_a_paused_peer_does_everything_late_and_loses_nothing(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        ticks: list[float] = []

        async def tick() -> None:
            for _ in range(3):
                await asyncio.sleep(1.0)
                ticks.append(world.now_s())

        b.spawn(tick())
        await asyncio.sleep(1.5)
        world.pause(b)
        await send(a, b, "0", 1000)
        with pytest.raises(Unreachable):
            await a.transport.call(b.peer_id, b"?", timeout_s=2.0)
        await asyncio.sleep(20.0)
        world.resume(b)
        await asyncio.sleep(5.0)
        assert ticks == NEAR([1.0, 23.5, 24.5])
        assert ear.frames == [(NEAR(23.5), "0")]
        assert ear.calls == [(NEAR(23.5), b"?")]

    run(main())


def test_close_lets_what_has_left_be_handled_and_tells_whoever_still_waits(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        await send(a, b, "left", 1000)
        await a.transport.close()
        assert world.now_s() == NEAR(0.001 + 2 * 0.05)
        assert [meta for _, meta in ear.frames] == ["left"]
        await a.transport.close()
        with pytest.raises(Unreachable, match="closing"):
            await send(a, b, "late", 1000)
        with pytest.raises(Unreachable, match="closing"):
            await a.transport.call(b.peer_id, b"?", timeout_s=1.0)
        waiting = asyncio.create_task(send(b, a, "to the closed", 1000))
        assert "nothing got through" in await outcome_of(waiting)

    run(main())


def test_close_gives_up_on_a_receiver_that_takes_its_time(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world, handle_s=100.0)
        await send(a, b, "slow", STREAM_CREDIT_BYTES)
        waiting = asyncio.create_task(send(a, b, "waiting", 1000))
        await a.transport.close()
        assert world.now_s() == NEAR(2.0)
        assert await outcome_of(waiting) == "this peer is closing"

    run(main())


def test_close_ends_the_handlers_that_run(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        ended: list[str] = []

        async def hang(source: PeerID, request: bytes) -> bytes:
            try:
                await asyncio.sleep(1000.0)
            finally:
                ended.append("call")
            return b""

        b.transport.serve(on_call=hang, on_frame=never)
        await a.transport.introduce(b.peer_id, b.transport.addresses())
        call = asyncio.create_task(a.transport.call(b.peer_id, b"?", timeout_s=5.0))
        await asyncio.sleep(1.0)
        await b.transport.close()
        assert ended == ["call"]
        assert "no answer" in await outcome_of(call)

    run(main())


# Partitions ---------------------------------------------------------------------------------------------------------


def test_a_cut_swallows_calls_both_ways_until_it_heals(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b, c = (world.add_peer(name) for name in "abc")
        await listen(world)
        world.partition([a], [b])
        for source, destination in ((a, b), (b, a)):
            with pytest.raises(Unreachable):
                await source.transport.call(destination.peer_id, b"?", timeout_s=1.0)
        assert await a.transport.call(c.peer_id, b"?", timeout_s=1.0) == b"?"
        assert await c.transport.call(b.peer_id, b"?", timeout_s=1.0) == b"?"
        world.heal()
        assert await a.transport.call(b.peer_id, b"?", timeout_s=1.0) == b"?"

    run(main())


def test_a_one_way_cut_lets_the_request_through_and_not_the_reply(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        ear_a, ear_b = await listen(world)
        world.partition([b], [a], one_way=True)
        with pytest.raises(Unreachable):
            await a.transport.call(b.peer_id, b"heard", timeout_s=1.0)
        with pytest.raises(Unreachable):
            await b.transport.call(a.peer_id, b"unheard", timeout_s=1.0)
        assert [request for _, request in ear_b.calls] == [b"heard"]
        assert ear_a.calls == []

    run(main())


def test_a_call_under_way_when_the_cut_comes_is_lost(listen: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        call = asyncio.create_task(a.transport.call(b.peer_id, b"?", timeout_s=1.0))
        await asyncio.sleep(0.02)
        world.partition([a], [b])
        assert "no answer" in await outcome_of(call)
        assert ear.calls == []

    run(main())


def test_frames_come_late_and_in_order_when_a_cut_heals_in_time(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6), stall_s=10.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        tasks = [asyncio.create_task(send(a, b, str(i), 100_000)) for i in range(4)]
        await asyncio.sleep(0.24)  # 0 has arrived, 1 has left and flies, 2 is leaving, 3 waits
        cut = world.partition([a], [b])
        await asyncio.sleep(8.0)
        world.heal(cut)
        assert [await outcome_of(task) for task in tasks] == ["sent"] * 4
        await asyncio.sleep(1.0)
        # What flew comes one latency after the healing, 3 starts at the healing.
        assert arrivals_of(ear) == NEAR({"0": 0.15, "1": 8.29, "2": 8.29, "3": 8.39})

    run(main())


def test_a_frame_that_arrives_just_after_the_healing_waits_for_those_the_cut_held(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        sends = asyncio.gather(*(send(a, b, str(i), 100_000) for i in range(2)))
        await asyncio.sleep(0.14)
        world.partition([a], [b])
        await asyncio.sleep(0.09)
        world.heal()  # at 0.23; frame 0 came at 0.15 and is held, frame 1 comes at 0.25
        await sends
        await asyncio.sleep(1.0)
        assert ear.frames == [(NEAR(0.28), "0"), (NEAR(0.28), "1")]

    run(main())


def arrivals_of(ear: Any) -> dict[str, float]:
    return {meta: at_s for at_s, meta in ear.frames}


@pytest.mark.parametrize("one_way", [False, True])
def test_a_stream_breaks_when_a_cut_lasts(one_way: bool, listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6), stall_s=10.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        tasks = [asyncio.create_task(send(a, b, str(i), 1_000_000)) for i in range(3)]
        await asyncio.sleep(1.02)
        world.partition([a], [b], one_way=one_way)
        assert [await outcome_of(task) for task in tasks] == ["sent", "sent", "nothing got through for 10 s"]
        assert world.now_s() == NEAR(11.02)
        world.heal()
        await asyncio.sleep(100.0)
        assert ear.frames == []  # the first was in flight at the cut, and what was in flight is gone with the stream
        await send(a, b, "anew", 1000)
        await asyncio.sleep(1.0)
        assert [meta for _, meta in ear.frames] == ["anew"]

    run(main())


def test_a_cut_of_the_way_back_holds_credits_and_healing_returns_them(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05), stall_s=10.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        world.partition([b], [a], one_way=True)
        tasks = [asyncio.create_task(send(a, b, str(i), STREAM_CREDIT_BYTES)) for i in range(2)]
        await asyncio.sleep(5.0)
        assert [task.done() for task in tasks] == [True, False]
        assert [meta for _, meta in ear.frames] == ["0"]
        world.heal()
        assert [await outcome_of(task) for task in tasks] == ["sent", "sent"]
        assert world.now_s() == NEAR(5.05)

    run(main())


def test_an_idle_stream_survives_any_cut(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05), stall_s=10.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        await send(a, b, "0", 1000)
        await asyncio.sleep(1.0)
        world.partition([a], [b])
        await asyncio.sleep(1000.0)
        late = asyncio.create_task(send(a, b, "1", 1000))
        await asyncio.sleep(9.0)
        world.heal()
        assert await outcome_of(late) == "sent"
        await asyncio.sleep(1.0)
        assert [meta for _, meta in ear.frames] == ["0", "1"]

    run(main())


def test_a_peer_that_dies_behind_a_cut_is_noticed_by_the_stall_alone(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6), stall_s=10.0)
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        task = asyncio.create_task(send(a, b, "0", 100_000_000))
        await asyncio.sleep(1.0)
        world.partition([a], [b])
        await asyncio.sleep(1.0)
        world.crash(b)
        assert await outcome_of(task) == "nothing got through for 10 s"
        assert world.now_s() == NEAR(11.0)

    run(main())


async def echo(source: PeerID, request: bytes) -> bytes:
    return request


async def never(source: PeerID, meta: bytes, payload: Payload) -> None:
    return None
