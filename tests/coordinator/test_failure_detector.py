import pytest

from shoal.coordinator.coordination_events import Ask, LogReason
from shoal.coordinator.failure_detector import (
    BACKING_HEARTBEATS,
    CLOSE_FLOOR_HEARTBEATS,
    PING_HEARTBEATS,
    RETURN_S,
    ROLL_CALL_HEARTBEATS,
    TOGETHER_HEARTBEATS,
    CoordinatorWatch,
    FailureDetector,
)
from shoal.coordinator.roster import FLOOR_HEARTBEATS, Roster
from shoal.protocol.messages import Ping

GROUPS = [["a", "d"], ["b", "e"], ["c", "f"]]
PEERS = "abcdef"
BEGIN_S = 20.0


@pytest.fixture
def plan(make_plan):
    return make_plan(GROUPS, coordinator="a").plan


@pytest.fixture
def roster(make_heartbeat):
    """Everyone was heard every second until `BEGIN_S`."""
    roster = Roster(1.0)
    for second in range(int(BEGIN_S) + 1):
        for peer in PEERS:
            roster.heard(peer, make_heartbeat(peer), float(second))
    return roster


@pytest.fixture
def suspects(roster):
    return FailureDetector(me="a", roster=roster)


def asked(commands):
    return [command.peer for command in commands if command == Ask(peer=command.peer, message=Ping())]


def notes(commands):
    return [command.text for command in commands if isinstance(command, LogReason)]


def hear(roster, make_heartbeat, peers, now_s):
    for peer in peers:
        roster.heard(peer, make_heartbeat(peer), now_s)


def test_nobody_on_time_is_asked(suspects, roster, plan):
    assert suspects.look(plan, BEGIN_S + 1.05) == []


def test_whose_heartbeat_is_late_is_asked_again_and_again(suspects, roster, plan, make_heartbeat):
    hear(roster, make_heartbeat, "abcde", BEGIN_S + 1)
    pinged = [tick for tick in range(32) if asked(suspects.look(plan, BEGIN_S + 1.11 + tick / 32)) == ["f"]]
    assert pinged == [0, 8, 16, 24]


def test_two_refusals_in_a_row_and_it_is_out(suspects, roster, plan, make_heartbeat):
    hear(roster, make_heartbeat, "abcde", BEGIN_S + 1)
    now_s = BEGIN_S + 1.11
    suspects.look(plan, now_s)
    assert suspects.refused("f", plan, irreplaceable=False, took_s=0.04, now_s=now_s + 0.04) == []
    called = asked(suspects.look(plan, now_s + 0.05))
    assert sorted(called) == list("bcde"), "who else died with it?"
    assert suspects.refused("f", plan, irreplaceable=False, took_s=0.5, now_s=now_s + 0.06) == [], (
        "the same piece of news"
    )
    assert asked(suspects.look(plan, now_s + 0.12)) == ["f"]
    assert "is gone" in notes(suspects.refused("f", plan, irreplaceable=False, took_s=0.04, now_s=now_s + 0.16))[0]
    assert roster.is_gone("f", now_s + 0.16)


def refuse(suspects, roster, plan, *, until_s, awaited=()):
    """Every ping to f is refused after 40 ms. Returns: when each was sent."""
    sent, now_s = [], BEGIN_S
    while now_s < until_s:
        if "f" in asked(suspects.look(plan, now_s, awaited=awaited)):
            sent.append(now_s - BEGIN_S)
            suspects.refused("f", plan, irreplaceable=True, took_s=0.04, now_s=now_s + 0.04)
        now_s += 1 / 16
    return sent


def test_who_alone_holds_a_state_is_given_time_to_come_back(suspects, roster, plan, make_heartbeat):
    suspects.begin(("f",), BEGIN_S)
    sent = refuse(suspects, roster, plan, until_s=BEGIN_S + 2.8)
    assert not roster.is_gone("f", BEGIN_S + 2.8)
    assert len(sent) > 8, "it is asked all the time"
    assert not suspects.is_settled(plan, BEGIN_S + 2.8), "and nobody is moved meanwhile"
    hear(roster, make_heartbeat, "f", BEGIN_S + 2.9)
    suspects.heard("f")
    assert asked(suspects.look(plan, BEGIN_S + 3.0)) == []
    assert suspects.is_settled(plan, BEGIN_S + 3.0)


