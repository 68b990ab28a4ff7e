import msgspec
import pytest

from shoal.coordinator.roster import FLOOR_HEARTBEATS, MEMORY_HEARTBEATS, Roster
from shoal.protocol.messages import ArrivalStatistics, FetchStatus


@pytest.fixture
def roster():
    return Roster(1.0)


def beat(roster, heartbeat, *, times, every_s=1.0, begin_s=0.0, peer="a"):
    for number in range(times):
        roster.heard(peer, heartbeat, begin_s + number * every_s)
    return begin_s + (times - 1) * every_s


def test_a_peer_is_alive_from_its_first_heartbeat_until_its_silence_is_suspicious(roster, make_heartbeat):
    last_s = beat(roster, make_heartbeat("a"), times=20)
    assert roster.alive(last_s + FLOOR_HEARTBEATS - 0.01) == ("a",)
    assert roster.alive(last_s + FLOOR_HEARTBEATS) == ()


def test_an_irregular_peer_gets_more_time_and_a_dead_one_not_for_ever(roster, make_heartbeat):
    now_s = 0.0
    for number in range(40):
        now_s += 0.5 if number % 2 else 3.5
        roster.heard("a", make_heartbeat("a"), now_s)
    patience_s = roster.presences["a"].arrivals.patience_s
    assert 1.5 * FLOOR_HEARTBEATS < patience_s <= MEMORY_HEARTBEATS / 2
    assert roster.alive(now_s + MEMORY_HEARTBEATS / 2) == ()


def test_one_gap_is_soon_forgotten(make_heartbeat):
    roster = Roster(1.0)
    beat(roster, make_heartbeat("a"), times=20)
    before_s = roster.presences["a"].arrivals.patience_s
    beat(roster, make_heartbeat("a"), times=100, begin_s=500.0)
    assert roster.presences["a"].arrivals.patience_s == pytest.approx(before_s)


def test_a_slower_rhythm_is_learned(make_heartbeat):
    roster = Roster(1.0)
    suspected = []
    for number in range(60):
        now_s = 9.0 * number
        if number:
            suspected.append(roster.alive(now_s) == ())
        roster.heard("a", make_heartbeat("a"), now_s)
    assert suspected[0]
    assert not any(suspected[30:])


def test_who_leaves_is_gone_at_once_and_may_come_back(roster, make_heartbeat):
    beat(roster, make_heartbeat("a"), times=3)
    roster.leave("a")
    assert roster.alive(2.0) == ()
    roster.expect("a", None, 2.0)
    assert roster.alive(2.0) == ()
    roster.heard("a", make_heartbeat("a"), 3.0)
    assert roster.alive(3.0) == ("a",)


def test_only_who_goes_without_a_word_has_vanished(roster, make_heartbeat):
    for peer in "abcd":
        roster.heard(peer, make_heartbeat(peer, draining=peer == "b"), 0.0)
    roster.leave("c")
    roster.lose("d")
    roster.lose("stranger")
    assert [peer for peer in "abcde" if roster.has_vanished(peer, 2.0)] == ["d"]
    assert [peer for peer in "abcde" if roster.has_vanished(peer, 60.0)] == ["a", "d"]
    roster.heard("d", make_heartbeat("d"), 60.0)
    assert not roster.has_vanished("d", 60.0)


def test_the_expected_are_alive_on_credit_and_unmeasured_without_an_advert(roster, make_advert):
    roster.expect("a", None, 0.0)
    roster.expect("b", make_advert("b"), 0.0)
    assert roster.alive(1.0) == ("a", "b")
    assert not any(roster.are_heard([peer]) for peer in "ab")
    assert [peer.peer for peer in roster.measured(1.0)] == ["b"]
    assert roster.alive(FLOOR_HEARTBEATS) == ()


