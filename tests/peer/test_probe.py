"""What a probe says of links and cards whose figures are known."""

import asyncio

import pytest
from open_gate import OpenGate

from shoal.peer.compute.probe import LinkProbe
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.messages import LinkReport
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import LinkSpec, MatrixNetwork, uniform
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.topology import make_topology

LATENCY_S = 0.03
LAN_AND_AFAR = MatrixNetwork(
    make_topology(
        [[1e-4 if i < 3 and j < 3 else LATENCY_S for j in range(6)] for i in range(6)],
        [[1e10 if i < 3 and j < 3 else 1e7 for j in range(6)] for i in range(6)],
    )
)


def probed(*, path: float, up: float, others: int) -> tuple[list[LinkReport], float]:
    """One peer with an uplink of `up` bytes/s measures its links, of `path` bytes/s, one by one and then together."""
    world = World(1, uniform(LATENCY_S, rate_bytes_per_s=path))
    ports = [world.add_peer("a", up_bytes_per_s=up), *(world.add_peer(f"b{number}") for number in range(others))]

    def probe_of(port: SimPeer) -> LinkProbe:
        return LinkProbe(
            endpoint=Endpoint(port.identity, port.transport, run="run", gate=OpenGate(), first_sequence=0),
            clock=port.clock,
        )

    async def main() -> tuple[list[LinkReport], float]:
        probes = [probe_of(port) for port in ports]
        for here in ports:
            for there in ports:
                await here.transport.introduce(there.peer_id, there.transport.addresses())

        async def measure() -> tuple[list[LinkReport], float]:
            links = [await probes[0].measure(port.peer_id) for port in ports[1:]]
            return links, await probes[0].measure_together(links)

        return await ports[0].spawn(measure())

    result = run(main())
    assert world.failures == []
    return result