def test_and_then_it_is_out_too(suspects, roster, plan):
    suspects.begin(("f",), BEGIN_S)
    refuse(suspects, roster, plan, until_s=BEGIN_S + RETURN_S + 0.4)
    assert roster.is_gone("f", BEGIN_S + RETURN_S + 0.4)


def test_whose_silence_ends_before_its_time_to_come_back_is_known_to_be_dead_all_the_same(suspects, roster, plan):
    suspects.begin(("f",), BEGIN_S)
    sent = refuse(suspects, roster, plan, until_s=BEGIN_S + RETURN_S + 0.4)
    assert roster.presences["f"].dead, "else the others wait for it to return"
    assert suspects.is_settled(plan, BEGIN_S + RETURN_S + TOGETHER_HEARTBEATS)
    assert not asked(suspects.look(plan, BEGIN_S + RETURN_S + 1.0)).count("f"), sent


def test_who_is_out_and_waited_for_is_asked_until_it_refuses_us(suspects, roster, plan):
    """Its neighbours could not reach it sooner than we had asked twice."""
    roster.lose("f")
    now_s, sent = BEGIN_S, 0
    while now_s < BEGIN_S + 5.0:
        assert not roster.presences["f"].dead
        sent += "f" in asked(suspects.look(plan, now_s, awaited={"f"}))
        now_s += 1 / 16
    assert sent > 15, "nothing but silence"
    while now_s < BEGIN_S + 6.0 + RETURN_S:
        if "f" in asked(suspects.look(plan, now_s, awaited={"f"})):
            suspects.refused("f", plan, irreplaceable=True, took_s=0.04, now_s=now_s + 0.04)
        now_s += 1 / 16
    assert roster.presences["f"].dead
    assert "f" not in asked(suspects.look(plan, now_s)), "and nobody waits any more"


def test_who_is_known_to_be_dead_is_asked_no_more_though_the_policy_still_waits_for_it(suspects, roster, plan):
    """The policy drops it from those that it waits for with its next plan, and no plan is made while a member has time
    to come back."""
    roster.lose("f", dead=True)
    assert refuse(suspects, roster, plan, until_s=BEGIN_S + 1.0, awaited={"f"}) == []
    assert suspects.is_settled(plan, BEGIN_S + 1.0)


def test_a_report_of_who_is_known_to_be_dead_gives_it_no_other_time_to_come_back(suspects, roster, plan):
    roster.lose("f", dead=True)
    suspects.report("e", ["f"], plan, BEGIN_S)
    for now_s in (BEGIN_S + 0.1, BEGIN_S + 0.3):
        suspects.refused("f", plan, irreplaceable=True, took_s=0.04, now_s=now_s)
    assert suspects.is_settled(plan, BEGIN_S + TOGETHER_HEARTBEATS + 0.3)


def test_an_answer_between_two_refusals_clears_it(suspects, roster, plan):
    suspects.begin(("f",), BEGIN_S)
    suspects.look(plan, BEGIN_S)
    suspects.refused("f", plan, irreplaceable=False, took_s=0.04, now_s=BEGIN_S + 0.04)
    suspects.answered("f", BEGIN_S + 0.2)
    suspects.refused("f", plan, irreplaceable=False, took_s=0.04, now_s=BEGIN_S + 0.3)
    assert not roster.is_gone("f", BEGIN_S + 0.3)


def test_who_answers_pings_is_never_out_however_slow(suspects, roster, plan, make_heartbeat):
    now_s = BEGIN_S
    while now_s < BEGIN_S + 60:
        hear(roster, make_heartbeat, "abcde", now_s)
        for peer in asked(suspects.look(plan, now_s)):
            suspects.answered(peer, now_s + 0.04)
        assert "f" in roster.alive(now_s)
        now_s += 0.25


def test_silence_alone_needs_the_patience(suspects, roster, plan, make_heartbeat):
    out_s = None
    for tick in range(64):
        now_s = BEGIN_S + tick / 16
        hear(roster, make_heartbeat, "abcde", now_s)
        suspects.look(plan, now_s)
        if out_s is None and roster.is_gone("f", now_s):
            out_s = now_s
    assert out_s == pytest.approx(BEGIN_S + FLOOR_HEARTBEATS, abs=0.1)


