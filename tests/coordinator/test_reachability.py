"""Which pairs cannot reach each other: whose word counts, for how long, and what ends it."""

import pytest

from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.link_survey import (
    EXPIRY_HEARTBEATS,
    LINKS_KEPT_MAX,
    PATIENCE_HEARTBEATS,
    RETRY_HEARTBEATS,
    LinkSurvey,
)
from shoal.coordinator.role import heirs
from shoal.coordinator.roster import Roster
from shoal.protocol.messages import LinkReport, UnreachablePair
from shoal.protocol.spec import RunSpec, SwarmSpec

SOON = PATIENCE_HEARTBEATS
AB = ("a", "b")


@pytest.fixture
def roster():
    return Roster(1.0)


@pytest.fixture
def reach(roster):
    return LinkSurvey(roster)


def fails(peer, tries=2, *, has_met=True):
    return LinkReport(peer=peer, round_trip_s=0.1 * has_met, bytes_per_s=0.0, num_failed=tries)


def meets(peer):
    return LinkReport(peer=peer, round_trip_s=0.1, bytes_per_s=1e6)


def lose(reach, one="a", other="b", now_s=0.0):
    reach.note(one, [fails(other)], now_s)
    reach.note(other, [fails(one)], now_s)


def test_a_pair_is_unreachable_once_both_ends_say_so_and_have_not_met_since(reach):
    reach.note("a", [fails("b")], 0.0)
    assert reach.pairs(10.0) == frozenset()
    reach.note("b", [fails("a")], 10.0)
    assert reach.pairs(10.0) == frozenset(), "a connection that has just broken may be there again at once"
    assert reach.pairs(10.0 + SOON) == {AB}
    assert reach.cannot_reach("a", 10.0 + SOON) == {"b"}
    assert reach.pairs(10.0 + SOON, {"a", "c"}) == frozenset()


def test_one_try_of_each_end_is_too_few(reach):
    reach.note("a", [fails("b", 1)], 0.0)
    reach.note("b", [fails("a", 1)], 0.0)
    assert reach.pairs(SOON) == frozenset()
    reach.note("b", [fails("a", 2)], 1.0)
    assert reach.pairs(SOON) == {AB}


def test_of_two_that_have_never_met_one_try_each_is_enough(reach):
    reach.note("a", [fails("b", 1, has_met=False)], 0.0)
    assert reach.pairs(0.0) == frozenset()
    reach.note("b", [fails("a", 1, has_met=False)], 0.0)
    assert reach.pairs(0.0) == {AB}


def test_who_says_that_it_reaches_nobody_is_believed_by_nobody(reach):
    reach.note("liar", [fails(name, 99) for name in "abcdef"], 0.0)
    reach.note("a", [fails("liar", 2), meets("b")], 0.0)
    assert reach.pairs(SOON) == {("a", "liar")}, "only who cannot reach the liar either"


def test_a_pair_that_meets_again_by_the_word_of_either_end_is_unreachable_no_more(reach):
    lose(reach)
    reach.note("b", [meets("a")], 5.0)
    assert reach.pairs(5.0) == frozenset()
    reach.note("b", [fails("a")], 6.0)
    assert reach.pairs(60.0) == frozenset(), "the other end has to say so anew, too"


def test_a_figure_of_an_end_that_has_not_tried_ends_nothing(reach):
    reach.note("b", [meets("a")], 0.0)
    lose(reach, now_s=1.0)
    reach.note("b", [meets("c")], 2.0)
    assert reach.pairs(1.0 + SOON) == {AB}


def test_what_nobody_has_said_for_long_is_forgotten(reach):
    lose(reach)
    assert reach.pairs(EXPIRY_HEARTBEATS - 1.0) == {AB}
    reach.note("a", [fails("b", 3)], 100.0)
    assert reach.pairs(100.0 + EXPIRY_HEARTBEATS - 1.0) == {AB}
    assert reach.pairs(100.0 + EXPIRY_HEARTBEATS) == frozenset()


def test_nobody_fills_the_book(roster, reach):
    for number in range(1000):
        reach.note("a", [fails(f"p{number}")], 0.0)
    assert len(roster.at("a").failing) == LINKS_KEPT_MAX
    roster.begin_term(frozenset("bc"))
    assert not roster.at("a").failing


