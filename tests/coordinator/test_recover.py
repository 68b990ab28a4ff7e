"""Half of a swarm or more is gone at once, and the owner decides: `shoal recover` on stub peers in virtual time."""

import asyncio
from pathlib import Path

import pytest
from open_gate import OpenGate

from shoal.coordinator.store import PlanStore
from shoal.deploy.visitor.recover import RESET_TERMS, Recovery
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused
from shoal.protocol.identity import Identity
from shoal.protocol.layers import stage_layer_keys
from shoal.protocol.messages import Done, Holding, Reset
from shoal.protocol.plan import Mandate, sign_mandate

pytestmark = pytest.mark.sim


async def visitor(swarm, name="visitor"):
    """A recovery of an identity that takes no part in the run."""
    port = swarm.world.add_peer(name)
    owner = swarm.peers["p0"].port.identity
    endpoint = Endpoint(port.identity, port.transport, run=swarm.peers["p0"].plan.run, gate=OpenGate())
    recovery = Recovery(
        endpoint=endpoint,
        directory=port.directory,
        clock=port.clock,
        owner=owner.peer_id,
        spec=swarm.spec,
    )
    return port, endpoint, recovery, owner


async def halved(swarm, *, num_peers=9, num_dead=5, stores=None, version=0):
    """A swarm whose last `num_dead` peers die at once."""
    for number in range(num_peers):
        name = f"p{number}"
        await swarm.add(name, store=stores[name] if stores else None)
    await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=10.0)
    if version:
        for peer in swarm.alive():
            peer.version = version
        await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=10.0)
    await asyncio.sleep(25.0)  # everybody's advert is in the directory
    dead = [f"p{number}" for number in range(num_peers - num_dead, num_peers)]
    for name in dead:
        swarm.world.crash(swarm.peers[name].port)
    return dead


def reset_in(swarm):
    return lambda: swarm.agreed() and all(peer.plan.term > RESET_TERMS for peer in swarm.alive())


def test_nobody_plans_until_the_owner_says_so_and_then_the_run_goes_on(run_swarm, tmp_path: Path, record_property):
    async def scenario(swarm):
        dead = await halved(swarm)
        orders = {peer.order for peer in swarm.alive()}
        await asyncio.sleep(40.0)
        assert {peer.order for peer in swarm.alive()} == orders, "four of nine are no majority"
        port, _, recovery, owner = await visitor(swarm)
        situation = await port.spawn(recovery.look())
        assert {found.advert.name for found in situation.found} == {"p0", "p1", "p2", "p3"}
        assert set(situation.missing) == {swarm.peers[name].peer_id for name in dead}
        begun_s = swarm.world.now_s()
        task = port.spawn(recovery.reset(situation, owner, tmp_path))
        record_property("live_after_s", await swarm.until(reset_in(swarm), within_s=2.0))
        recovered = await task
        record_property("told_after_s", swarm.world.now_s() - begun_s)
        assert len(recovered.following) == 4
        assert set(recovered.plan.members) == {peer.peer_id for peer in swarm.alive()}
        assert recovered.status is not None
        assert "reset by the owner" in recovered.plan.reason
        assert all(stage.members for stage in recovered.plan.stages)
        # From here on the four are a majority of their plan like any other.
        await swarm.add("new")
        await swarm.until(
            lambda: swarm.agreed() and swarm.peers["new"].peer_id in swarm.coordinator.plan.members, within_s=10.0
        )
        assert all(peer.coordination.core.chain.num_forks == 0 for peer in swarm.alive())

    run_swarm(scenario, min_peers=9)


def test_a_stage_that_died_with_the_missing_comes_back_from_snapshots(run_swarm, tmp_path: Path, record_property):
    async def scenario(swarm):
        await swarm.begin(9)
        for peer in swarm.alive():
            peer.version = 57
        await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=10.0)
        await asyncio.sleep(25.0)
        plan = swarm.coordinator.plan
        layers = stage_layer_keys(swarm.spec.model, 0, swarm.spec.model.num_layers)
        by_id = {peer.peer_id: peer for peer in swarm.peers.values()}
        for peer in (*plan.stages[1].peers, plan.stages[2].peers[0], plan.stages[2].peers[1]):
            swarm.world.crash(by_id[peer].port)
        for peer in swarm.alive():
            peer.holdings = (Holding(era=0, version=50, layers=layers),)
        await asyncio.sleep(10.0)
        assert swarm.alive()[0].plan.era == 0
        port, _, recovery, owner = await visitor(swarm)
        situation = await port.spawn(recovery.look())
        assert situation.version == 57
        await port.spawn(recovery.reset(situation, owner, tmp_path))
        took_s = await swarm.until(
            lambda: swarm.agreed() and all(peer.plan.era == 1 for peer in swarm.alive()), within_s=10.0
        )
        record_property("back_after_s", took_s)
        plan = swarm.coordinator.plan
        assert (plan.restore_version, plan.not_started) == (50, True)
        assert all(peer.state is not None for peer in swarm.alive())

    run_swarm(scenario, min_peers=9, steps=1000)


