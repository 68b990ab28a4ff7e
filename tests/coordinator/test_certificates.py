"""The run goes back to what a majority of the makers of every layer has signed, and to nothing else."""

import asyncio

import msgspec
import pytest

from shoal.coordinator.era import ATTESTED_MAX, KEPT, Certificates, certified_flaw
from shoal.coordinator.voting import Electorate
from shoal.protocol.certificate import JURY, Attested, Certified, jury, layers_at
from shoal.protocol.layers import all_layer_keys, group_keys
from shoal.protocol.messages import Holding
from shoal.protocol.spec import ModelSpec
from shoal.protocol.statement import sign_statement

MODEL = ModelSpec(num_layers=6)


@pytest.fixture(autouse=True)
def certified():
    """Nothing is taken at its word here."""


majority = Electorate(1.0, lambda _: b"").are_enough


def believe(signer, signature, body) -> bool:
    return signature == b"yes"


def attested(plan, group, version, *, era=0, salt="", signature=b"yes") -> Attested:
    keys = group_keys(MODEL, plan, group)
    return Attested(era, version, tuple((key, f"{key}@{version}{salt}") for key in keys), signature)


@pytest.fixture
def plan(make_plan):
    return make_plan([["a", "b", "c"], ["d", "e"], ["f"]], coordinator="a").plan


@pytest.fixture
def certificates(plan):
    made = Certificates(MODEL, placed=False, are_enough=majority)
    made.obey(plan)
    return made


def all_say(certificates, plan, version, *, but="") -> None:
    for group, stage in enumerate(plan.stages):
        for peer in stage.peers:
            if peer not in but:
                certificates.hear(peer, [attested(plan, group, version)], verify=believe)


# --- what counts ---


def test_members_that_download_certify_nothing(certificates):
    whole = [frozenset("abc"), frozenset("de"), frozenset("f")]
    assert certificates.are_possible(whole)
    assert certificates.are_possible([frozenset("ab"), *whole[1:]])
    assert not certificates.are_possible([frozenset("a"), *whole[1:]])
    assert not certificates.are_possible([whole[0], frozenset("d"), whole[2]])


def test_the_members_of_one_invite_certify_nothing_alone_where_the_group_has_others(plan):
    invites = {"a": b"theirs", "b": b"theirs", "c": b"", "d": b"theirs", "e": b"theirs"}
    are_enough = Electorate(1.0, invites.get).are_enough
    certificates = Certificates(MODEL, placed=False, are_enough=are_enough)
    certificates.obey(plan)
    forged = attested(plan, 0, 50)
    for peer in "ab":
        certificates.hear(peer, [forged], verify=believe)
    assert certificates.layers((0, 50)) == frozenset()
    entry = Certified(0, 50, forged.proofs, ((0, b"yes"), (1, b"yes")))
    flaw = certified_flaw(successor(plan, certified=(entry,)), plan, MODEL, verify=believe, are_enough=are_enough)
    assert flaw == "2 of 3 members have signed version 50 of embed, which is no majority, or of one invite alone"
    certificates.hear("c", [forged], verify=believe)
    for peer in "de":
        certificates.hear(peer, [attested(plan, 1, 50)], verify=believe)
    held = {key for group in (0, 1) for key in group_keys(MODEL, plan, group)}
    assert certificates.layers((0, 50)) == held, "a group of one invite certifies what it holds"


def test_a_majority_of_the_places_certifies_and_not_of_those_that_speak(certificates, plan):
    certificates.hear("a", [attested(plan, 0, 50)], verify=believe)
    assert certificates.layers((0, 50)) == frozenset(), "two of three have not spoken"
    certificates.hear("b", [attested(plan, 0, 50)], verify=believe)
    assert certificates.layers((0, 50)) == frozenset(group_keys(MODEL, plan, 0))
    certificates.hear("d", [attested(plan, 1, 50)], verify=believe)
    assert not certificates.layers((0, 50)) & set(group_keys(MODEL, plan, 1)), "one of two is no majority"


def test_those_who_sign_different_states_certify_none(certificates, plan):
    certificates.hear("d", [attested(plan, 1, 50)], verify=believe)
    certificates.hear("e", [attested(plan, 1, 50, salt="forged")], verify=believe)
    assert certificates.layers((0, 50)) == frozenset()


