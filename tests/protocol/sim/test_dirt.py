"""Dirt by its numbers: means, deviations and rates, and that a world without any is the one it was."""

import asyncio
import random
import runpy
import statistics
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from open_gate import OpenGate

from shoal.peer.compute.probe import LinkProbe
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.messages import LinkReport
from shoal.protocol.ports import JobKind, Priority, Timed
from shoal.protocol.sim.dirt import CLEAN, Cores, Dirt, LineDirt
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import SimPeer, World

NEAR = pytest.approx


async def job(peer: SimPeer, seconds: float, kind: JobKind = "forward") -> Timed[None]:
    """Run a job that takes `seconds` at full speed."""
    return await peer.compute.run(kind, lambda: None, flop=1e12 * seconds)


async def took_s(peer: SimPeer, seconds: float, kind: JobKind = "forward") -> float:
    timed = await job(peer, seconds, kind)
    return timed.ended_s - timed.started_s


def test_a_world_without_dirt_is_the_one_it_was() -> None:
    clean = runpy.run_path(str(Path(__file__).with_name("scenario.py")))["main"]
    assert run(clean(7)).startswith("a55ace6039d478755fe50bce0c75652a 3523 ")


# --- devices ---


def test_devices_of_one_machine_share_its_cores_exactly() -> None:
    async def main() -> None:
        world, cores = World(0, uniform(0.05)), Cores(2)
        peers = [world.add_peer(name, cores=cores) for name in "abc"]
        alone = world.add_peer("alone")
        jobs = [asyncio.create_task(job(peer, 2.0)) for peer in (*peers[:2], alone)]
        await asyncio.sleep(1.0)
        jobs.append(asyncio.create_task(job(peers[2], 1.0)))
        ends = [(await each).ended_s for each in jobs]
        # Two at full speed for 1 s; then three at 2/3 for 1.5 s, when all have done their work.
        assert ends == [NEAR(2.5), NEAR(2.5), NEAR(2.0), NEAR(2.5)]
        began_s = world.now_s()
        long, short = asyncio.create_task(job(peers[0], 3.0)), asyncio.create_task(job(peers[1], 1.0))
        third = asyncio.create_task(job(peers[2], 2.0))
        # Three at 2/3 until 1.5 s, when `short` ends; the others have 2 and 1 left, each on a core of its own.
        assert [(await each).ended_s - began_s for each in (short, third, long)] == [NEAR(1.5), NEAR(2.5), NEAR(3.5)]

    run(main())


def test_a_device_that_is_gone_leaves_its_core_to_the_others() -> None:
    async def main() -> None:
        world, cores = World(0, uniform(0.05)), Cores(1)
        a, b = (world.add_peer(name, cores=cores) for name in "ab")
        stays = asyncio.create_task(job(a, 2.0))
        b.spawn(job(b, 100.0))
        await asyncio.sleep(1.0)
        world.crash(b)
        assert (await stays).ended_s == NEAR(2.5)
        assert (await took_s(world.add_peer("b", cores=cores), 3.0)) == NEAR(3.0)

    run(main())


def test_a_closed_device_ends_its_job_or_its_next_process_does() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a", dirt=Dirt(throttled=0.5))
        last = asyncio.create_task(job(a, 2.0))
        await asyncio.sleep(1.0)
        a.compute.close()
        assert (await last).ended_s == NEAR(4.0), "as on a clean device"
        again = world.add_peer("b", dirt=Dirt(throttled=0.5))
        again.spawn(job(again, 100.0))
        await asyncio.sleep(1.0)
        await again.transport.close()
        assert await took_s(world.add_peer("b"), 1.0) == NEAR(2.0)

    run(main())


def test_a_paused_peer_ends_its_job_on_time_and_hears_of_it_late() -> None:
    async def main() -> None:
        world, cores = World(0, uniform(0.05)), Cores(1)
        a, b = (world.add_peer(name, cores=cores) for name in "ab")
        late = a.spawn(job(a, 1.0))
        other = asyncio.create_task(job(b, 2.0))
        await asyncio.sleep(0.5)
        world.pause(a)
        assert (await other).ended_s == NEAR(3.0)
        await asyncio.sleep(7.0)
        assert not late.done()
        world.resume(a)
        assert (await late).ended_s == NEAR(10.0)

    run(main())


