import asyncio
from collections.abc import Callable

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


def test_a_time_that_is_put_off_again_and_again_arms_one_handle() -> None:
    async def main() -> tuple[list[float], int]:
        loop, armed, rung = asyncio.get_running_loop(), [], []
        call_later = loop.call_later

        def counted(delay_s: float, callback: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
            armed.append(delay_s)
            return call_later(delay_s, callback, *arguments)

        clock = Clock()
        timer = Timer(clock, lambda: rung.append(clock.now_s()))
        loop.call_later = counted  # type: ignore[method-assign]
        for tenths in range(50, 150):
            timer.set(tenths / 10.0)
        num_armed = len(armed)
        timer.set(3.0)  # sooner
        loop.call_later = call_later  # type: ignore[method-assign]
        await asyncio.sleep(4.0)
        timer.set(6.0)
        timer.set(7.0)
        await asyncio.sleep(4.0)
        return rung, num_armed

    assert run(main()) == ([3.0, 7.0], 1)


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