def test_the_doubted_must_be_heard_soon(roster, make_heartbeat):
    roster.expect("a", None, 100.0)
    roster.doubt("a", 100.0)
    assert roster.alive(101.9) == ("a",)
    assert roster.alive(102.0) == ()
    roster.heard("a", make_heartbeat("a"), 101.0)
    assert roster.alive(103.9) == ("a",)


def test_impossible_numbers_are_replaced(roster, make_heartbeat, make_advert):
    liar = make_advert("a", flop_per_s=float("nan"), upload_bytes_per_s=float("inf"), memory_bytes=-5)
    roster.heard("a", make_heartbeat("a", advert=liar), 0.0)
    (peer,) = roster.measured(0.0)
    assert (peer.flop_per_s, peer.upload_bytes_per_s, peer.memory_bytes) == (1.0, 1.0, 0)
    boaster = make_advert("a", flop_per_s=1e300, upload_bytes_per_s=-1.0)
    roster.heard("a", make_heartbeat("a", advert=boaster), 1.0)
    (peer,) = roster.measured(1.0)
    assert (peer.flop_per_s, peer.upload_bytes_per_s) == (1e15, 1.0)


def test_only_a_synced_holder_counts_as_keeping_its_stage(roster, make_heartbeat):
    roster.heard("a", make_heartbeat("a", stage=2, synced=True), 0.0)
    roster.heard("b", make_heartbeat("b", stage=2, synced=False), 0.0)
    assert [peer.synced_stage for peer in roster.measured(0.0)] == [2, None]


def test_a_member_has_the_state_of_its_place_not_of_a_place_before(roster, make_heartbeat, make_plan):
    plan = make_plan([["a", "b"], ["c"]], coordinator="a", order=(1, 7)).plan
    places = {"a": 0, "b": 0, "c": 1}
    since = plan.since_of("a")
    for peer in "abc":
        roster.heard(peer, make_heartbeat(peer, stage=places[peer], synced=True, plan_sequence=since), 0.0)
    assert all(roster.has_state(peer, plan) for peer in "abc")
    # "a" was dropped and taken in again, and does not know it yet: it will fetch the state once it does.
    again = msgspec.structs.replace(plan.stages[0].members[0], since=since + 1)
    later = (msgspec.structs.replace(plan.stages[0], members=(again, plan.stages[0].members[1])), plan.stages[1])
    plan = msgspec.structs.replace(plan, sequence=plan.sequence + 1, stages=later)
    assert [roster.has_state(peer, plan) for peer in "abc"] == [False, True, True]
    roster.heard("a", make_heartbeat("a", stage=0, synced=True, plan_sequence=since + 1), 1.0)
    assert roster.has_state("a", plan)
    for says in ({"synced": False}, {"stage": 1}, {"era": plan.era + 1}):
        said = {"stage": 0, "synced": True, "plan_sequence": since + 1, **says}
        roster.heard("a", make_heartbeat("a", **said), 2.0)
        assert not roster.has_state("a", plan), says
    assert not roster.has_state("nobody", plan)


def test_who_trains_with_weights_alone_is_told_of_within_what_its_stage_has(roster, make_heartbeat, make_plan):
    plan = make_plan([["a"], ["b"]], coordinator="a").plan
    first, last = plan.stages[1].layers
    place = {"stage": 1, "synced": False, "plan_sequence": plan.sequence, "era": plan.era}

    def told(**says):
        roster.heard("b", make_heartbeat("b", **{**place, "light": (1, 3), **says}), 0.0)
        return roster.status("b", plan, 0.0).light

    most = last - first + 2
    assert told(light=(1, 2)) == (1, 2)
    assert told(light=(2**60, 2**60)) == (most, most)
    assert told(light=(-4, 2)) == (0, 2)
    assert told(light=(1, -2)) == (0, 0)
    for not_there in ({"light": None}, {"synced": True}, {"stage": 0}, {"era": plan.era + 1}, {"plan_sequence": -1}):
        assert told(**not_there) is None, not_there
    assert not roster.has_state("b", plan)


