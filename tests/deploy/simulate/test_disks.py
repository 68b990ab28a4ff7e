"""Whole nodes on disks that are full, broken or torn: training goes on, and equals one process step by step."""

import asyncio
from pathlib import PurePosixPath

import pytest
from newest_snapshot import read_snapshot
from sim_swarm import SimSwarm
from single_process import train
from tiny_run import tiny_corpus, tiny_spec

from shoal.peer.disk.snapshot import DamagedSnapshot, list_snapshots
from shoal.protocol.sim.disk import SimDisk
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

pytestmark = pytest.mark.sim

STEPS, PEERS = 14, 6


def swarm_of(seed: int) -> SimSwarm:
    spec = tiny_spec(steps=STEPS, peers=PEERS, term_s=5.0)
    return SimSwarm(spec, tiny_corpus(), seed=seed, network=uniform(0.02, 1e7), device_flop_per_s=2.5e7)


def assert_trained_as_one_process(swarm: SimSwarm) -> None:
    single = [step.loss for step in train(swarm.spec, swarm.corpus, steps=STEPS)]
    assert sorted(swarm.steps) == list(range(STEPS))
    assert max(abs((swarm.steps[step].loss or 0.0) - loss) for step, loss in enumerate(single)) < 1e-4
    assert sum(step.given_up for step in swarm.steps.values()) == 0


def no_damage(damage: DamagedSnapshot) -> None:
    raise AssertionError(damage)


def num_snapshots(disk: SimDisk) -> int:
    """All of them sound."""
    found = 0
    for name in disk.list(PurePosixPath()):
        for group in disk.list(PurePosixPath(name, "snapshots")):
            for stored in list_snapshots(disk, PurePosixPath(name, "snapshots", group), on_damage=no_damage):
                read_snapshot(disk, stored.path)
                found += 1
    return found


def test_four_full_disks_of_six_cost_their_snapshots_and_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> tuple[SimSwarm, float]:
        swarm = swarm_of(1)
        for number in range(PEERS):
            swarm.launch(f"n{number}")
        await swarm.until(lambda: len(swarm.steps) >= 3)
        for number in range(4):
            swarm.world.peers[f"n{number}"].disk.limit(0)
        await swarm.end()
        return swarm, swarm.world.now_s() / 60

    swarm, minutes = run(main())
    assert_trained_as_one_process(swarm)
    written = [num_snapshots(swarm.world.peers[f"n{number}"].disk) for number in range(PEERS)]
    assert sum(written[:4]) == 0
    assert sum(written[4:]) > 0
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors
    assert all("No space left on device: make room" in error for error in errors)
    assert len(errors) <= 4 * 2 * (minutes + 1), "of each, one about votes and one about snapshots"


def test_a_power_cut_in_the_middle_of_a_snapshot_costs_time_only() -> None:
    async def main() -> SimSwarm:
        swarm = swarm_of(2)
        for number in range(PEERS):
            swarm.launch(f"n{number}")
        await swarm.until(lambda: len(swarm.steps) >= 9)
        victim = swarm.world.peers["n1"]
        victim.disk.cut_power(after=10, then=lambda: swarm.world.crash(victim))
        await swarm.until(lambda: not victim.is_alive)
        await asyncio.sleep(5.0)
        swarm.launch("n1")
        await swarm.end()
        return swarm

    swarm = run(main())
    assert_trained_as_one_process(swarm)
    for peer in swarm.world.peers.values():
        num_snapshots(peer.disk)
