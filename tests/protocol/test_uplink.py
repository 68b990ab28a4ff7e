"""A modelled line in virtual time: one queue before it, TCP's queues before that, and receivers that may be slow."""

from collections import defaultdict, deque

import pytest

from shoal.protocol.uplink import QUEUE_S, WINDOW_BYTES_MIN, UplinkConnection, UplinkWindow

MBIT = 125_000.0
TICK_S = 0.001
LOOK_S = 0.02
SLICE_BYTES = 4096
ROUND_TRIP_S = 0.03


class Line:
    """An uplink that sends `bytes_per_s`, from what each connection has queued, in turns.

    Args: takes: what a receiver takes in bytes/s, where that is less.
    """

    def __init__(self, bytes_per_s, *, takes=None, round_trip_s=ROUND_TRIP_S):
        self.bytes_per_s, self.takes, self.round_trip_s = bytes_per_s, takes or {}, round_trip_s
        self.now_s = 0.0
        self.window = UplinkWindow()
        self.wants = set()
        self.queued, self.delivered, self.left = defaultdict(float), defaultdict(float), defaultdict(float)
        self.credit = defaultdict(float)
        self.on_way = deque()
        self.worst_s = 0.0

    def connections(self, *names):
        for name in names:
            self.queued[name] += 0.0
        self.look()

    def look(self):
        seen = {
            name: UplinkConnection(
                delivered_bytes=int(self.delivered[name]),
                queued_bytes=int(self.queued[name] + self.left[name] - self.delivered[name]),
                round_trip_s=self.round_trip_s,
            )
            for name in self.queued
        }
        self.window.look(seen, now_s=self.now_s)

    def run(self, seconds, *wants):
        """Who wants to writes as much as it may. Returns: what was delivered to each, in bytes/s."""
        before, begun_s = dict(self.delivered), self.now_s
        for tick in range(round(seconds / TICK_S)):
            if tick % round(LOOK_S / TICK_S) == 0:
                self.look()
            is_open = True
            while is_open:
                is_open = False
                for name in wants:
                    if self.window.admits(name):
                        self.window.wrote(name, SLICE_BYTES)
                        self.queued[name] += SLICE_BYTES
                        is_open = True
            self.tick()
        took_s = self.now_s - begun_s
        return {name: (self.delivered[name] - before.get(name, 0.0)) / took_s for name in self.queued}

    def tick(self):
        self.now_s += TICK_S
        room = self.bytes_per_s * TICK_S
        names = [name for name in self.queued if self.queued[name] > 0.0]
        for name in names:
            self.credit[name] = min(self.takes.get(name, 1e12) * TICK_S, self.queued[name])
        while room > 1e-6 and (ready := [name for name in names if self.credit[name] > 1e-9]):
            for name in ready:
                sent = min(room / len(ready), self.credit[name])
                self.credit[name] -= sent
                self.queued[name] -= sent
                self.left[name] += sent
                self.on_way.append((self.now_s + self.round_trip_s, name, sent))
            room -= sum(entry[2] for entry in list(self.on_way)[-len(ready) :])
        while self.on_way and self.on_way[0][0] <= self.now_s:
            _, name, sent = self.on_way.popleft()
            self.delivered[name] += sent

    def waits_s(self, *names):
        """How long a heartbeat written now would wait behind these connections' bytes."""
        return sum(self.queued[name] for name in names or self.queued) / self.bytes_per_s


@pytest.mark.parametrize("mbit", [1, 5, 20, 100])
@pytest.mark.parametrize("round_trip_s", [0.002, 0.03, 0.2])
def test_the_line_is_full_and_little_stands_before_it(mbit, round_trip_s):
    line = Line(mbit * MBIT, round_trip_s=round_trip_s)
    line.connections("a")
    line.run(3.0, "a")
    assert line.run(2.0, "a")["a"] >= 0.97 * mbit * MBIT
    assert line.waits_s() <= 1.3 * QUEUE_S or line.queued["a"] <= WINDOW_BYTES_MIN + 2 * SLICE_BYTES
    assert line.window.bytes_per_s == pytest.approx(mbit * MBIT, rel=0.05)


def test_a_quick_line_is_full_within_a_second():
    line = Line(1000 * MBIT)
    line.connections("a")
    line.run(1.0, "a")
    assert line.run(0.5, "a")["a"] >= 0.97 * 1000 * MBIT


def test_a_fall_to_a_quarter_is_followed_within_two_seconds():
    line = Line(20 * MBIT)
    line.connections("a")
    line.run(5.0, "a")
    line.bytes_per_s = 5 * MBIT
    assert line.run(2.0, "a")["a"] >= 0.97 * 5 * MBIT
    assert line.waits_s() <= 1.5 * QUEUE_S


