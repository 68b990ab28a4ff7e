"""When a driver measures what its network card carries over several links at once."""

import asyncio

from shoal.peer.compute.probe import FAR_S, LinkProbe
from shoal.protocol.messages import LinkReport
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform


def test_a_card_is_measured_over_links_that_their_last_probe_found_far(make_swarm, tiny_spec, monkeypatch):
    """On a busy line a link to the same machine looks far once: it may not count when the card is measured later."""
    together = []
    round_trips_s = []

    async def scripted(probe: LinkProbe, peer):
        return LinkReport(peer=peer, round_trip_s=round_trips_s.pop(0), bytes_per_s=1e6)

    async def recorded(probe: LinkProbe, links, beside=()):
        together.append({link.peer for link in links})
        return 1e6

    monkeypatch.setattr(LinkProbe, "measure_if_possible", scripted)
    monkeypatch.setattr(LinkProbe, "measure_together", recorded)

    async def main():
        swarm = make_swarm(tiny_spec, network=uniform(latency_s=0.01))
        driver, *_ = [await swarm.add(name) for name in ("a", "b", "c")]
        b, c = (swarm.peer(name).peer_id for name in ("b", "c"))

        async def probe(peers, *seen_s):
            round_trips_s.extend(seen_s)
            driver.measure_links(peers, ())
            await swarm.until(lambda: not round_trips_s)
            await asyncio.sleep(1.0)

        await probe((b,), 2 * FAR_S)
        await probe((c, b), 2 * FAR_S, FAR_S / 2)
        assert together == []
        await probe((b,), 2 * FAR_S)
        assert together == [{b, c}]
        await swarm.close()

    run(main())