def test_the_next_coordinator_is_told_and_believes_it_at_once_until_a_member_says_otherwise(reach):
    lose(reach)
    heir = LinkSurvey(Roster(1.0))
    heir.take_over(reach.tell(20.0), 500.0)
    assert heir.pairs(500.0) == {AB}
    assert heir.pairs(500.0 + EXPIRY_HEARTBEATS - 20.0) == frozenset(), "it is no newer for being told on"
    heir.note("a", [meets("b")], 501.0)
    assert heir.pairs(501.0) == frozenset()


@pytest.mark.parametrize("age_s", [-1.0, float("nan"), float("inf"), EXPIRY_HEARTBEATS])
def test_a_hand_over_that_cannot_be_is_ignored(reach, age_s):
    reach.take_over([UnreachablePair("a", "b", age_s), UnreachablePair("a", "a", 0.0)], 0.0)
    assert reach.pairs(0.0) == frozenset()


# --- who is to try ---


def test_who_is_said_to_be_out_of_reach_is_asked_to_try_as_well(reach, make_plan):
    plan = make_plan([["a"], ["b"], ["c"]], coordinator="c").plan
    reach.note("a", [fails("b")], 0.0)
    assert reach.choose_one("b", plan, 0.0) == ("a",)
    assert "a" not in reach.choose_one("b", plan, 1.0), "it has just been asked"


def test_both_ends_try_again_now_and_then(reach, make_plan):
    plan = make_plan([["a"], ["b"], ["c"]], coordinator="c").plan
    lose(reach)
    asked = [now_s for now_s in range(100) if reach.choose_one("a", plan, float(now_s)) == ("b",)]
    assert asked == [0, RETRY_HEARTBEATS, 2 * RETRY_HEARTBEATS, 3 * RETRY_HEARTBEATS]


def test_the_first_plan_does_not_wait_for_links_that_there_are_not(reach):
    for peer, others in (("a", "c"), ("b", "c"), ("c", "ab")):
        reach.note(peer, [LinkReport(peer=o, round_trip_s=0.1, bytes_per_s=1e6, num_probes=1) for o in others], 0.0)
    assert not reach.is_enough(["a", "b", "c"], 0.0)
    lose(reach)
    assert reach.is_enough(["a", "b", "c"], SOON)


# --- who coordinates ---


@pytest.fixture
def view(make_plan, make_heartbeat):
    """Six members that have all been heard, and their plan."""
    live = make_plan([["a", "b", "c"], ["d", "e", "f"]], coordinator="a").plan
    view = ClusterView("run", RunSpec(swarm=SwarmSpec(stages=2, heartbeat_s=1.0)))
    view.obey(live, 0.0)
    view.begin_term(live, 0.0, continuing=False, silent=None)
    for name in "abcdef":
        view.hear(name, make_heartbeat(name), 0.0)
    return view, live


def test_whom_members_cannot_reach_comes_last_and_the_best_one_where_nobody_is_reached_by_all(view):
    view, live = view
    order = heirs(view, live, SOON)
    first, second, *rest = order
    lose(view.links, first, second)
    lose(view.links, first, rest[0])
    assert heirs(view, live, SOON) == [*rest[1:], second, rest[0], first]
    for one, other in zip(rest[1::2], rest[2::2], strict=False):
        lose(view.links, one, other)
    assert set(heirs(view, live, SOON)) == set(order), "nobody is barred"


def test_a_liar_bars_nobody_from_the_role(view):
    view, live = view
    order = heirs(view, live, SOON)
    view.links.note(order[3], [fails(peer) for peer in order if peer != order[3]], 0.0)
    assert heirs(view, live, SOON) == order


def test_unreachable_pairs_are_handed_over(view, make_plan):
    view, live = view
    lose(view.links, "b", "e")
    signed = make_plan([["a", "b", "c"], ["d", "e", "f"]], coordinator="a")
    heir = ClusterView("run", view.spec)
    heir.obey(live, 0.0)
    heir.inherit(view.hand_over(signed, SOON))
    heir.begin_term(live, 100.0, continuing=False, silent=None)
    assert heir.links.pairs(100.0) == {("b", "e")}
