import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.protocol.errors import Unreachable
from shoal.protocol.limits import STREAM_CREDIT_BYTES
from shoal.protocol.ports import Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import CardSpec, LinkSpec, uniform
from shoal.protocol.sim.world import World

NEAR = pytest.approx
MIB = 1024 * 1024


def arrivals(frames: list[tuple[float, str]]) -> dict[str, float]:
    return {meta: at_s for at_s, meta in frames}


# What a frame costs -------------------------------------------------------------------------------------------------


def test_a_frame_takes_its_size_over_the_rate_plus_the_latency(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        async with asyncio.TaskGroup() as group:
            group.create_task(send(a, b, "0", 100_000))
            group.create_task(send(a, b, "1", 200_000))
        assert world.now_s() == NEAR(0.3)  # the last byte has left
        await asyncio.sleep(1.0)
        assert arrivals(ear.frames) == NEAR({"0": 0.15, "1": 0.35})

    run(main())


def test_an_idle_path_is_not_faster_for_having_been_idle(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        await asyncio.sleep(10.0)
        await send(a, b, "0", 100_000)
        await asyncio.sleep(1.0)
        assert arrivals(ear.frames) == NEAR({"0": 10.15})

    run(main())


def test_frames_to_two_peers_share_the_uplink(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", up_bytes_per_s=1e6)
        b, c = world.add_peer("b"), world.add_peer("c")
        _, ear_b, ear_c = await listen(world)
        await asyncio.gather(send(a, b, "0", 100_000), send(a, c, "1", 300_000))
        await asyncio.sleep(1.0)
        assert arrivals(ear_b.frames + ear_c.frames) == NEAR({"0": 0.15, "1": 0.45})

    run(main())


def test_a_backlog_to_one_peer_does_not_delay_another_peers_first_frame(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.0))
        a = world.add_peer("a", up_bytes_per_s=1e6)
        b, c = world.add_peer("b"), world.add_peer("c")
        _, ear_b, ear_c = await listen(world)
        await asyncio.gather(
            *(send(a, b, str(i), 400_000) for i in range(3)), *(send(a, c, "x", 100_000) for _ in "1234")
        )
        # Fair in bytes: after b's first 400 kB, c catches up with four frames of 100 kB.
        assert [at_s for at_s, _ in ear_b.frames] == NEAR([0.4, 1.2, 1.6])
        assert [at_s for at_s, _ in ear_c.frames] == NEAR([0.5, 0.6, 0.7, 0.8])

    run(main())


def test_a_slow_path_does_not_block_the_uplink(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", up_bytes_per_s=1e6)
        b, c = world.add_peer("b"), world.add_peer("c")
        world.set_link(a, b, LinkSpec(latency_s=0.05, rate_bytes_per_s=1e5))
        _, ear_b, ear_c = await listen(world)
        await asyncio.gather(send(a, b, "slow", 100_000), send(a, c, "quick", 100_000))
        await asyncio.sleep(1.0)
        assert arrivals(ear_b.frames + ear_c.frames) == NEAR({"slow": 1.05, "quick": 0.25})

    run(main())


def test_frames_from_two_peers_share_the_downlink(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", down_bytes_per_s=1e6)
        b, c = world.add_peer("b"), world.add_peer("c")
        ear, *_ = await listen(world)
        await asyncio.gather(send(b, a, "0", 100_000), send(c, a, "1", 100_000))
        await asyncio.sleep(1.0)
        assert arrivals(ear.frames) == NEAR({"0": 0.15, "1": 0.25})

    run(main())


def test_a_downlink_serves_first_bytes_in_order_of_arrival_not_of_departure(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.01))
        a = world.add_peer("a", down_bytes_per_s=1e6)
        far, close = world.add_peer("far"), world.add_peer("close")
        world.set_link(far, a, LinkSpec(latency_s=0.1))
        ear, *_ = await listen(world)
        await send(far, a, "far", 100_000)
        await asyncio.sleep(0.02)
        await send(close, a, "close", 100_000)
        await asyncio.sleep(1.0)
        assert arrivals(ear.frames) == NEAR({"close": 0.13, "far": 0.23})

    run(main())


def test_a_downlink_faster_than_the_path_costs_nothing(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e5))
        a, b = world.add_peer("a"), world.add_peer("b", down_bytes_per_s=1e6)
        _, ear = await listen(world)
        await asyncio.gather(send(a, b, "0", 100_000), send(a, b, "1", 100_000))
        await asyncio.sleep(1.0)
        assert arrivals(ear.frames) == NEAR({"0": 1.05, "1": 2.05})

    run(main())


def test_a_changed_link_holds_for_the_rest_of_a_frame(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.0, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        both = asyncio.gather(send(a, b, "0", 100_000), send(a, b, "1", 100_000))
        await asyncio.sleep(0.05)
        world.set_link(a, b, LinkSpec(latency_s=0.0, rate_bytes_per_s=1e5))
        await both
        assert arrivals(ear.frames) == NEAR({"0": 0.05 + 0.5, "1": 0.55 + 1.0})

    run(main())


def test_a_changed_card_holds_from_the_next_frame_on(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.0))
        a, b = world.add_peer("a", up_bytes_per_s=1e6), world.add_peer("b")
        _, ear = await listen(world)
        both = asyncio.gather(send(a, b, "0", 100_000), send(a, b, "1", 100_000))
        await asyncio.sleep(0.05)
        world.set_card(a, CardSpec(up_bytes_per_s=1e5))
        await both
        world.set_card(b, CardSpec(down_bytes_per_s=2e4))
        await send(a, b, "2", 100_000)
        await asyncio.sleep(10.0)
        assert arrivals(ear.frames) == NEAR({"0": 0.1, "1": 1.1, "2": 6.1})

    run(main())


# Order, priorities, credits -----------------------------------------------------------------------------------------


def test_what_waits_leaves_by_priority_and_what_leaves_is_not_stopped(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.0, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        order = (Priority.BULK, Priority.BULK, Priority.ACTIVATION, Priority.GRADIENT, Priority.ACTIVATION)
        await asyncio.gather(*(send(a, b, str(i), 100_000, priority) for i, priority in enumerate(order)))
        assert [meta for _, meta in ear.frames] == ["0", "3", "2", "4", "1"]

    run(main())


def test_what_is_urgent_passes_whatever_waits_for_other_peers(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", up_bytes_per_s=1e6)
        b, c, d = world.add_peer("b"), world.add_peer("c"), world.add_peer("d")
        _, _, _, ear_d = await listen(world)
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(send(a, b, f"b{number}", 100_000, Priority.REDUCTION))
                group.create_task(send(a, c, f"c{number}", 100_000, Priority.STATE))
            await asyncio.sleep(0.01)
            for number in range(3):
                group.create_task(send(a, d, f"d{number}", 100_000, Priority.ACTIVATION))
        await asyncio.sleep(1.0)
        # One that leaves is not stopped; then all three, with two others before them in fair queueing.
        assert arrivals(ear_d.frames) == NEAR({"d0": 0.25, "d1": 0.35, "d2": 0.45})

    run(main())


def test_a_sixth_of_an_uplink_is_for_what_is_least_urgent(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", up_bytes_per_s=1e6)
        b, c = world.add_peer("b"), world.add_peer("c")
        _, ear_b, ear_c = await listen(world)
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(send(a, c, f"c{number}", 100_000, Priority.BULK))
            for number in range(25):
                group.create_task(send(a, b, f"b{number}", 100_000, Priority.GRADIENT))
        await asyncio.sleep(1.0)
        assert len(ear_b.frames) == 25
        apart_s = [later - sooner for (sooner, _), (later, _) in pairwise(ear_c.frames)]
        assert apart_s == NEAR([0.5, 0.6, 0.6, 0.6])  # what left first, since nothing else was there, counts too

    run(main())


def test_a_sender_waits_for_credit_until_the_handler_is_done(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world, handle_s=1.0)
        size = STREAM_CREDIT_BYTES // 2
        await asyncio.gather(*(send(a, b, str(i), size) for i in range(3)))
        # Two fit at once. The third needs the first one's credit: handled 1.05, returned 1.10.
        assert world.now_s() == NEAR(1.10)
        await asyncio.sleep(10.0)
        # Handled one at a time: the third arrived at 1.15 and waited for the second.
        assert arrivals(ear.frames) == NEAR({"0": 0.05, "1": 1.05, "2": 2.05})

    run(main())


def test_a_frame_larger_than_the_credit_goes_alone(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        await asyncio.gather(
            *(send(a, b, m, n) for m, n in (("0", MIB), ("huge", 2 * STREAM_CREDIT_BYTES), ("1", MIB)))
        )
        await asyncio.sleep(1.0)
        assert arrivals(ear.frames) == NEAR({"0": 0.05, "huge": 0.15, "1": 0.25})

    run(main())


def test_credit_that_a_large_urgent_frame_waits_for_is_not_given_to_a_small_one(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world, handle_s=1.0)
        await asyncio.gather(
            send(a, b, "first", STREAM_CREDIT_BYTES - MIB),
            send(a, b, "urgent", 2 * MIB, Priority.GRADIENT),
            send(a, b, "small", MIB // 2, Priority.BULK),
        )
        await asyncio.sleep(5.0)
        assert [meta for _, meta in ear.frames] == ["first", "urgent", "small"]

    run(main())


def test_a_frame_whose_sender_gives_up_never_leaves_and_the_next_one_does(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world, handle_s=100.0)
        await send(a, b, "first", STREAM_CREDIT_BYTES - MIB)
        blocked = asyncio.create_task(send(a, b, "blocked", 2 * MIB, Priority.GRADIENT))
        small = asyncio.create_task(send(a, b, "small", MIB))
        await asyncio.sleep(1.0)
        assert not small.done()
        blocked.cancel()
        await small
        assert world.now_s() == NEAR(1.0)
        await asyncio.sleep(500.0)
        assert [meta for _, meta in ear.frames] == ["first", "small"]

    run(main())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(50, 400_000),
            st.sampled_from(Priority),
            st.integers(0, 30),
        ).filter(lambda frame: frame[0] != frame[1]),
        max_size=25,
    ),
    jitter_s=st.sampled_from([0.0, 0.2]),
    loss=st.sampled_from([0.0, 0.3]),
    up=st.sampled_from([float("inf"), 2e6, 5e5]),
    down=st.sampled_from([float("inf"), 2e6, 5e5]),
    seed=st.integers(0, 9),
)
def test_every_frame_arrives_once_in_order_and_not_sooner_than_physics_allows(
    frames: list[tuple[int, int, int, Priority, int]],
    jitter_s: float,
    loss: float,
    up: float,
    down: float,
    seed: int,
    listen: Any,
    send: Any,
) -> None:
    latency_s, rate = 0.05, 1e6

    async def main() -> None:
        world = World(seed, uniform(latency_s, rate, jitter_s=jitter_s, loss=loss))
        peers = [world.add_peer(name, up_bytes_per_s=up, down_bytes_per_s=down) for name in "abc"]
        ears = await listen(world)

        async def later(index: int) -> None:
            source, destination, nbytes, priority, delay_cs = frames[index]
            await asyncio.sleep(delay_cs * 0.01)
            await send(peers[source], peers[destination], str(index), nbytes, priority)

        await asyncio.gather(*map(later, range(len(frames))))
        await asyncio.sleep(1000.0)
        arrived = {int(meta): (at_s, place) for place, ear in enumerate(ears) for at_s, meta in ear.frames}
        assert sorted(arrived) == list(range(len(frames)))
        assert sum(len(ear.frames) for ear in ears) == len(frames)
        for index, (_, destination, nbytes, _, delay_cs) in enumerate(frames):
            at_s, place = arrived[index]
            assert place == destination
            assert at_s >= delay_cs * 0.01 + latency_s + nbytes / min(rate, up, down) - 1e-9
        for first, second in ((i, j) for j in range(len(frames)) for i in range(j)):
            same_way = frames[first][:2] == frames[second][:2] and frames[first][3] == frames[second][3]
            if same_way and frames[first][4] <= frames[second][4]:
                assert arrived[first][0] <= arrived[second][0]
        for place in range(3):
            received = [i for i in range(len(frames)) if frames[i][1] == place]
            if received:
                began_s = min(frames[i][4] for i in received) * 0.01 + latency_s
                needed_s = sum(frames[i][2] for i in received) / down
                assert max(arrived[i][0] for i in received) >= began_s + needed_s - 1e-9

    run(main())


# Jitter and loss ----------------------------------------------------------------------------------------------------


def test_a_lost_frame_comes_one_retransmission_late_and_holds_up_the_next(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(3, uniform(0.05, loss=0.5))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        late_by = []
        for index in range(40):
            began_s = world.now_s()
            await send(a, b, str(index), 1000)
            await asyncio.sleep(10.0)
            late_by.append((ear.frames[-1][0] - began_s - 0.05) / 0.1)
        assert late_by == NEAR([round(turns) for turns in late_by], abs=1e-6)
        assert {round(turns) for turns in late_by} >= {0, 1, 2}
        burst_s = world.now_s()
        await asyncio.gather(*(send(a, b, f"burst {index}", 1000) for index in range(40)))
        await asyncio.sleep(60.0)
        burst = ear.frames[40:]
        assert [meta for _, meta in burst] == [f"burst {index}" for index in range(40)]
        assert burst[-1][0] - burst_s > 0.1

    run(main())


def test_jitter_stays_in_its_bounds_and_differs_by_frame(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(3, uniform(0.05, jitter_s=0.02))
        a, b = world.add_peer("a"), world.add_peer("b")
        _, ear = await listen(world)
        took_s = []
        for index in range(20):
            began_s = world.now_s()
            await send(a, b, str(index), 1000)
            await asyncio.sleep(1.0)
            took_s.append(ear.frames[-1][0] - began_s)
        assert all(0.05 <= seconds <= 0.07 for seconds in took_s)
        assert len(set(took_s)) == 20

    run(main())


def test_a_lost_call_is_never_answered(listen: Any) -> None:
    async def main() -> None:
        world = World(3, uniform(0.05, loss=0.5))
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        answered = 0
        for _ in range(200):
            began_s = world.now_s()
            try:
                await a.transport.call(b.peer_id, b"?", timeout_s=3.0)
                answered += 1
                assert world.now_s() - began_s == NEAR(0.1)
            except Unreachable:
                assert world.now_s() - began_s == NEAR(3.0)
        assert 25 <= answered <= 75  # request and reply must both get through: 50 of 200

    run(main())


def test_a_call_does_not_wait_behind_frames(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e6))
        a, b = world.add_peer("a"), world.add_peer("b")
        await listen(world)
        backlog = asyncio.create_task(send(a, b, "backlog", 20_000_000))
        await asyncio.sleep(1.0)
        await a.transport.call(b.peer_id, bytes(10_000), timeout_s=5.0)
        assert world.now_s() == NEAR(1.0 + 2 * (0.05 + 0.01))
        await backlog

    run(main())