@pytest.mark.parametrize(
    ("peer", "group", "signature"),
    [("f", 1, b"yes"), ("stranger", 1, b"yes"), ("d", 1, b"no")],
    ids=["of another group", "no member", "forged"],
)
def test_who_has_no_place_or_has_not_signed_is_not_heard(certificates, plan, peer, group, signature):
    certificates.hear("e", [attested(plan, 1, 50)], verify=believe)
    certificates.hear(peer, [attested(plan, group, 50, signature=signature)], verify=believe)
    assert certificates.layers((0, 50)) == frozenset()


def test_a_member_that_attests_without_end_fills_no_memory(certificates, plan):
    for version in range(1, 100):
        certificates.hear("d", [attested(plan, 1, version)], verify=believe)
    (said,) = certificates._said.values()
    assert len(said) == ATTESTED_MAX
    assert max(said) == (0, 99)


def test_of_a_large_group_a_jury_signs(make_plan):
    names = [f"m{number:02}" for number in range(40)]
    plan = make_plan([names, ["d"], ["f"]], coordinator="m00").plan
    chosen = jury(names, plan.previous)
    assert len(chosen) == JURY
    certificates = Certificates(MODEL, placed=False, are_enough=majority)
    certificates.obey(plan)
    for peer in sorted(set(names) - set(chosen)):
        certificates.hear(peer, [attested(plan, 0, 50)], verify=believe)
    assert certificates.layers((0, 50)) == frozenset()
    for peer in chosen[: JURY // 2 + 1]:
        certificates.hear(peer, [attested(plan, 0, 50)], verify=believe)
    assert certificates.layers((0, 50)) == frozenset(group_keys(MODEL, plan, 0))


# --- plans ---


def test_a_plan_is_due_once_a_whole_version_is_signed_and_keeps_the_newest(certificates, plan):
    all_say(certificates, plan, 50, but="f")
    assert not certificates.is_due
    certificates.hear("f", [attested(plan, 2, 50)], verify=believe)
    assert certificates.is_due
    for version in (50, 60, 70):
        all_say(certificates, plan, version)
        plan = msgspec.structs.replace(plan, certified=certificates.for_plan((0, 0)))
        certificates.obey(plan)
        assert not certificates.is_due
        all_say(certificates, plan, version)  # by heartbeats that were under way
        assert not certificates.is_due
    assert sorted({entry.version for entry in plan.certified}) == [60, 70]
    assert KEPT == 2
    assert certificates.newest == (0, 70)
    kept = certificates.for_plan((0, 50))
    assert all(not entry.signatures for entry in kept), "its voters have checked them"
    assert layers_at(kept, (0, 70)).keys() == set(all_layer_keys(MODEL))


def successor(plan, **says):
    return msgspec.structs.replace(plan, sequence=plan.sequence + 1, **says)


def test_a_voter_takes_no_certificate_without_signatures(plan):
    keys = group_keys(MODEL, plan, 1)
    proofs = tuple((key, "digest") for key in keys)
    for signatures, why in (
        ((), "0 of 2 members have signed version 50 of layers.2, which is no majority"),
        (((0, b"yes"),), "1 of 2 members have signed version 50 of layers.2, which is no majority"),
        (((0, b"yes"), (0, b"yes")), "1 of 2"),
        (((0, b"yes"), (1, b"no")), "1 of 2"),
        (((0, b"yes"), (7, b"yes")), "1 of 2"),
    ):
        made = successor(plan, certified=(Certified(0, 50, proofs, signatures),))
        assert certified_flaw(made, plan, MODEL, verify=believe, are_enough=majority).startswith(why)
    sound = successor(plan, certified=(Certified(0, 50, proofs, ((0, b"yes"), (1, b"yes"))),))
    assert certified_flaw(sound, plan, MODEL, verify=believe, are_enough=majority) == ""
    handed_on = successor(sound, certified=(sound.certified[0].bare,))
    assert certified_flaw(handed_on, sound, MODEL, verify=believe, are_enough=majority) == ""
    others = successor(plan, certified=(Certified(0, 50, proofs[:1], ((0, b"yes"), (1, b"yes"))),))
    assert "no group holds these layers" in certified_flaw(others, plan, MODEL, verify=believe, are_enough=majority)


def test_a_voter_lets_no_plan_forget_the_newest_version_that_is_certified(plan):
    every = (Certified(0, 50, attested(plan, group, 50).proofs) for group in range(3))
    base = successor(plan, certified=tuple(every))
    assert (
        certified_flaw(successor(base, certified=base.certified), base, MODEL, verify=believe, are_enough=majority)
        == ""
    )
    for certified in ((), base.certified[1:]):
        forgets = successor(base, certified=certified)
        flaw = certified_flaw(forgets, base, MODEL, verify=believe, are_enough=majority)
        assert flaw == "version 50 of era 0 is no longer certified"
    part = successor(plan, certified=base.certified[:2])
    assert certified_flaw(successor(part), part, MODEL, verify=believe, are_enough=majority) == "", (
        "a part is no version to go back to"
    )


def test_a_voter_follows_no_plan_to_a_version_that_nobody_has_certified(plan):
    back = successor(plan, era=1, restore_era=0, restore_version=4800, not_started=True)
    flaw = certified_flaw(back, plan, MODEL, verify=believe, are_enough=majority)
    assert flaw == "era 1 begins at version 4800 of era 0, which is not certified"
    assert (
        certified_flaw(
            msgspec.structs.replace(back, mandate=b"the owner's"), plan, MODEL, verify=believe, are_enough=majority
        )
        == ""
    )
    assert (
        certified_flaw(
            msgspec.structs.replace(back, restore_version=0), plan, MODEL, verify=believe, are_enough=majority
        )
        == ""
    )


# --- a swarm ---


def signed(swarm, peer, version, *, era=0) -> Attested:
    plan = peer.plan
    keys = group_keys(swarm.spec.model, plan, plan.stage_of(peer.peer_id))
    word = Attested(era, version, tuple((key, f"{key}@{version}") for key in keys), b"")
    identity, run = peer.port.identity, peer.coordination._endpoint.run
    return msgspec.structs.replace(word, signature=sign_statement(identity, "state", run=run, body=word.body))


async def trained(swarm, version=57):
    await swarm.begin(6)
    for peer in swarm.alive():
        peer.version = version
    await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.not_started, within_s=10.0)


