"""Votes follow work: who comes on the roll and when, in which group, and which rolls nobody votes for."""

import asyncio

import msgspec
import pytest

from shoal.coordinator.voting import PROBATION_HEARTBEATS, Electorate
from shoal.protocol.plan import Plan, is_quorum

INVITES = {"a": b"", "b": b"one", "c": b"one", "w": b"two", "x": b"two", "y": b"two", "z": b"two", "n": b""}
LATER = PROBATION_HEARTBEATS + 1.0


def electorate_of(*plans, invite_of=INVITES.get):
    """It has obeyed these plans, a second apart."""
    electorate = Electorate(1.0, invite_of)
    for now_s, plan in enumerate(plans):
        electorate.obey(plan, float(now_s), follows=now_s > 0)
    return electorate


@pytest.fixture
def make(make_plan):
    """make(groups, roll as names, spares): a plan."""

    def go(groups, roll=(), spares="", **says) -> Plan:
        plan = make_plan(groups, coordinator="a", spares=tuple(spares), **says).plan
        numbers = tuple(tuple(plan.members.index(peer) for peer in group) for group in roll)
        return msgspec.structs.replace(plan, roll=numbers)

    return go


def named(plan, roll):
    return {"".join(sorted(plan.members[at] for at in group)) for group in roll}


def test_the_first_roll_has_all_that_hold_a_place_by_their_invites(make):
    plan = make([["a", "b"], ["c", "w"]], spares="xyz")
    assert named(plan, electorate_of().roll(None, plan, 0.0)) == {"a", "bc", "w"}


def test_spares_are_on_the_first_roll_of_a_small_run_which_so_survives_its_owner(make):
    plan = make([["a", "b"]], spares="wx")
    plan = msgspec.structs.replace(plan, roll=electorate_of().roll(None, plan, 0.0))
    assert named(plan, plan.roll) == {"a", "b", "w"}
    assert is_quorum({"b", "w"}, plan, "a")
    assert not is_quorum({"b"}, plan, "a")


def test_a_newcomer_votes_after_its_probation_and_a_spare_never(make):
    first = make([["a"], ["b"], ["w"]], ["a", "b", "w"])
    plan = make([["a", "x"], ["b", "n"], ["w"]], ["a", "b", "w"], spares="yz")
    electorate = electorate_of(first, plan)
    assert named(plan, electorate.roll(plan, plan, PROBATION_HEARTBEATS)) == {"a", "b", "w"}
    assert named(plan, electorate.roll(plan, plan, LATER)) == {"a", "b", "wx", "n"}


def test_an_elector_keeps_its_vote_without_a_place_and_loses_it_with_its_membership(make):
    before = make([["a"], ["b"], ["c"], ["w"]], ["a", "bc", "w"])
    plan = make([["a"], ["b"], ["w"]], spares="c")
    assert named(plan, electorate_of(before).roll(before, plan, 1.0)) == {"a", "bc", "w"}
    plan = make([["a"], ["b"], ["w"]])
    assert named(plan, electorate_of(before).roll(before, plan, 1.0)) == {"a", "b", "w"}


def test_where_few_are_left_members_join_at_once(make):
    before = make([["a", "x"], ["b", "y"], ["w", "z"]], ["a", "b"], spares="c")
    plan = make([["x"], ["b", "y"], ["z"]], spares="c")
    roll = electorate_of(before).roll(before, plan, 1.0)
    assert named(plan, roll) == {"b", "xy"}, "three electors, and no spare"
    nobody = make([["n"]])
    assert named(nobody, electorate_of(before).roll(before, nobody, 1.0)) == {"n"}


def test_a_member_whose_invite_is_not_known_waits(make):
    plan = make([["a", "u"], ["b"], ["w"]], ["a", "b", "w"])
    electorate = electorate_of(plan)
    assert named(plan, electorate.roll(plan, plan, LATER)) == {"a", "b", "w"}


def test_electors_are_never_grouped_anew(make):
    """A coordinator that has just begun may not know by which invite the others came."""
    before = make([["a", "x"], ["b"], ["c"], ["w"]], ["a", "bc", "w"])
    knows = {"x": b"two"}.get
    plan = make([["a", "x"], ["b"], ["c"], ["w"]])
    assert named(plan, electorate_of(before, invite_of=knows).roll(before, plan, LATER)) == {"a", "bc", "w", "x"}


def test_plans_from_before_there_were_rolls_are_followed_by_one_with_groups(make):
    before = make([["a"], ["b"], ["c"], ["w"]])
    assert named(before, electorate_of(before).roll(before, before, 1.0)) == {"a", "bc", "w"}


def test_a_newcomer_with_which_a_roll_was_refused_keeps_nobody_else_out(make):
    before = make([["a", "x", "y"], ["b"], ["w"]], ["a", "b", "w"])
    electorate = electorate_of(before)

    def offered():
        return msgspec.structs.replace(before, roll=electorate.roll(before, before, LATER))

    assert named(before, offered().roll) == {"a", "b", "wxy"}
    electorate.refused(before, offered())
    assert named(before, offered().roll) == {"a", "b", "wx"}
    electorate.refused(before, offered())
    assert named(before, offered().roll) == {"a", "b", "wy"}
    electorate.begin_term()
    assert named(before, offered().roll) == {"a", "b", "wxy"}


