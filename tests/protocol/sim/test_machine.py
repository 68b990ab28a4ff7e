"""Slow devices and wrong clocks: what belongs to a machine, and outlives a process."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Ping
from shoal.protocol.sim.clock import WALL_AT_ZERO_S
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.trace import Event, Kind
from shoal.protocol.sim.world import SimPeer, World

NEAR = pytest.approx

Speak = Callable[..., Any]


# Slow devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modelled", [False, True])
def test_a_slow_device_takes_longer_from_the_next_job_on(modelled: bool) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05), modelled=modelled)
        a = world.add_peer("a", device_flop_per_s=1e12, overhead_s=0.5)

        async def takes_s() -> float:
            timed = await a.compute.run("forward", lambda: None, flop=1e12)
            return timed.ended_s - timed.started_s

        assert await takes_s() == NEAR(1.5)
        running = asyncio.create_task(takes_s())
        await asyncio.sleep(0.1)
        world.slow_device(a, 100.0)
        assert await running == NEAR(1.5)
        assert await takes_s() == NEAR(150.0)
        world.crash(a)
        a = world.add_peer("a", device_flop_per_s=2e12)
        assert await takes_s() == NEAR(50.0)
        world.slow_device(a, 1.0)
        assert await takes_s() == NEAR(0.5)

    run(main())


def test_a_slow_device_delays_its_answers_and_nobody_elses(speak: Speak) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        peers = [world.add_peer(name) for name in "abc"]
        voice_a, *others = await speak(world)
        for voice in others:
            voice.endpoint.on(Ping, _compute_then_answer(voice.peer))
        world.slow_device(peers[1], 50.0)

        async def takes_s(voice: Any) -> float:
            began_s = world.now_s()
            await voice_a.ping(voice, timeout_s=100.0)
            return world.now_s() - began_s

        assert [await takes_s(voice) for voice in others] == NEAR([50.1, 1.1])

    run(main())


def _compute_then_answer(peer: SimPeer) -> Callable[..., Any]:
    async def answer(source: PeerID, ping: Ping) -> Ping:
        await peer.compute.run("probe", lambda: None, flop=1e12)
        return ping

    return answer


# Clocks -------------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_shows_it_on_the_wall_alone() -> None:
    events: list[Event] = []

    async def main() -> None:
        world = World(0, uniform(0.05), watch=events.append)
        a, b = world.add_peer("a"), world.add_peer("b")
        await asyncio.sleep(100.0)
        world.jump_clock(a, 30.0)
        world.jump_clock(b, -30.0)
        assert a.clock.now_s() == b.clock.now_s() == 100.0
        assert a.clock.wall_s() == WALL_AT_ZERO_S + 130.0
        assert b.clock.wall_s() == WALL_AT_ZERO_S + 70.0
        world.crash(a)
        a = world.add_peer("a")
        assert a.clock.wall_s() == WALL_AT_ZERO_S + 130.0  # the machine's, not the process's
        world.jump_clock(a, -30.0)
        assert a.clock.wall_s() == WALL_AT_ZERO_S + 100.0

    run(main())
    assert [event.source for event in events if event.kind is Kind.CLOCK_JUMPED] == [0, 1, 2]
    assert len({event.digest for event in events if event.kind is Kind.CLOCK_JUMPED}) == 2


def test_records_of_a_clock_that_is_behind_lapse_early_or_are_refused() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        world.jump_clock(a, -30.0)
        assert not await a.directory.store("key", "short", b"", expires_in_s=29.0)
        assert await a.directory.store("key", "long", b"", expires_in_s=60.0)
        assert await b.directory.get("key") == {"long": b""}
        await asyncio.sleep(31.0)
        assert await b.directory.get("key") == {}
        # What has lapsed for the nodes that hold it is not there for anybody, however late it is for him.
        assert await a.directory.get("key") == {}

    run(main())


def test_records_of_a_clock_that_is_ahead_live_on_and_stand_in_the_way_once_it_is_right() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        world.jump_clock(a, 30.0)
        assert await a.directory.store("key", "a", b"old", expires_in_s=20.0)
        await asyncio.sleep(25.0)
        assert await b.directory.get("key") == {"a": b"old"}
        world.jump_clock(a, -30.0)
        assert not await a.directory.store("key", "a", b"new", expires_in_s=20.0)
        assert await b.directory.get("key") == {"a": b"old"}
        await asyncio.sleep(25.0)
        assert await a.directory.store("key", "a", b"new", expires_in_s=20.0)
        assert await b.directory.get("key") == {"a": b"new"}

    run(main())


def test_to_a_clock_that_is_ahead_others_records_have_lapsed() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await b.directory.store("key", "short", b"", expires_in_s=25.0)
        await b.directory.store("key", "long", b"", expires_in_s=60.0)
        world.jump_clock(a, 30.0)
        assert await a.directory.get("key") == {"long": b""}
        assert await b.directory.get("key") == {"short": b"", "long": b""}

    run(main())


# Impossible ones ----------------------------------------------------------------------------------------------------


def test_impossible_devices_and_clocks_are_refused() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a")
        for factor in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(LocalError, match="slower"):
                world.slow_device(a, factor)
        for seconds in (math.inf, math.nan):
            with pytest.raises(LocalError, match="jump"):
                world.jump_clock(a, seconds)

    run(main())
