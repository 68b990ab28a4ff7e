"""On a disk that is full a peer gives no promise, and does all the rest."""

import asyncio
import random

import msgspec
import pytest

from shoal.coordinator.chain import ChainRecord
from shoal.coordinator.coordination_events import Ask, LogReason, LookUp, Persist, Reply
from shoal.coordinator.store import COMPLAIN_EVERY_S, PlanStore
from shoal.protocol.errors import LocalError
from shoal.protocol.messages import Done, PlanOffer, PlanVote, Refusal, TermGrant, TermRequest
from shoal.protocol.sim.disk import SimDisk

VOTE, GRANT = Reply(message=PlanVote(accepted=True)), Reply(message=TermGrant(granted=True))
OFFER = Ask(peer="b", message=PlanOffer(term=2, plan=b"plan", predecessor=b""))
REQUEST = Ask(peer="b", message=TermRequest(term=2, live=b"", permit=b""))
REFUSED = Reply(message=Refusal(reason="cannot save its promise on disk"))


def keep(term):
    return Persist(record=ChainRecord(run="run", granted_term=term))


@pytest.fixture
def disk():
    return SimDisk(random.Random(0))


@pytest.fixture
def word(disk):
    return PlanStore(disk)


def kept(disk):
    record = PlanStore(disk).load("run")
    return record.granted_term if record else 0


def test_who_has_promised_nothing_yet_shows_that_it_could(word, disk):
    disk.limit(0)
    with pytest.raises(LocalError, match="cannot keep votes"):
        word.save(ChainRecord(run="run"))
    disk.limit(None)
    word.save(ChainRecord(run="run"))
    assert PlanStore(disk.crash()).load("run") == ChainRecord(run="run")


def test_after_a_restart_a_full_disk_keeps_nobody_away(disk):
    PlanStore(disk).save(keep(3).record)
    disk.limit(0)
    assert PlanStore(disk).load("run") == keep(3).record


def test_a_promise_is_on_disk_before_it_is_given(word, disk):
    commands = word.backed([keep(1), VOTE, LookUp()], 0.0)
    assert next(commands) == VOTE
    assert kept(disk.crash()) == 1


@pytest.mark.parametrize("promise", [VOTE, GRANT])
def test_a_promise_that_cannot_be_kept_is_a_refusal(word, disk, promise):
    disk.limit(0)
    assert list(word.backed([keep(1), promise], 0.0)) == [REFUSED]


@pytest.mark.parametrize("question", [OFFER, REQUEST])
def test_nobody_is_asked_for_what_we_cannot_give_ourselves(word, disk, question):
    disk.limit(0)
    assert list(word.backed([keep(1), question, LogReason(text="said")], 0.0)) == [LogReason(text="said")]
    assert list(word.backed([question], 0.0)) == [], "the core asks again, and does not say again that it is to be kept"
    disk.limit(None)
    assert list(word.backed([question], 0.0)) == [question]
    assert kept(disk) == 1


def test_all_the_rest_is_done(word, disk):
    disk.limit(0)
    rest = [LogReason(text="obeyed"), LookUp(), Ask(peer="b", message=Done()), Reply(message=PlanVote(accepted=False))]
    assert list(word.backed([keep(1), *rest], 0.0)) == rest


def test_the_last_word_counts(word, disk):
    disk.limit(0)
    assert list(word.backed([keep(1), VOTE], 0.0)) == [REFUSED]
    assert list(word.backed([keep(2), VOTE], 0.0)) == [REFUSED]
    disk.limit(None)
    assert list(word.backed([keep(3), VOTE], 0.0)) == [VOTE]
    assert kept(disk) == 3


def test_a_full_disk_is_tried_once_for_many_questions_and_told_once_a_minute(disk, caplog):
    word = PlanStore(disk)
    disk.make_folder(word._path.parent)
    list(word.backed([keep(1)], 0.0))
    disk.limit(0)
    before = disk.num_operations
    for now_s in (0.0, 1.0, COMPLAIN_EVERY_S - 1.0, COMPLAIN_EVERY_S, COMPLAIN_EVERY_S + 1.0):
        list(word.backed([keep(2), *[OFFER] * 20], now_s))
    assert disk.num_operations - before == 5
    assert [record.getMessage()[:21] for record in caplog.records] == ["this peer cannot vote"] * 2


@pytest.mark.sim
def test_peers_on_full_disks_obey_and_are_voted_around(run_swarm):
    async def scenario(swarm):
        await swarm.begin(5)
        full = [await swarm.add(f"full {number}", keeps=True) for number in range(2)]
        await swarm.until(lambda: swarm.agreed() and len(swarm.coordinator.plan.members) == 7, within_s=20)
        before = swarm.coordinator.order
        for peer in full:
            peer.port.disk.limit(0)
        await swarm.add("newcomer")
        await swarm.until(lambda: swarm.agreed() and swarm.coordinator.order > before, within_s=10)
        for peer in full:
            assert peer.order == swarm.coordinator.order, "the peer's work follows the plan that its core obeys"
        await asyncio.sleep(60.0)  # terms go by, and the full ones have theirs
        assert swarm.agreed()
        assert swarm.coordinator.plan.term >= 4
        assert len(swarm.coordinator.plan.members) == 8

    run_swarm(scenario, min_peers=5, term_s=10.0)


@pytest.mark.sim
def test_a_lone_owners_plan_waits_for_its_disk(run_swarm):
    async def scenario(swarm):
        alone = msgspec.structs.replace(swarm.spec.swarm, stages=1, min_peers=1)
        swarm.spec = msgspec.structs.replace(swarm.spec, swarm=alone)
        owner = await swarm.add("p0", keeps=True)
        await swarm.until(lambda: owner.order == (1, 1), within_s=10)
        owner.port.disk.limit(0)
        newcomer = await swarm.add("p1")
        await asyncio.sleep(20.0)
        assert (owner.order, len(owner.plan.members)) == ((1, 1), 1)
        owner.port.disk.limit(None)
        await swarm.until(lambda: swarm.agreed() and newcomer.peer_id in owner.plan.members, within_s=10)
        await asyncio.sleep(60.0)  # terms go by with its own vote and the tie-break
        assert swarm.agreed()
        assert swarm.coordinator.plan.term >= 4
        assert PlanStore(owner.port.disk).load(owner.plan.run).live == owner.coordination.plan.link

    run_swarm(scenario, min_peers=3, term_s=10.0)
