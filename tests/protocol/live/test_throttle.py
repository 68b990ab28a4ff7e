"""In virtual time: what waits for its turn, and for how long."""

import asyncio
import math
import time

import pytest

from shoal.protocol.identity import PeerID
from shoal.protocol.live.throttle import ACK_FACTOR, WIRE_FACTOR, Intake, RateLimiter, SendLine, Throttle
from shoal.protocol.live.uplink import Uplink
from shoal.protocol.ports import Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.token_bucket import RateLimits
from shoal.protocol.uplink import UplinkConnection

RATE = 625_000.0
"""5 Mbit/s."""
MATE, OTHER = PeerID("mate"), PeerID("other")


def test_a_minute_of_everything_at_once_keeps_to_the_rate():
    async def main():
        throttle = Throttle(RateLimits(upload_bytes_per_s=RATE))
        line, loop = throttle.line, asyncio.get_running_loop()
        left = 0

        async def send(priority, size):
            nonlocal left
            while loop.time() < 60.0:
                for piece in line.cut([bytes(size)], MATE):
                    await line.admit(len(piece), priority, MATE)
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
        line = SendLine(RateLimiter(RATE))
        order = []

        async def send(what, size, priority):
            for piece in line.cut([bytes(size)], MATE):
                await line.admit(len(piece), priority, MATE)
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


def test_a_limit_that_its_owner_changes_holds_for_what_waits_already():
    async def main():
        throttle = Throttle(RateLimits(upload_bytes_per_s=RATE / 10), Uplink())
        line, loop = throttle.line, asyncio.get_running_loop()

        async def seconds(nbytes):
            began_s = loop.time()
            for piece in line.cut([bytes(nbytes)], MATE):
                await line.admit(len(piece), Priority.BULK, MATE)
            return loop.time() - began_s

        sending = asyncio.ensure_future(seconds(1 << 20))
        await asyncio.sleep(1.0)
        throttle.limit_upload(RATE)
        slow, unlimited = await sending, []
        for bytes_per_s in (math.inf, RATE):
            throttle.limit_upload(bytes_per_s)
            unlimited.append(await seconds(1 << 20))
        return slow, *unlimited

    alone_s = (1 << 20) * WIRE_FACTOR / RATE
    changed_s, unlimited_s, limited_s = run(main())
    assert changed_s == pytest.approx(1.0 + alone_s - 0.1, rel=0.15)
    assert unlimited_s < 0.1
    assert limited_s == pytest.approx(alone_s, rel=0.15)


