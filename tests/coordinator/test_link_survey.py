"""Whom the coordinator asks to measure which link."""

from itertools import pairwise

import pytest

from shoal.coordinator.link_survey import (
    APART_HEARTBEATS,
    CONFIRM_HEARTBEATS,
    DOUBT_HEARTBEATS,
    IN_USE_STALE_S,
    PARTNERS_FIRST,
    STALE_S,
    SUSPECT_PER_HEARTBEAT,
    UNANSWERED_HEARTBEATS,
    LinkSurvey,
)
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PROBES_PER_REPLY_MAX
from shoal.protocol.messages import LinkReport

PEERS = tuple(PeerID(f"p{number:02}") for number in range(20))
GROUPS = [list(PEERS[:3]), list(PEERS[3:6])]


@pytest.fixture
def roster():
    return Roster(1.0)


@pytest.fixture
def survey(roster):
    return LinkSurvey(roster)


def answer(survey, peer, others, *, num_probes=1):
    survey.note(peer, [LinkReport(other, 0.02, 1e7, num_probes=num_probes) for other in others], 0.0)


def test_before_the_first_plan_everybody_measures_until_a_few_links_of_each_are_known(survey):
    beats = 0
    while not survey.is_enough(PEERS, float(beats)):
        asked = {peer: survey.choose(peer, PEERS, float(beats)) for peer in PEERS}
        targets = [other for others in asked.values() for other in others]
        assert all(len(others) == PROBES_PER_REPLY_MAX and peer not in others for peer, others in asked.items())
        assert max(map(targets.count, PEERS)) <= 2 * PROBES_PER_REPLY_MAX, "no line answers many probes at once"
        for peer, others in asked.items():
            answer(survey, peer, others)
        beats += 1
    assert beats == PARTNERS_FIRST // PROBES_PER_REPLY_MAX


def test_of_a_small_swarm_every_link_is_measured(survey):
    for peer in PEERS[:3]:
        assert not survey.is_enough(PEERS[:3], 0.0)
        answer(survey, peer, survey.choose(peer, PEERS[:3], 0.0))
    assert survey.is_enough(PEERS[:3], 0.0)
    assert survey.is_enough(PEERS[:1], 0.0), "a host that is alone has no links"


def test_a_link_is_asked_for_again_if_nothing_was_told_of_it(survey):
    asked = survey.choose(PEERS[0], PEERS[:4], 0.0)
    assert len(asked) == 3
    assert survey.choose(PEERS[0], PEERS[:4], UNANSWERED_HEARTBEATS - 1.0) == ()
    assert set(survey.choose(PEERS[0], PEERS[:4], UNANSWERED_HEARTBEATS)) == set(asked)


def test_peers_of_one_machine_take_turns_and_know_for_each_other(roster, survey):
    for number, peer in enumerate(PEERS[:12]):
        roster.of(peer).machine = f"server {number // 4}"
    inside, leaving = [], []
    for beat in range(20):
        now_s = beat / 4.0
        peer = PEERS[beat % 4]
        if survey.is_enough(PEERS[:12], now_s):
            break
        for others in range(4, 12):
            answer(survey, PEERS[others], [p for p in PEERS[:12] if p != PEERS[others]])
        asked = survey.choose(peer, PEERS[:12], now_s)
        inside += [(peer, other) for other in asked if other in PEERS[:4]]
        if outside := [other for other in asked if other not in PEERS[:4]]:
            leaving.append((now_s, peer, outside))
        answer(survey, peer, asked)
    assert sorted(peer for peer, _ in inside) == list(PEERS[:4]), "one link each inside"
    assert all(later - sooner >= 1.0 for (sooner, *_), (later, *_) in pairwise(leaving))
    assert all(before != after for (_, before, _), (_, after, _) in pairwise(leaving)), "each in turn"
    assert sorted(other for _, _, outside in leaving for other in outside) == list(PEERS[4:12]), "none is asked twice"


