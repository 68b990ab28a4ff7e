"""What came of a run, in figures and in words."""

from pathlib import Path

import pytest

from record_lines import plan, step, validation
from shoal.deploy.base.words import amount, span
from shoal.deploy.record.lines import Line, PeerLine, StartLine, encode_line
from shoal.deploy.record.reading import Record, record_of
from shoal.deploy.record.summary import Totals, in_words, what_was_lost
from shoal.protocol.identity import PeerID


def start(**says: object) -> StartLine:
    return StartLine(
        time=1000.0,
        run="0123456789abcdef",
        name="notes",
        peer=PeerID("host"),
        peer_name="host",
        steps=100,
        tokens_per_step=10,
        num_parameters=180_800,
        num_layers=4,
        optimizer="nadam",
        version="0.1.0",
    )


def record(*lines: Line) -> Record:
    return record_of(map(encode_line, lines))


def test_totals_are_of_what_holds() -> None:
    lines = [start(), *(step(n, loss=6.0 - 0.1 * n, tokens_per_s=100.0) for n in range(1, 21)), step(18, 1, loss=4.0)]
    found = Totals(record(*lines, validation(0, loss=6.1), validation(10, loss=4.9), validation(16, loss=5.0)))
    assert (found.step, found.steps, found.recorded, found.redone, found.rollbacks, found.lost) == (
        18,
        100,
        18,
        3,
        1,
        0,
    )
    assert found.tokens == 180
    assert found.loss is not None
    assert found.loss[0] == pytest.approx(5.9)
    assert found.loss[1] == pytest.approx((sum(6.0 - 0.1 * n for n in range(9, 18)) + 4.0) / 10)
    assert found.validation is not None
    assert [line.step for line in found.validation] == [0, 16, 10]
    assert found.elapsed_s == 17.0


def test_what_was_lost_is_said_and_nothing_if_nothing_was() -> None:
    assert what_was_lost(Totals(record(*(step(n) for n in range(1, 9))))) == "nothing"
    lost = what_was_lost(Totals(record(step(1, given_up=2), step(2, duplicates=3), step(9), step(3, 1), step(5, 1))))
    assert "1 step done again, as the run went back once" in lost
    assert "2 microbatches given up" in lost
    assert "3 microbatches computed twice" in lost
    assert "1 step not in the record" in lost


def test_the_summary_says_what_came_and_where_the_record_is() -> None:
    people = [
        PeerLine(time=1.0, peer=PeerID(name), name=name, change="joined", stage=stage)
        for name, stage in (("ana", 0), ("ben", None))
    ]
    text = "\n".join(in_words(record(start(), plan(), *people, step(1, loss=3.0), step(2, loss=2.0)), Path("/r.jsonl")))
    for part in (
        "notes: 2 of 100 steps",
        "20 tokens in 1 s",
        "3.000 at first",
        "ana (20 tokens), ben (stood by)",
        "nothing",
        "/r.jsonl",
    ):
        assert part in text


def test_each_peer_has_the_tokens_of_the_steps_that_it_worked_on() -> None:
    def peer(name: str, at_s: float, change: str, stage: int | None = None) -> PeerLine:
        return PeerLine(time=at_s, peer=PeerID(name), name=name, change=change, stage=stage)

    people = peer("ana", 1000.0, "joined", 0), peer("ben", 1002.5, "joined", 1), peer("cy", 1002.5, "joined")
    gone = peer("ana", 1003.5, "left"), peer("cy", 1004.5, "moved", 0)
    found = Totals(record(*people, *gone, *(step(n) for n in range(1, 7)))).shares
    assert [(one.name, one.tokens, one.work_s) for one in found] == [
        ("ana", 30, 3.5),
        ("ben", 40, 3.5),
        ("cy", 20, 1.5),
    ]


def test_a_record_without_a_step_has_a_summary_too() -> None:
    assert "nothing recorded" in in_words(record(start()), Path("/r"))[0]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (725, "12 min 5 s"), (11_400, "3 h 10 min"), (187_200, "2 d 4 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(812, "812"), (9812, "9,812"), (35_100, "35.1 k"), (3.3e6, "3.3 M")])
def test_counts(number: float, text: str) -> None:
    assert amount(number) == text


def test_another_division_into_stages_is_no_way_back() -> None:
    found = Totals(record(step(1), step(2), step(3, 1), step(4, 1), step(4, 2), step(5, 3)))
    assert (found.rollbacks, found.redone) == (1, 1)
