"""Cut networks and silent members: who plans, who does not, and how soon planning goes on after the healing."""

import asyncio

import pytest

from shoal.protocol.messages import Ping, PingRequest

pytestmark = pytest.mark.sim


def down(swarm, peer, how):
    """Killed: its connections are refused. Suspended: they stay. Both still count as alive to the swarm."""
    if how == "killed":
        swarm.world.kill_daemon(peer.port, restarts_in_s=1e9)
    swarm.world.pause(peer.port)


def bury(swarm, peers):
    """What stands still cannot be closed."""
    for peer in peers:
        swarm.world.crash(peer.port)


async def plan_with(swarm, peer, *, within_s):
    """Until everyone obeys one plan that `peer` is in."""
    return await swarm.until(
        lambda: swarm.agreed() and peer.peer_id in swarm.coordinator.plan.members, within_s=within_s
    )


def test_half_and_half_nobody_plans_and_after_healing_it_goes_on(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(3)
        coordinator = swarm.coordinator
        others = [peer for peer in swarm.alive() if peer is not coordinator]
        orders = {peer.order for peer in swarm.alive()}
        cut = swarm.world.partition([p.port for p in (coordinator, *others[:2])], [p.port for p in others[2:]])
        new = await swarm.add("new")
        await asyncio.sleep(120)
        assert {peer.order for peer in swarm.alive() if peer is not new} == orders
        granted = {peer.coordination.core.chain.granted_term for peer in others}
        assert granted == {1}, "no term was spent"
        swarm.world.heal(cut)
        assert await plan_with(swarm, new, within_s=10) < 5
        assert swarm.coordinator is coordinator

    run_swarm(scenario, min_peers=6, term_s=1e4).chain()


@pytest.mark.parametrize("coordinator_in", ["the majority", "the minority"])
def test_the_majority_goes_on_and_the_minority_joins_it(run_swarm, coordinator_in):
    async def scenario(swarm):
        await swarm.begin(5)
        await asyncio.sleep(3)
        coordinator = swarm.coordinator
        others = [peer for peer in swarm.alive() if peer is not coordinator]
        few = others[:2] if coordinator_in == "the majority" else [coordinator, others[0]]
        many = [peer for peer in swarm.alive() if peer not in few]
        before = {peer.name: peer.order for peer in few}
        cut = swarm.world.partition([p.port for p in few], [p.port for p in many])
        gone = {peer.peer_id for peer in few}
        await swarm.until(lambda: all(not gone & set(peer.plan.members) for peer in many), within_s=7)
        await asyncio.sleep(30)
        assert {peer.name: peer.order for peer in few} == before
        swarm.world.heal(cut)
        for peer in few:
            await plan_with(swarm, peer, within_s=8)

    run_swarm(scenario, min_peers=5).chain()


@pytest.mark.parametrize("deaf", [True, False], ids=["hears nobody", "is heard by nobody"])
def test_a_coordinator_that_is_cut_off_one_way_is_replaced(run_swarm, deaf):
    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(3)
        old = swarm.coordinator
        rest = [peer for peer in swarm.alive() if peer is not old]
        sides = [p.port for p in rest], [old.port]
        cut = swarm.world.partition(*(sides if deaf else sides[::-1]), one_way=True)
        took_s = await swarm.until(lambda: all(peer.plan.term == 2 for peer in rest), within_s=5)
        assert took_s < 2.1
        await swarm.until(lambda: all(old.peer_id not in peer.plan.members for peer in rest), within_s=5)
        assert old.coordination.core.is_coordinator == deaf, "who hears is told"
        new = await swarm.add("new")
        await swarm.until(lambda: all(new.peer_id in peer.plan.members for peer in rest), within_s=5)
        swarm.world.heal(cut)
        await plan_with(swarm, old, within_s=5)

    run_swarm(scenario, min_peers=6).chain()


def test_who_lost_only_its_own_way_to_the_coordinator_stays_and_the_role_goes_to_who_reaches_both(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(3)
        old = swarm.coordinator
        standby = next(peer for peer in swarm.alive() if peer.coordination.core.role.watch.is_close)
        swarm.world.partition([standby.port], [old.port])
        await asyncio.sleep(2.5)
        assert swarm.agreed()
        await swarm.until(lambda: swarm.agreed() and swarm.coordinator not in (old, standby), within_s=12)
        await asyncio.sleep(20)
        assert swarm.agreed()
        assert swarm.coordinator.plan.term == 2, "handed over once, and nobody took it"
        assert all({old.peer_id, standby.peer_id} <= set(plan.members) for plan in swarm.chain())

    run_swarm(scenario, min_peers=6, term_s=1e4)


def test_a_dead_member_is_not_kept_alive_by_a_liar(run_swarm):
    """Of those that are asked to ping the dead one says that they answer."""

    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(3)
        victim, *rest = [peer for peer in swarm.alive() if peer is not swarm.coordinator]

        async def lie(source, message):
            return Ping()

        liar = next(peer for peer in rest if peer.plan.stage_of(peer.peer_id) == victim.plan.stage_of(victim.peer_id))
        endpoint = liar.coordination._endpoint
        endpoint.off(liar.coordination._ping_for)
        endpoint.on(PingRequest, lie)
        swarm.world.pause(victim.port)
        left = [peer for peer in swarm.alive() if peer is not victim]
        await swarm.until(lambda: all(victim.peer_id not in p.plan.members for p in left), within_s=20)
        bury(swarm, [victim])

    run_swarm(scenario, min_peers=6, term_s=1e4)


@pytest.mark.parametrize(("how", "within_s"), [("killed", 1.6), ("suspended", 3.6)])
@pytest.mark.parametrize("how_many", [1, 3])
def test_silent_members_are_soon_out_of_the_plan(run_swarm, how, within_s, how_many):
    async def scenario(swarm):
        await swarm.begin(8)
        await asyncio.sleep(5)
        coordinator = swarm.coordinator
        others = {swarm.coordinator.plan.stage_of(p.peer_id): p for p in swarm.alive() if p is not coordinator}
        victims = [peer for _, peer in sorted(others.items())][:how_many]  # of each stage somebody is left
        rest = [peer for peer in swarm.alive() if peer not in victims]
        for peer in victims:
            down(swarm, peer, how)
        gone = {peer.peer_id for peer in victims}
        sequence = coordinator.plan.sequence
        took_s = await swarm.until(lambda: all(not gone & set(peer.plan.members) for peer in rest), within_s=6)
        assert took_s <= within_s
        if how == "killed":
            assert coordinator.plan.sequence == sequence + 1, "one plan for all who died together"
        bury(swarm, victims)

    run_swarm(scenario, min_peers=8, term_s=1e4).chain()


def test_a_report_of_its_mates_makes_a_killed_member_leave_sooner(run_swarm):
    async def scenario(swarm):
        await swarm.begin(8)
        await asyncio.sleep(5)
        victim, *rest = [peer for peer in swarm.alive() if peer is not swarm.coordinator]
        down(swarm, victim, "killed")
        for peer in rest:
            peer.silent = (victim.peer_id,)
        took_s = await swarm.until(lambda: all(victim.peer_id not in peer.plan.members for peer in rest), within_s=3)
        assert took_s < 0.9
        bury(swarm, [victim])

    run_swarm(scenario, min_peers=8, term_s=1e4)


def test_who_is_reported_but_answers_stays(run_swarm):
    async def scenario(swarm):
        await swarm.begin(8)
        await asyncio.sleep(5)
        accused, *rest = [peer for peer in swarm.alive() if peer is not swarm.coordinator]
        for peer in rest:
            peer.silent = (accused.peer_id,)
        await asyncio.sleep(20)
        assert {peer.order for peer in swarm.alive()} == {(1, 1)}

    run_swarm(scenario, min_peers=8, term_s=1e4)


def test_a_member_that_keeps_stalling_is_thrown_out_once_at_most(run_swarm):
    """It stands still for 2.9 of every 8 heartbeats: slow, not dead."""

    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(3)
        slow = next(peer for peer in swarm.alive() if peer is not swarm.coordinator)
        for _ in range(12):
            swarm.world.pause(slow.port)
            await asyncio.sleep(2.9)
            swarm.world.resume(slow.port)
            await asyncio.sleep(5.1)
        assert swarm.agreed()
        assert swarm.coordinator.order <= (1, 3)

    run_swarm(scenario, min_peers=6, term_s=1e4)


def test_a_coordinator_that_keeps_stalling_loses_the_role_no_more_in_the_end(run_swarm):
    """Every peer in turn would, on a busy machine: each false alarm must make everyone more patient."""

    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(3)
        for _ in range(12):
            coordinator = swarm.coordinator
            swarm.world.pause(coordinator.port)
            await asyncio.sleep(2.5)
            swarm.world.resume(coordinator.port)
            await asyncio.sleep(10)
        assert swarm.agreed()
        assert swarm.coordinator.plan.term <= 5, "the first few are taken for dead"

    run_swarm(scenario, min_peers=6, term_s=1e4).chain()
