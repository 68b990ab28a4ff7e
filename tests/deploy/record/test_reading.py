"""What of a record holds."""

from pathlib import Path

import pytest

from record_lines import plan, step, validation
from shoal.deploy.record.lines import NoteLine, StepLine, decode_line, encode_line
from shoal.deploy.record.reading import read_record, record_of
from shoal.protocol.errors import LocalError


def numbers(lines: list[StepLine]) -> list[tuple[int, int]]:
    return [(line.era, line.step) for line in lines]


def test_every_kind_of_line_comes_back_as_it_went() -> None:
    for line in (step(3), validation(2), plan(0, 0), NoteLine(time=1.5, text='a "word"\n')):
        assert encode_line(line).count(b"\n") == 1
        assert decode_line(encode_line(line)) == line


def test_steps_that_were_done_again_hold_and_the_earlier_ones_do_not() -> None:
    lines = [step(n) for n in range(1, 9)] + [step(n, 1) for n in range(5, 8)]
    record = record_of(map(encode_line, lines))
    assert numbers(record.steps) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (1, 6), (1, 7)]
    assert numbers(record.redone) == [(0, 5), (0, 6), (0, 7), (0, 8)]
    assert record.reached == (1, 7)


def test_a_plan_says_where_an_era_began_if_its_first_step_has_no_line() -> None:
    lines = [*(step(n) for n in range(1, 9)), plan(1, 4), step(7, 1)]
    record = record_of(map(encode_line, lines))
    assert numbers(record.steps) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 7)]


def test_an_era_without_a_step_has_not_undone_anything_yet() -> None:
    record = record_of(map(encode_line, [step(1), step(2), plan(1, 0)]))
    assert numbers(record.steps) == [(0, 1), (0, 2)]


def test_two_steps_back_count_whatever_the_order_of_the_lines() -> None:
    lines = [*(step(n) for n in range(1, 7)), *(step(n, 1) for n in (5, 6, 7)), *(step(n, 2) for n in (3, 4))]
    for shown in (lines, lines[::-1]):
        record = record_of(map(encode_line, shown))
        assert numbers(record.steps) == [(0, 1), (0, 2), (2, 3), (2, 4)]


def test_a_validation_holds_as_long_as_the_step_that_made_its_version() -> None:
    lines = [*(step(n) for n in range(1, 9)), validation(4), validation(8), step(5, 1), validation(5, 1)]
    record = record_of(map(encode_line, lines))
    assert [(line.era, line.step) for line in record.validations] == [(0, 4), (1, 5)]
    assert record.validated == (1, 5)


def test_a_step_that_stands_there_twice_counts_once() -> None:
    record = record_of(map(encode_line, [step(1, loss=3.0), step(2), step(1, loss=4.0)]))
    assert [line.loss for line in record.steps] == [3.0, 1.0]


@pytest.mark.parametrize("torn", [b'{"kind":"step","ti', b"\xff\xfe", b'{"kind":"later-kind","time":1.0}', b"[1]"])
def test_what_a_crash_has_torn_is_passed_over(torn: bytes) -> None:
    record = record_of([encode_line(step(1)), torn + b"\n", encode_line(step(2)), b"\n"])
    assert numbers(record.steps) == [(0, 1), (0, 2)]
    assert record.torn == 1


def test_a_field_that_a_later_version_adds_is_passed_over() -> None:
    later = encode_line(step(1)).replace(b'"step":1', b'"step":1,"later":[1,2]')
    assert numbers(record_of([later]).steps) == [(0, 1)]


def test_a_folder_without_a_record_says_so(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="there is no record"):
        read_record(tmp_path)