def test_a_rise_is_followed_within_a_second():
    line = Line(5 * MBIT)
    line.connections("a")
    line.run(5.0, "a")
    line.bytes_per_s = 100 * MBIT
    line.run(1.0, "a")
    assert line.run(1.0, "a")["a"] >= 0.97 * 100 * MBIT


def test_a_line_that_comes_back_is_used_at_once():
    line = Line(20 * MBIT)
    line.connections("a")
    line.run(3.0, "a")
    line.bytes_per_s = 1e-3
    line.run(30.0, "a")
    line.bytes_per_s = 20 * MBIT
    line.run(1.0, "a")
    assert line.run(1.0, "a")["a"] >= 0.97 * 20 * MBIT


def test_an_idle_line_says_nothing_about_its_rate():
    line = Line(20 * MBIT)
    line.connections("a")
    line.run(3.0, "a")
    known = line.window.bytes_per_s
    for _ in range(200):  # a heartbeat's worth now and then
        line.window.wrote("a", 500)
        line.queued["a"] += 500
        line.run(0.1)
    assert line.window.bytes_per_s == known
    assert line.run(0.2, "a")["a"] > 0.5 * 20 * MBIT


def test_a_slow_receiver_is_no_slow_uplink():
    line = Line(20 * MBIT, takes={"slow": 1 * MBIT})
    line.connections("slow", "fast")
    line.run(5.0, "slow")
    line.run(2.0, "slow", "fast")
    rates = line.run(3.0, "slow", "fast")
    assert rates["slow"] >= 0.95 * MBIT
    assert sum(rates.values()) >= 0.97 * 20 * MBIT
    assert line.queued["slow"] / MBIT <= 3.0 * QUEUE_S


@pytest.mark.parametrize("alone_s", [0.1, 3.0])
def test_a_receiver_that_stands_still_holds_up_nobody(alone_s):
    line = Line(20 * MBIT, takes={"dead": 0.0})
    line.connections("dead", "fast")
    line.run(alone_s, "dead")
    line.run(3.0, "dead", "fast")
    assert line.run(3.0, "dead", "fast")["fast"] >= 0.95 * 20 * MBIT


def test_connections_that_were_alone_before_share_one_queue():
    names = [f"peer {number}" for number in range(8)]
    line = Line(20 * MBIT)
    line.connections(*names)
    for name in names:
        line.run(2.0, name)
    line.run(0.2, *names)
    assert line.waits_s() <= 1.5 * QUEUE_S  # and not eight times that
    line.run(1.0, *names)
    rates = line.run(3.0, *names)
    assert sum(rates.values()) >= 0.97 * 20 * MBIT
    assert line.waits_s() <= 1.5 * QUEUE_S


def test_bytes_that_the_daemon_still_has_stand_before_the_line():
    """The kernel does not see them yet, and they are no less in the way."""
    window = UplinkWindow()
    nothing = UplinkConnection(delivered_bytes=0, queued_bytes=0, round_trip_s=ROUND_TRIP_S)
    window.look({"a": nothing}, now_s=0.0)
    written = 0
    while window.admits("a"):
        window.wrote("a", SLICE_BYTES)
        written += SLICE_BYTES
    window.look({"a": nothing}, now_s=0.02)
    assert not window.admits("a")
    taken = UplinkConnection(delivered_bytes=written, queued_bytes=0, round_trip_s=ROUND_TRIP_S)
    window.look({"a": taken}, now_s=0.04)
    assert window.admits("a")
    assert not window.busy


def test_bytes_that_never_come_are_not_waited_for_for_ever():
    window = UplinkWindow()
    nothing = UplinkConnection(delivered_bytes=0, queued_bytes=0, round_trip_s=ROUND_TRIP_S)
    window.look({"a": nothing}, now_s=0.0)
    window.wrote("a", 1 << 20)
    assert not window.admits("a")
    for tick in range(1, 75):
        window.look({"a": nothing}, now_s=0.02 * tick)
    assert window.admits("a")


def test_a_connection_that_is_gone_leaves_its_room_to_others():
    window = UplinkWindow()
    window.look({"a": UplinkConnection(delivered_bytes=0, queued_bytes=10**9, round_trip_s=0.1)}, now_s=0.0)
    nothing = UplinkConnection(delivered_bytes=0, queued_bytes=0, round_trip_s=0.1)
    window.look({"b": nothing}, now_s=0.02)
    assert not window.admits("b")
    window.forget("a")
    window.look({"b": nothing}, now_s=0.04)
    assert not window.knows("a")
    assert window.admits("b")