def test_a_fetch_is_told_until_it_ends(roster, make_heartbeat, make_plan):
    plan = make_plan([["a"], ["b"]], coordinator="a").plan
    fetch = FetchStatus(what="state", total_bytes=9, left_bytes=3, left_s=2, sources=("a",))
    for told in (fetch, None):
        roster.heard("b", make_heartbeat("b", fetch=told), 0.0)
        assert roster.status("b", plan, 0.0).fetch == told


def test_who_may_coordinate(roster, make_heartbeat, make_advert):
    roster.heard("a", make_heartbeat("a"), 0.0)
    roster.heard("b", make_heartbeat("b", draining=True), 0.0)
    roster.heard("c", make_heartbeat("c", advert=make_advert("c", willing_to_coordinate=False)), 0.0)
    roster.expect("d", make_advert("d"), 0.0)
    assert [peer for peer in "abcde" if roster.may_coordinate(peer, 1.0)] == ["a"]


def test_the_forgotten_are_those_long_gone(roster, make_heartbeat):
    for peer in "abc":
        roster.heard(peer, make_heartbeat(peer), 0.0)
    roster.leave("c")
    roster.forget_silent(10.0, keep=frozenset())
    assert sorted(roster.presences) == ["a", "b"]
    roster.forget_silent(1000.0, keep=frozenset("a"))
    assert sorted(roster.presences) == ["a"]


def test_a_pause_of_ours_is_nobodys_silence(roster, make_heartbeat):
    beat(roster, make_heartbeat("a"), times=5)
    roster.excuse_all(100.0)
    assert roster.alive(100.0 + FLOOR_HEARTBEATS / 2) == ("a",)


def test_who_answers_a_ping_is_alive_however_late_its_heartbeats_are(roster, make_heartbeat):
    last_s = beat(roster, make_heartbeat("a"), times=20)
    assert roster.overdue_at_s("a") == pytest.approx(last_s + 1.1)
    for count in range(20):
        roster.signed("a", last_s + count)
    assert roster.alive(last_s + 19 + FLOOR_HEARTBEATS - 0.1) == ("a",)
    assert roster.alive(last_s + 19 + FLOOR_HEARTBEATS) == ()


def test_a_peer_that_only_answers_pings_may_follow_another_coordinator(roster, make_heartbeat):
    last_s = beat(roster, make_heartbeat("a"), times=20)
    late_s = last_s + FLOOR_HEARTBEATS
    roster.signed("a", late_s)
    assert roster.followers(late_s - 0.1) == ["a"]
    assert (roster.alive(late_s), roster.followers(late_s)) == (("a",), [])


def test_how_irregular_a_peer_is_the_next_coordinator_knows(roster, make_heartbeat):
    now_s = 0.0
    for number in range(40):
        now_s += 0.5 if number % 2 else 3.5
        roster.heard("a", make_heartbeat("a"), now_s)
        roster.heard("b", make_heartbeat("b"), 2.0 * number)
    patience_s = roster.arrivals("a").patience_s
    told = roster.irregular()
    assert [each.peer for each in told] == ["a"]

    heir = Roster(1.0)
    heir.take_over(told)
    heir.expect("a", None, 100.0)
    heir.heard("c", make_heartbeat("c"), 100.0)
    assert heir.arrivals("a").patience_s == pytest.approx(patience_s)
    assert heir.alive(100.0 + FLOOR_HEARTBEATS) == ("a",)
    assert heir.alive(100.0 + patience_s) == ()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_absurd_statistics_are_not_taken_over(roster, seconds):
    roster.take_over(
        [
            ArrivalStatistics("a", 1.0, 0.0, seconds),
            ArrivalStatistics("b", seconds, 0.0, 0.0),
            ArrivalStatistics("c", 1.0, seconds, 0.0),
        ]
    )
    for peer in "abc":
        roster.expect(peer, None, 0.0)
        assert roster.arrivals(peer).patience_s == FLOOR_HEARTBEATS
