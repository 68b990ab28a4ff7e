"""What the driver adds to the core: verification, disk, directory, reports and replies."""

import asyncio
import contextlib
from pathlib import PurePosixPath

import msgspec
import pytest
from open_gate import OpenGate

from shoal.coordinator.coordination_events import Unanswered
from shoal.coordinator.role import transfer_body
from shoal.coordinator.store import PlanStore
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused
from shoal.protocol.identity import PeerID
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.messages import (
    CommitReport,
    Done,
    Heartbeat,
    PlanHead,
    PlanLive,
    PlanOffer,
    PlanVote,
    StatusRequest,
    SwarmStatus,
    TransferLeadership,
)
from shoal.protocol.plan import sign_plan
from shoal.protocol.spec import run_id
from shoal.protocol.statement import sign_statement


async def stranger(swarm, name="stranger"):
    """An endpoint in the run that takes no part in it, introduced to everybody."""
    port = swarm.world.add_peer(name)
    run = swarm.peers["p0"].plan.run
    endpoint = Endpoint(port.identity, port.transport, run=run, gate=OpenGate())
    for peer in swarm.alive():
        await port.transport.introduce(peer.peer_id, peer.port.transport.addresses())
    return port, endpoint


def report(*, stage, microbatches):
    return CommitReport(
        stage=stage,
        step=1,
        members=2,
        microbatches=microbatches,
        duplicates=0,
        given_up=0,
        tokens=1,
        staleness_steps_mean=0.0,
        loss=None,
        digest="",
    )


def test_a_peer_that_cannot_keep_its_word_does_not_give_it(run_swarm):
    async def scenario(swarm):
        await swarm.begin(5)
        forgetful = await swarm.add("forgetful", keeps=True)
        await swarm.until(lambda: forgetful.order == (1, 2), within_s=10)
        owner = swarm.peers["p0"]
        live = forgetful.coordination.plan
        forgetful.port.disk.limit(0)
        plan = msgspec.structs.replace(live.plan, sequence=3, previous=live.digest)
        offer = PlanOffer(term=1, plan=sign_plan(owner.port.identity, plan).envelope, predecessor=live.link)
        ask = owner.coordination._endpoint.ask
        with pytest.raises(Refused, match="cannot save its promise"):
            await owner.port.spawn(ask(forgetful.peer_id, offer, PlanVote))
        forgetful.port.disk.limit(None)
        assert (await owner.port.spawn(ask(forgetful.peer_id, offer, PlanVote))).accepted

    run_swarm(scenario, min_peers=5)


