"""Machines that share one way to the network."""

import asyncio
from typing import Any

import pytest

from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

NEAR = pytest.approx


def arrivals(frames: list[tuple[float, str]]) -> dict[str, float]:
    return {meta: at_s for at_s, meta in frames}


def test_machines_behind_one_plug_share_its_uplink(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", plug="box", up_bytes_per_s=1e6)
        b = world.add_peer("b", plug="box", up_bytes_per_s=1e6)
        c, d = world.add_peer("c"), world.add_peer("d")
        _, _, ear_c, ear_d = await listen(world)
        await asyncio.gather(send(a, c, "0", 100_000), send(b, d, "1", 100_000))
        await asyncio.sleep(1.0)
        assert [*arrivals(ear_c.frames).values(), *arrivals(ear_d.frames).values()] == NEAR([0.15, 0.25])

    run(main())


def test_machines_behind_one_plug_share_its_downlink(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", plug="box", down_bytes_per_s=1e6)
        b = world.add_peer("b", plug="box", down_bytes_per_s=1e6)
        c, d = world.add_peer("c"), world.add_peer("d")
        ear_a, ear_b, _, _ = await listen(world)
        await asyncio.gather(send(c, a, "0", 100_000), send(d, b, "1", 100_000))
        await asyncio.sleep(1.0)
        assert [*arrivals(ear_a.frames).values(), *arrivals(ear_b.frames).values()] == NEAR([0.15, 0.25])

    run(main())


def test_what_machines_behind_one_plug_send_each_other_does_not_pass_it(listen: Any, send: Any) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05, 1e7))
        a = world.add_peer("a", plug="box", up_bytes_per_s=1e6)
        b = world.add_peer("b", plug="box", down_bytes_per_s=1e3)
        c = world.add_peer("c")
        _, ear_b, _ = await listen(world)
        await asyncio.gather(send(a, c, "0", 1_000_000), send(a, b, "1", 1_000_000))
        assert arrivals(ear_b.frames) == NEAR({"1": 0.15})

    run(main())
