"""In virtual time: what waits for its turn, and for how long."""

import asyncio

import pytest

from shoal.protocol.live.throttle import ACK_FACTOR, WIRE_FACTOR, Intake, RateLimiter, Throttle
from shoal.protocol.ports import Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.token_bucket import RateLimits

RATE = 625_000.0
"""5 Mbit/s."""


def test_a_minute_of_everything_at_once_keeps_to_the_rate():
    async def main():
        throttle = Throttle(RateLimits(upload_bytes_per_s=RATE))
        limiter, loop = throttle.upload, asyncio.get_running_loop()
        left = 0

        async def send(priority, size):
            nonlocal left
            while loop.time() < 60.0:
                for piece in limiter.cut([bytes(size)]):
                    await limiter.admit(len(piece), priority)
                    left += len(piece)
                await asyncio.sleep(0.001)

        async def call():
            nonlocal left
            while loop.time() < 60.0:
                throttle.called(sent=2000, received=5000)
                left += 2000 + 5000 * ACK_FACTOR / WIRE_FACTOR
                await asyncio.sleep(0.5)

        tasks = [send(Priority.BULK, 1 << 20), send(Priority.ACTIVATION, 300_000), send(Priority.GRADIENT, 10), call()]
        running = [asyncio.ensure_future(task) for task in tasks]
        await asyncio.sleep(60.0)
        for task in running:
            task.cancel()
        return left * WIRE_FACTOR / 60.0

    assert run(main()) == pytest.approx(RATE, rel=0.01)


def test_a_gradient_does_not_wait_for_the_rest_of_a_megabyte():
    async def main():
        limiter = RateLimiter(RATE)
        order = []

        async def send(what, size, priority):
            for piece in limiter.cut([bytes(size)]):
                await limiter.admit(len(piece), priority)
            order.append((what, asyncio.get_running_loop().time()))

        bulk = asyncio.ensure_future(send("bulk", 1 << 20, Priority.BULK))
        await asyncio.sleep(0.3)
        await send("gradient", 60_000, Priority.GRADIENT)
        await bulk
        return order

    (first, at_s), (second, end_s) = run(main())
    assert (first, second) == ("gradient", "bulk")
    assert at_s < 0.6
    assert end_s == pytest.approx(((1 << 20) + 60_000) * WIRE_FACTOR / RATE, rel=0.15)


def test_who_is_cancelled_in_line_pays_nothing():
    async def main():
        limiter = RateLimiter(1000.0)
        limiter.charge(1000)
        waiting = [asyncio.ensure_future(limiter.admit(10_000, Priority.BULK)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await limiter.admit(1, Priority.BULK)
        return asyncio.get_running_loop().time()

    assert run(main()) < 1.5


class Socket:
    """As much of asyncio's transport as an intake needs."""

    def __init__(self):
        self.is_reading = True

    def pause_reading(self):
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self):
        assert not self.is_reading
        self.is_reading = True


def test_several_streams_together_are_read_at_the_rate():
    async def main():
        throttle = Throttle(RateLimits(download_bytes_per_s=RATE))
        loop, total = asyncio.get_running_loop(), 0
        sockets = [Socket() for _ in range(3)]
        intakes = [Intake(throttle.download, socket, lambda: False) for socket in sockets]
        while loop.time() < 60.0:
            for socket, intake in zip(sockets, intakes, strict=True):
                if socket.is_reading:
                    total += intake.slice_bytes
                    throttle.received(intake.slice_bytes)
                    intake.came()
            await asyncio.sleep(0.002)
        for intake in intakes:
            intake.close()
        return total * WIRE_FACTOR / 60.0

    assert run(main()) == pytest.approx(RATE, rel=0.02)


def test_a_stream_that_was_lost_is_left_alone():
    async def main():
        throttle, socket = Throttle(RateLimits(download_bytes_per_s=1000.0)), Socket()
        lost = False
        intake = Intake(throttle.download, socket, lambda: lost)
        throttle.received(5000)
        intake.came()
        assert not socket.is_reading
        lost = True
        await asyncio.sleep(10.0)
        assert not socket.is_reading
        intake.came()

    run(main())


def test_without_limits_nothing_waits():
    throttle = Throttle()
    assert throttle.upload is None
    assert throttle.download is None
    throttle.called(sent=1, received=1)