def test_of_several_links_those_to_different_machines_come_first(roster, survey):
    for number, peer in enumerate(PEERS):
        roster.of(peer).machine = f"server {number // 5}"
    asked = survey.choose(PEERS[0], PEERS, 0.0)
    assert [PEERS.index(other) // 5 for other in asked] == [0, 1, 2, 3]


def test_what_frames_have_shown_is_no_probe(survey):
    answer(survey, PEERS[0], PEERS[1:3], num_probes=0)
    assert set(survey.choose(PEERS[0], PEERS[:3], 0.0)) == set(PEERS[1:3])


def test_while_the_run_trains_links_in_use_come_first_and_one_at_a_time(survey, make_plan):
    plan = make_plan(GROUPS, coordinator=PEERS[0]).plan
    told = []
    for second in range(int(6 * APART_HEARTBEATS)):
        for peer in survey.choose_one(PEERS[0], plan, float(second)):
            told.append((second, peer))
            answer(survey, PEERS[0], [peer])
    assert [at for at, _ in told] == [int(APART_HEARTBEATS) * turn for turn in range(len(told))]
    num_first = int(IN_USE_STALE_S / APART_HEARTBEATS)
    assert len({peer for _, peer in told[:num_first]}) == num_first, "each in turn"


def test_a_known_link_is_measured_again_some_minutes_later(survey, make_plan):
    """The spare at the end is nobody's neighbour."""
    plan = make_plan([[PEERS[0]], [PEERS[1]], [PEERS[2]]], coordinator=PEERS[0]).plan
    for other in PEERS[1:3]:
        answer(survey, PEERS[0], [other])
    asked = [peer for second in range(1, 1000) for peer in survey.choose_one(PEERS[0], plan, float(second))]
    assert asked.count(PEERS[1]) == pytest.approx(1000 / IN_USE_STALE_S, abs=2)
    assert asked.count(PEERS[2]) == pytest.approx(1000 / STALE_S, abs=2)


def test_a_spare_measures_a_link_with_each_heartbeat_until_a_few_are_known(survey, make_plan):
    plan = make_plan(GROUPS, coordinator=PEERS[0], spares=PEERS[6:]).plan
    told = []
    for second in range(4 * PARTNERS_FIRST):
        told += survey.choose_one(PEERS[6], plan, float(second))
        answer(survey, PEERS[6], told[-1:])
    assert len(set(told[:PARTNERS_FIRST])) == PARTNERS_FIRST
    workers = {peer for group in GROUPS for peer in group}
    assert set(told[: len(workers)]) == workers, "those that it would work with come first"
    assert len(told) <= PARTNERS_FIRST + 3, "then as seldom as everybody"


def test_a_member_measures_the_way_to_a_spare_of_which_nobody_has_told(survey, make_plan):
    plan = make_plan(GROUPS, coordinator=PEERS[0], spares=PEERS[6:8]).plan
    answer(survey, PEERS[1], [PEERS[6]])
    assert survey.choose_one(PEERS[0], plan, 0.0) == (PEERS[7],)
    answer(survey, PEERS[0], [PEERS[7]])
    assert set(survey.choose_one(PEERS[2], plan, 0.0)) <= {*GROUPS[0], *GROUPS[1]}


def test_links_in_use_are_measured_far_more_often_while_the_run_is_slower_than_they_explain(survey, make_plan):
    plan = make_plan(GROUPS, coordinator=PEERS[0]).plan
    answer(survey, PEERS[0], [*GROUPS[0][1:], *GROUPS[1]])
    usual, in_doubt = (
        [p for second in range(60) for p in survey.choose_one(PEERS[0], plan, begin_s + second, in_doubt=doubt)]
        for doubt, begin_s in ((False, 0.0), (True, 1000.0))
    )
    assert len(usual) == 60 / APART_HEARTBEATS
    assert len(in_doubt) == 60 / DOUBT_HEARTBEATS
    assert set(in_doubt) == {*GROUPS[0][1:], *GROUPS[1]}


def test_everybody_measures_the_link_towards_a_peer_whose_line_seems_to_have_become_slow(survey, make_plan):
    plan = make_plan(GROUPS, coordinator=PEERS[0]).plan
    slow, *others = PEERS[:6]
    for peer in plan.members:
        answer(survey, peer, [other for other in plan.members if other != peer])
    for other in others[:2]:
        assert not survey.is_confirming(plan.members, 1000.0)
        survey.note(other, [LinkReport(slow, 0.02, 1e6, num_probes=2, has_fallen=True)], 0.0)
    now_s, askers = 1000.0, []
    assert survey.is_confirming(plan.members, now_s)
    for _ in range(2 * SUSPECT_PER_HEARTBEAT):
        asked = [peer for peer in others if survey.choose_one(peer, plan, now_s) == (slow,)]
        assert len(asked) <= 1, "its line answers one after the other"
        askers += asked
        now_s += 1.0 / SUSPECT_PER_HEARTBEAT
    assert sorted(askers) == sorted(others), "each once"
    assert survey.is_confirming(plan.members, now_s), "the last answer is on its way"
    assert not survey.is_confirming(plan.members, now_s + CONFIRM_HEARTBEATS)