def test_a_report_makes_look_at_once(suspects, roster, plan):
    suspects.report("b", ("f",), plan, BEGIN_S)
    assert asked(suspects.look(plan, BEGIN_S)) == ["f"]


def test_who_is_reported_and_answers_stays_and_the_link_is_named(suspects, roster, plan):
    suspects.report("b", ("f",), plan, BEGIN_S)
    suspects.look(plan, BEGIN_S)
    (note,) = notes(suspects.answered("f", BEGIN_S + 0.04))
    assert note == "f answers: only its links to b are broken"
    assert not roster.is_gone("f", BEGIN_S + 0.04)


@pytest.mark.parametrize(
    ("reporters", "out"),
    [("be", True), ("b", False), ("bb", False), ("ad", False)],
    ids=["two neighbours", "one", "one twice", "two who do not work with it"],
)
def test_two_neighbours_and_our_own_ping_need_half_the_patience(suspects, roster, plan, make_heartbeat, reporters, out):
    for reporter in reporters:
        suspects.report(reporter, ("f",), plan, BEGIN_S)
    suspects.look(plan, BEGIN_S)
    for tick in range(1, 28):
        now_s = BEGIN_S + tick / 16
        hear(roster, make_heartbeat, "abcde", now_s)
        suspects.look(plan, now_s)
    assert roster.is_gone("f", now_s) == out


def test_strangers_reports_and_reports_of_strangers_are_nothing(suspects, roster, plan):
    suspects.report("z", ("f",), plan, BEGIN_S)
    suspects.report("b", ("z", "b", "a"), plan, BEGIN_S)
    assert suspects.look(plan, BEGIN_S) == []


def test_a_heartbeat_ends_the_matter(suspects, roster, plan):
    suspects.report("b", ("f",), plan, BEGIN_S)
    suspects.heard("f")
    assert suspects.look(plan, BEGIN_S + 0.1) == []


def test_a_death_waits_for_those_that_may_have_died_with_it(suspects, roster, plan, make_heartbeat):
    assert suspects.is_settled(plan, BEGIN_S)
    suspects.begin("ef", BEGIN_S)
    suspects.look(plan, BEGIN_S)
    for peer in "ef":
        suspects.refused(peer, plan, irreplaceable=False, took_s=0.04, now_s=BEGIN_S + 0.04)
    suspects.look(plan, BEGIN_S + 0.12)
    for peer in "bcd":
        suspects.answered(peer, BEGIN_S + 0.1)
    suspects.refused("f", plan, irreplaceable=False, took_s=0.04, now_s=BEGIN_S + 0.16)
    assert not suspects.is_settled(plan, BEGIN_S + 0.16)
    suspects.refused("e", plan, irreplaceable=False, took_s=0.04, now_s=BEGIN_S + 0.18)
    assert suspects.is_settled(plan, BEGIN_S + 0.18)


def test_a_death_does_not_wait_long(suspects, roster, plan):
    suspects.begin("ef", BEGIN_S)
    suspects.look(plan, BEGIN_S)
    for took_s, now_s in ((0.04, BEGIN_S + 0.04), (0.04, BEGIN_S + 0.16)):
        suspects.refused("f", plan, irreplaceable=False, took_s=took_s, now_s=now_s)
    assert not suspects.is_settled(plan, BEGIN_S + 0.16)
    called_s = BEGIN_S + 0.04 + ROLL_CALL_HEARTBEATS + 0.01
    assert suspects.is_settled(plan, called_s), "those who were called up had their time"
    assert called_s < BEGIN_S + 0.16 + TOGETHER_HEARTBEATS


def test_whoever_sends_other_things_is_not_counted_out_for_late_heartbeats(suspects, roster, plan, make_heartbeat):
    for tick in range(40):
        now_s = BEGIN_S + tick * 0.5
        hear(roster, make_heartbeat, "abcd", now_s)
        roster.heard_otherwise("e", now_s)
        suspects.look(plan, now_s)
    assert not roster.is_gone("e", now_s)
    assert roster.is_gone("f", now_s)


def test_what_comes_late_of_a_peer_that_is_gone_does_not_bring_it_back(roster):
    now_s = BEGIN_S + 100.0
    assert roster.is_gone("f", now_s)
    roster.heard_otherwise("f", now_s)
    assert roster.is_gone("f", now_s)
    roster.lose("e")
    roster.heard_otherwise("e", BEGIN_S)
    assert roster.is_gone("e", BEGIN_S)


