"""Peers come and go, and nobody stops for it."""

import asyncio
import itertools
from pathlib import PurePosixPath

import msgspec
import pytest
from uncontrolled import Uncontrolled

from shoal.protocol.messages import PresenceUpdate
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform


@pytest.mark.sim
def test_newcomers_take_traffic_and_leavers_drain_without_a_stall_or_a_loss(make_swarm, tiny_spec):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"s_max": 1, "steps": 24}
    spec = msgspec.convert(builtins, type(tiny_spec))
    stages = [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]]
    committed_at_s = []

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
        for names in stages:
            for name in names:
                await swarm.add(name, device_flop_per_s=4e7)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(3)

        newcomers = ["0.2", "1.2", "2.2"]
        joined_s = swarm.world.now_s()
        for stage, name in enumerate(newcomers):
            await swarm.add(name, device_flop_per_s=4e7)
            stages[stage].append(name)
        swarm.obey(stages, not_started=False)
        await swarm.until(lambda: all(swarm.drivers[name].heartbeat().forward_s > 0 for name in newcomers))
        assert swarm.world.now_s() - joined_s < 20.0

        leavers = ["0.0", "1.0", "2.1"]  # two of them lead their group
        goodbyes = [swarm.peer(name).spawn(swarm.drivers[name].drain()) for name in leavers]
        for name in leavers:
            stages[int(name[0])].remove(name)
        await asyncio.sleep(0.2)
        swarm.obey(stages, not_started=False)
        assert all([await goodbye for goodbye in goodbyes])
        for name in leavers:
            await swarm.peer(name).spawn(swarm.drivers.pop(name).close())
            await swarm.peer(name).transport.close()

        for step in range(len(swarm.commits[0]), 24):
            await swarm.until_step(step)
            committed_at_s.append(swarm.world.now_s())
        await swarm.until_step(24)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm

    swarm = run(main())
    for stage in range(3):
        commits = [swarm.commits[stage][step] for step in range(24)]
        assert {(c.microbatches, c.duplicates, c.given_up) for c in commits} == {(6, 0, 0)}
        assert [c.members for c in commits][-1] == 2
        assert max(c.members for c in commits) == 3
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(committed_at_s)]
    assert max(gaps_s) < 4 * sorted(gaps_s)[len(gaps_s) // 2], "somebody waited for a timeout"
    assert swarm.losses[-1] < swarm.losses[0] - 0.5


@pytest.mark.sim
def test_a_run_begins_though_activations_overtake_their_senders_hello(make_swarm, tiny_spec, monkeypatch):
    """Found by a run of the command line whose first step never came."""

    async def main():
        swarm = make_swarm(tiny_spec, network=uniform(latency_s=0.01, rate_bytes_per_s=1e7))
        first = await swarm.add("0.0")
        # what has overtaken the PresenceUpdate is still here when that comes
        await swarm.add("1.0", device_flop_per_s=4e6)
        take_place, ask = first._stage._take_place, first.services.endpoint.ask

        async def later(*arguments):
            await asyncio.sleep(1.0)  # the next stage has heard meanwhile that it has no place yet
            await take_place(*arguments)

        async def slow(peer, message, *arguments, **options):
            if isinstance(message, PresenceUpdate):
                await asyncio.sleep(0.5)
            return await ask(peer, message, *arguments, **options)

        monkeypatch.setattr(first._stage, "_take_place", later)
        monkeypatch.setattr(first.services.endpoint, "ask", slow)
        swarm.obey([["0.0"], ["1.0"]], not_started=True)
        await swarm.until(lambda: len(swarm.commits.get(1, {})) > 2, timeout_s=60.0)
        await swarm.close()
        assert swarm.world.failures == []

    run(main())


@pytest.mark.sim
@pytest.mark.parametrize(
    ("vanishes", "within_s"),
    [
        ("whom it sent to, dead", 10.0),
        ("whom it sent to, for another whom it has not met", 15.0),
        ("its mates, for one whom it has not met", 10.0),
        ("who was to stay, when two stages swap members", 15.0),
        ("somebody who was on its way out itself", 10.0),
    ],
)
def test_who_moves_away_hears_of_later_plans_while_it_drains(make_swarm, tiny_spec, vanishes, within_s):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"] |= {"s_max": 1, "steps": 20}
    spec = msgspec.convert(builtins, type(tiny_spec))
    speeds = {"0.0": 4e7, "0.1": 4e7, "1.0": 2e7, "1.1": 2e7, "2.0": 4e7}

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))

        async def obey(*stages):
            swarm.obey([stage.split() for stage in stages], not_started=swarm.plan is None)
            await asyncio.sleep(0.1)  # some are on their way into a plan when the next one comes

        for name, speed in speeds.items():
            # As much in flight as may be: who is to drain is not done when the next plan comes.
            await swarm.add(name, device_flop_per_s=speed, traffic=Uncontrolled())
        await obey("0.0 0.1", "1.0 1.1", "2.0")
        await swarm.until_step(3)
        match vanishes:
            case "whom it sent to, dead":
                await obey("0.1", "1.0 1.1", "2.0 0.0")
                swarm.world.crash(swarm.peer("1.0"))
                swarm.drivers.pop("1.0")
                await obey("0.1", "1.1", "2.0 0.0")
            case "whom it sent to, for another whom it has not met":
                await swarm.add("1.2", device_flop_per_s=2e7)
                await obey("0.1", "1.0 1.1", "2.0 0.0")
                await obey("0.1", "1.0 1.1 1.2", "2.0 0.0")
                await swarm.until(lambda: swarm.drivers["1.2"].heartbeat().synced)
                for name in ("1.0", "1.1"):
                    swarm.world.crash(swarm.peer(name))
                    swarm.drivers.pop(name)
                await obey("0.1", "1.2", "2.0 0.0")
            case "its mates, for one whom it has not met":
                await swarm.add("0.2", device_flop_per_s=4e7)
                await obey("0.1", "1.0 1.1", "2.0 0.0")
                await obey("0.1 0.2", "1.0 1.1", "2.0 0.0")
                await swarm.until(lambda: swarm.drivers["0.2"].heartbeat().synced)
                await obey("0.2", "1.0 1.1", "2.0 0.0 0.1")
            case "somebody who was on its way out itself":
                await obey("0.0 0.1", "1.1", "2.0 1.0")
                swarm.world.crash(swarm.peer("1.0"))
                swarm.drivers.pop("1.0")
                await obey("0.0 0.1", "1.1", "2.0")
            case "who was to stay, when two stages swap members":
                await obey("0.0", "1.0 0.1", "2.0 1.1")
                swarm.world.crash(swarm.peer("1.0"))
                swarm.drivers.pop("1.0")
                await obey("0.0", "0.1", "2.0 1.1")
                await swarm.add("1.2", device_flop_per_s=2e7)
                await obey("0.0", "0.1 1.2", "2.0 1.1")
        changed_s = swarm.world.now_s()
        await swarm.until_step(len(swarm.commits[0]) + 4)
        moved_s = swarm.world.now_s() - changed_s
        await swarm.until_step(20)
        await swarm.close()
        assert swarm.world.failures == []
        return swarm, moved_s

    swarm, moved_s = run(main())
    assert moved_s < within_s, "somebody waited for a timeout"
    for stage in range(3):
        commits = [swarm.commits[stage][step] for step in range(20)]
        assert {(c.microbatches, c.given_up) for c in commits} == {(6, 0)}