def test_who_is_cancelled_in_line_pays_nothing():
    async def main():
        limiter = RateLimiter(1000.0)
        limiter.charge(1000)
        line = SendLine(limiter)
        waiting = [asyncio.ensure_future(line.admit(10_000, Priority.BULK, MATE)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await line.admit(1, Priority.BULK, MATE)
        return asyncio.get_running_loop().time()

    assert run(main()) < 1.5


class Queues:
    """The kernel's, before a line of `RATE`: what is written is there at once, and goes in turns."""

    def __init__(self):
        self.queued = {"mate's": 0.0, "other's": 0.0}
        self.delivered = dict.fromkeys(self.queued, 0.0)
        self.stalled = set()
        self.at_s = asyncio.get_running_loop().time()
        self.fails = False

    def wrote(self, name, nbytes):
        self.pass_time()
        self.queued[name] += nbytes

    def pass_time(self):
        now_s = asyncio.get_running_loop().time()
        room = (now_s - self.at_s) * RATE
        self.at_s = now_s
        while room > 1.0 and (ready := [n for n, q in self.queued.items() if q > 0.0 and n not in self.stalled]):
            share = min(room / len(ready), *(self.queued[name] for name in ready))
            for name in ready:
                self.queued[name] -= share
                self.delivered[name] += share
            room -= share * len(ready)

    def list(self):
        pass

    def look(self, names):
        if self.fails:
            raise OSError("not any more")
        self.pass_time()
        return {
            name: UplinkConnection(
                delivered_bytes=int(self.delivered[name]), queued_bytes=int(self.queued[name]), round_trip_s=0.02
            )
            for name in names
        }

    def close(self):
        pass


class Home:
    """A peer with an uplink that sends to two others, and keeps what has left."""

    def __init__(self):
        self.queues = Queues()
        self.uplink = Uplink()
        self.line = Throttle(uplink=self.uplink).line
        self.uplink.follow(self.queues)
        self.uplink.opened(MATE, ["mate's"])
        self.uplink.opened(OTHER, ["other's"])
        self.left = []
        self.tasks = []

    async def send(self, what, size, priority, peer=MATE):
        for piece in self.line.cut([bytes(size)], peer):
            await self.line.admit(len(piece), priority, peer)
            self.queues.wrote("mate's" if peer == MATE else "other's", len(piece))
        self.left.append((what, asyncio.get_running_loop().time()))

    def begin(self, *args):
        self.tasks.append(asyncio.ensure_future(self.send(*args)))

    async def end(self):
        self.uplink.close()
        await asyncio.gather(*self.tasks)


def test_what_stands_before_the_line_is_a_tenth_of_a_second_of_it():
    async def main():
        home, most = Home(), 0.0
        home.begin("a", 4 << 20, Priority.BULK, MATE)
        home.begin("b", 4 << 20, Priority.BULK, OTHER)
        await asyncio.sleep(2.0)
        for _ in range(400):
            await asyncio.sleep(0.02)
            home.queues.pass_time()
            most = max(most, sum(home.queues.queued.values()) / RATE)
        sent = sum(home.queues.delivered.values())
        await home.end()
        return most, sent / asyncio.get_running_loop().time()

    most_s, rate = run(main())
    assert most_s < 0.17
    assert rate == pytest.approx(RATE, rel=0.03)


def test_what_a_step_waits_for_passes_a_copy_of_state_on_another_link():
    async def main():
        home = Home()
        home.begin("state", 1 << 20, Priority.BULK, OTHER)
        await asyncio.sleep(0.3)
        home.begin("gradients", 60_000, Priority.REDUCTION, MATE)
        await asyncio.sleep(0.0)
        await home.send("activation", 30_000, Priority.ACTIVATION, MATE)
        asked_s = asyncio.get_running_loop().time()
        await asyncio.gather(*home.tasks)
        await home.end()
        return asked_s, home.left

    asked_s, left = run(main())
    assert [what for what, _ in left] == ["activation", "gradients", "state"]
    assert left[0][1] - 0.3 < 0.2
    assert left[1][1] - asked_s < 0.2


def test_a_link_that_stands_still_lets_the_others_pass():
    async def main():
        home = Home()
        home.queues.stalled.add("mate's")
        home.begin("urgent", 1 << 20, Priority.GRADIENT, MATE)
        await asyncio.sleep(1.0)
        await home.send("bulk", 1 << 20, Priority.BULK, OTHER)
        took_s = asyncio.get_running_loop().time() - 1.0
        await home.end()
        return took_s

    assert run(main()) == pytest.approx((1 << 20) / RATE, rel=0.15)


def test_a_copy_of_state_has_a_sixth_of_a_line_that_others_fill():
    async def main():
        home, loop = Home(), asyncio.get_running_loop()
        home.begin("step", 16 << 20, Priority.ACTIVATION, MATE)
        await asyncio.sleep(1.0)
        began_s, before = loop.time(), home.queues.delivered["other's"]
        home.begin("state", 4 << 20, Priority.BULK, OTHER)
        await asyncio.sleep(10.0)
        home.queues.pass_time()
        share = (home.queues.delivered["other's"] - before) / RATE / (loop.time() - began_s)
        await home.end()
        return share

    assert run(main()) == pytest.approx(1 / 6, abs=0.04)


def test_what_waits_behind_a_copy_on_its_own_link_hurries_that_copy():
    async def main(hurries):
        home, loop = Home(), asyncio.get_running_loop()
        home.begin("step", 16 << 20, Priority.ACTIVATION, MATE)
        await asyncio.sleep(1.0)

        async def copy():
            priority = Priority.BULK
            for piece in home.line.cut([bytes(200_000)], OTHER):
                await home.line.admit(len(piece), priority, OTHER)
                home.queues.wrote("other's", len(piece))
                if hurries:
                    priority = Priority.GRADIENT
                    home.line.hurry(OTHER, priority)

        began_s = loop.time()
        await copy()
        took_s = loop.time() - began_s
        await home.end()
        return took_s

    assert run(main(True)) < 0.6
    assert run(main(False)) > 1.5


def test_nothing_is_looked_at_while_nothing_is_sent():
    async def main():
        home = Home()
        looks, look = 0, home.queues.look

        def counted(names):
            nonlocal looks
            looks += 1
            return look(names)

        home.queues.look = counted
        await home.send("a", 100_000, Priority.BULK)
        await asyncio.sleep(5.0)
        before = looks
        await asyncio.sleep(60.0)
        assert looks == before
        await home.send("b", 100_000, Priority.BULK)
        assert looks > before
        await home.end()

    run(main())


def test_a_look_that_the_machine_held_up_puts_the_next_one_off_no_longer():
    """The processor was somebody else's meanwhile: a line that then waits for twenty times as long stands still."""

    async def main():
        home, loop = Home(), asyncio.get_running_loop()
        look = home.queues.look

        def held_up(names):
            home.queues.look = look
            time.sleep(0.5)
            return look(names)

        home.queues.look = held_up
        began_s = loop.time()
        await home.send("a", 200_000, Priority.GRADIENT)
        took_s = loop.time() - began_s
        await home.end()
        return took_s

    assert asyncio.run(main()) < 5.0


def test_where_the_kernel_says_no_more_everybody_passes():
    async def main():
        home = Home()
        home.begin("a", 4 << 20, Priority.BULK)
        await asyncio.sleep(1.0)
        home.queues.fails = True
        await asyncio.sleep(0.1)
        assert [what for what, _ in home.left] == ["a"]
        assert not home.uplink.holds(MATE)
        await home.end()

    run(main())


def test_who_is_on_this_machine_does_not_wait():
    async def main():
        home = Home()
        home.uplink.opened(PeerID("neighbour"), [])
        home.begin("a", 4 << 20, Priority.BULK)
        await asyncio.sleep(1.0)
        began_s = asyncio.get_running_loop().time()
        await home.line.admit(1 << 20, Priority.BULK, PeerID("neighbour"))
        assert asyncio.get_running_loop().time() == began_s
        await home.end()

    run(main())


def test_what_stands_on_lanes_stands_before_the_line_as_well():
    async def main():
        home = Home()
        home.queues.queued["mate's lane"] = home.queues.delivered["mate's lane"] = 0.0
        home.uplink.joined(MATE, "mate's lane")
        home.queues.stalled.add("mate's lane")
        home.queues.wrote("mate's lane", RATE)
        home.uplink.wrote(MATE, 1)
        home.uplink._look(MATE)
        assert not home.uplink.admits(MATE)
        home.uplink.left("mate's lane")
        home.uplink._look(MATE)
        assert home.uplink.admits(MATE)
        assert home.uplink.round_trip_s(MATE) == 0.02
        assert home.uplink.round_trip_s(PeerID("neighbour")) == 0.0
        home.uplink.close()

    run(main())


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
    assert throttle.line is None
    assert throttle.download is None
    throttle.called(sent=1, received=1)