def test_a_plan_that_its_coordinator_did_not_sign_is_refused(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        port, endpoint = await stranger(swarm)
        victim = swarm.peers["p1"]
        live = victim.coordination.plan
        forged = sign_plan(port.identity, msgspec.structs.replace(live.plan, sequence=9, previous=live.digest))
        with pytest.raises(Refused, match="signer's envelope contradicts"):
            await port.spawn(endpoint.ask(victim.peer_id, PlanLive(plan=forged.link), Done))
        impossible = sign_plan(port.identity, msgspec.structs.replace(live.plan, coordinator=port.peer_id, stages=()))
        with pytest.raises(Refused, match="impossible plan"):
            await port.spawn(endpoint.ask(victim.peer_id, PlanLive(plan=impossible.link), Done))
        with pytest.raises(Refused, match="left out a plan"):
            await port.spawn(endpoint.ask(victim.peer_id, PlanLive(plan=b""), Done))
        assert victim.order == (1, 1)

    run_swarm(scenario, min_peers=6)


def test_any_member_answers_with_the_coordinators_status(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(3)
        port, endpoint = await stranger(swarm)
        status = await port.spawn(endpoint.ask(swarm.peers["p4"].peer_id, StatusRequest(), SwarmStatus))
        assert status.coordinator == swarm.peers["p0"].peer_id
        assert (status.term, status.plan_sequence, status.steps) == (1, 1, 50)
        assert sorted(peer.name for peer in status.peers) == sorted(swarm.peers)
        assert {peer.stage for peer in status.peers} == {0, 1, 2}
        assert all(peer.seen_s_ago < 2 for peer in status.peers)
        assert 2 < status.elapsed_s < 10
        assert swarm.peers["p4"].coordination.status() is None
        assert await swarm.peers["p4"].port.spawn(swarm.peers["p4"].coordination.ask_status())

    run_swarm(scenario, min_peers=6)


def test_before_there_is_a_plan_the_status_says_what_it_waits_for(run_swarm):
    async def scenario(swarm):
        await swarm.add("p0")
        other = await swarm.add("p1")
        await asyncio.sleep(2)
        status = await other.port.spawn(other.coordination.ask_status())
        assert (status.waits_for, status.plan_sequence, status.stages) == ("peers: 2 of 6 are here", 0, ())

    run_swarm(scenario, min_peers=6)


def test_a_head_that_somebody_else_wrote_leads_nobody_astray(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        port, endpoint = await stranger(swarm)
        key = f"shoal/{endpoint.run}/plan"
        owner = swarm.peers["p0"].peer_id
        lie = PlanHead(term=99, sequence=99, digest="", coordinator=owner, addresses=())
        await port.directory.store(key, owner, endpoint.seal_record(lie), expires_in_s=60)
        await port.directory.store(key, port.peer_id, endpoint.seal_record(lie), expires_in_s=60)
        await port.directory.store(key, "junk", b"\xff" * 40, expires_in_s=60)
        await asyncio.sleep(30)
        new = await swarm.add("new")
        await swarm.until(lambda: new.order > (1, 1) and swarm.agreed(), within_s=10)

    run_swarm(scenario, min_peers=6)


def test_addresses_in_a_will_are_dialled_if_it_is_the_coordinators(run_swarm, make_advert):
    async def scenario(swarm):
        await swarm.begin(6)
        await swarm.until(swarm.agreed, within_s=10)
        last = swarm.coordinator
        liar, heir = [peer for peer in swarm.alive() if peer is not last][:2]
        dialled, transport = [], heir.port.transport
        introduce = transport.introduce

        async def introducing(peer, addresses):
            dialled.append(peer)
            await introduce(peer, addresses)

        transport.introduce = introducing
        for source, ghost in ((liar, "ghost"), (last, "newcomer")):
            roster = ((PeerID(ghost), make_advert(ghost)),)
            plan, endpoint = source.coordination.plan, source.coordination._endpoint
            body = transfer_body(plan.plan.term, heir.peer_id)
            permit = sign_statement(endpoint.identity, "transfer", run=endpoint.run, body=body)
            transfer = TransferLeadership(plan=plan.link, roster=roster, permit=permit)
            with contextlib.suppress(Refused):
                await source.port.spawn(endpoint.ask(heir.peer_id, transfer, Done))
            await asyncio.sleep(1.0)
            assert (ghost in dialled) == (source is last)

    run_swarm(scenario, min_peers=6)


def test_what_is_too_large_to_send_is_not_answered(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        peer, other = swarm.peers["p1"], swarm.peers["p2"].peer_id
        coordination, transport = peer.coordination, peer.port.transport
        call, feed, fed = transport.call, coordination._feed, []

        async def too_large(target, request, *, timeout_s):
            raise ValueError("a call of 300000 bytes is larger than any peer accepts")

        def feeding(event):
            fed.append(event)
            return feed(event)

        transport.call, coordination._feed = too_large, feeding
        peer.commits.append(report(stage=0, microbatches=swarm.spec.training.microbatches_per_step))
        for message in (TransferLeadership(plan=b"", roster=()), PlanOffer(term=1, plan=b"", predecessor=b"")):
            await peer.port.spawn(coordination._ask(other, message))
        await asyncio.sleep(2.5)
        unanswered = {type(event.asked) for event in fed if isinstance(event, Unanswered)}
        assert {TransferLeadership, Heartbeat} <= unanswered
        assert PlanOffer not in unanswered, "or it would be made and signed again for everybody, at every tick"
        transport.call = call
        await swarm.until(lambda: not coordination._reports._waiting, within_s=3)

    run_swarm(scenario, min_peers=6)


@pytest.mark.parametrize("owner_dies", [False, True])
def test_a_stranger_who_says_it_has_a_plan_leads_nobody_astray_for_long(run_swarm, owner_dies):
    async def scenario(swarm):
        await swarm.begin(6)
        port, endpoint = await stranger(swarm)
        if owner_dies:
            swarm.world.crash(swarm.peers["p0"].port)
            await swarm.until(swarm.agreed, within_s=10)
        lie = PlanHead(term=99, sequence=99, digest="", coordinator=port.peer_id, addresses=port.transport.addresses())
        await port.directory.store(
            f"shoal/{endpoint.run}/plan", port.peer_id, endpoint.seal_record(lie), expires_in_s=60
        )
        await asyncio.sleep(30)
        new = await swarm.add("new")
        await swarm.until(lambda: new.order > (1, 1) and new.peer_id in new.plan.members, within_s=10)
        assert swarm.coordinator.order < (99, 99)

    run_swarm(scenario, min_peers=6)


def test_a_run_of_which_the_directory_alone_remembers_a_plan_begins_once_it_has_forgotten(run_swarm):
    async def scenario(swarm):
        port = swarm.world.add_peer("gone")
        endpoint = Endpoint(
            port.identity, port.transport, run=run_id(swarm.spec, swarm.world.identity("p0").peer_id), gate=OpenGate()
        )
        head = PlanHead(term=3, sequence=9, digest="", coordinator=port.peer_id, addresses=())
        key = f"shoal/{endpoint.run}/plan"
        await port.directory.store(key, port.peer_id, endpoint.seal_record(head), expires_in_s=40)
        swarm.world.crash(port)
        for number in range(6):
            await swarm.add(f"p{number}")
        await asyncio.sleep(30)
        assert swarm.peers["p0"].coordination.plan is None
        assert "the plan of this run" in swarm.peers["p0"].coordination.said
        await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=20)

    run_swarm(scenario, min_peers=6)


def test_an_owner_that_has_forgotten_its_plan_gets_it_back(run_swarm):
    async def scenario(swarm):
        owner = await swarm.add("p0", keeps=True)
        owner.port.disk.limit(0)
        for number in range(1, 6):
            await swarm.add(f"p{number}")
        await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=10)
        await swarm.add("p6")
        await asyncio.sleep(3)
        owner.port.disk.limit(None)
        swarm.world.crash(owner.port)
        owner = await swarm.add("p0", keeps=True)
        assert owner.coordination.plan is None
        await asyncio.sleep(20)
        assert swarm.agreed()
        assert len(swarm.coordinator.plan.members) == 7
        swarm.chain()
        assert all(peer.coordination.num_alarms == 0 for peer in swarm.alive())

    run_swarm(scenario, min_peers=6)


def test_who_cannot_keep_its_word_takes_no_part(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        swarm.world.add_peer("full").disk.limit(0)
        swarm.world.crash(swarm.world.peers["full"])
        with pytest.raises(LocalError, match="cannot keep votes"):
            await swarm.add("full", keeps=True)
        swarm.world.crash(swarm.world.peers["full"])

    run_swarm(scenario, min_peers=6)


def test_a_new_coordinator_is_told_of_the_end_at_once(run_swarm):
    """Members that know the end leave soon, and the coordinator that told them may have died before it told the
    others."""
    ends = (("member", b"its signature"),)

    async def scenario(swarm):
        await swarm.begin(5)
        old = swarm.coordinator
        told = next(peer for peer in swarm.alive() if peer is not old)
        for peer in (old, told):
            peer.coordination.core.ends = ends
        sent, ask = [], told.coordination._endpoint.ask

        async def asking(whom, message, *rest, **how):
            if isinstance(message, Heartbeat):
                sent.append((whom, message.ends))
            return await ask(whom, message, *rest, **how)

        told.coordination._endpoint.ask = asking
        await asyncio.sleep(2.5)
        assert sent[-1] == (old.peer_id, ()), "the coordinator has the proof"
        swarm.world.crash(old.port)
        await swarm.until(lambda: swarm.agreed() and told.plan.coordinator != old.peer_id, within_s=10)
        new = told.plan.coordinator
        assert new != told.peer_id
        await swarm.until(lambda: sent[-1][0] == new, within_s=2)
        assert next(said for whom, said in sent if whom == new) == ends

    run_swarm(scenario, min_peers=5)


def test_the_endpoints_term_follows_the_plan(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        await asyncio.sleep(70)
        assert swarm.agreed()
        assert {peer.coordination._endpoint.term for peer in swarm.alive()} == {2}

    run_swarm(scenario, min_peers=6)


def test_a_damaged_store_is_a_local_error(run_swarm, tmp_path):
    (tmp_path / "plans").write_bytes(b"not a record")

    async def scenario(swarm):
        with pytest.raises(LocalError, match="not a record of plans"):
            await swarm.add("p0", store=PlanStore(LiveDisk(tmp_path), PurePosixPath("plans")))

    run_swarm(scenario, min_peers=6)


def test_a_closed_peer_answers_no_more_and_leaves_nothing_running(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        closed = swarm.peers["p3"]
        await closed.port.spawn(closed.coordination.close(leave=True))
        sent = swarm.world.num_events
        await closed.port.spawn(closed.coordination.close(leave=True))
        assert swarm.world.num_events == sent
        ask = swarm.peers["p1"].coordination._endpoint.ask
        with pytest.raises(Refused, match="closing"):
            await swarm.peers["p1"].port.spawn(ask(closed.peer_id, PlanLive(plan=closed.coordination.plan.link), Done))
        await swarm.until(lambda: closed.peer_id not in swarm.peers["p0"].plan.members, within_s=5)

    run_swarm(scenario, min_peers=6)


def test_a_fork_and_a_ledger_that_does_not_add_up_are_alarms(run_swarm, caplog):
    async def scenario(swarm):
        await swarm.begin(6)
        owner, victim = swarm.peers["p0"], swarm.peers["p1"]
        live = victim.coordination.plan
        twin = sign_plan(owner.port.identity, msgspec.structs.replace(live.plan, reason="another"))
        ask = owner.coordination._endpoint.ask
        await owner.port.spawn(ask(victim.peer_id, PlanLive(plan=twin.link), Done))
        assert victim.coordination.num_alarms == 1
        assert victim.coordination.plan.digest == live.digest
        assert live.digest in caplog.text
        assert twin.digest in caplog.text
        victim.commits.append(report(stage=0, microbatches=99))
        await swarm.until(lambda: owner.coordination.num_alarms == 1, within_s=3)
        assert victim.peer_id in caplog.text

    run_swarm(scenario, min_peers=6)
