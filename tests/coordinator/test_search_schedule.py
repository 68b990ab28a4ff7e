"""When a coordinator searches for a better layout, and what becomes of what is found."""

import numpy as np
import pytest

from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, SwarmSnapshot
from shoal.coordinator.search_schedule import (
    FIRST_PATIENCE_S,
    LOSS_HEARTBEATS,
    REST_HEARTBEATS,
    REST_PEERS,
    SETTLE_HEARTBEATS,
    SearchSchedule,
)
from shoal.protocol.identity import PeerID

GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
SWARM = tuple("abcdef")
SETTLED = SETTLE_HEARTBEATS + 1.0


def snapshot_of(num_peers=6):
    peers = tuple(
        MeasuredPeer(
            peer=PeerID(f"p{number:03}"), flop_per_s=1e12, upload_bytes_per_s=1e7, memory_bytes=1 << 30, has_data=True
        )
        for number in range(num_peers)
    )
    return SwarmSnapshot(peers=peers, layer_costs=(1.0,) * 6, num_stages=3)


@pytest.fixture
def live(make_plan):
    return make_plan(GROUPS, coordinator="a", not_started=False).plan


@pytest.fixture
def better(make_plan):
    plan = make_plan([["a", "d", "e"], ["b"], ["c", "f"]], coordinator="a").plan
    return Layout(stages=plan.stages, spares=(), reason="search")


@pytest.fixture
def schedule(live):
    schedule = SearchSchedule(1.0, term_s=60.0, enabled=True)
    schedule.begin_term(live, 0.0)
    return schedule


def look(schedule, plan, now_s, *, snapshot=None, swarm=SWARM):
    if not schedule.is_due(plan, swarm, now_s):
        return None
    return schedule.begin(snapshot or snapshot_of(), plan, swarm, now_s, seed=1)


def test_a_search_follows_a_change_and_is_repeated_at_an_interval(schedule, live):
    assert look(schedule, live, 0.0) is None
    assert look(schedule, live, SETTLE_HEARTBEATS - 0.1) is None
    job = look(schedule, live, SETTLED)
    assert job is not None
    assert look(schedule, live, SETTLED + 1000.0) is None, "it is still running"
    assert schedule.returned(job, None)
    begun = [second for second in range(1, 100) if found_nothing(schedule, live, SETTLED + second)]
    assert begun == [15, 30, 45, 60, 75, 90]


def found_nothing(schedule, live, now_s, **says):
    """True if a search began, which has ended at once."""
    job = look(schedule, live, now_s, **says)
    return job is not None and schedule.returned(job, None)


def test_the_search_for_the_first_plan_does_not_delay_the_next_one(live):
    schedule = SearchSchedule(1.0, term_s=60.0, enabled=True)
    schedule.returned(schedule.begin(snapshot_of(), None, SWARM, 0.0, seed=1), None)
    schedule.begin_term(live, 0.0)
    assert look(schedule, live, 0.0) is None
    assert look(schedule, live, SETTLED) is not None


def test_a_short_term_has_time_for_a_search(live):
    schedule = SearchSchedule(1.0, term_s=6.0, enabled=True)
    schedule.begin_term(live, 0.0)
    assert look(schedule, live, 0.0) is None
    assert look(schedule, live, 3.0) is not None


def test_searches_of_a_large_swarm_are_further_apart(schedule, live):
    look(schedule, live, 0.0)
    large = snapshot_of(3 * REST_PEERS)
    assert found_nothing(schedule, live, SETTLED, snapshot=large)
    assert look(schedule, live, SETTLED + 3 * REST_HEARTBEATS - 0.1, snapshot=large) is None
    assert look(schedule, live, SETTLED + 3 * REST_HEARTBEATS, snapshot=large) is not None


def test_a_search_that_broke_down_is_not_repeated_for_the_same_plan_and_swarm(schedule, live):
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None, is_bug=True)
    assert all(look(schedule, live, SETTLED + second) is None for second in range(1000))
    other = (*SWARM, "a newcomer")
    look(schedule, live, 2000.0, swarm=other)
    assert look(schedule, live, 3000.0, swarm=other) is not None


def test_what_is_found_is_taken_once(schedule, live, better):
    look(schedule, live, 0.0)
    job = look(schedule, live, SETTLED)
    assert schedule.found_for(live, SWARM) is None
    assert schedule.returned(job, better)
    assert schedule.found_for(live, SWARM) == better
    assert schedule.found_for(live, SWARM) is None


@pytest.mark.parametrize("change", ["swarm", "plan", "term"])
def test_what_changes_meanwhile_makes_it_stale(schedule, live, better, make_plan, change):
    look(schedule, live, 0.0)
    job = look(schedule, live, SETTLED)
    swarm = (*SWARM, "g") if change == "swarm" else SWARM
    plan = make_plan([["a"], ["b", "d", "e"], ["c", "f"]], coordinator="a").plan if change == "plan" else live
    if change == "term":
        schedule.begin_term(live, SETTLED)
    assert schedule.returned(job, better) is (change != "term")
    assert schedule.found_for(plan, swarm) is None