# --- a member watches the coordinator ---


@pytest.fixture
def watch():
    return CoordinatorWatch(heartbeat_s=1.0, now_s=0.0)


def listen(watch, *, until_s, every_s=1.0):
    """Answers to heartbeats. Returns: when the last came."""
    now_s = 0.0
    while now_s < until_s:
        now_s += every_s
        watch.heard(0.0, now_s)
    return now_s


def ping(watch, *, begin_s, until_s, answered=lambda now_s: True, took_s=0.0):
    """As whoever is next in turn, from tick to tick. Returns: when it pinged."""
    pinged, now_s = [], begin_s
    while now_s < until_s:
        watch.keep_close(True, now_s)
        if watch.takes_ping(now_s):
            pinged.append(now_s)
            if answered(now_s):
                watch.answered(took_s, now_s + took_s)
        now_s += 1 / 16
    return pinged


def test_silence_is_counted_from_the_coordinators_last_answer(watch):
    last_s = listen(watch, until_s=9.0)
    assert watch.suspect_at_s == pytest.approx(last_s + FLOOR_HEARTBEATS, abs=0.01)


def test_the_coordinator_is_backed_until_its_next_answer_is_late(watch):
    last_s = listen(watch, until_s=30.0)
    assert watch.heard_lately(last_s + BACKING_HEARTBEATS - 0.01)
    assert not watch.heard_lately(last_s + BACKING_HEARTBEATS)


def test_whoever_has_seen_it_late_backs_it_for_longer(watch):
    last_s = listen(watch, until_s=30.0)
    watch.heard(0.0, last_s + 2.5)
    assert watch.heard_lately(last_s + 2.5 + 2.0)


def test_whoever_is_next_pings_and_suspects_sooner(watch):
    pinged = ping(watch, begin_s=0.0, until_s=20.0)
    assert len(pinged) == pytest.approx(20 / PING_HEARTBEATS, abs=2)
    assert watch.suspect_at_s == pytest.approx(pinged[-1] + CLOSE_FLOOR_HEARTBEATS, abs=0.01)


def test_an_answer_under_way_is_waited_for(watch):
    pinged = ping(watch, begin_s=0.0, until_s=20.0, took_s=0.8)
    last_s = pinged[-1] + 0.8
    assert watch.suspect_at_s == pytest.approx(last_s + CLOSE_FLOOR_HEARTBEATS + 0.8, abs=0.05)


def test_stalls_that_come_back_are_borne(watch):
    ping(watch, begin_s=0.0, until_s=120.0, answered=lambda now_s: now_s % 30 > 2)
    last_s = 120.0
    assert watch.suspect_at_s > last_s + 2.0


def test_a_coordinator_that_was_wrongly_replaced_teaches_patience(watch):
    ping(watch, begin_s=0.0, until_s=20.0)
    watch.obeys(replaced="owner", now_s=22.0)
    before_s = watch.suspect_at_s
    watch.keep_close(True, 22.0)
    watch.was_wronged("owner", 23.0)
    assert watch.suspect_at_s > before_s + 1.0


def test_one_refusal_may_be_an_accident_and_two_are_not(watch):
    ping(watch, begin_s=0.0, until_s=5.0)
    watch.refused(0.04, 5.0)
    assert watch.suspect_at_s > 5.0
    assert not watch.takes_ping(5.05)
    assert watch.takes_ping(5.1), "and asks again soon"
    watch.refused(0.3, 5.17)
    assert watch.suspect_at_s > 5.17, "that one had left before the first came back"
    watch.refused(0.04, 5.2)
    assert watch.suspect_at_s == 5.2
    assert not watch.heard_lately(5.2)
    watch.answered(0.04, 5.5)
    assert watch.suspect_at_s > 6.0


def test_an_alarm_makes_look_for_a_while(watch):
    listen(watch, until_s=5.0)
    assert not watch.takes_ping(5.0)
    watch.alarm(5.0)
    assert watch.takes_ping(5.0)
    watch.alarm(5.1)
    assert not watch.takes_ping(5.1)
    assert watch.takes_ping(5.3)
    assert not watch.takes_ping(9.0)
