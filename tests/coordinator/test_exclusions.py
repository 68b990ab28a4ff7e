"""Who is put out of a run stays out: by the owner's order, or by that of a majority, and by nobody else's."""

import asyncio

import msgspec
import pytest

from shoal.coordinator.chain import link_flaw
from shoal.protocol.errors import RemoteError
from shoal.protocol.exclusion import Exclusion, exclusion_body, open_exclusion, order_exclusion
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import EXCLUSION_BYTES_MAX, EXCLUSIONS_MAX
from shoal.protocol.plan import PlanShape, plan_flaw
from shoal.protocol.statement import sign_statement

KEY = bytes(range(32))


def run_of(swarm):
    return swarm.peers["p0"].plan.run


def key_of(peer):
    return peer.port.identity.public_key


def owners_order(swarm, *peers):
    return order_exclusion(swarm.peers["p0"].port.identity, map(key_of, peers), run=run_of(swarm))


def vote_of(swarm, elector, out):
    """The vote of one elector of its live plan for excluding `out`."""
    live, keys = elector.coordination.plan, (key_of(out),)
    body = exclusion_body(keys, live.digest)
    signature = sign_statement(elector.port.identity, "exclusion", run=run_of(swarm), body=body)
    return Exclusion(keys, base=live.digest, votes=((live.plan.electors.index(elector.peer_id), signature),))


@pytest.mark.sim
def test_the_owners_order_puts_a_member_out_within_two_heartbeats(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        out = swarm.peers["p3"]
        order = owners_order(swarm, out)
        swarm.peers["p0"].port.spawn(_call(swarm.peers["p0"].coordination.exclude, order))
        others = [peer for peer in swarm.alive() if peer is not out]

        def is_out(peer):
            return peer.coordination._endpoint.members.is_excluded(out.peer_id)

        took_s = await swarm.until(lambda: all(map(is_out, others)), within_s=10.0)
        assert took_s <= 2.0 * swarm.spec.swarm.heartbeat_s
        assert out.coordination._endpoint.members.excludes_us(out.peer_id), "it knows why nobody hears it"
        await swarm.until(
            lambda: all(not peer.plan.has(out.peer_id) and order.encode() in peer.plan.exclusions for peer in others),
            within_s=20.0,
        )
        await asyncio.sleep(30.0)
        assert all(not peer.plan.has(out.peer_id) for peer in others)

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_whoever_comes_or_comes_back_goes_by_the_orders_of_the_plan(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        out = swarm.peers["p3"]
        swarm.peers["p0"].port.spawn(_call(swarm.peers["p0"].coordination.exclude, owners_order(swarm, out)))
        await swarm.until(lambda: all(peer.plan.exclusions for peer in swarm.alive() if peer is not out), within_s=20.0)
        await swarm.add("new")
        await swarm.until(lambda: swarm.peers["new"].coordination.plan is not None, within_s=20.0)
        assert swarm.peers["new"].coordination._endpoint.members.is_excluded(out.peer_id)

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_a_majority_of_the_plans_electors_puts_a_member_out_and_less_does_not(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        out, voters = swarm.peers["p3"], [swarm.peers[name] for name in ("p1", "p2", "p4", "p5")]

        def are_rid():
            return [peer.coordination._endpoint.members.is_excluded(out.peer_id) for peer in voters]

        for peer in voters[:3]:
            peer.port.spawn(_call(peer.coordination.exclude, vote_of(swarm, peer, out)))
        await asyncio.sleep(5.0)
        assert not any(are_rid()), "three of six are no majority"
        voters[3].port.spawn(_call(voters[3].coordination.exclude, vote_of(swarm, voters[3], out)))
        await swarm.until(lambda: all(are_rid()), within_s=5.0)
        await swarm.until(lambda: all(not peer.plan.has(out.peer_id) for peer in voters), within_s=20.0)

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_nobody_elses_order_counts(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        exclusions = swarm.peers["p1"].coordination._core.chain.exclusions
        live, run = swarm.peers["p1"].coordination.plan, run_of(swarm)
        mallory = Identity(bytes([9]) * 32)
        body = exclusion_body([KEY], live.digest)
        said = sign_statement(swarm.peers["p2"].port.identity, "exclusion", run=run, body=body)
        at = live.plan.electors.index(swarm.peers["p2"].peer_id)
        forged = [
            order_exclusion(mallory, [KEY], run=run),
            order_exclusion(swarm.peers["p0"].port.identity, [KEY], run="another"),
            Exclusion((KEY,), base=live.digest, votes=tuple((n, said) for n in range(6))),
            Exclusion((KEY,), base=live.digest, votes=((at, said),) * 6),
            Exclusion((KEY,), base="unknown", votes=((at, said),)),
            Exclusion((KEY,), base=live.digest, votes=((-1, said), (99, said))),
        ]
        for order in forged:
            assert not exclusions.note(order)
            assert not exclusions.proves(order.encode())
        assert not exclusions.keys

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_a_coordinator_brings_in_no_order_of_its_own_and_forgets_none(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        peer = swarm.peers["p1"]
        chain, live = peer.coordination._core.chain, peer.coordination.plan
        order = owners_order(swarm, swarm.peers["p3"]).encode()
        bad = order_exclusion(Identity(bytes([9]) * 32), [KEY], run=run_of(swarm)).encode()
        for orders, accepted in (((bad,), False), ((b"rubbish",), False), ((order,), True)):
            plan = msgspec.structs.replace(
                live.plan, sequence=live.plan.sequence + 1, previous=live.digest, exclusions=orders
            )
            digest = str(orders)
            offered = msgspec.structs.replace(live, plan=plan, digest=digest)
            vote = chain.vote(live.plan.coordinator, live.plan.term, offered, None)
            assert vote.accepted is accepted, orders
        after = msgspec.structs.replace(plan, sequence=plan.sequence + 1, previous=digest, exclusions=())
        assert "lets somebody back in" in link_flaw(msgspec.structs.replace(offered, plan=after), offered)

    run_swarm(scenario, min_peers=6)


def test_what_is_no_order_is_the_senders_fault():
    good = order_exclusion(Identity(bytes(32)), [KEY], run="run")
    replace = msgspec.structs.replace
    for data in (
        b"",
        b"rubbish",
        b"\xc1" * 100,
        replace(good, keys=()).encode(),
        replace(good, keys=(KEY, KEY)).encode(),
        replace(good, keys=(KEY[:-1],)).encode(),
        replace(good, signature=bytes(EXCLUSION_BYTES_MAX)).encode(),
    ):
        with pytest.raises(RemoteError, match="no exclusion"):
            open_exclusion(data, PeerID("peer"))
    assert open_exclusion(good.encode(), PeerID("peer")) == good


@pytest.mark.sim
def test_a_plan_with_too_many_orders_is_none(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        plan = swarm.peers["p0"].plan
        shape = PlanShape.of(swarm.spec)
        assert plan_flaw(plan, shape) is None
        for orders in ((b"x",) * (EXCLUSIONS_MAX + 1), (bytes(EXCLUSION_BYTES_MAX + 1),)):
            flaw = plan_flaw(msgspec.structs.replace(plan, exclusions=orders), shape)
            assert flaw is not None
            assert "exclusions" in flaw

    run_swarm(scenario, min_peers=6)


async def _call(function, *arguments):
    function(*arguments)