def test_a_hand_over_with_the_same_places_makes_nothing_stale(schedule, live, better, make_plan):
    look(schedule, live, 0.0)
    job = look(schedule, live, SETTLED)
    schedule.returned(job, better)
    again = make_plan(GROUPS, coordinator="a", order=(2, 2), not_started=False).plan
    assert schedule.found_for(again, SWARM) == better


def test_when_somebody_is_gone_it_searches_at_once(schedule, live, make_plan):
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None)
    without_f = make_plan([["a", "d"], ["b", "e"], ["c"]], coordinator="a").plan
    gone_s = SETTLED + LOSS_HEARTBEATS
    job = look(schedule, without_f, gone_s, swarm=SWARM[:-1])
    assert job is not None
    schedule.returned(job, None)
    back_s = gone_s + SETTLE_HEARTBEATS
    assert look(schedule, live, back_s) is None
    assert look(schedule, live, back_s + SETTLE_HEARTBEATS - 0.1) is None, "who comes has time, and so have we"
    assert look(schedule, live, back_s + SETTLE_HEARTBEATS) is not None


def test_whom_a_dead_coordinator_leaves_searches_at_once_without_it(schedule, live, make_plan):
    schedule.begin_term(live, SETTLED)
    without_a = make_plan([["d"], ["b", "e"], ["c", "f"]], coordinator="d", order=(2, 2)).plan
    assert look(schedule, without_a, SETTLED + 1.0, swarm=SWARM[1:]) is not None


def test_who_loses_one_after_the_other_rests_in_between(schedule, make_plan):
    begun = []
    for tick in range(100):
        now_s = SETTLED + tick / 4
        spares = tuple(f"g{number}" for number in range(tick, 100))
        plan = make_plan(GROUPS, coordinator="a", spares=spares).plan
        job = look(schedule, plan, now_s, swarm=(*SWARM, *spares))
        if job:
            begun.append(now_s)
            schedule.returned(job, None)
    assert len(begun) >= 2
    assert min(np.diff(begun)) >= LOSS_HEARTBEATS


def test_searches_are_apart_whatever_happens(schedule, live, make_plan):
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None)
    begun = []
    for second in range(300):
        now_s = SETTLED + second
        plan = make_plan([["a", "d"], ["b", "e"], ["c", f"f{second // 20}"]], coordinator="a").plan
        job = look(schedule, plan, now_s)
        if job:
            begun.append(now_s)
            schedule.returned(job, None)
    assert len(begun) >= 5
    assert min(np.diff(begun)) >= REST_HEARTBEATS


def test_the_first_plan_waits_for_its_search_but_not_forever(better):
    schedule = SearchSchedule(1.0, term_s=60.0, enabled=True)
    assert schedule.awaits_first(SWARM, 0.0)
    job = schedule.begin(snapshot_of(), None, SWARM, 0.0, seed=1)
    assert job is not None
    assert schedule.begin(snapshot_of(), None, SWARM, 0.5, seed=1) is None, "it is being searched"
    assert schedule.awaits_first(SWARM, FIRST_PATIENCE_S - 0.1)
    assert not schedule.awaits_first(SWARM, FIRST_PATIENCE_S)
    assert schedule.returned(job, better)
    assert schedule.found_for(None, SWARM) == better
    assert not schedule.awaits_first(SWARM, 1.0)


def test_a_newcomer_before_the_first_plan_begins_its_search_anew(better):
    schedule = SearchSchedule(1.0, term_s=60.0, enabled=True)
    schedule.awaits_first(SWARM, 0.0)
    stale = schedule.begin(snapshot_of(), None, SWARM, 0.0, seed=1)
    more = (*SWARM, "g")
    job = schedule.begin(snapshot_of(), None, more, 1.0, seed=1)
    assert job is not None
    assert not schedule.returned(stale, better)
    assert schedule.awaits_first(more, 2.0)
    assert schedule.returned(job, None)
    assert not schedule.awaits_first(more, 2.0)


def test_without_a_search_nobody_waits():
    assert not SearchSchedule(1.0, term_s=60.0, enabled=False).awaits_first(SWARM, 0.0)


@pytest.mark.parametrize(("num_peers", "heartbeats"), [(1, 10.0), (8, 10.0), (24, 18.0), (64, 30.0), (1000, 30.0)])
def test_more_peers_have_longer_to_measure_their_links_before_the_first_plan(num_peers, heartbeats):
    schedule = SearchSchedule(2.0, term_s=60.0, enabled=True)
    assert schedule.awaits_links(num_peers, 5.0)
    assert schedule.awaits_links(num_peers, 4.9 + 2.0 * heartbeats)
    assert not schedule.awaits_links(num_peers, 5.0 + 2.0 * heartbeats)
