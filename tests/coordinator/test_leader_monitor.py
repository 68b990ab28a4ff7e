import pytest

from shoal.coordinator.leader_monitor import (
    BACKING_HEARTBEATS,
    CLOSE_FLOOR_HEARTBEATS,
    DOUBT_HEARTBEATS,
    DOUBTED_MAX,
    FLOOR_HEARTBEATS,
    GONE_ON_HEARTBEATS,
    HINT_HEARTBEATS,
    PING_HEARTBEATS,
    LeaderMonitor,
)
from shoal.protocol.messages import HeartbeatReply, PlanHead


@pytest.fixture
def watch():
    return LeaderMonitor(owner="owner", heartbeat_s=1.0, now_s=0.0)


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
    assert watch.found(head("c", 7, 9), None, me="new", now_s=0.0)
    assert watch.target(None) == "c"
    assert watch.run_exists(0.0)


def test_an_older_head_is_no_news(watch, plan):
    assert not watch.found(head("c", 1, 1), plan, me="b", now_s=0.0)
    assert watch.found(head("c", 2, 2), plan, me="b", now_s=0.0)
    assert not watch.found(head("b", 2, 1), plan, me="b", now_s=0.0)
    assert watch.target(plan) == "c"


def test_who_is_not_the_coordinator_names_who_is(watch, plan):
    watch.replied("owner", reply("c", leads=False, term=2), plan, me="b", took_s=0.04, now_s=1.0)
    assert watch.target(plan) == "c"


@pytest.mark.parametrize("leads", [True, False])
def test_a_coordinator_that_has_long_named_a_later_plan_is_no_sign_of_ours(watch, plan, leads):
    """It may lead that plan, or have handed the role over."""
    later = reply("owner" if leads else "c", leads=leads, term=2)
    watch.replied("owner", later, plan, me="b", took_s=0.04, now_s=1.0)
    for second in range(2, 1 + int(GONE_ON_HEARTBEATS)):
        watch.replied("c", reply("c", leads=True), plan, me="b", took_s=0.04, now_s=float(second))
        watch.replied("owner", later, plan, me="b", took_s=0.04, now_s=float(second))
        assert not watch.has_gone_on(float(second))
    assert watch.has_gone_on(1.0 + GONE_ON_HEARTBEATS)
    watch.answered("owner", plan, took_s=0.04, now_s=6.0)
    assert watch.has_gone_on(6.0), "its process answers, and says nothing of our plan"
    watch.replied("owner", reply("owner", leads=True), plan, me="b", took_s=0.04, now_s=6.0)
    assert not watch.has_gone_on(6.0)


def test_the_plan_that_follows_ends_the_doubt_of_ours(watch, plan, make_plan):
    watch.replied("owner", reply("c", leads=False, term=2), plan, me="b", took_s=0.04, now_s=1.0)
    newer = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2)).plan
    watch.obeys(newer, new_term=True, replaced=None, now_s=1.1)
    assert not watch.has_gone_on(100.0)


def test_a_plan_ends_the_hint(watch, plan, make_plan):
    watch.found(head("c", 2, 2), plan, me="b", now_s=0.0)
    newer = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2)).plan
    watch.obeys(newer, new_term=True, replaced=None, now_s=5.0)
    assert watch.target(newer) == "c"
    watch.found(None, newer, me="b", now_s=6.0)
    assert not watch.run_exists(6.0)


def test_who_does_not_show_its_plan_in_time_is_doubted_for_a_while(watch, plan):
    late_s = HINT_HEARTBEATS
    watch.found(head("liar", 99, 99), plan, me="b", now_s=0.0)
    watch.found(head("liar", 99, 100), plan, me="b", now_s=late_s - 0.1)
    assert watch.target(plan) == "liar"
    watch.weigh_hint(late_s)
    assert watch.target(plan) == "owner", "and another plan has not given it more time"
    assert not watch.found(head("liar", 99, 101), plan, me="b", now_s=late_s)
    assert watch.found(head("c", 2, 2), plan, me="b", now_s=late_s), "others are believed"
    watch.weigh_hint(2 * late_s)
    again_s = late_s + DOUBT_HEARTBEATS
    watch.weigh_hint(again_s)
    assert watch.found(head("liar", 99, 102), plan, me="b", now_s=again_s), "it may have been out of reach"


def test_two_who_outdo_each_other_gain_no_time(watch, plan):
    watch.found(head("liar", 9, 9), plan, me="b", now_s=0.0)
    assert watch.found(head("other", 10, 10), plan, me="b", now_s=3.0)
    assert not watch.found(head("liar", 11, 11), plan, me="b", now_s=6.0)
    watch.weigh_hint(3.0 + HINT_HEARTBEATS)
    assert watch.target(plan) == "owner"


def test_who_shows_its_plan_is_not_doubted_any_more(watch, plan, make_plan):
    watch.found(head("c", 2, 2), plan, me="b", now_s=0.0)
    watch.weigh_hint(HINT_HEARTBEATS)
    assert "c" in watch.doubted
    newer = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2)).plan
    watch.obeys(newer, new_term=True, replaced=None, now_s=9.0)
    assert watch.found(head("c", 3, 3), newer, me="b", now_s=9.0)


def test_liars_without_number_take_no_room_without_end(watch, plan):
    for number in range(2 * DOUBTED_MAX):
        watch.found(head(f"liar {number}", 9 + number, 9), plan, me="b", now_s=0.0)
    assert len(watch.doubted) == DOUBTED_MAX


