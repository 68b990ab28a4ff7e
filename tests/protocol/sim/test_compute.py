import asyncio
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timelines import busy_fraction

from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Timed
from shoal.protocol.sim.compute import SimJob
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

NEAR = pytest.approx


def test_work_runs_when_the_job_starts_and_is_handed_out_when_it_ends() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        device = world.add_peer("a", device_flop_per_s=1e12, overhead_s=0.5).compute
        weights = torch.ones(3, requires_grad=True)

        def backward() -> torch.Tensor:
            (weights**2).sum().backward()
            assert weights.grad is not None
            return weights.grad

        job = asyncio.create_task(device.run("backward", backward, flop=2e12))
        await asyncio.sleep(0.1)
        assert weights.grad is not None
        assert not job.done()
        timed = await job
        assert torch.equal(timed.value, torch.full((3,), 2.0))
        assert (timed.started_s, timed.ended_s, world.now_s()) == (0.0, 2.5, 2.5)

    run(main())


def test_a_modelled_device_takes_the_time_and_does_nothing() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05), modelled=True)
        device = world.add_peer("a", device_flop_per_s=1e12).compute
        assert await device.run("forward", lambda: pytest.fail("it ran"), flop=3e12) == Timed(
            value=None, started_s=0.0, ended_s=3.0
        )

    run(main())


@given(
    jobs=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=15),
    window=st.tuples(st.integers(0, 30), st.integers(1, 30)),
)
def test_one_job_at_a_time_in_the_order_given(jobs: list[tuple[int, int]], window: tuple[int, int]) -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        device = world.add_peer("a", device_flop_per_s=1.0).compute
        order: list[int] = []
        asked: list[tuple[int, int, int]] = []

        async def ask(index: int, at_s: int, seconds: int) -> Timed[None]:
            await asyncio.sleep(at_s)
            asked.append((at_s, seconds, index))
            return await device.run("forward", partial(order.append, index), flop=seconds)

        timed = await asyncio.gather(*(ask(index, at_s, seconds) for index, (at_s, seconds) in enumerate(jobs)))
        assert order == [index for _, _, index in asked]
        free_s = 0.0
        for at_s, seconds, index in asked:
            started_s = max(free_s, at_s)
            free_s = started_s + seconds
            assert (timed[index].started_s, timed[index].ended_s) == (started_s, free_s)
        from_s, to_s = window[0], window[0] + window[1]
        busy_s = sum(max(0.0, min(t.ended_s, to_s) - max(t.started_s, from_s)) for t in timed)
        assert busy_fraction(device.timeline, from_s, to_s) == NEAR(busy_s / (to_s - from_s))

    run(main())


def test_the_timeline_says_what_ran_and_for_how_long() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        device = world.add_peer("a", device_flop_per_s=1e12).compute

        def step() -> None:
            step.calls += 1  # type: ignore[attr-defined]

        step.calls = 0  # type: ignore[attr-defined]
        labelled = partial(int, 3)
        labelled.label = "microbatch (4, 2)"  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
        await device.run("forward", labelled, flop=1e12)
        device.device_flop_per_s = 2e12
        await device.run("step", step, flop=1e12)
        first, second = device.timeline
        assert first == SimJob("forward", 1.0, 2.0, "microbatch (4, 2)")
        assert (second.kind, second.started_s, second.ended_s) == ("step", 2.0, 2.5)
        assert second.label.endswith("step")
        assert busy_fraction(device.timeline, 0.0, 4.0) == NEAR(1.5 / 4.0)
        assert busy_fraction(device.timeline, 1.5, 2.25) == 1.0
        assert busy_fraction(device.timeline, 3.0, 4.0) == 0.0

    run(main())


def test_a_failing_job_raises_and_the_next_one_runs() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        device = world.add_peer("a", device_flop_per_s=1e12).compute
        first = asyncio.create_task(device.run("forward", lambda: 1 // 0, flop=1e12))
        second = asyncio.create_task(device.run("forward", lambda: 7, flop=1e12))
        with pytest.raises(ZeroDivisionError):
            await first
        assert (await second).value == 7

    run(main())


def test_a_cancelled_job_keeps_the_device_busy_if_it_runs_and_vanishes_if_it_waits() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        device = world.add_peer("a", device_flop_per_s=1e12).compute
        ran: list[str] = []
        tasks = [
            asyncio.create_task(device.run("forward", partial(ran.append, name), flop=1e12))
            for name in ("runs", "waits", "last")
        ]
        await asyncio.sleep(0.5)
        tasks[0].cancel()
        tasks[1].cancel()
        timed = await tasks[2]
        assert ran == ["runs", "last"]
        assert (timed.started_s, timed.ended_s) == (1.0, 2.0)

    run(main())


def test_a_closed_device_drops_what_waits_and_takes_nothing_more() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        device = world.add_peer("a", device_flop_per_s=1e12).compute
        ran: list[str] = []
        tasks = [
            asyncio.create_task(device.run("forward", partial(ran.append, name), flop=1e12))
            for name in ("runs", "waits")
        ]
        await asyncio.sleep(0.5)
        device.close()
        device.close()
        await asyncio.wait(tasks)
        assert tasks[1].cancelled()
        assert ran == ["runs"]
        with pytest.raises(LocalError, match="closed"):
            await device.run("forward", lambda: None, flop=0.0)

    run(main())
