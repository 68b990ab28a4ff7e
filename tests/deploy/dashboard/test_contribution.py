"""What a peer gives, from what it measures: virtual time, one real node's parts where they are pure."""

import asyncio
from types import SimpleNamespace

import pytest

from shoal.deploy.dashboard.contribution import (
    LINKS_MAX,
    WINDOW_S,
    WORK_WINDOW_S,
    ContributionMeter,
    MeteredCompute,
)
from shoal.deploy.record.report import LimitsNow
from shoal.peer.links.meter import LinkMeter
from shoal.protocol.ports import Timed


class HandClock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s


class Device:
    """Each job takes a second."""

    async def run(self, kind, work, *, flop):
        return Timed(value=work(), started_s=1.0, ended_s=2.0)

    def close(self) -> None:
        pass


def node_of(clock, *, replica=None, paused=False):
    peer = SimpleNamespace(replica=replica, pausing=SimpleNamespace(is_paused=paused))
    return SimpleNamespace(peer=peer, peer_id="me", links=LinkMeter(clock))


def computes(compute, *kinds):
    async def all_of_them():
        return [(await compute.run(kind, lambda: 42, flop=5.0)).value for kind in kinds]

    assert asyncio.run(all_of_them()) == [42] * len(kinds)


def send(links, clock, peer, nbytes, seconds):
    links.send_begins(peer)
    clock.at_s += seconds
    links.send_ends(peer, nbytes, left=True)


@pytest.fixture
def clock():
    return HandClock()


def test_a_device_is_metered_and_the_probe_is_no_work():
    compute = MeteredCompute(Device())
    computes(compute, "probe", "forward", "backward", "step", "forward")
    assert (compute.busy_s, compute.flop, compute.microbatches) == (4.0, 20.0, 2)


def test_rates_are_over_the_last_seconds_and_totals_over_all(clock):
    compute, node = MeteredCompute(Device()), node_of(clock)
    meter = ContributionMeter(node, compute, clock, name="p")
    computes(compute, "forward", "backward")
    send(node.links, clock, "b", 400, 1.0)
    clock.at_s += 3.0
    told = meter.measure()
    assert (told.busy, told.sending, told.flop_per_s, told.microbatches_per_s) == (0.5, 0.25, 2.5, 0.25)
    assert told.links == (("b", 100.0, 0.0),)
    for _ in range(3):
        clock.at_s += WINDOW_S
        told = meter.measure()
    assert (told.busy, told.sending, told.links) == (0.0, 0.0, ())
    assert (told.flop_total, told.microbatches_total, told.sent_bytes_total) == (10.0, 1, 400.0)
    assert told.uptime_s == 4.0 + 3 * WINDOW_S
    assert told.memory_bytes > 1_000_000


def test_work_is_over_the_last_minute_as_the_runs_rate_is(clock):
    compute = MeteredCompute(Device())
    meter = ContributionMeter(node_of(clock), compute, clock, name="p")
    for _ in range(60):
        computes(compute, "forward")
        clock.at_s += 1.0
        meter.measure()
    for idle_s in range(1, 61):
        clock.at_s += 1.0
        told = meter.measure()
        assert told.microbatches_per_s == pytest.approx((60 - idle_s) / WORK_WINDOW_S)
        assert (told.busy == 0.0) is (idle_s >= WINDOW_S)


def test_two_sends_at_a_time_are_one_time(clock):
    links = LinkMeter(clock)
    links.send_begins("a")
    clock.at_s += 1.0
    links.send_begins("b")
    clock.at_s += 1.0
    links.send_ends("a", 10, left=True)
    assert links.sending_s == 2.0
    clock.at_s += 1.0
    links.send_ends("b", 10, left=True)
    clock.at_s += 5.0
    assert links.sending_s == 3.0
    assert links.traffic() == {"a": (10.0, 0.0), "b": (10.0, 0.0)}


def test_only_the_busiest_links_are_told(clock):
    node = node_of(clock)
    meter = ContributionMeter(node, MeteredCompute(Device()), clock, name="p")
    for number in range(LINKS_MAX + 5):
        node.links.received(f"p{number:02}", 10 + number)
    clock.at_s += 1.0
    told = meter.measure()
    assert [peer for peer, _, _ in told.links] == [f"p{number:02}" for number in range(LINKS_MAX + 4, 4, -1)]
    assert told.received_bytes_total == sum(10 + number for number in range(LINKS_MAX + 5))


def test_a_pause_is_seen_even_if_nobody_has_set_limits(clock):
    compute = MeteredCompute(Device())
    assert ContributionMeter(node_of(clock), compute, clock, name="p").measure().limits is None
    paused = node_of(clock, paused=True)
    assert ContributionMeter(paused, compute, clock, name="p").measure().limits == LimitsNow(paused=True)
    caps = LimitsNow(caps=("a",))
    meter = ContributionMeter(paused, compute, clock, name="p", limits=lambda: caps)
    assert meter.measure().limits == LimitsNow(paused=True, caps=("a",))
