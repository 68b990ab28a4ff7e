import random

import pytest

from shoal.protocol.identity import PeerID
from shoal.protocol.reconnection import (
    AFTER_A_MOVE_S,
    DEAD_S,
    DIALS_MAX,
    EVERY_S,
    EVERY_S_MAX,
    FRESH_S,
    LINGER_S,
    PATIENCES_S,
    SECOND_AFTER_S,
    SECOND_PATIENCE_S,
    STOOD_STILL_S,
    UNANSWERED_MAX,
    DialOutcome,
    Reconnection,
    Way,
    goes_first,
)

ME, A, B = PeerID("m"), PeerID("a"), PeerID("z")
HERE, THERE = "192.0.2.1", "198.51.100.7"


def way(*, is_owed=False, silent_s=0.0, local=HERE):
    return Way(is_owed=is_owed, silent_s=silent_s, local=local)


def at_one(peer, **what):
    return {peer: {f"where {peer} is": way(**what)}}


@pytest.fixture
def core():
    core = Reconnection(lambda peer: peer > ME, random.Random(0))
    core.want([A, B], now_s=0.0)
    return core


def look(core, connections, now_s, **what):
    return core.look(connections, {A, B}, now_s, gone={THERE}, **what)


def lose(core, peer, now_s):
    """It is wanted, was connected and is no more."""
    look(core, {A: {"x": way()}, B: {"y": way()}}, now_s)
    rest = {A: {"x": way()}, B: {"y": way()}}
    del rest[peer]
    return look(core, rest, now_s)


def test_a_connection_that_acknowledges_nothing_is_dropped_after_three_seconds(core):
    for tick in range(6):
        assert look(core, at_one(A, is_owed=True, silent_s=tick * 0.5), tick * 0.5).drop == ()
    assert look(core, at_one(A, is_owed=True, silent_s=DEAD_S), DEAD_S).drop == (A,)


def test_a_connection_on_which_something_comes_back_lives_however_much_it_owes(core):
    for tick in range(100):
        assert look(core, at_one(A, is_owed=True, silent_s=0.4), tick * 0.5).drop == ()


def test_an_idle_connection_lives_however_silent_it_is(core):
    for tick in range(100):
        assert look(core, at_one(A, silent_s=tick * 0.5), tick * 0.5).drop == ()


def test_what_was_silent_before_it_was_sent_something_has_its_time_to_answer(core):
    look(core, at_one(A, silent_s=600.0), 600.0)
    assert look(core, at_one(A, is_owed=True, silent_s=600.5), 600.5).drop == ()
    assert look(core, at_one(A, is_owed=True, silent_s=0.1), 601.0).drop == ()


def test_a_connection_from_an_address_that_this_machine_has_no_more_is_dropped_at_once(core):
    assert look(core, at_one(A, local=THERE), 0.0).drop == (A,)


def test_one_dead_connection_condemns_the_others_of_its_peer(core):
    ways = {A: {"old": way(local=THERE), "new": way()}, B: {"y": way()}}
    assert look(core, ways, 0.0).drop == (A,)


def test_a_process_that_stood_still_drops_what_was_silent_meanwhile_and_nothing_else(core):
    ways = {A: {"x": way(silent_s=60.0)}, B: {"y": way(silent_s=0.2)}}
    assert look(core, ways, 60.0, stood_still_s=60.0).drop == (A,)
    assert look(core, ways, 61.0, stood_still_s=STOOD_STILL_S - 1.0).drop == ()


def test_after_a_suspension_of_the_machine_nothing_is_believed(core):
    assert look(core, {A: {"x": way()}, B: {"y": None}}, 0.0, was_suspended=True).drop == (A, B)


def test_unanswered_calls_condemn_only_a_peer_of_which_the_kernel_says_nothing(core):
    for _ in range(UNANSWERED_MAX):
        core.unanswered(A)
        core.unanswered(B)
    assert look(core, {A: {"over a relay": None}, B: {"y": way()}}, 0.0).drop == (A,)


def test_whoever_is_heard_has_answered(core):
    core.unanswered(A)
    core.heard(A)
    core.unanswered(A)
    assert look(core, {A: {"over a relay": None}}, 0.0).drop == ()


