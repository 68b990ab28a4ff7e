import asyncio

from shoal.protocol.sim.loop import run
from shoal.protocol.timer import Timer


class Clock:
    """A clock that is behind the loop's by as much as is set: the loop rings too early by it."""

    behind_s = 0.0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.behind_s

    def wall_s(self) -> float:
        return self.now_s()


def test_it_rings_once_at_the_time_that_was_set_last() -> None:
    async def main() -> list[float]:
        clock, rung = Clock(), []
        timer = Timer(clock, lambda: rung.append(clock.now_s()))
        timer.set(2.0)
        timer.set(5.0)
        timer.set(5.0)
        await asyncio.sleep(10.0)
        timer.set(12.0)
        timer.set(float("inf"))
        await asyncio.sleep(10.0)
        timer.set(21.0)
        timer.cancel()
        await asyncio.sleep(10.0)
        timer.set(1.0)  # past
        await asyncio.sleep(1.0)
        return rung

    assert run(main()) == [5.0, 30.0]


def test_it_does_not_ring_early_and_does_not_turn_in_circles() -> None:
    async def main() -> tuple[float, int]:
        clock, asked = Clock(), []
        rung: list[float] = []

        class Asked(Clock):
            def now_s(self) -> float:
                asked.append(None)
                return super().now_s()

        clock = Asked()
        timer = Timer(clock, lambda: rung.append(super(Asked, clock).now_s()))
        timer.set(1.0)
        clock.behind_s = 0.0005
        await asyncio.sleep(2.0)
        return rung[0], len(asked)

    rung_s, num_asked = run(main())
    assert 1.0 <= rung_s < 1.002
    assert num_asked <= 4
