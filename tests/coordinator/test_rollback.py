"""A stage loses its state, or the whole swarm its memory: the run goes back, once, to what is left. In virtual time."""

import asyncio

import pytest

from shoal.coordinator.era import MISSING_HEARTBEATS
from shoal.coordinator.store import PlanStore
from shoal.protocol.layers import all_layer_keys, stage_layer_keys
from shoal.protocol.messages import Holding

pytestmark = pytest.mark.sim

VERSION = 57


def layers_of(swarm, stage):
    plan = max(swarm.alive(), key=lambda peer: peer.order).plan
    found = plan.stages[stage]
    return stage_layer_keys(swarm.spec.model, found.first_layer, found.last_layer)


def snapshot(swarm, version, *, era=0, but=()):
    """Members of each stage keep the one after: the layers of a stage survive its members."""
    plan = max(swarm.alive(), key=lambda peer: peer.order).plan
    for peer in swarm.alive():
        stage = plan.stage_of(peer.peer_id)
        if stage is not None:
            kept = {stage, (stage + 1) % len(plan.stages)} - set(but)
            layers = tuple(key for index in sorted(kept) for key in layers_of(swarm, index))
            peer.holdings += (Holding(era=era, version=version, layers=layers),)


def train(swarm, version=VERSION):
    for peer in swarm.alive():
        if peer.state is not None:
            peer.version = version


def holders(swarm, stage):
    plan = max(swarm.alive(), key=lambda peer: peer.order).plan
    return [peer for peer in swarm.alive() if plan.stage_of(peer.peer_id) == stage]


def gone_back(swarm, era=1):
    return lambda: swarm.agreed() and all(peer.plan.era == era for peer in swarm.alive())


async def trained(swarm, num_peers=6):
    """A swarm at version 57 with snapshots of 50 around, whose plan says that it is under way."""
    await swarm.begin(num_peers)
    train(swarm)
    snapshot(swarm, 50)
    await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=10.0)
    await asyncio.sleep(3.0)


def checked(plan, *, era=1, version=50, from_era=0):
    assert (plan.era, plan.restore_version, plan.restore_era, plan.not_started) == (era, version, from_era, True)
    assert 0 < plan.rollbacks <= era
    assert all(stage.members for stage in plan.stages)
    assert {member.since for stage in plan.stages for member in stage.members} == {plan.sequence}


@pytest.mark.parametrize(("stage", "seed"), [(0, 0), (1, 0), (1, 1), (2, 2), (0, 2)])
def test_a_stage_whose_members_all_die_is_made_again_from_snapshots(run_swarm, stage, seed, record_property):
    async def scenario(swarm):
        await trained(swarm, 9)
        for peer in holders(swarm, stage):
            swarm.world.crash(peer.port)
        record_property("back_after_s", await swarm.until(gone_back(swarm), within_s=12.0))
        plan = swarm.coordinator.plan
        checked(plan)
        assert f"stage {stage} has no holder left: back to version 50" in plan.reason
        await asyncio.sleep(2.0)
        assert swarm.coordinator.coordination.status().era == 1
        assert swarm.coordinator.coordination.status().step == 50
        train(swarm, 51)
        await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=5.0)
        await asyncio.sleep(10.0)
        assert swarm.coordinator.plan.era == 1, "once"

    run_swarm(scenario, steps=1000, min_peers=9, seed=seed)


@pytest.mark.parametrize("away_s", [1.5, 2.5])
@pytest.mark.parametrize("which", [0, 1])
def test_a_lone_holder_whose_daemon_restarts_is_waited_for(run_swarm, which, away_s):
    async def scenario(swarm):
        await trained(swarm, 4)
        alone = [holders(swarm, stage) for stage in range(3) if len(holders(swarm, stage)) == 1]
        (lone,) = alone[which]
        stage = lone.plan.stage_of(lone.peer_id)
        swarm.world.kill_daemon(lone.port, restarts_in_s=away_s)
        await asyncio.sleep(15.0)
        assert swarm.agreed()
        assert {(peer.plan.era, peer.plan.stage_of(lone.peer_id)) for peer in swarm.alive()} == {(0, stage)}

    run_swarm(scenario, steps=1000, min_peers=4)


def test_a_stage_whose_members_restart_waits_a_little_and_goes_back(run_swarm, record_property):
    async def scenario(swarm):
        await trained(swarm)
        for peer in holders(swarm, 1):
            peer.state = None  # as after a restart that nobody noticed
            peer.mates = list
        took_s = await swarm.until(gone_back(swarm), within_s=6.0)
        record_property("back_after_s", took_s)
        assert took_s > 2.5
        checked(swarm.coordinator.plan)

    run_swarm(scenario, steps=1000, min_peers=6)


def test_who_only_fetches_its_state_takes_nobody_back(run_swarm):
    async def scenario(swarm):
        await trained(swarm)
        first, second = holders(swarm, 1)
        first.state = None
        first.mates = list
        await asyncio.sleep(10.0)
        assert swarm.coordinator.plan.era == 0, "its mate has it"
        second.state = None
        second.mates = list
        await asyncio.sleep(1.5)
        second.state, second.version = (0, 1), VERSION
        await asyncio.sleep(10.0)
        assert swarm.coordinator.plan.era == 0, "it was back in time"

    run_swarm(scenario, steps=1000, min_peers=6)


