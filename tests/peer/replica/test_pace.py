from shoal.peer.replica.router import LAGS, TRIES_APART, TRIES_APART_S, PeerPace
from shoal.protocol.identity import PeerID

A, B, C = (PeerID(name) for name in "abc")


def pace(**takes_s: float) -> PeerPace:
    made = PeerPace()
    for name, seconds in takes_s.items():
        made.took(PeerID(name), seconds)
    return made


def test_who_keeps_pace_weighs_one_however_much_faster_the_others_are_within_bounds() -> None:
    made = pace(a=1.0, b=LAGS)
    assert [made.weight(peer, (A, B)) for peer in (A, B)] == [1.0, 1.0]


def test_who_does_not_weighs_what_it_does() -> None:
    made = pace(a=1.0, b=10.0)
    assert [made.weight(peer, (A, B)) for peer in (A, B)] == [1.0, 0.1]


def test_only_those_who_are_there_are_compared() -> None:
    made = pace(a=1.0, b=10.0, c=12.0)
    assert made.weight(B, (B, C)) == 1.0


def test_of_whom_nothing_is_known_nothing_is_held_against() -> None:
    made = pace(a=1.0)
    assert made.weight(B, (A, B)) == 1.0
    assert PeerPace().weight(A, (A, B)) == 1.0


def test_one_bad_microbatch_is_not_held_against_a_peer_for_long() -> None:
    made = pace(a=1.0, b=1.0)
    made.took(B, 100.0)
    assert made.weight(B, (A, B)) < 1.0
    for _ in range(12):
        made.took(B, 1.0)
    assert made.weight(B, (A, B)) == 1.0


def test_a_laggard_is_due_after_many_times_what_it_takes() -> None:
    made = pace(a=1.0, b=10.0)
    made.given(B, 100.0)
    assert not made.is_due(B, 100.0 + TRIES_APART * 10.0 - 0.1)
    assert made.is_due(B, 100.0 + TRIES_APART * 10.0)


def test_a_quick_one_that_got_nothing_is_due_after_seconds() -> None:
    made = pace(a=0.001)
    assert not made.is_due(A, 7.0), "its share shows first"
    assert not made.is_due(A, 7.0 + TRIES_APART_S - 0.1)
    assert made.is_due(A, 7.0 + TRIES_APART_S)


def test_one_quick_answer_outweighs_an_old_slow_one() -> None:
    made = pace(a=1.0, b=16.0)
    made.took(B, 1.0)
    assert made.weight(B, (A, B)) < 1.0
    made.took(B, 1.0)
    assert made.weight(B, (A, B)) == 1.0


def test_each_time_it_is_given_up_on_the_next_try_is_further_away() -> None:
    made = pace(a=1.0)
    made.given(B, 0.0)
    made.gave_up(B, 10.0)
    assert made.weight(B, (A, B)) == 0.1
    assert not made.is_due(B, 10.0 * TRIES_APART - 1.0)
    assert made.is_due(B, 10.0 * TRIES_APART)
    made.gave_up(B, 10.0)
    assert not made.is_due(B, 20.0 * TRIES_APART - 1.0)


def test_who_never_answers_still_weighs_something() -> None:
    made = pace(a=1.0)
    for _ in range(5000):
        made.gave_up(B, 3.0)
    assert made.weight(B, (A, B)) > 0.0
