"""What people are told of the plans so far, by whoever coordinates."""

import math

import msgspec
import pytest

from shoal.coordinator.voting import NOTES_MAX, REASON_CHARS_MAX, PlanNotes
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PEER_ID_CHARS_MAX
from shoal.protocol.messages import PlanNote


def obeying(make_plan, *sequences: int) -> PlanNotes:
    notes = PlanNotes()
    for sequence in sequences:
        plan = make_plan([["a"], ["b"]], coordinator="a", order=(1, sequence), reason=f"{sequence}").plan
        notes.obey(plan, None, sequence)
    return notes


def test_a_plan_that_moves_nobody_displaces_no_layout(make_plan):
    """A short term certifies, measures shares and hands over: within minutes that is more than a status tells."""
    first = make_plan([["a"], ["b"]], coordinator="a", order=(1, 1), reason="first plan").plan
    notes, before = PlanNotes(), None
    for sequence in range(1, 3 * NOTES_MAX):
        plan = msgspec.structs.replace(first, sequence=sequence, reason=first.reason if before is None else "certified")
        notes.obey(plan, before, sequence)
        before = plan
    notes.judge("100 tokens/s as predicted")
    assert [(note.reason, note.outcome) for note in notes.tell(99.0)] == [("first plan", "100 tokens/s as predicted")]
    joined = msgspec.structs.replace(first, sequence=99, spares=(PeerID("c"),), reason="c joined")
    notes.obey(joined, before, 99.0)
    divided = msgspec.structs.replace(joined, sequence=100, next_layout=joined.stages[:1], reason="1 stage")
    notes.obey(divided, joined, 99.0)
    notes.obey(msgspec.structs.replace(joined, sequence=101, era=1, reason="the run goes back"), joined, 101.0)
    assert [note.reason for note in notes.tell(101.0)] == ["first plan", "c joined", "1 stage", "the run goes back"]


def test_who_came_later_is_told_what_was_before_and_nothing_twice(make_plan):
    notes = obeying(make_plan, 4, 5)
    notes.inherit(obeying(make_plan, 1, 2, 3, 4).tell(7.0), 107.0)
    told = notes.tell(107.0)
    assert [note.reason for note in told] == ["1", "2", "3", "4", "5"]
    assert [note.seconds_ago for note in told][:3] == [6.0, 5.0, 4.0]


def test_what_came_of_a_plan_is_told_on_and_cut(make_plan):
    before, heir = obeying(make_plan, 1, 2), obeying(make_plan, 2, 3)
    before.judge("foreseen 2")
    before.judge("foreseen 2, seen 1")
    heir.judge("x" * 999)
    heir.inherit(before.tell(5.0), 5.0)
    assert [note.outcome for note in heir.tell(5.0)] == ["", "foreseen 2, seen 1", "x" * REASON_CHARS_MAX]
    PlanNotes().judge("nobody has planned yet")


def test_the_newest_are_kept_and_none_is_longer_than_a_line(make_plan):
    notes = obeying(make_plan, 50)
    notes.inherit([PlanNote(1, i, float(50 - i), PeerID("a"), "x" * 999) for i in range(1, 50)], 0.0)
    told = notes.tell(0.0)
    assert [note.sequence for note in told] == list(range(51 - NOTES_MAX, 51))
    assert {len(note.reason) for note in told[:-1]} == {REASON_CHARS_MAX}


def test_nobody_remembers_the_future():
    notes = PlanNotes()
    notes.inherit([PlanNote(1, 1, -5.0, PeerID("a"), "")], 10.0)
    assert notes.tell(10.0)[0].seconds_ago == 0.0


@pytest.mark.parametrize("seconds_ago", [math.inf, math.nan])
def test_what_was_at_no_time_is_not_told_on(seconds_ago):
    notes = PlanNotes()
    notes.inherit([PlanNote(1, 1, seconds_ago, PeerID("a"), "")], 10.0)
    assert notes.tell(10.0) == ()


def test_a_coordinator_that_is_no_name_is_cut():
    notes = PlanNotes()
    notes.inherit([PlanNote(1, 1, 0.0, PeerID("a" * 9999), "")], 10.0)
    assert notes.tell(10.0)[0].coordinator == "a" * PEER_ID_CHARS_MAX


def test_a_plan_is_as_old_as_the_one_says_that_has_known_it_for_longer(make_plan):
    notes = obeying(make_plan, 4)
    notes.inherit([PlanNote(1, 4, 300.0, PeerID("a"), "4")], 9.0)
    assert [note.seconds_ago for note in notes.tell(9.0)] == [300.0]
    notes.inherit([PlanNote(1, 4, 1.0, PeerID("a"), "4")], 9.0)
    assert [note.seconds_ago for note in notes.tell(9.0)] == [300.0]