@pytest.mark.parametrize("term_s", [60.0, 20.0])
def test_a_snapshot_that_is_nowhere_whole_is_waited_for_and_then_done_without(run_swarm, term_s):
    async def scenario(swarm):
        await swarm.begin(6)
        train(swarm)
        snapshot(swarm, 50, but=[1])
        await asyncio.sleep(5.0)
        for peer in holders(swarm, 1):
            swarm.world.crash(peer.port)
        took_s = await swarm.until(gone_back(swarm), within_s=MISSING_HEARTBEATS + 15.0)
        assert took_s > MISSING_HEARTBEATS
        checked(swarm.coordinator.plan, version=0)
        assert "back to the seed" in swarm.coordinator.plan.reason

    run_swarm(scenario, steps=1000, min_peers=6, term_s=term_s)


def test_the_disk_that_was_missing_comes_back(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        train(swarm)
        snapshot(swarm, 50, but=[1])
        await asyncio.sleep(5.0)
        lost = layers_of(swarm, 1)
        dead = holders(swarm, 1)
        for peer in dead:
            swarm.world.crash(peer.port)
        await asyncio.sleep(15.0)
        back = await swarm.add(dead[0].name)
        back.holdings = (Holding(era=0, version=50, layers=lost),)
        await swarm.until(gone_back(swarm), within_s=10.0)
        checked(swarm.coordinator.plan)

    run_swarm(scenario, steps=1000, min_peers=6)


def test_without_any_snapshot_the_run_begins_again_at_once(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        train(swarm, 3)
        await asyncio.sleep(5.0)
        for peer in holders(swarm, 2):
            swarm.world.crash(peer.port)
        await swarm.until(gone_back(swarm), within_s=12.0)
        checked(swarm.coordinator.plan, version=0)

    run_swarm(scenario, steps=1000, min_peers=6)


def test_a_snapshot_that_is_lost_while_the_era_begins_gives_way_to_the_one_before(run_swarm):
    async def scenario(swarm):
        await trained(swarm, 9)
        snapshot(swarm, 55, but=[1])
        layers = layers_of(swarm, 1)
        dead = holders(swarm, 1)
        only = next(peer for peer in swarm.alive() if peer is not swarm.coordinator and peer not in dead)
        only.holdings += (Holding(era=0, version=55, layers=layers),)
        await asyncio.sleep(1.5)
        for peer in swarm.alive():
            peer.begins = False
        for peer in dead:
            swarm.world.crash(peer.port)
        await swarm.until(gone_back(swarm), within_s=12.0)
        checked(swarm.coordinator.plan, version=55)
        swarm.world.crash(only.port)
        await swarm.until(gone_back(swarm, era=2), within_s=12.0)
        checked(swarm.coordinator.plan, era=2, version=50)

    run_swarm(scenario, steps=1000, min_peers=9)


def test_a_swarm_that_was_switched_off_goes_on_from_its_disks(run_swarm, tmp_path, record_property):
    async def scenario(swarm):
        stores = {f"p{number}": PlanStore() for number in range(6)}
        for name, store in stores.items():
            await swarm.add(name, store=store)
        await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=10.0)
        train(swarm)
        snapshot(swarm, 50)
        await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=10.0)
        catalog = {peer.name: peer.holdings for peer in swarm.alive()}
        for peer in swarm.alive():
            swarm.world.crash(peer.port)
        await asyncio.sleep(300.0)
        for name, store in stores.items():
            back = await swarm.add(name, store=store)
            back.holdings = catalog[name]
            assert back.plan.era == 0
            assert back.state is None
        record_property("back_after_s", await swarm.until(gone_back(swarm), within_s=15.0))
        checked(swarm.coordinator.plan)

    run_swarm(scenario, steps=1000, min_peers=6)


def test_a_swarm_that_has_kept_its_snapshots_alone_goes_on_from_them(run_swarm):
    async def scenario(swarm):
        layers = all_layer_keys(swarm.spec.model)
        for number in range(6):
            peer = await swarm.add(f"p{number}")
            peer.holdings = (Holding(era=3, version=70, layers=layers[number % 2 :: 2]),)
        await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=10.0)
        plan = swarm.coordinator.plan
        checked(plan, era=4, version=70, from_era=3)
        assert plan.reason.startswith("restart from disk: back to version 70, first plan: 6 peers")
        status = swarm.coordinator.coordination.status()
        assert (status.step, status.era) == (70, 4)

    run_swarm(scenario, steps=1000, min_peers=6)


def test_a_coordinator_that_restarts_throws_nobody_out(run_swarm):
    async def scenario(swarm):
        store = PlanStore()
        await swarm.add("p0", store=store)
        for number in range(1, 6):
            await swarm.add(f"p{number}")
        await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=10.0)
        train(swarm)
        await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=10.0)
        swarm.world.crash(swarm.peers["p0"].port)
        await asyncio.sleep(0.5)
        await swarm.add("p0", store=store)
        await asyncio.sleep(20.0)
        assert swarm.agreed()
        plan = swarm.coordinator.plan
        assert plan.era == 0
        for peer in swarm.peers.values():
            assert all(len(signed.plan.members) == 6 for signed in peer.plans)

    run_swarm(scenario, steps=1000, min_peers=6)