@pytest.mark.parametrize("sd", [0.1, 0.3, 1.0])
def test_jobs_jitter_by_their_deviation_and_keep_their_mean(sd: float) -> None:
    async def main(seed: int) -> list[float]:
        peer = World(seed, uniform(0.05)).add_peer("a", dirt=Dirt(compute_sd=sd))
        return [await took_s(peer, 0.5) for _ in range(20_000)]

    seconds = run(main(1))
    assert statistics.mean(seconds) == NEAR(0.5, rel=0.02)
    assert statistics.stdev(seconds) / 0.5 == NEAR(sd, rel=0.06)
    assert run(main(1))[:9] == seconds[:9] != run(main(2))[:9]


def test_a_quota_gives_a_burst_and_then_its_fraction() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        peer = world.add_peer("a", dirt=Dirt(throttled=0.25, burst_s=0.025))
        assert await took_s(peer, 0.02) == NEAR(0.02), "shorter than the burst: full speed"
        await asyncio.sleep(1.0)
        assert await took_s(peer, 0.05) == NEAR(0.125), "25 ms at once, the other 25 ms at a quarter"
        began_s = world.now_s()
        for _ in range(100):
            await job(peer, 0.05)
        assert (world.now_s() - began_s) / 100 == NEAR(0.2), "what the quota sustains"
        began_s = world.now_s()
        for _ in range(100):  # 5 ms of work in 25 ms: less than the quota, which does not show
            assert await took_s(peer, 0.005) == NEAR(0.005, abs=0.016)
            await asyncio.sleep(0.02)
        assert (world.now_s() - began_s) / 100 == NEAR(0.025, rel=0.02)

    run(main())


def test_heat_takes_minutes_and_a_rest_cools() -> None:
    async def main() -> None:
        peer = World(0, uniform(0.05)).add_peer("a", dirt=Dirt(throttled=0.6, burst_s=120.0))
        seconds = [await took_s(peer, 1.0) for _ in range(200)]
        assert seconds[:120] == [NEAR(1.0)] * 120
        assert seconds[121:] == [NEAR(1.0 / 0.6)] * 79
        await asyncio.sleep(120.0 * (1.0 / 0.6 - 1.0))
        assert [await took_s(peer, 1.0) for _ in range(120)] == [NEAR(1.0)] * 120

    run(main())


@pytest.mark.parametrize("probe_waits", [True, False])
def test_a_probe_meets_the_burst_and_sees_the_quota_by_its_clock(probe_waits: bool) -> None:
    async def main() -> None:
        dirt = Dirt(throttled=0.25, burst_s=0.025, probe_waits=probe_waits)
        peer = World(0, uniform(0.05)).add_peer("a", dirt=dirt)
        seconds = [await took_s(peer, 0.004, "probe") for _ in range(6)]
        assert seconds == [NEAR(0.004)] * 6, "24 ms in all are over before the quota bites"
        longer = [await took_s(peer, 0.02, "probe") for _ in range(6)]
        assert longer[1:] == [NEAR(0.08 if probe_waits else 0.02)] * 5
        assert await took_s(peer, 0.02) == NEAR(0.08), "work always waits"

    run(main())


# --- lines ---


def test_a_wandering_rate_keeps_its_mean_its_deviation_and_its_correlation_time() -> None:
    line = LineDirt(Dirt(wander_sd=0.4, wander_s=20.0), random.Random(3))
    factors = [line.now(at_s).factor for at_s in range(0, 200_000, 10)]
    assert statistics.mean(factors) == NEAR(1.0, rel=0.03)
    # exp(s²) - 1 is the variance of a lognormal with mean 1.
    assert statistics.stdev(factors) == NEAR(0.417, rel=0.06)
    assert max(factors) <= 2.7183 ** (3 * 0.4)
    assert statistics.correlation(factors[:-2], factors[2:]) == NEAR(0.35, abs=0.06), "1/e after 20 s"


def test_other_peoples_traffic_takes_its_share_in_its_periods() -> None:
    dirt = Dirt(others_share=0.75, others_on_s=5.0, others_off_s=15.0, others_delay_s=0.1)
    line = LineDirt(dirt, random.Random(3))
    pieces = [line.now(float(at_s)) for at_s in range(100_000)]
    assert {(piece.factor, piece.delay_s) for piece in pieces} == {(1.0, 0.0), (0.25, 0.1)}
    busy = [piece.factor < 1.0 for piece in pieces]
    assert statistics.mean(busy) == NEAR(0.25, abs=0.02)
    assert line.takes_s(100_000.0, 20_000.0) == NEAR(20_000.0 / (1.0 - 0.25 * 0.75), rel=0.03)