@pytest.mark.sim
def test_a_forged_snapshot_of_a_newcomer_moves_nobody_however_often_it_comes(run_swarm):
    """Row 1: the run went back to the forged version 1.4 s after the join, and three repeats emptied all disks."""

    async def scenario(swarm):
        await trained(swarm)
        every = all_layer_keys(swarm.spec.model)
        for number in range(3):
            forger = await swarm.add(f"forger{number}")
            forger.holdings = (Holding(era=0, version=4800 + number, layers=every),)
            await asyncio.sleep(10.0)
            assert {peer.plan.era for peer in swarm.alive()} == {0}
            forger.holdings = (Holding(era=7, version=999, layers=every),)
            await asyncio.sleep(10.0)
        assert {peer.plan.era for peer in swarm.alive()} == {0}
        assert {peer.state is not None for peer in swarm.alive() if peer.plan.stage_of(peer.peer_id) is not None}

    run_swarm(scenario, steps=5000, min_peers=6)


@pytest.mark.sim
def test_a_stage_that_dies_is_made_again_from_what_was_certified_beside_a_newer_forgery(run_swarm):
    async def scenario(swarm):
        await trained(swarm)
        for peer in swarm.alive():
            peer.attested = (signed(swarm, peer, 50),)
        await swarm.until(lambda: swarm.agreed() and bool(swarm.coordinator.plan.certified), within_s=10.0)
        every = all_layer_keys(swarm.spec.model)
        for peer in swarm.alive():
            peer.attested = ()
            peer.holdings = (Holding(era=0, version=50, layers=every),)
        forger = await swarm.add("forger")
        forger.holdings = (Holding(era=0, version=4800, layers=every),)
        await asyncio.sleep(5.0)
        lost = [peer for peer in swarm.alive() if peer.plan.stage_of(peer.peer_id) == 1]
        for peer in lost:
            swarm.world.crash(peer.port)
        await swarm.until(lambda: swarm.agreed() and swarm.coordinator.plan.era == 1, within_s=60.0)
        plan = swarm.coordinator.plan
        assert (plan.restore_era, plan.restore_version) == (0, 50)
        assert layers_at(plan.certified, (0, 50)).keys() == set(every), "whoever fetches it knows its digests"

    run_swarm(scenario, steps=5000, min_peers=6)