@pytest.mark.sim
@pytest.mark.parametrize(("num_experts", "optimizer"), [(0, "adamw"), (4, "adamw"), (4, "muon")])
def test_a_newcomer_holds_the_very_bits_of_its_mates(make_swarm, tiny_spec, num_experts, optimizer):
    builtins = msgspec.to_builtins(tiny_spec)
    builtins["model"]["num_experts"] = num_experts
    builtins["optimizer"]["name"] = optimizer
    builtins["training"] |= {"s_max": 1, "steps": 12}
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.02, rate_bytes_per_s=1e6))
        for name in ("a", "b"):
            await swarm.add(name, device_flop_per_s=1e8)
        swarm.obey([["a"], ["b"]], not_started=True)
        await swarm.until_step(4)
        await swarm.add("c", device_flop_per_s=1e8)
        swarm.obey([["a"], ["b", "c"]], not_started=False)
        await swarm.until_step(12)
        states = [swarm.drivers[name].replica.runtime.state for name in ("b", "c")]
        await swarm.close()
        return [(state.version, state.digest()) for state in states], swarm.commits[1][11].members

    states, members = run(main())
    assert states[0] == states[1]
    assert members == 2


@pytest.mark.sim
@pytest.mark.parametrize("num_experts", [0, 4])
def test_a_snapshot_is_written_at_the_end_and_reads_back(make_swarm, tiny_spec, tmp_path, num_experts):
    from newest_snapshot import read_snapshot

    from shoal.peer.disk.snapshot import list_snapshots
    from shoal.protocol.live.disk import LiveDisk

    builtins = msgspec.to_builtins(tiny_spec)
    builtins["training"]["steps"] = 3
    builtins["model"]["num_experts"] = num_experts
    spec = msgspec.convert(builtins, type(tiny_spec))

    async def main():
        swarm = make_swarm(spec, network=uniform(latency_s=0.01))
        for name in ("a", "b"):
            await swarm.add(name, device_flop_per_s=1e9, disk=LiveDisk(tmp_path / name))
        swarm.obey([["a", "b"]], not_started=True)
        await swarm.until_step(3)
        state = swarm.drivers["a"].replica.runtime.state
        await swarm.close()
        return state

    state = run(main())
    for name in ("a", "b"):  # one of them may die over it
        disk = LiveDisk(tmp_path / name)
        (run_folder,) = disk.list(PurePosixPath())
        (newest,) = list_snapshots(disk, PurePosixPath(run_folder, "snapshots", "embed-head"))
        read = read_snapshot(disk, newest.path)
        assert (read.version, read.era) == (3, 0)
        for key, layer in state.layers.items():
            assert read.layers[key].param_N.equal(layer.param_N)