def test_whoever_is_lost_is_dialled_at_once_and_every_second_until_it_answers(core):
    assert lose(core, A, 0.0).dial == (A,)
    now_s, tried = 0.0, []
    while now_s < 20.0:
        if A in look(core, {B: {"y": way()}}, now_s).dial:
            tried.append(now_s)
            core.dials(A)
            core.dialled(A, DialOutcome.REFUSED, began_s=now_s, now_s=now_s)
        now_s += 0.1
    assert 16 <= len(tried) <= 26
    core.dials(A)
    assert core.dialled(A, DialOutcome.REACHED, began_s=now_s, now_s=now_s) is DialOutcome.REACHED
    assert not core.is_absent(A)


def test_a_dial_ends_before_libp2p_would_count_it_as_a_failure(core):
    assert max(PATIENCES_S) < 5
    lose(core, A, 0.0)
    given_s = []
    for turn in range(6):
        given_s.append(core.dials(A))
        core.dialled(A, DialOutcome.NO_ANSWER, began_s=turn, now_s=turn)
    assert tuple(given_s) == PATIENCES_S * 2


def test_of_two_that_find_out_by_silence_one_waits_for_the_other(core):
    owed = {A: {"x": way(is_owed=True)}, B: {"y": way(is_owed=True)}}
    look(core, owed, 0.0)
    silent = {peer: {name: way(is_owed=True, silent_s=DEAD_S) for name in ways} for peer, ways in owed.items()}
    found = look(core, silent, DEAD_S)
    assert found.drop == (A, B)
    assert found.dial == (B,)  # our name comes before this one's
    core.dials(B)
    assert look(core, {}, DEAD_S + SECOND_AFTER_S - 0.1).dial == ()
    assert look(core, {}, DEAD_S + SECOND_AFTER_S).dial == (A,)
    assert core.dials(A) == SECOND_PATIENCE_S


@pytest.mark.parametrize(("ours", "theirs", "first"), [(True, False, False), (False, True, True)])
def test_whoever_cannot_be_dialled_goes_first(ours, theirs, first):
    assert goes_first(A, B, ours=ours, theirs=theirs) is first
    assert goes_first(B, A, ours=ours, theirs=theirs) is first


@pytest.mark.parametrize("can", [True, False])
def test_of_two_that_are_alike_exactly_one_goes_first(can):
    assert goes_first(A, B, ours=can, theirs=can)
    assert not goes_first(B, A, ours=can, theirs=can)


def test_a_peer_that_moved_or_slept_itself_dials_everybody_at_once(core):
    gone = {A: {"x": way(local=THERE)}, B: {"y": way(local=THERE)}}
    assert set(look(core, gone, 0.0).dial) == {A, B}


def test_whom_the_daemon_itself_was_refused_is_away_and_known_to_refuse(core):
    core.refused(A, 0.0)
    assert core.is_absent(A)
    assert not core.may_be_there(A)
    core.dials(B)
    assert core.dialled(B, DialOutcome.REFUSED, began_s=0.0, now_s=0.1) is DialOutcome.REFUSED
    assert not core.may_be_there(B)


def test_what_was_opened_after_a_loss_is_not_from_before_it(core):
    both = {A: {"z": way()}, B: {"y": way()}}
    look(core, both, 0.0)
    assert not core.is_fresh(A, 0.0)
    lose(core, A, 0.0)
    assert core.is_fresh(A, 60.0)
    look(core, both, 60.0)
    assert core.is_fresh(A, 61.0)
    assert not core.is_fresh(A, 60.0 + FRESH_S)
    assert not core.is_fresh(B, 61.0)


def test_whoever_stays_away_is_dialled_more_and_more_rarely(core):
    lose(core, A, 0.0)
    for began_s, least_s, most_s in ((60.0, 2.0, 4.0), (3600.0, EVERY_S_MAX * 0.7, EVERY_S_MAX * 1.3)):
        core.dials(A)
        core.dialled(A, DialOutcome.REFUSED, began_s=began_s, now_s=began_s)
        assert look(core, {}, began_s + least_s).dial in ((), (B,))
        assert A in look(core, {}, began_s + most_s).dial


