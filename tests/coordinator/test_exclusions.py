"""Who is put out of a run stays out: by the owner's order, or by that of a majority, and by nobody else's."""

import asyncio

import msgspec
import pytest

from shoal.coordinator.chain import link_flaw
from shoal.protocol.errors import RemoteError
from shoal.protocol.exclusion import Exclusion, in_force, open_exclusion, order_exclusion, propose_exclusion
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import EXCLUSION_BYTES_MAX, EXCLUSIONS_MAX
from shoal.protocol.plan import PlanShape, plan_flaw
from shoal.protocol.statement import sign_statement

KEY, INVITE = bytes(range(32)), bytes([7]) * 32


def run_of(swarm):
    return swarm.peers["p0"].plan.run


def key_of(peer):
    return peer.port.identity.public_key


def owners_order(swarm, *peers):
    return order_exclusion(swarm.peers["p0"].port.identity, {key_of(peer): b"" for peer in peers}, run=run_of(swarm))


def vote_of(swarm, elector, out):
    """The vote of one elector of its live plan for excluding `out`."""
    live = elector.coordination.plan
    order = propose_exclusion({key_of(out): INVITE}, base=live.digest)
    signature = sign_statement(elector.port.identity, "exclusion", run=run_of(swarm), body=order.body)
    return msgspec.structs.replace(order, votes=((live.plan.electors.index(elector.peer_id), signature),))


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
def test_the_owner_lets_in_again_whom_it_or_a_majority_has_excluded(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        owner, mine, theirs = swarm.peers["p0"], swarm.peers["p3"], swarm.peers["p4"]
        others = [peer for peer in swarm.alive() if peer not in (mine, theirs)]
        for peer in [*others, mine]:
            peer.port.spawn(_call(peer.coordination.exclude, vote_of(swarm, peer, theirs)))
        owner.port.spawn(_call(owner.coordination.exclude, owners_order(swarm, mine)))

        def are_out(*peers):
            keys = {key_of(peer) for peer in peers}
            return lambda: all(peer.coordination.core.excluded.keys == keys for peer in others)

        await swarm.until(are_out(mine, theirs), within_s=20.0)
        coordinator = next(peer for peer in others if peer.coordination.core.is_coordinator)
        said = {risk for risk in coordinator.coordination.status().risks if "excluded" in risk}
        undo = "(`shoal readmit` on the host undoes it)"
        assert said == {
            f"excluded by the owner: p3 ({mine.peer_id[-8:]}) {undo}",
            f"excluded by 4 members: p4 ({theirs.peer_id[-8:]}) {undo}",
        }

        both = {key_of(mine): b"", key_of(theirs): b""}
        again = order_exclusion(owner.port.identity, both, run=run_of(swarm), readmitted=both, number=2)
        owner.port.spawn(_call(owner.coordination.exclude, again))
        await swarm.until(are_out(), within_s=10.0)
        await swarm.until(lambda: all(peer.plan.exclusions == (again.encode(),) for peer in others), within_s=20.0)
        assert not any("excluded" in risk for risk in coordinator.coordination.status().risks)
        for peer in others:  # neither an older order of the owner nor the majority's votes again change that
            peer.coordination.exclude(owners_order(swarm, mine, theirs))
            peer.coordination.exclude(vote_of(swarm, peer, theirs))
        await asyncio.sleep(5.0)
        assert are_out()()

    run_swarm(scenario, min_peers=6)


def test_the_second_exclusion_of_an_invites_members_excludes_the_invite():
    owner, keys = Identity(bytes(32)), [bytes([number]) * 32 for number in range(3)]

    def out(*excluded, **terms):
        return in_force([order_exclusion(owner, dict(excluded), run="run", **terms)])

    first, second, other = ((key, INVITE) for key in keys)
    assert out(first).keys == {keys[0]}
    assert out(first).came_by == {keys[0]: INVITE}, "its seat is taken for good"
    assert out(first, (keys[1], b"")).keys == {keys[0], keys[1]}, "nobody knows by which that one came"
    assert out(first, second).keys == {keys[0], keys[1], INVITE}
    assert out(first, second, readmitted=[keys[1]]).keys == {keys[0]}
    with_invite = out(first, second, (INVITE, INVITE), readmitted=[INVITE])
    assert with_invite.keys == {keys[0], keys[1]}, "the owner trusts the others that came by it"
    by_two = in_force([propose_exclusion(dict([first]), base="x"), propose_exclusion(dict([other]), base="x")])
    assert INVITE in by_two.keys, "whoever ordered it"


def test_an_order_of_an_earlier_version_still_holds():
    owner = Identity(bytes(32))
    body = msgspec.msgpack.encode(("", (KEY,)))
    signature = sign_statement(owner, "exclusion", run="run", body=body)
    old = open_exclusion(msgspec.msgpack.encode([[KEY], signature, "", []]), PeerID("peer"))
    assert old.body == body
    assert in_force([old]).keys == {KEY}


@pytest.mark.sim
def test_nobody_elses_order_counts(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        exclusions = swarm.peers["p1"].coordination.core.chain.exclusions
        live, run = swarm.peers["p1"].coordination.plan, run_of(swarm)
        mallory = Identity(bytes([9]) * 32)
        body = Exclusion((KEY,), base=live.digest).body
        said = sign_statement(swarm.peers["p2"].port.identity, "exclusion", run=run, body=body)
        at = live.plan.electors.index(swarm.peers["p2"].peer_id)
        forged = [
            order_exclusion(mallory, {KEY: b""}, run=run),
            order_exclusion(swarm.peers["p0"].port.identity, {KEY: b""}, run="another"),
            Exclusion((KEY,), base=live.digest, votes=tuple((n, said) for n in range(6))),
            Exclusion((KEY,), base=live.digest, votes=((at, said),) * 6),
            Exclusion((KEY,), base="unknown", votes=((at, said),)),
            Exclusion((KEY,), base=live.digest, votes=((-1, said), (99, said))),
        ]
        for order in forged:
            assert not exclusions.note(order)
            assert not exclusions.proves(order.encode())
        assert not exclusions.excluded.keys

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_a_coordinator_brings_in_no_order_of_its_own_and_forgets_none(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        peer = swarm.peers["p1"]
        chain, live = peer.coordination.core.chain, peer.coordination.plan
        order = owners_order(swarm, swarm.peers["p3"]).encode()
        bad = order_exclusion(Identity(bytes([9]) * 32), {KEY: b""}, run=run_of(swarm)).encode()
        for orders, accepted in (((bad,), False), ((b"rubbish",), False), ((order,), True)):
            plan = msgspec.structs.replace(
                live.plan, sequence=live.plan.sequence + 1, previous=live.digest, exclusions=orders
            )
            digest = str(orders)
            offered = msgspec.structs.replace(live, plan=plan, digest=digest)
            refusal = chain.vote(live.plan.coordinator, live.plan.term, offered, None)
            assert (refusal == "") is accepted, orders
        after = msgspec.structs.replace(plan, sequence=plan.sequence + 1, previous=digest, exclusions=())
        assert "readmits an excluded peer" in link_flaw(msgspec.structs.replace(offered, plan=after), offered)

    run_swarm(scenario, min_peers=6)


def test_what_is_no_order_is_the_senders_fault():
    good = order_exclusion(Identity(bytes(32)), {KEY: INVITE}, run="run")
    replace = msgspec.structs.replace
    for data in (
        b"",
        b"rubbish",
        b"\xc1" * 100,
        replace(good, keys=()).encode(),
        replace(good, keys=(KEY, KEY)).encode(),
        replace(good, keys=(KEY[:-1],)).encode(),
        replace(good, signature=bytes(EXCLUSION_BYTES_MAX)).encode(),
        replace(good, invites=(INVITE, INVITE)).encode(),
        replace(good, invites=(INVITE[:-1],)).encode(),
        replace(good, readmitted=(1,)).encode(),
        replace(good, readmitted=(-1,)).encode(),
        replace(good, readmitted=(0,), signature=b"").encode(),
    ):
        with pytest.raises(RemoteError, match="an invalid exclusion"):
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