@pytest.mark.parametrize("rate", [2.5e6, 1.25e8, 1.25e9], ids=["20 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
def test_a_probe_finds_round_trip_and_rate(rate: float) -> None:
    links, _ = probed(path=rate, up=1e12, others=1)
    assert links[0].round_trip_s == pytest.approx(2 * LATENCY_S, rel=0.05)
    assert links[0].bytes_per_s == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("rate", [2.5e6, 1.25e7], ids=["20 Mbit/s", "100 Mbit/s"])
def test_a_link_that_begins_slowly_is_as_quick_as_it_becomes(rate: float) -> None:
    """As TCP does: ten packets of 1,460 bytes in the first round trip, and twice as much in each that follows."""
    world = World(1, uniform(LATENCY_S))
    near, far = world.add_peer("near"), world.add_peer("far")

    async def main() -> LinkReport:
        probes = [
            LinkProbe(
                endpoint=Endpoint(port.identity, port.transport, run="run", gate=OpenGate(), first_sequence=0),
                clock=port.clock,
            )
            for port in (near, far)
        ]
        for here, there in ((near, far), (far, near)):
            await here.transport.introduce(there.peer_id, there.transport.addresses())

        def carries(bytes_per_s: float) -> None:
            world.set_link(near, far, LinkSpec(latency_s=LATENCY_S, rate_bytes_per_s=bytes_per_s))

        carries(14_600 / (2 * LATENCY_S))
        probe = near.spawn(probes[0].measure(far.peer_id))
        for _ in range(1_000):
            await asyncio.sleep(0.001)
            if any(count > 14_600 for count in world.sent_bytes.values()):
                break
        window_bytes = 14_600
        while window_bytes / (2 * LATENCY_S) < rate:
            await asyncio.sleep(2 * LATENCY_S)
            window_bytes *= 2
            carries(min(rate, window_bytes / (2 * LATENCY_S)))
        return await probe

    assert run(main()).bytes_per_s == pytest.approx(rate, rel=0.1)


def test_an_answer_that_waits_on_a_busy_line_takes_nothing_from_the_rate() -> None:
    """The far end, behind 20 Mbit/s, sends to somebody else all the while."""
    world = World(1, uniform(LATENCY_S))
    near = world.add_peer("near", up_bytes_per_s=1.25e8)
    far = world.add_peer("far", up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e7)
    other = world.add_peer("other")

    async def main() -> LinkReport:
        probes = [
            LinkProbe(
                endpoint=Endpoint(port.identity, port.transport, run="run", gate=OpenGate(), first_sequence=0),
                clock=port.clock,
            )
            for port in (near, far, other)
        ]
        for here, there in ((near, far), (far, near), (far, other), (other, far)):
            await here.transport.introduce(there.peer_id, there.transport.addresses())
        busy = far.spawn(probes[1].measure(other.peer_id, payload_bytes=64 * 1024 * 1024))
        begun_s = near.clock.now_s()
        found = await near.spawn(probes[0].measure(far.peer_id))
        assert near.clock.now_s() > begun_s + 1.0, "an answer waited"
        await busy
        return found

    assert run(main()).bytes_per_s == pytest.approx(2.5e7, rel=0.1)


def test_a_mark_that_waits_on_the_way_in_makes_no_link_faster() -> None:
    """Somebody quick fills the far end's downlink when a peer behind 20 Mbit/s measures its link."""
    world = World(1, uniform(LATENCY_S))
    slow = world.add_peer("slow", up_bytes_per_s=2.5e6)
    far = world.add_peer("far", down_bytes_per_s=2.5e7)
    quick = world.add_peer("quick")

    async def main() -> LinkReport:
        probes = [
            LinkProbe(
                endpoint=Endpoint(port.identity, port.transport, run="run", gate=OpenGate(), first_sequence=0),
                clock=port.clock,
            )
            for port in (slow, quick, far)
        ]
        for here in (slow, quick):
            await here.transport.introduce(far.peer_id, far.transport.addresses())
            await far.transport.introduce(here.peer_id, here.transport.addresses())
        busy = quick.spawn(probes[1].measure(far.peer_id, payload_bytes=16 * 1024 * 1024))
        found = await slow.spawn(probes[0].measure(far.peer_id))
        await busy
        return found

    assert run(main()).bytes_per_s <= 1.01 * 2.5e6


def test_together_links_show_what_the_card_carries() -> None:
    links, together = probed(path=1e7, up=1e9, others=4)
    assert together == pytest.approx(4e7, rel=0.1), "the paths are the limit: the card carries at least so much"
    links, together = probed(path=1e9, up=2e7, others=4)
    assert [link.bytes_per_s for link in links] == pytest.approx([2e7] * 4, rel=0.1)
    assert together == pytest.approx(2e7, rel=0.1)


def test_peers_behind_one_card_find_out_together_what_it_carries() -> None:
    """Three links of 80 Mbit/s each do not fill a card of 500 Mbit/s; those of three peers do."""
    world = World(1, LAN_AND_AFAR)
    server = [world.add_peer(f"a{number}", place=number, up_bytes_per_s=6.25e7, plug=1) for number in range(3)]
    afar = [world.add_peer(f"b{number}", place=3 + number) for number in range(3)]

    async def main() -> list[float]:
        probes = [
            LinkProbe(
                endpoint=Endpoint(port.identity, port.transport, run="run", gate=OpenGate(), first_sequence=0),
                clock=port.clock,
            )
            for port in (*server, *afar)
        ]
        for here in (*server, *afar):
            for there in (*server, *afar):
                await here.transport.introduce(there.peer_id, there.transport.addresses())

        async def measure(probe: LinkProbe) -> list[float]:
            links = [await probe.measure(port.peer_id) for port in afar]
            group_peers = [port.peer_id for port in server[1:]]
            alone = await probe.measure_together(links)
            return [
                alone,
                await probe.measure_together(links, group_peers),
                await probe.measure_together(links, group_peers),
                await probe.measure_together(links, [afar[0].peer_id]),
            ]

        return await server[0].spawn(measure(probes[0]))

    alone, together, again, with_far = run(main())
    assert alone == pytest.approx(3e7, rel=0.1)
    assert together == pytest.approx(6.25e7, rel=0.1)
    assert again == pytest.approx(3e7, rel=0.1), "nobody can make others send all the time"
    assert with_far == pytest.approx(3e7, rel=0.1), "who is far away is not behind our card"


def test_who_does_not_answer_says_nothing_of_the_card() -> None:
    world = World(1, uniform(LATENCY_S, rate_bytes_per_s=1e7))
    port = world.add_peer("a")
    gone = world.add_peer("b")

    async def main() -> float:
        endpoint = Endpoint(port.identity, port.transport, run="run", gate=OpenGate(), first_sequence=0)
        probe = LinkProbe(endpoint=endpoint, clock=port.clock)
        await port.transport.introduce(gone.peer_id, gone.transport.addresses())
        world.crash(gone)
        async with asyncio.timeout(60.0):
            return await port.spawn(probe.measure_together([LinkReport(gone.peer_id, 0.06, 1e7)] * 2))

    assert run(main()) == 0.0
