"""What a peer measures of its links, against links whose figures are known."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from shoal.peer.links.meter import FAILED_TOLD_MAX, REPORTED_MAX, REPORTS_PER_BEAT, LinkMeter, MeteredTransport
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import BULK_CHUNK_BYTES, LINKS_PER_HEARTBEAT_MAX
from shoal.protocol.messages import LinkReport
from shoal.protocol.ports import Payload, Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World

LATENCY_S = 0.03
RATE = 2e6


@dataclass
class Hands:
    """A clock that is set by hand."""

    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def meter(clock: Hands) -> LinkMeter:
    return LinkMeter(clock)


def only(meter: LinkMeter) -> LinkReport:
    (report,) = meter.report()
    return report


class Metered:
    """A peer of a simulated world that answers calls after a while and keeps what it gets."""

    def __init__(self, port: SimPeer) -> None:
        self.port = port
        self.meter = LinkMeter(port.clock)
        self.transport = MeteredTransport(port.transport, self.meter, port.clock)
        self.got: list[int] = []
        self.transport.serve(on_call=self._answer, on_frame=self._take)

    async def _answer(self, source: PeerID, request: bytes) -> bytes:
        await asyncio.sleep(float(request.decode()))
        return request

    async def _take(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        self.got.append(len(payload))

    def report(self) -> LinkReport:
        return only(self.meter)


@pytest.fixture
def in_a_world() -> Callable[..., tuple[Metered, Metered]]:
    def go(play: Callable[[Metered, Metered], object]) -> tuple[Metered, Metered]:
        world = World(1, uniform(LATENCY_S, rate_bytes_per_s=RATE))
        a, b = Metered(world.add_peer("a")), Metered(world.add_peer("b"))

        async def main() -> None:
            for here, there in ((a, b), (b, a)):
                await here.transport.introduce(there.port.peer_id, there.transport.addresses())
            await a.port.spawn(play(a, b))  # type: ignore[arg-type]

        run(main())
        assert world.failures == []
        return a, b

    return go


def test_a_round_trip_is_that_of_the_quickest_answer(in_a_world: Callable[..., tuple[Metered, Metered]]) -> None:
    async def play(a: Metered, b: Metered) -> None:
        for work_s in ("0.5", "0", "0.2"):
            await a.transport.call(b.port.peer_id, work_s.encode(), timeout_s=5.0)

    a, b = in_a_world(play)
    assert a.report().round_trip_s == pytest.approx(2 * LATENCY_S, rel=0.05)
    assert b.meter.report() == ()


def test_both_ends_measure_the_rate_of_a_transfer(in_a_world: Callable[..., tuple[Metered, Metered]]) -> None:
    async def play(a: Metered, b: Metered) -> None:
        for _ in range(4):
            await a.transport.send(b.port.peer_id, b"", bytes(BULK_CHUNK_BYTES), priority=Priority.BULK)
        await asyncio.sleep(5.0)

    a, b = in_a_world(play)
    assert b.got == [BULK_CHUNK_BYTES] * 4
    assert a.report().bytes_per_s == pytest.approx(RATE, rel=0.05)
    assert b.report().received_bytes_per_s == pytest.approx(RATE, rel=0.05)
    assert b.report().bytes_per_s == 0.0


def test_idle_time_does_not_count_and_frames_may_overlap(clock: Hands, meter: LinkMeter) -> None:
    peer = PeerID("b")
    for start_s in (0.0, 100.0):
        clock.at_s = start_s
        meter.send_begins(peer)
        clock.at_s = start_s + 0.5
        meter.send_begins(peer)
        clock.at_s = start_s + 1.0
        meter.send_ends(peer, 200_000, left=True)
        clock.at_s = start_s + 2.0
        meter.send_ends(peer, 200_000, left=True)
    assert only(meter).bytes_per_s == pytest.approx(200_000.0)


def test_what_did_not_go_out_says_nothing(clock: Hands, meter: LinkMeter) -> None:
    peer = PeerID("b")
    meter.send_begins(peer)
    clock.at_s = 10.0
    meter.send_ends(peer, 1_000_000, left=False)
    assert meter.report() == ()
    meter.send_begins(peer)
    clock.at_s = 11.0
    meter.send_ends(peer, 1_000_000, left=True)
    assert only(meter).bytes_per_s == pytest.approx(1e6)


def test_frames_count_for_nothing_beside_a_probe(clock: Hands, meter: LinkMeter) -> None:
    peer = PeerID("b")
    meter.probed(LinkReport(peer=peer, round_trip_s=0.1, bytes_per_s=1e6))
    assert only(meter).bytes_per_s == 1e6
    meter.send_begins(peer)
    clock.at_s = 0.001
    meter.send_ends(peer, 1_000_000, left=True)
    assert only(meter).bytes_per_s == 1e6


def test_chunks_that_are_not_one_behind_the_other_say_nothing(clock: Hands, meter: LinkMeter) -> None:
    peer = PeerID("b")
    for at_s, nbytes in ((0.0, BULK_CHUNK_BYTES), (1.0, 100), (9.0, BULK_CHUNK_BYTES), (11.0, BULK_CHUNK_BYTES)):
        clock.at_s = at_s
        meter.received(peer, nbytes)
    assert only(meter).received_bytes_per_s == BULK_CHUNK_BYTES / 2.0


def test_the_busiest_links_take_turns(meter: LinkMeter) -> None:
    peers = [PeerID(f"p{number:03}") for number in range(200)]
    for number, peer in enumerate(peers):
        meter.called(peer, 0.1)
        meter.received(peer, number)
    for beat in (LINKS_PER_HEARTBEAT_MAX, REPORTS_PER_BEAT, LINKS_PER_HEARTBEAT_MAX):
        told = [meter.report() for _ in range(REPORTED_MAX // beat)]
        assert {len(reports) for reports in told} == {beat}
        assert [report.peer for reports in told for report in reports] == peers[: -REPORTED_MAX - 1 : -1]
        if beat == REPORTS_PER_BEAT:
            meter.tell_all()  # another coordinator hears of all of them soon


def test_a_probe_is_told_of_first(meter: LinkMeter) -> None:
    for number in range(100):
        meter.called(PeerID(f"p{number:03}"), 0.1)
    for _ in range(REPORTED_MAX // LINKS_PER_HEARTBEAT_MAX):
        meter.report()
    meter.probed(LinkReport(peer=PeerID("p050"), round_trip_s=0.1, bytes_per_s=1e6))
    told = meter.report()
    assert (told[0].peer, told[0].num_probes, len(told)) == ("p050", 1, REPORTS_PER_BEAT)


def test_a_probe_beside_other_traffic_counts_only_if_it_is_faster(clock: Hands, meter: LinkMeter) -> None:
    peer, other = PeerID("b"), PeerID("c")

    def probe(bytes_per_s: float, *, is_alone: bool) -> float:
        mark = meter.mark
        meter.send_begins(peer)
        if not is_alone:
            meter.send_begins(other)
            meter.send_ends(other, 10, left=True)
        meter.send_ends(peer, 1000, left=True)
        meter.probed(LinkReport(peer=peer, round_trip_s=0.1, bytes_per_s=bytes_per_s), since=mark)
        return max((report.bytes_per_s for report in meter.report() if report.peer == peer), default=0.0)

    assert probe(1e5, is_alone=False) == 0.0
    assert probe(1e6, is_alone=True) == 1e6
    assert probe(1e5, is_alone=False) == 1e6
    assert probe(2e6, is_alone=False) == 2e6
    assert [probe(1.1e6, is_alone=True) for _ in range(3)] == [2e6, 2e6, 1.1e6], "the best of the last three"
    assert [probe(2e5, is_alone=True) for _ in range(2)] == [1.1e6, 2e5], "two that say the same, and far less"
    assert probe(1e6, is_alone=True) == 1e6
    assert [probe(rate, is_alone=True) for rate in (1e5, 4e5)] == [1e6, 1e6], "two that do not say the same"


def test_two_probes_that_agree_that_a_link_has_become_slow_are_said_to(meter: LinkMeter) -> None:
    def probed(bytes_per_s: float) -> bool:
        return meter.probed(LinkReport(peer=PeerID("b"), round_trip_s=0.1, bytes_per_s=bytes_per_s))

    assert not probed(1e7)
    assert probed(1e6), "another one will tell"
    assert not only(meter).has_fallen
    assert not probed(1.1e6)
    assert only(meter).has_fallen
    assert only(meter).bytes_per_s == 1.1e6


def test_a_peer_keeps_so_many_links_and_no_more(meter: LinkMeter) -> None:
    busy = PeerID("busy")
    meter.received(busy, 10_000)
    meter.called(busy, 0.1)
    for number in range(5_000):
        meter.called(PeerID(f"p{number}"), 0.1)
    assert len(meter._links) <= 256
    assert meter.report()[0].peer == busy


@dataclass
class Sending:
    """Sends frames of a megabyte over links, one behind the other on each."""

    clock: Hands
    meter: LinkMeter
    bytes_per_s: dict[PeerID, float]

    def go_on(self, seconds: float) -> None:
        until_s = self.clock.at_s + seconds
        ends = dict.fromkeys(self.bytes_per_s, self.clock.at_s)
        for peer in ends:
            self.meter.send_begins(peer)
        while min(ends.values()) < until_s:
            peer = min(ends, key=lambda each: ends[each])
            ends[peer] += 1e6 / self.bytes_per_s[peer]
            self.clock.at_s = max(self.clock.at_s, min(ends[peer], until_s))
            if ends[peer] <= until_s:
                self.meter.send_begins(peer)
                self.meter.send_ends(peer, 1_000_000, left=True)
        self.clock.at_s = until_s
        for peer in ends:
            self.meter.send_ends(peer, 0, left=True)


def rates(meter: LinkMeter) -> dict[PeerID, float]:
    return {report.peer: report.bytes_per_s for _ in range(2) for report in meter.report()}


def probed_at(meter: LinkMeter, bytes_per_s: float, *peers: PeerID) -> None:
    for peer in peers:
        for _ in range(3):
            meter.probed(LinkReport(peer=peer, round_trip_s=0.1, bytes_per_s=bytes_per_s))


def test_a_link_that_became_slow_is_seen_by_what_it_carries(clock: Hands, meter: LinkMeter) -> None:
    """It is always busy, and so can never be probed."""
    slow, usual = PeerID("b"), PeerID("c")
    probed_at(meter, 1e8, slow, usual)
    sending = Sending(clock, meter, {slow: 1e7})
    meter.look()
    for _ in range(2):
        sending.go_on(5.0)
        meter.look()
    assert rates(meter) == {slow: pytest.approx(1e7, rel=0.05), usual: 1e8}


def test_what_links_carry_says_nothing_where_they_share_a_card_that_is_full(clock: Hands, meter: LinkMeter) -> None:
    peers = [PeerID(name) for name in "bcdef"]
    probed_at(meter, 1e8, *peers)
    sending = Sending(clock, meter, dict.fromkeys(peers, 2e7))
    meter.look()
    for _ in range(3):
        sending.go_on(5.0)
        meter.look()
    assert set(rates(meter).values()) == {1e8}


def test_a_link_that_is_hardly_used_says_nothing_of_what_it_can_carry(clock: Hands, meter: LinkMeter) -> None:
    peer = PeerID("b")
    probed_at(meter, 1e8, peer)
    meter.look()
    for _ in range(3):
        Sending(clock, meter, {peer: 5e6}).go_on(1.0)
        clock.at_s += 5.0
        meter.look()
    assert rates(meter) == {peer: 1e8}


def test_where_all_links_in_use_have_become_slow_the_others_have_too(clock: Hands, meter: LinkMeter) -> None:
    slow, idle = [PeerID("b"), PeerID("c")], PeerID("d")
    probed_at(meter, 1e8, *slow, idle)
    sending = Sending(clock, meter, dict.fromkeys(slow, 1e7))
    assert not meter.look()
    for _ in range(2):
        sending.go_on(5.0)
        seen_bytes_per_s = meter.look()
    assert seen_bytes_per_s == pytest.approx(2e7, rel=0.05), "what both carry together our card carries at least"
    assert set(rates(meter)) == {*slow, idle}
    assert max(rates(meter).values()) == pytest.approx(1e7, rel=0.05)


def test_a_mate_on_our_machine_does_not_make_our_line_look_slow(clock: Hands, meter: LinkMeter) -> None:
    """Two processes share a card of 2e8 bytes/s: neither sees its links carry more than half of what a probe showed,
    and the way between the two, which does not pass the card, is a hundred times as quick."""
    mate, others = PeerID("mate"), [PeerID("b"), PeerID("c")]
    probed_at(meter, 1e8, *others)
    probed_at(meter, 2e10, mate)
    sending = Sending(clock, meter, dict.fromkeys(others, 2e7))
    meter.look([mate])
    for _ in range(3):
        sending.go_on(5.0)
        assert meter.look([mate]) is None
    assert rates(meter) == dict.fromkeys(others, 1e8) | {mate: 2e10}
    slowed = Sending(clock, meter, dict.fromkeys(others, 1e6))
    for _ in range(2):
        slowed.go_on(5.0)
        seen_bytes_per_s = meter.look([mate])
    assert seen_bytes_per_s == pytest.approx(2e6, rel=0.05)
    assert rates(meter)[mate] == 2e10, "what leaves the machine says nothing of it"


# --- who cannot be reached ---


def test_tries_that_fail_are_counted_until_an_answer_comes_and_told_first(meter: LinkMeter) -> None:
    lost = PeerID("lost")
    meter.failed(lost)
    assert not meter.cannot_reach(lost), "a connection that has just broken may be there again"
    meter.failed(lost)
    assert meter.cannot_reach(lost)
    assert not meter.has_met(lost)
    assert only(meter) == LinkReport(peer=lost, round_trip_s=0.0, bytes_per_s=0.0, num_failed=2)
    meter.tell_all()
    assert only(meter).num_failed == 2, "another coordinator has not heard of it"
    meter.called(lost, 0.5)
    assert only(meter) == LinkReport(peer=lost, round_trip_s=0.5, bytes_per_s=0.0)
    assert meter.has_met(lost)


def test_a_peer_without_a_network_leaves_room_in_its_heartbeats(meter: LinkMeter) -> None:
    for number in range(40):
        meter.failed(PeerID(f"p{number}"))
    for number in range(40):
        meter.probed(LinkReport(peer=PeerID(f"q{number}"), round_trip_s=0.1, bytes_per_s=1e6))
    told = [report.peer for report in meter.report()]
    assert len(told) <= LINKS_PER_HEARTBEAT_MAX
    assert sum(peer.startswith("p") for peer in told) == FAILED_TOLD_MAX


def test_calls_and_frames_over_a_path_that_is_cut_are_failed_tries() -> None:
    async def scenario() -> None:
        world = World(1, uniform(LATENCY_S), stall_s=2.0, acquainted=True)
        a, b = Metered(world.add_peer("a")), Metered(world.add_peer("b"))
        world.partition([a.port], [b.port])
        with pytest.raises(Unreachable):
            await a.transport.call(b.port.peer_id, b"0.1", timeout_s=1.0)
        with pytest.raises(Unreachable):
            await a.transport.send(b.port.peer_id, b"meta", bytes(4096), priority=Priority.BULK)
        assert a.meter.cannot_reach(b.port.peer_id)
        world.heal()
        await a.transport.call(b.port.peer_id, b"0.1", timeout_s=9.0)
        assert not a.meter.cannot_reach(b.port.peer_id)

    run(scenario())
