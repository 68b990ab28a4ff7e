"""When a coordinator searches for a better layout, and what becomes of what is found."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.coordinator.allocate.interface import Layout, MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.measured import MeasuredNetwork
from shoal.coordinator.search_schedule import (
    AFRESH_TERMS,
    FIRST_PATIENCE_S,
    LOOK_HEARTBEATS,
    REST_HEARTBEATS,
    SETTLE_HEARTBEATS,
    SearchSchedule,
    has_drifted,
)
from shoal.protocol.identity import PeerID

GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
SWARM = tuple("abcdef")
SETTLED = SETTLE_HEARTBEATS + 1.0


def snapshot_of(*, speed=1e12, rate=1e7, latency_s=0.05, known=4):
    """Everything is alike; the first `known` peers have measured each other."""
    peers = tuple(
        MeasuredPeer(peer=PeerID(name), flop_per_s=speed, upload_bytes_per_s=rate, memory_bytes=1 << 30, has_data=True)
        for name in SWARM
    )
    here = np.where(np.arange(len(SWARM)) < known, 1.0, np.nan)
    between = here[:, None] * here[None, :]
    return SwarmSnapshot(
        peers=peers,
        layer_costs=(1.0,) * 6,
        num_stages=3,
        network=MeasuredNetwork(latency_s=latency_s * between, bytes_per_s=rate * between, is_certain=between > 0.0),
    )


@pytest.fixture
def live(make_plan):
    return make_plan(GROUPS, coordinator="a", not_started=False).plan


@pytest.fixture
def better(make_plan):
    plan = make_plan([["a", "d", "e"], ["b"], ["c", "f"]], coordinator="a").plan
    return Layout(stages=plan.stages, spares=(), reason="search")


@pytest.fixture
def schedule(live):
    schedule = SearchSchedule(1.0, enabled=True)
    schedule.begin_term(live, 0.0, searched=False)
    return schedule


def look(schedule, plan, now_s, *, snapshot=None, swarm=SWARM):
    if not schedule.is_due(plan, swarm, now_s):
        return None
    return schedule.begin(snapshot or snapshot_of(), plan, swarm, now_s, seed=1)


def test_a_search_comes_behind_a_change_and_only_once(schedule, live):
    assert look(schedule, live, 0.0) is None
    assert look(schedule, live, SETTLE_HEARTBEATS - 0.1) is None
    job = look(schedule, live, SETTLED)
    assert job is not None
    assert look(schedule, live, SETTLED + 1000.0) is None, "it is still running"
    assert schedule.returned(job, None)
    assert all(look(schedule, live, SETTLED + second) is None for second in range(10_000))


def test_a_pace_that_is_off_brings_a_search_though_no_figure_has_drifted(schedule, live):
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None)
    at_s = SETTLED + SETTLE_HEARTBEATS
    assert not schedule.is_due(live, SWARM, at_s - 0.1, is_off=True), "the last search has only just ended"
    assert schedule.is_due(live, SWARM, at_s, is_off=True)
    assert schedule.begin(snapshot_of(), live, SWARM, at_s, seed=1, is_off=True) is not None


def test_a_search_that_broke_down_is_not_repeated_for_the_same_plan_and_swarm(schedule, live):
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None, is_bug=True)
    for now_s in np.arange(SETTLED, SETTLED + 1000.0):
        if schedule.is_due(live, SWARM, now_s, is_off=True):
            assert schedule.begin(snapshot_of(speed=3e10), live, SWARM, now_s, seed=1, is_off=True) is None
    assert schedule.has_searched(live, SWARM), "and the next coordinator is told so"
    other = (*SWARM, "a newcomer")
    look(schedule, live, 2000.0, swarm=other)
    assert look(schedule, live, 3000.0, swarm=other) is not None


def test_an_heir_searches_at_once_what_is_off(live):
    schedule = SearchSchedule(1.0, enabled=True)
    schedule.begin_term(live, 0.0, searched=True)
    assert not schedule.is_due(live, SWARM, 1.0, is_off=True), "it has to hear everybody first"
    assert schedule.is_due(live, SWARM, SETTLED, is_off=True)
    assert schedule.begin(snapshot_of(), live, SWARM, SETTLED, seed=1, is_off=True) is not None


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
        schedule.begin_term(live, SETTLED, searched=False)
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
    gone_s = SETTLED + SETTLE_HEARTBEATS
    job = look(schedule, without_f, gone_s, swarm=SWARM[:-1])
    assert job is not None
    schedule.returned(job, None)
    back_s = gone_s + SETTLE_HEARTBEATS
    assert look(schedule, live, back_s) is None
    assert look(schedule, live, back_s + SETTLE_HEARTBEATS) is None, "who comes has time, and so have we"


def test_whom_a_dead_coordinator_leaves_searches_at_once_without_it(schedule, live, make_plan):
    schedule.begin_term(live, SETTLED, searched=False)
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
    assert min(np.diff(begun)) >= SETTLE_HEARTBEATS


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


def test_a_drift_is_a_reason_and_noise_is_none(schedule, live):
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None)
    rested_s = SETTLED + REST_HEARTBEATS + 1.0
    assert look(schedule, live, rested_s, snapshot=snapshot_of(rate=1.2e7, speed=0.9e12)) is None
    assert look(schedule, live, rested_s + 1.0, snapshot=snapshot_of(rate=1e6)) is None, "it has just looked"
    assert look(schedule, live, rested_s + LOOK_HEARTBEATS, snapshot=snapshot_of(rate=1e6)) is not None


@pytest.mark.parametrize(
    ("after", "drifts"),
    [
        ({}, False),
        ({"speed": 1.2e12, "rate": 1.4e7, "latency_s": 0.07}, False),
        ({"speed": 1.4e12}, True),
        ({"rate": 5e6}, True),
        ({"latency_s": 0.1}, True),
        ({"known": 5}, True),
        ({"known": 3}, False),
    ],
)
def test_what_counts_as_a_drift(after, drifts):
    assert has_drifted(snapshot_of(), snapshot_of(**after)) is drifts


def test_milliseconds_are_no_drift():
    assert not has_drifted(snapshot_of(latency_s=0.001), snapshot_of(latency_s=0.004))


def test_a_successor_searches_only_what_its_predecessor_has_not(schedule, live, make_plan):
    assert not schedule.has_searched(live, SWARM)
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None)
    assert schedule.has_searched(live, SWARM)

    def searches(plan, *, searched):
        heir = SearchSchedule(1.0, enabled=True)
        heir.begin_term(plan, 0.0, searched=searched)
        found = [second for second in range(60) if look(heir, plan, float(second))]
        assert heir.has_searched(plan, SWARM) is (searched and not found)
        return bool(found)

    second = make_plan(GROUPS, coordinator="b", order=(2, 2), not_started=False).plan
    assert not searches(second, searched=True)
    assert searches(second, searched=False)
    assert searches(msgspec.structs.replace(second, term=AFRESH_TERMS), searched=True)


def test_the_first_plan_waits_for_its_search_but_not_forever(better):
    schedule = SearchSchedule(1.0, enabled=True)
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
    schedule = SearchSchedule(1.0, enabled=True)
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
    assert not SearchSchedule(1.0, enabled=False).awaits_first(SWARM, 0.0)


def test_a_snapshot_with_other_peers_is_never_compared(schedule, live):
    """Searches are told apart by the swarm before figures are compared, which need the same peers."""
    look(schedule, live, 0.0)
    schedule.returned(look(schedule, live, SETTLED), None)
    fewer = replace(snapshot_of(), peers=snapshot_of().peers[:-1])
    swarm = SWARM[:-1]
    look(schedule, live, 100.0, snapshot=fewer, swarm=swarm)
    assert look(schedule, live, 200.0, snapshot=fewer, swarm=swarm) is not None


@pytest.mark.parametrize(("num_peers", "heartbeats"), [(1, 10.0), (8, 10.0), (24, 18.0), (64, 30.0), (1000, 30.0)])
def test_more_peers_have_longer_to_measure_their_links_before_the_first_plan(num_peers, heartbeats):
    schedule = SearchSchedule(2.0, enabled=True)
    assert schedule.awaits_links(num_peers, 5.0)
    assert schedule.awaits_links(num_peers, 4.9 + 2.0 * heartbeats)
    assert not schedule.awaits_links(num_peers, 5.0 + 2.0 * heartbeats)
