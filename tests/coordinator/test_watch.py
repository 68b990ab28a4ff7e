import pytest

from shoal.coordinator.roster import FLOOR_HEARTBEATS
from shoal.coordinator.watch import CoordinatorWatch
from shoal.protocol.messages import HeartbeatReply, PlanHead


@pytest.fixture
def watch():
    return CoordinatorWatch(owner="owner", heartbeat_s=1.0, now_s=0.0)


@pytest.fixture
def plan(make_plan):
    return make_plan([["owner"], ["b"], ["c"]], coordinator="owner").plan


def head(coordinator, term, sequence):
    return PlanHead(term=term, sequence=sequence, digest="", coordinator=coordinator, addresses=())


def reply(coordinator, *, leads, term=1):
    return HeartbeatReply(coordinator=coordinator, term=term, is_coordinator=leads)


def test_before_any_plan_everyone_reports_to_the_owner(watch):
    assert watch.target(None) == "owner"


def test_a_newcomer_reports_to_whom_the_directory_names(watch):
    assert watch.found(head("c", 7, 9), None, me="new")
    assert watch.target(None) == "c"
    assert watch.run_exists


def test_an_older_head_is_no_news(watch, plan):
    assert not watch.found(head("c", 1, 1), plan, me="b")
    assert watch.found(head("c", 2, 2), plan, me="b")
    assert not watch.found(head("b", 2, 1), plan, me="b")
    assert watch.target(plan) == "c"


def test_who_is_not_the_coordinator_names_who_is(watch, plan):
    watch.replied("owner", reply("c", leads=False, term=2), plan, me="b", now_s=1.0)
    assert watch.target(plan) == "c"


def test_a_plan_ends_the_hint(watch, plan, make_plan):
    watch.found(head("c", 2, 2), plan, me="b")
    newer = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2)).plan
    watch.obeys(newer, new_term=True, now_s=5.0)
    assert not watch.run_exists
    assert watch.target(newer) == "c"


def test_silence_is_counted_from_the_coordinators_last_answer(watch, plan):
    for now_s in range(1, 10):
        watch.replied("owner", reply("owner", leads=True), plan, me="b", now_s=float(now_s))
    watch.replied("b", reply("owner", leads=True), plan, me="c", now_s=20.0)
    assert watch.suspect_at_s == pytest.approx(9.0 + FLOOR_HEARTBEATS)
    assert watch.heard_lately(9.0 + FLOOR_HEARTBEATS / 2 - 0.1)
    assert not watch.heard_lately(9.0 + FLOOR_HEARTBEATS / 2)