def test_the_missing_come_back_all_at_once_and_follow(run_swarm, tmp_path: Path):
    async def scenario(swarm):
        stores = {f"p{number}": PlanStore() for number in range(9)}
        dead = await halved(swarm, stores=stores, version=30)
        await asyncio.sleep(10.0)
        port, _, recovery, owner = await visitor(swarm)
        await port.spawn(recovery.reset(await port.spawn(recovery.look()), owner, tmp_path))
        four = swarm.alive()
        for name in dead:
            back = await swarm.add(name, store=stores[name])
            assert back.order < (RESET_TERMS, 0)
        await swarm.until(lambda: swarm.agreed() and len(swarm.coordinator.plan.members) == 9, within_s=20.0)
        assert swarm.coordinator.plan.term > RESET_TERMS
        await asyncio.sleep(30.0)
        assert swarm.agreed()
        for peer in swarm.alive():
            below = [signed.plan for signed in peer.plans if signed.plan.term < RESET_TERMS]
            if peer not in four:
                assert len(below) == 1, "no plan of theirs was made on the old chain"
            assert peer.coordination.core.chain.num_forks == 0

    run_swarm(scenario, min_peers=9, steps=1000)


def test_what_the_missing_agreed_on_among_themselves_gives_way(run_swarm, tmp_path: Path):
    async def scenario(swarm):
        await swarm.begin(9)
        await asyncio.sleep(25.0)
        left, right = swarm.alive()[:4], swarm.alive()[4:]
        port, _, recovery, owner = await visitor(swarm)
        cut = swarm.world.partition([peer.port for peer in right], [*(peer.port for peer in left), port])
        await asyncio.sleep(30.0)  # five of nine go on without the four
        assert max(peer.order for peer in right) > max(peer.order for peer in left)
        situation = await port.spawn(recovery.look())
        assert len(situation.missing) == 5
        await port.spawn(recovery.reset(situation, owner, tmp_path))
        assert {(peer.plan.override_epoch, peer.plan.term) for peer in left} == {(1, situation.term_max + RESET_TERMS)}
        swarm.world.heal(cut)
        await swarm.until(lambda: swarm.agreed() and len(swarm.coordinator.plan.members) == 9, within_s=60.0)
        assert swarm.coordinator.plan.term >= RESET_TERMS

    run_swarm(scenario, min_peers=9)


def test_there_is_nothing_to_recover_while_a_majority_is_here(run_swarm):
    async def scenario(swarm):
        await halved(swarm, num_dead=4)
        port, _, recovery, _ = await visitor(swarm)
        with pytest.raises(LocalError, match=r"nothing to recover: 5 of the (5|9) members"):
            await port.spawn(recovery.look())

    run_swarm(scenario, min_peers=9)


def test_no_peer_in_reach_is_said(run_swarm):
    async def scenario(swarm):
        await halved(swarm, num_peers=6, num_dead=6)
        port, _, recovery, _ = await visitor(swarm)
        with pytest.raises(LocalError, match="no peer of the run is in reach"):
            await port.spawn(recovery.look())

    run_swarm(scenario, min_peers=6)


def test_too_few_for_the_stages_is_said(run_swarm, tmp_path: Path):
    async def scenario(swarm):
        await halved(swarm, num_dead=7)
        port, _, recovery, owner = await visitor(swarm)
        situation = await port.spawn(recovery.look())
        with pytest.raises(LocalError, match="2 peers cannot hold 3 stages; `shoal recover --era 0` goes back"):
            await port.spawn(recovery.reset(situation, owner, tmp_path))
        await swarm.add("late")
        await asyncio.sleep(5.0)
        situation = await port.spawn(recovery.look())
        recovered = await port.spawn(recovery.reset(situation, owner, tmp_path))
        assert len(recovered.plan.members) == 3
        assert recovered.plan.override_epoch == 2, "no override epoch begins twice"

    run_swarm(scenario, min_peers=9)


def test_too_few_for_the_stages_go_back_with_fewer_stages(run_swarm, tmp_path: Path):
    async def scenario(swarm):
        await halved(swarm, num_dead=7)
        layers = stage_layer_keys(swarm.spec.model, 0, swarm.spec.model.num_layers)
        for peer in swarm.alive():
            peer.holdings = (Holding(era=0, version=50, layers=layers),)
        port, _, recovery, owner = await visitor(swarm)
        situation = await port.spawn(recovery.look(era=0))
        plan = (await port.spawn(recovery.reset(situation, owner, tmp_path))).plan
        assert (len(plan.stages), len(plan.members), plan.era, plan.restore_version) == (1, 2, 1, 50)
        await asyncio.sleep(10.0)
        assert all(peer.plan.era == 1 and peer.state is not None for peer in swarm.alive())
        assert all(peer.coordination.num_alarms == 0 for peer in swarm.alive())

    run_swarm(scenario, min_peers=9)


