"""The comparer of the oracle, and the exit status of the whole."""

import json
from collections.abc import Callable

import oracle
import pytest
from compare import Record, compare, difference

Line = tuple[str, str, list[str]]
LINES: list[Line] = [
    ("planner", "mixture", ["[0, 1]\t", "[2]\t"]),
    ("planner", "home-gpus", ["[3]\t"]),
    ("live", "six-equal, seed 0", ["hash 7"]),
]


def record(*lines: Line, seconds: float = 1.0) -> Record:
    return Record(json.dumps([*line, seconds]) for line in lines)


def test_equal_records_are_equal_whatever_they_took_and_whatever_is_said_for_people() -> None:
    told: list[Line] = [("planner", "mixture", ["[0, 1]\tTold", "[2]\tRenamed"]), *LINES[1:]]
    sections = compare(record(*LINES), record(*told, seconds=2.5))
    assert [section.differing for section in sections] == [(), ()]
    assert [str(section) for section in sections] == [
        "planner       2 equal, in 2 s and 5 s of one core",
        "live          1 equal, in 1 s and 2 s of one core",
    ]


def test_the_first_difference_is_named_with_both_values() -> None:
    changed: list[Line] = [("planner", "mixture", ["[0, 1]\t", "[9]\tStep"]), ("planner", "home-gpus", []), LINES[2]]
    planner, live = compare(record(*LINES), record(*changed))
    assert planner.differing == ("mixture", "home-gpus")
    assert str(planner).splitlines() == [
        "planner       2 of 2 DIFFER, in 2 s and 2 s of one core",
        "  planner/mixture: item 1 differs",
        "    base value: [2]",
        "    tree Step: [9]",
    ]
    assert not live.differing


def test_an_end_that_comes_sooner_is_a_difference() -> None:
    assert "item 1 differs\n    base value: b\n    tree value: nothing more" in difference(["a", "b"], ["a"])
    assert "base value: nothing more" in difference([], ["a"])


def test_of_a_long_item_the_part_that_differs_is_shown() -> None:
    before, after = (f"{'x' * 500}, {number}, {'y' * 500}\tReport" for number in (7, 8))
    base, tree = difference([before], [after]).splitlines()[1:]
    assert base.startswith("    base Report: …xx")
    assert "xx, 7, yy" in base
    assert "xx, 8, yy" in tree
    assert len(base) < 500


@pytest.mark.parametrize("missing", [slice(2, 3), slice(0, 1)], ids=["a section", "a case"])
def test_what_only_one_record_has_is_a_difference(missing: slice) -> None:
    rest = LINES.copy()
    (gone,) = rest[missing]
    del rest[missing]
    for before, after, who in ((LINES, rest, "base"), (rest, LINES, "working tree")):
        found = {section.name: section for section in compare(record(*before), record(*after))}
        assert found[gone[0]].differing == (gone[1],)
        assert found[gone[0]].where == f"only the {who} has it"


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Line]], int]:
    """The whole, but for what is played."""

    def of(lines: list[Line]) -> int:
        monkeypatch.setattr(oracle, "_git", lambda *words: None)
        monkeypatch.setattr(oracle, "_play", lambda base, *arguments: (record(*LINES), record(*lines)))
        monkeypatch.setattr("sys.argv", ["oracle.py"])
        return oracle.main()

    return of


def test_the_exit_status_says_whether_anything_differs(
    status: Callable[[list[Line]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(LINES) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert status([LINES[0], LINES[1], ("live", "six-equal, seed 0", ["hash 8"])]) == 1
    assert "item 0 differs\n    base value: hash 7\n    tree value: hash 8" in capsys.readouterr().out
    assert status(LINES[:2]) == 1
    assert "only the base has it" in capsys.readouterr().out