def test_a_dial_that_did_not_take_place_says_what_the_one_before_said(core):
    lose(core, A, 0.0)
    core.dials(A)
    assert core.dialled(A, None, began_s=0.0, now_s=0.0) is DialOutcome.NO_ANSWER
    assert core.may_be_there(A)
    core.refused(A, 0.5)
    assert core.dialled(A, None, began_s=1.0, now_s=1.0) is DialOutcome.REFUSED
    assert not core.may_be_there(A)


def test_whoever_dials_us_is_there_again(core):
    lose(core, A, 0.0)
    look(core, {A: {"z": way()}, B: {"y": way()}}, 1.0)
    assert not core.is_absent(A)


def test_a_peer_that_comes_by_itself_is_left_alone_for_a_moment(core):
    core.lost(A, 0.0, pause_s=1.0)
    assert A not in look(core, {B: {"y": way()}}, 0.5).dial
    assert not core.is_untried(A)
    assert A in look(core, {B: {"y": way()}}, 1.0).dial


def test_whom_a_plan_leaves_out_is_dialled_for_a_minute_still(core):
    lose(core, A, 0.0)
    core.want([B], now_s=10.0)
    assert A in look(core, {B: {"y": way()}}, 10.0 + LINGER_S - 1.0).dial
    assert look(core, {B: {"y": way()}}, 10.0 + LINGER_S).dial == ()
    assert not core.is_absent(A)


def test_nobody_is_dialled_whose_address_is_unknown_or_who_is_not_wanted(core):
    core.want([A, B], now_s=0.0)
    assert core.look({}, {B}, 0.0).dial == (B,)
    stranger = PeerID("stranger")
    assert core.look({stranger: {"x": way(local=THERE)}}, {stranger}, 0.0, gone={THERE}).drop == (stranger,)
    assert core.look({}, {stranger}, 1.0).dial == ()


def test_only_so_many_are_dialled_at_once():
    core = Reconnection(lambda peer: peer > ME, random.Random(0))
    everybody = [PeerID(f"p{number:02}") for number in range(3 * DIALS_MAX)]
    core.want(everybody, now_s=0.0)
    first = core.look({}, set(everybody), 0.0).dial
    assert len(first) == DIALS_MAX
    for peer in first:
        core.dials(peer)
    assert core.look({}, set(everybody), 0.1).dial == ()


def test_whoever_has_moved_pauses_after_each_dial_without_an_answer_so_that_the_other_end_can_dial(core):
    look(core, at_one(A, local=THERE) | at_one(B), 0.0)
    assert look(core, at_one(B), 0.0).dial == (A,)
    for began_s in (0.0, 4.5, 9.0):
        patience_s = core.dials(A)
        core.dialled(A, DialOutcome.NO_ANSWER, began_s=began_s, now_s=began_s + patience_s)
        ended_s = began_s + patience_s
        assert look(core, at_one(B), ended_s + AFTER_A_MOVE_S - 0.1).dial == ()
        assert look(core, at_one(B), ended_s + AFTER_A_MOVE_S).dial == (A,)


def test_whoever_has_moved_and_has_no_network_yet_does_not_pause(core):
    look(core, at_one(A, local=THERE) | at_one(B), 0.0)
    core.dials(A)
    core.dialled(A, None, began_s=0.0, now_s=0.5)
    assert look(core, at_one(B), 1.2 * EVERY_S).dial == (A,)


def test_a_peer_that_has_lost_us_ends_what_we_have_of_it(core):
    for now_s in (0.0, FRESH_S):
        look(core, at_one(A) | at_one(B), now_s)
    assert core.missed_by(A, FRESH_S)
    assert core.is_absent(A)
    assert look(core, at_one(B), FRESH_S).dial == (A,)  # at once, in whatever order the two would dial otherwise


def test_what_is_new_outlives_the_word_of_a_peer_that_has_not_seen_it_yet(core):
    assert not core.missed_by(A, 0.0)  # we have none, as it says
    look(core, at_one(A), 0.0)
    assert not core.missed_by(A, FRESH_S - 0.1)
    look(core, {A: {f"where {A} is": way(), "another": way()}}, FRESH_S)
    assert not core.missed_by(A, FRESH_S)
    lose(core, B, 2 * FRESH_S)
    look(core, at_one(B), 2 * FRESH_S + 1.0)
    assert not core.missed_by(B, 2 * FRESH_S + 1.5)
