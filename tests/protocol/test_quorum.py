"""Votes are weighed: the members that came by one invite are one voice, and any two majorities have an elector in
common."""

import itertools
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.exclusion import exclusion_holds, propose_exclusion
from shoal.protocol.limits import ELECTED_FROM_PEERS, ELECTORS
from shoal.protocol.plan import Member, Plan, PlanShape, SignedPlan, Stage, is_quorum, plan_flaw

OWNER = "a"


def plan_of(members, roll=()):
    stage = Stage(0, 2, tuple(Member(peer, 1.0, 1.0) for peer in members))
    return Plan(run="run", term=1, sequence=1, previous="", coordinator=members[0], stages=(stage,), roll=roll)


def grouped(*groups):
    """A plan whose roll has these groups of members."""
    plan, at = plan_of([peer for group in groups for peer in group]), itertools.count()
    return msgspec.structs.replace(plan, roll=tuple(tuple(next(at) for _ in group) for group in groups))


def share_of(group, plan):
    return Fraction(sum(plan.weights.get(peer, 0) for peer in group), sum(plan.weights.values()))


def sets_of(plan):
    for bits in range(2 ** len(plan.electors)):
        yield {peer for index, peer in enumerate(plan.electors) if bits >> index & 1}


@pytest.mark.parametrize(
    ("voters", "members", "enough"),
    [
        ("ab", "abc", True),
        ("a", "abc", False),
        ("ab", "abcd", True),  # a tie, and the owner is in it
        ("bc", "abcd", False),
        ("a", "ab", True),
        ("b", "ab", False),
        ("abc", "abcdef", False),  # large swarms have no tie break
        ("bcde", "abcdef", True),
        ("axyz", "abc", False),  # strangers do not count
        ("bc", "bcde", False),  # the owner is not a member any more
        ("abc", "bcde", False),
    ],
)
def test_without_a_roll_every_member_has_one_vote(voters, members, enough):
    assert is_quorum(set(voters), plan_of(members), "a") is enough


@pytest.mark.parametrize(
    ("groups", "voters", "enough"),
    [
        (("a", "bc", "wxyz"), "wxyz", False),  # four keys of one invite: a third
        (("a", "bc", "wxyz"), "wxyzb", False),
        (("a", "bc", "wxyz"), "wxyzbc", True),
        (("a", "bc", "wxyz"), "bc", False),  # they too
        (("a", "bc", "wxyz"), "abc", True),
        (("a", "b", "uvwxyz"), "uvwxyz", False),
        (("a", "b", "uvwxyz"), "uvwxyzb", True),  # the owner is not needed
        (("a", "b", "uvwxyz"), "ab", True),
        (("a", "bcd"), "bcd", True),  # all came by one invite, and the run outlives its owner
        (("bcd", "wxyz"), "wxyz", True),  # with two invites and no owner heads are counted
        (("a", "bcdefgh", "tuvwxyz"), "tuvwxyz", False),  # both are larger than a third
        (("a", "bcdefghij", "wxyz"), "wxyz", False),
        (("a", "bcdefghij", "wxyz"), "bcdefghijwx", False),
        (("a", "bcdefghij", "wxyz"), "bcdefghijwxy", True),
    ],
)
def test_an_invite_is_one_voice(groups, voters, enough):
    assert is_quorum(set(voters), grouped(*groups), OWNER) is enough


@given(sizes=st.lists(st.integers(1, 25), min_size=3, max_size=9))
def test_no_invite_has_more_than_a_third_where_there_are_three_groups(sizes):
    names = map(str, itertools.count())
    groups = [tuple(itertools.islice(names, size)) for size in sizes]
    plan = grouped(*groups)
    for group in groups:
        assert 3 * share_of(group, plan) <= 1
        assert len({plan.weights[peer] for peer in group}) == 1
    assert all(plan.weights.values()), "every elector counts"
    if 3 * max(sizes) <= sum(sizes):
        assert len(set(plan.weights.values())) == 1, "nothing is capped that need not be"


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) <= 8))
def test_two_disjoint_sets_are_never_both_a_quorum(sizes):
    names = iter("abcdefgh")
    plan = grouped(*(tuple(itertools.islice(names, size)) for size in sizes))
    assert is_quorum(plan.electors, plan, OWNER)
    for one in sets_of(plan):
        assert not (is_quorum(one, plan, OWNER) and is_quorum(set(plan.electors) - one, plan, OWNER))


def test_members_that_are_not_on_the_roll_have_no_vote():
    plan = plan_of("abcdefg", roll=((0,), (2,), (1,)))
    assert plan.electors == ("a", "b", "c")
    assert is_quorum({"b", "c"}, plan, OWNER)
    assert not is_quorum(set("adefg"), plan, OWNER)


def test_of_a_large_roll_a_jury_is_drawn_and_its_groups_are_weighed():
    names = [f"peer{number:04d}" for number in range(ELECTED_FROM_PEERS + 100)]
    plan = grouped(names[:1], names[1:50], names[50:-50])
    assert len(plan.electors) == ELECTORS == len(plan.weights)
    assert not is_quorum(set(names[50:-50]), plan, names[0])
    few = plan_of(names, roll=tuple((at,) for at in range(ELECTED_FROM_PEERS)))
    assert few.electors == tuple(names[:ELECTED_FROM_PEERS]), "many members, and no jury of those that do not vote"


def test_four_keys_of_one_invite_exclude_nobody():
    plan = SignedPlan(grouped("a", "bc", "wxyz"), b"", "base")
    proposed = propose_exclusion({bytes(32): b""}, base="base")

    def order(voters):
        votes = tuple((plan.plan.electors.index(peer), b"yes") for peer in voters)
        return msgspec.structs.replace(proposed, votes=votes)

    def verify(signer, signature, body):
        return signature == b"yes" and body == proposed.body

    assert not exclusion_holds(order("wxyz"), owner=OWNER, plans=[plan], verify=verify)
    assert exclusion_holds(order("wxyzbc"), owner=OWNER, plans=[plan], verify=verify)


@pytest.mark.parametrize("roll", [((0, 0),), ((0,), (0,)), ((3,),), ((-1,),), ((),), ((0,), ())])
def test_a_roll_that_names_nobody_or_somebody_twice_is_impossible(roll):
    assert "its roll" in plan_flaw(plan_of("abc", roll=roll), PlanShape(num_layers=2))
    assert plan_flaw(plan_of("abc", roll=((2,), (0,))), PlanShape(num_layers=2)) is None
