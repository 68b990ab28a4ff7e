"""Fencing: single votes here, and all interleavings of many proposers in `test_chain_safety.py`."""

import msgspec
import pytest

from shoal.protocol.limits import SEQUENCE_JUMP_MAX, TERM_JUMP_MAX
from shoal.protocol.messages import TermRequest

ABC = [["a"], ["b"], ["c"]]


@pytest.fixture
def first(make_plan):
    return make_plan(ABC, coordinator="a")


@pytest.fixture
def chain(make_chain, first):
    chain = make_chain()
    chain.adopt(first)
    return chain


def test_obeys_only_what_is_above_all_it_obeyed(make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    third = make_plan(ABC, coordinator="b", order=(2, 3), base=second)
    assert chain.adopt(third, after=second).new
    assert not chain.adopt(second)[0]
    assert not chain.adopt(third)[0]
    assert chain.live is third


def test_another_plan_of_the_same_order_is_never_obeyed(make_plan, chain, first):
    other = make_plan(ABC, coordinator="a", reason="forged")
    taken, reason, _ = chain.adopt(other)
    assert not taken
    assert chain.live is not other
    assert first.digest in reason
    assert other.digest in reason
    assert chain.num_forks == 1


def test_an_invention_is_no_fork(make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    chain.adopt(second)
    unvoted = msgspec.structs.replace(make_plan(ABC, coordinator="a", order=(1, 2), base=first, seed=9), proof=None)
    for plan in (make_plan(ABC, coordinator="b"), unvoted):
        assert not chain.adopt(plan).new
    assert chain.num_forks == 0


def test_a_plan_that_comes_again_is_no_fork(make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    chain.adopt(second)
    assert not chain.adopt(first)[0]
    assert not chain.adopt(second)[0]
    assert chain.num_forks == 0


def test_a_fork_is_noticed_long_after_and_after_a_restart(make_chain, make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    third = make_plan(ABC, coordinator="b", order=(2, 3), base=second)
    chain.adopt(second)
    chain.adopt(third)
    chain.adopt(make_plan(ABC, coordinator="a", order=(1, 2), base=first, reason="another"))
    assert chain.num_forks == 1
    again = make_chain()
    again.restore(chain.record(), {plan.link: plan for plan in (second, chain.live)}.get)
    again.adopt(make_plan(ABC, coordinator="b", order=(2, 3), base=second, reason="another"))
    assert again.num_forks == 1
    assert again.live is third


def test_votes_for_the_successor_of_its_plan_again_and_again(make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    assert chain.vote("a", 1, second, first) == ""
    assert chain.vote("a", 1, second, first) == ""
    assert chain.live is first, "a vote is not obedience"


def test_does_not_vote_for_two_plans_of_one_order(make_plan, chain, first):
    assert chain.vote("a", 1, make_plan(ABC, coordinator="a", order=(1, 2), base=first), first) == ""
    other = make_plan(ABC, coordinator="a", order=(1, 2), base=first, reason="another")
    assert "voted for another plan" in chain.vote("a", 1, other, first)


def test_a_coordinator_may_replace_its_offer_by_a_later_one_but_not_by_an_earlier(make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    third = make_plan(ABC, coordinator="a", order=(1, 3), base=first)
    assert chain.vote("a", 1, second, first) == ""
    assert chain.vote("a", 1, third, first) == ""
    assert chain.vote("a", 1, second, first) != ""


def test_refuses_what_does_not_follow_its_plan(make_plan, chain, first):
    stranger = make_plan(ABC, coordinator="a", order=(1, 1), reason="not in our chain")
    assert chain.vote("a", 1, make_plan(ABC, coordinator="a", order=(1, 2), base=stranger), None) != ""


def test_a_term_changes_hands_only_with_a_higher_term(make_plan, chain, first):
    assert chain.vote("b", 1, make_plan(ABC, coordinator="b", order=(1, 2), base=first), first) != ""
    assert chain.vote("b", 2, make_plan(ABC, coordinator="b", order=(2, 2), base=first), first) == ""


def test_a_term_once_granted_is_nobody_elses(make_plan, chain, first):
    assert chain.grant("b", 2, first) == ""
    assert chain.grant("c", 2, first) != ""
    assert chain.vote("c", 2, make_plan(ABC, coordinator="c", order=(2, 2), base=first), first) != ""
    assert chain.vote("a", 1, make_plan(ABC, coordinator="a", order=(1, 2), base=first), first) != ""
    assert chain.grant("c", 3, first) == ""


def test_no_promise_is_given_that_nobody_could_outbid(make_plan, chain, first):
    far = 2**64 - 1
    offer = make_plan(ABC, coordinator="b", order=(2, 2), base=first)
    for _ in range(1000):
        assert chain.grant("b", far, first) != ""
        assert chain.vote("b", far, offer, first) != ""
        assert not chain.answer_pre_vote("b", TermRequest(term=far, live=b"", permit=b"yes"), first).granted
    assert chain.record().granted_term == 1
    assert chain.grant("c", 2, first) == ""


def test_a_term_far_ahead_is_believed_of_who_insists(chain, first):
    far = 1 + 3 * TERM_JUMP_MAX  # where somebody who lies may have led a part of the members
    assert [chain.grant("b", far, first) == "" for _ in range(4)] == [False, False, True, True]


def test_no_plan_uses_all_sequences_up(make_plan, chain, first):
    far = make_plan(ABC, coordinator="a", order=(1, 2 + SEQUENCE_JUMP_MAX), base=first)
    assert "too far" in chain.vote("a", 1, far, first)
    assert chain.vote("a", 1, make_plan(ABC, coordinator="a", order=(1, 99), base=first), first) == ""


def test_a_grant_tells_what_was_voted_for_before(make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    chain.vote("a", 1, second, first)
    grant = chain.answer_request("b", TermRequest(term=2, live=b"", permit=b"yes"), first)
    assert (grant.granted, grant.accepted, grant.accepted_term) == (True, second.envelope, 1)
    # which the candidate then offers in its own term, in the dead coordinator's name
    assert chain.vote("b", 2, second, first) == ""


def test_strangers_are_granted_nothing(chain, first):
    assert chain.grant("stranger", 2, first) != ""


def test_laggards_adopt_the_enclosed_predecessor(make_plan, chain, first):
    second = make_plan(ABC, coordinator="a", order=(1, 2), base=first)
    third = make_plan(ABC, coordinator="a", order=(1, 3), base=second)
    assert chain.vote("a", 1, third, None) != ""
    assert chain.vote("a", 1, third, second) == ""
    assert chain.live is second


def test_who_asks_on_an_old_plan_is_told_so(make_plan, chain, first):
    chain.adopt(make_plan(ABC, coordinator="b", order=(2, 2), base=first))
    assert "obeys plan (2, 2)" in chain.grant("c", 3, first)


def test_who_knows_no_plan_votes_for_none(make_chain, make_plan, first):
    chain = make_chain()
    assert chain.vote("a", 1, make_plan(ABC, coordinator="a", order=(1, 2), base=first), None) != ""


def test_a_record_brings_everything_back(make_chain, make_plan, chain, first):
    chain.vote("a", 1, make_plan(ABC, coordinator="a", order=(1, 2), base=first), first)
    chain.grant("b", 2, first)
    again = make_chain()
    again.restore(chain.record(), {chain.live.link: chain.live, chain.accepted.envelope: chain.accepted}.get)
    assert again.record() == chain.record()
    assert again.grant("c", 2, first) != ""