def test_mandates_that_do_not_hold_are_refused(run_swarm):
    async def scenario(swarm):
        await halved(swarm)
        port, endpoint, recovery, owner = await visitor(swarm)
        situation = await port.spawn(recovery.look())
        run, term = endpoint.run, 2000
        coordinator = situation.coordinator(term)
        other = next(found.peer for found in situation.found if found.peer != coordinator)
        before = {peer.order for peer in swarm.alive()}

        def forged(
            signer: Identity, *, run=run, override_epoch=1, to=coordinator, previous=situation.base.digest
        ) -> Reset:
            mandate = Mandate(override_epoch=override_epoch, term=term, coordinator=to, previous=previous)
            return Reset(
                mandate=sign_mandate(signer, mandate, run=run),
                live=situation.base.link,
                version=0,
                roster=tuple((found.peer, found.advert) for found in situation.found),
            )

        stranger = port.identity
        for reset, complaint in [
            (forged(stranger), "owner did not sign"),
            (forged(owner, run="another"), "speaks for run"),
            (forged(owner, to=other), "mandate for another peer"),
            (forged(owner, override_epoch=0), "a mandate of override epoch 0"),
            (forged(owner, previous="another"), "look again"),
        ]:
            with pytest.raises(Refused, match=complaint):
                await port.spawn(endpoint.ask(coordinator, reset, Done))
        assert {peer.order for peer in swarm.alive()} == before
        # The right one; twice, since an answer may be lost; and then once more when the run has gone on.
        for _ in range(2):
            await port.spawn(endpoint.ask(coordinator, forged(owner), Done))
        await swarm.until(lambda: swarm.agreed() and swarm.coordinator.plan.term == term, within_s=5.0)
        await asyncio.sleep(30.0)
        order = swarm.coordinator.order
        with pytest.raises(Refused, match="look again"):
            await port.spawn(endpoint.ask(coordinator, forged(owner), Done))
        assert swarm.coordinator.order == order

    run_swarm(scenario, min_peers=9, term_s=20.0)


def test_a_reset_for_nobody_is_refused_with_a_sentence(run_swarm):
    """Found by the fuzzer: it ended in an error of the allocator's."""

    async def scenario(swarm):
        await halved(swarm)
        port, endpoint, recovery, owner = await visitor(swarm)
        situation = await port.spawn(recovery.look())
        coordinator = situation.coordinator(2000)
        mandate = Mandate(override_epoch=1, term=2000, coordinator=coordinator, previous=situation.base.digest)
        reset = Reset(
            mandate=sign_mandate(owner, mandate, run=endpoint.run), live=situation.base.link, version=0, roster=()
        )
        with pytest.raises(Refused, match="no reachable peer"):
            await port.spawn(endpoint.ask(coordinator, reset, Done))
        assert not swarm.world.failures

    run_swarm(scenario, min_peers=9)


def test_the_owner_goes_back_to_an_older_era_whoever_is_there(run_swarm, tmp_path: Path):
    """What a swarm that was led astray trained since is undone, though all of its members are in reach."""

    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(25.0)
        layers = stage_layer_keys(swarm.spec.model, 0, swarm.spec.model.num_layers)
        half = layers[: len(layers) // 2]
        for peer in swarm.alive():
            peer.holdings = (
                Holding(era=3, version=9, layers=layers),
                Holding(era=0, version=57, layers=half),
                Holding(era=0, version=50, layers=layers),
            )
        await asyncio.sleep(2.0)
        port, _, recovery, owner = await visitor(swarm)
        with pytest.raises(LocalError, match="nothing to recover"):
            await port.spawn(recovery.look())
        with pytest.raises(LocalError, match=r"no snapshot of era 7 is whole .* of era 0, 3"):
            await port.spawn(recovery.look(era=7))
        situation = await port.spawn(recovery.look(era=0))
        assert (situation.missing, situation.beginning.version, situation.beginning.era) == ((), 50, 4)
        recovered = await port.spawn(recovery.reset(situation, owner, tmp_path))
        assert len(recovered.following) == 6
        plan = recovered.plan
        assert (plan.override_epoch, plan.era, plan.restore_era, plan.restore_version, plan.not_started) == (
            1,
            4,
            0,
            50,
            True,
        )
        await asyncio.sleep(10.0)
        assert all(peer.plan.era == 4 and peer.state is not None for peer in swarm.alive())
        assert all(peer.coordination.num_alarms == 0 for peer in swarm.alive())

    run_swarm(scenario, min_peers=6)