@pytest.mark.parametrize(
    ("roll", "now_s", "flaw"),
    [
        (["a", "bc", "w"], 2.0, ""),
        (["a", "bc", "wx"], LATER, ""),
        (["a", "bc", "wx"], 2.0, "it gives X a vote, which came a moment ago"),
        (["a", "bc", "w", "x"], LATER, "it counts X apart from W, against their invites"),
        (["a", "bcx", "w"], LATER, "it counts X with B, against their invites"),
        (["a", "b", "c", "w"], 2.0, "it groups electors anew"),
        (["abc", "w"], 2.0, "it groups electors anew"),
        (["a", "b", "w"], 2.0, "it takes C off the roll"),
        (["a", "bc", "wz"], LATER, "it gives Z a vote, which holds no place"),
        ([], LATER, "it groups electors anew"),
    ],
)
def test_a_voter_judges_a_roll(make, roll, now_s, flaw):
    before = make([["a"], ["b"], ["c"], ["w"]], ["a", "bc", "w"])
    plan = make([["a", "x"], ["b"], ["c"], ["w"]], roll, spares="z")
    voter = electorate_of(before, make([["a", "x"], ["b"], ["c"], ["w"]], ["a", "bc", "w"]))
    assert voter.flaw(plan, before, now_s, str.upper) == flaw


def test_a_voter_objects_to_nothing_that_it_does_not_know(make):
    before = make([["a"], ["b"], ["w"]], ["a", "b", "w"])
    plan = make([["a", "x"], ["b"], ["w"]], ["a", "b", "w", "x"])
    away = Electorate(1.0, lambda _: None)
    away.obey(before, 0.0, follows=False)
    away.obey(plan, 1.0, follows=False)  # it has missed plans, so it cannot say when X came
    assert away.flaw(plan, before, 2.0, str.upper) == ""


def test_few_electors_may_have_a_newcomer_beside_them(make):
    before = make([["a"], ["b"]], ["a", "b"])
    grown = make([["a", "w"], ["b", "n"]], ["a", "b"])
    voter = electorate_of(before, grown)
    assert voter.flaw(make([["a", "w"], ["b", "n"]], ["a", "b", "w"]), grown, 2.0, str.upper) == ""
    assert "came a moment ago" in voter.flaw(
        make([["a", "w"], ["b", "n"]], ["a", "b", "w", "n"]), grown, 2.0, str.upper
    )


@pytest.mark.sim
def test_newcomers_vote_once_they_have_worked_for_a_while_in_a_swarm(run_swarm):
    async def scenario(swarm):
        await swarm.begin(4)
        for number in range(4):
            await swarm.add(f"new{number}")
        first = {peer.peer_id for peer in swarm.alive()[:4]}

        def all_are_members():
            return all(peer.coordination.plan is not None and len(peer.plan.members) == 8 for peer in swarm.alive())

        await swarm.until(all_are_members, within_s=30.0)
        await asyncio.sleep(PROBATION_HEARTBEATS / 2)
        assert {*swarm.coordinator.plan.electors} == first, "a majority of it is none of the newcomers"
        await swarm.until(
            lambda: all(
                peer.plan.stage_of(p) is None or p in peer.plan.electors
                for peer in swarm.alive()
                for p in peer.plan.members
            ),
            within_s=2.0 * PROBATION_HEARTBEATS,
        )
        swarm.chain()
        assert not any(peer.coordination.core.view.refusals.tell(swarm.world.now_s()) for peer in swarm.alive())

    run_swarm(scenario, min_peers=4)


async def begin(swarm, *invites):
    """Peers that came by these invites; the owner is the first."""
    for number, invite in enumerate(invites):
        await swarm.add(f"p{number}", invite=invite)
    await swarm.until(lambda: all(peer.order == (1, 1) for peer in swarm.alive()), within_s=10.0)


@pytest.mark.sim
def test_a_run_whose_members_came_by_one_invite_outlives_its_owner(run_swarm):
    async def scenario(swarm):
        await begin(swarm, b"", b"one", b"one", b"one", b"one")
        swarm.world.crash(swarm.peers["p0"].port)
        owner = swarm.peers["p0"].peer_id
        await swarm.until(lambda: swarm.agreed() and not swarm.coordinator.plan.has(owner), within_s=30.0)

    run_swarm(scenario, min_peers=5)


@pytest.mark.sim
@pytest.mark.parametrize("invite", [b"two", b""], ids=["of one invite", "of four invites"])
def test_four_keys_make_plans_without_the_others_only_if_they_came_by_several_invites(run_swarm, invite):
    async def scenario(swarm):
        await begin(swarm, b"", b"one", b"one", invite, invite, invite, invite)
        for name in ("p0", "p1", "p2"):
            swarm.world.crash(swarm.peers[name].port)
        await asyncio.sleep(60.0)
        went_on = any(peer.order > (1, 1) for peer in swarm.alive())
        assert went_on is (invite == b"")

    run_swarm(scenario, min_peers=7)