def test_the_run_exists_until_the_directory_has_forgotten_it(watch):
    watch.found(head("c", 7, 9), None, me="owner", now_s=0.0)
    watch.weigh_hint(HINT_HEARTBEATS)
    assert watch.target(None) == "owner"
    watch.found(head("c", 7, 9), None, me="owner", now_s=HINT_HEARTBEATS)
    assert watch.run_exists(HINT_HEARTBEATS), "though who has its plan does not answer"
    watch.found(None, None, me="owner", now_s=120.0)
    assert not watch.run_exists(120.0)


def test_a_sleep_of_ours_gives_it_more_time(watch, plan):
    watch.found(head("c", 2, 2), plan, me="b", now_s=0.0)
    watch.excuse(60.0)
    watch.weigh_hint(60.0)
    assert watch.target(plan) == "c"


def listen(watch, plan, *, until_s, every_s=1.0):
    """Answers to heartbeats. Returns: when the last came."""
    now_s = 0.0
    while now_s < until_s:
        now_s += every_s
        watch.replied("owner", reply("owner", leads=True), plan, me="b", took_s=0.0, now_s=now_s)
    return now_s


def ping(watch, plan, *, begin_s, until_s, answered=lambda now_s: True, took_s=0.0):
    """As whoever is next in turn, from tick to tick. Returns: when it pinged."""
    pinged, now_s = [], begin_s
    while now_s < until_s:
        watch.keep_close(True, now_s)
        if watch.takes_ping(now_s):
            pinged.append(now_s)
            if answered(now_s):
                watch.answered("owner", plan, took_s=took_s, now_s=now_s + took_s)
        now_s += 1 / 16
    return pinged


def test_silence_is_counted_from_the_coordinators_last_answer(watch, plan):
    last_s = listen(watch, plan, until_s=9.0)
    watch.replied("b", reply("owner", leads=True), plan, me="c", took_s=0.0, now_s=20.0)
    assert watch.suspect_at_s == pytest.approx(last_s + FLOOR_HEARTBEATS, abs=0.01)


def test_the_coordinator_is_backed_until_its_next_answer_is_late(watch, plan):
    last_s = listen(watch, plan, until_s=30.0)
    assert watch.heard_lately(last_s + BACKING_HEARTBEATS - 0.01)
    assert not watch.heard_lately(last_s + BACKING_HEARTBEATS)


def test_whoever_has_seen_it_late_backs_it_for_longer(watch, plan):
    last_s = listen(watch, plan, until_s=30.0)
    watch.replied("owner", reply("owner", leads=True), plan, me="b", took_s=0.0, now_s=last_s + 2.5)
    assert watch.heard_lately(last_s + 2.5 + 2.0)


def test_whoever_is_next_pings_and_suspects_sooner(watch, plan):
    pinged = ping(watch, plan, begin_s=0.0, until_s=20.0)
    assert len(pinged) == pytest.approx(20 / PING_HEARTBEATS, abs=2)
    assert watch.suspect_at_s == pytest.approx(pinged[-1] + CLOSE_FLOOR_HEARTBEATS, abs=0.01)


def test_an_answer_under_way_is_waited_for(watch, plan):
    pinged = ping(watch, plan, begin_s=0.0, until_s=20.0, took_s=0.8)
    last_s = pinged[-1] + 0.8
    assert watch.suspect_at_s == pytest.approx(last_s + CLOSE_FLOOR_HEARTBEATS + 0.8, abs=0.05)


def test_stalls_that_come_back_are_borne(watch, plan):
    ping(watch, plan, begin_s=0.0, until_s=120.0, answered=lambda now_s: now_s % 30 > 2)
    last_s = 120.0
    assert watch.suspect_at_s > last_s + 2.0


def test_a_coordinator_that_was_wrongly_replaced_teaches_patience(watch, plan, make_plan):
    ping(watch, plan, begin_s=0.0, until_s=20.0)
    newer = make_plan([["owner"], ["b"], ["c"]], coordinator="c", order=(2, 2)).plan
    watch.obeys(newer, new_term=True, replaced="owner", now_s=22.0)
    before_s = watch.suspect_at_s
    watch.keep_close(True, 22.0)
    watch.answered("owner", newer, took_s=3.0, now_s=23.0)
    assert watch.suspect_at_s > before_s + 1.0


def test_one_refusal_may_be_an_accident_and_two_are_not(watch, plan):
    ping(watch, plan, begin_s=0.0, until_s=5.0)
    watch.refused("owner", plan, took_s=0.04, now_s=5.0)
    assert watch.suspect_at_s > 5.0
    assert not watch.takes_ping(5.1)
    assert watch.takes_ping(5.13), "and asks again soon"
    watch.refused("owner", plan, took_s=0.3, now_s=5.17)
    assert watch.suspect_at_s > 5.17, "that one had left before the first came back"
    watch.refused("owner", plan, took_s=0.04, now_s=5.2)
    assert watch.suspect_at_s == 5.2
    assert not watch.heard_lately(5.2)
    watch.answered("owner", plan, took_s=0.04, now_s=5.5)
    assert watch.suspect_at_s > 6.0


def test_refusals_of_others_say_nothing(watch, plan):
    for now_s in (5.0, 6.0):
        watch.refused("c", plan, took_s=0.04, now_s=now_s)
    assert not watch.is_fast_tick(6.0)


def test_an_alarm_makes_look_for_a_while(watch, plan):
    listen(watch, plan, until_s=5.0)
    assert not watch.takes_ping(5.0)
    watch.alarm(5.0)
    assert watch.takes_ping(5.0)
    watch.alarm(5.1)
    assert not watch.takes_ping(5.1)
    assert watch.takes_ping(5.3)
    assert not watch.takes_ping(9.0)