def test_a_transfer_over_a_change_takes_what_each_part_takes() -> None:
    line = LineDirt(Dirt(others_share=0.5, others_on_s=10.0, others_off_s=10.0), random.Random(1))
    first = line.now(0.0)
    over_s = first.until_s * first.factor  # seconds of the line's own rate that the first piece carries
    rest = 0.5 if first.factor == 1.0 else 1.0
    assert line.takes_s(0.0, over_s) == NEAR(first.until_s)
    assert line.takes_s(0.0, over_s + 0.01) == NEAR(first.until_s + 0.01 / rest)
    assert line.takes_s(first.until_s / 2, over_s / 2) == NEAR(first.until_s / 2)


def test_frames_over_a_dirty_line_have_its_mean_rate(
    listen: Callable[..., Coroutine[Any, Any, list[Any]]], send: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    async def main(**dirt: float) -> float:
        world = World(4, uniform(0.01))
        a = world.add_peer("a", up_bytes_per_s=1e6, dirt=Dirt(**dirt))
        b = world.add_peer("b")
        await listen(world)
        for _ in range(3000):
            await send(a, b, "x", 1_000_000)
        return 3000.0 / world.now_s()

    assert run(main()) == NEAR(1.0, rel=0.01)
    assert run(main(others_share=0.5, others_on_s=10.0, others_off_s=10.0)) == NEAR(0.75, abs=0.03)
    assert run(main(wander_sd=0.3, wander_s=20.0)) == NEAR(1.0, abs=0.06)


# --- probes of links ---


def probes(world: World, *names: str) -> list[LinkProbe]:
    made = []
    for name in names:
        peer = world.peers[name]
        endpoint = Endpoint(peer.identity, peer.transport, run="run", gate=OpenGate(), first_sequence=1)
        made.append(LinkProbe(endpoint=endpoint, clock=peer.clock))
    return made


async def measured(dirt: Dirt, beside: Priority | None = None) -> list[LinkReport]:
    """Probe a line of 20 Mbit/s every 5 s. Args: beside: the priority of own frames that fill the line meanwhile."""
    world = World(5, uniform(0.02), acquainted=True)
    a = world.add_peer("a", up_bytes_per_s=2.5e6, dirt=dirt)
    b, c = world.add_peer("b"), world.add_peer("c")
    ours, _ = probes(world, "a", "b")
    filling: list[asyncio.Task[None]] = []
    if beside is not None:

        async def fill() -> None:
            while True:
                await a.transport.send(c.peer_id, b"m", memoryview(bytes(65_536)), priority=beside)

        c.transport.serve(on_call=_silent_call, on_frame=_silent_frame)
        filling = [a.spawn(fill()) for _ in range(4)]
    reports = []
    for _ in range(200):
        reports.append(await ours.measure(b.peer_id))
        await asyncio.sleep(5.0)
    for task in filling:
        task.cancel()
    return reports


async def _silent_call(source: str, request: bytes) -> bytes:
    return request


async def _silent_frame(source: str, meta: bytes, payload: object) -> None:
    return None


def test_a_probe_measures_what_other_peoples_traffic_leaves() -> None:
    quiet = run(measured(CLEAN))
    assert {round(report.bytes_per_s / 1e5) for report in quiet} == {25}
    dirt = Dirt(others_share=0.6, others_on_s=20.0, others_off_s=20.0, others_delay_s=0.08)
    busy = run(measured(dirt))
    rates = sorted(report.bytes_per_s for report in busy)
    assert rates[20] == NEAR(1e6, rel=0.02), "0.4 of the line while others use it"
    assert rates[-20] == NEAR(2.5e6, rel=0.02)
    assert statistics.mean(rates) == NEAR(1.75e6, rel=0.15)
    trips = sorted(report.round_trip_s for report in busy)
    assert [trips[20], trips[100], trips[-20]] == NEAR([0.04, 0.12, 0.2], abs=0.005), "their queues show, each way"


def test_a_probe_beside_own_urgent_frames_finds_the_share_of_the_longest_waiting() -> None:
    rates = [report.bytes_per_s for report in run(measured(CLEAN, Priority.ACTIVATION))]
    assert statistics.median(rates) == NEAR(2.5e6 / 6, rel=0.25), "a sixth, as `live/throttle.py` leaves to it"
