import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.deploy.manners.limits import Limits, is_within, next_begin, parse_hours, with_overrides
from shoal.protocol.errors import LocalError


def test_without_limits_everything_is_given():
    limits = Limits()
    assert limits.in_words == ()
    assert (limits.rates.upload_bytes_per_s, limits.memory_bytes) == (math.inf, math.inf)


def test_what_is_typed_stands_above_what_is_set():
    limits = with_overrides(
        Limits(upload_mbit_s=1.0, nice=3), ["upload_mbit_s=5", "only_when_idle=true", "hours = 22:00-7"]
    )
    assert limits == Limits(upload_mbit_s=5.0, nice=3, only_when_idle=True, hours="22:00-7")
    assert limits.rates.upload_bytes_per_s == 625_000.0
    assert limits.in_words == ("upload at most 5 Mbit/s", "only 22:00-7", "only when unused for 5 minutes")


def test_who_joins_stands_back_unless_its_owner_says_how_far():
    assert Limits().of_a_volunteer == Limits(nice=19)
    assert Limits(nice=0).of_a_volunteer == Limits(nice=0)
    assert with_overrides(Limits(), ["nice=4"]).of_a_volunteer.nice == 4


def test_a_part_of_the_upload_is_lent_unless_its_owner_says_nothing_is():
    assert Limits().rates.relay_bytes_per_s == 20e6 / 8
    assert with_overrides(Limits(), ["relay_mbit_s=5"]).rates.relay_bytes_per_s == 5e6 / 8
    assert with_overrides(Limits(), ["relay_mbit_s=0"]).rates.relay_bytes_per_s == 0.0


@pytest.mark.parametrize(
    ("typed", "limits"),
    [
        ("compute_share=50%", Limits(compute_share=0.5)),
        ("compute_share=50", Limits(compute_share=0.5)),
        ("compute_share=1%", Limits(compute_share=0.01)),
        ("memory_gb=2 GB", Limits(memory_gb=2.0)),
        ("upload_mbit_s=5Mbit/s", Limits(upload_mbit_s=5.0)),
        ("only_when_idle=Yes", Limits(only_when_idle=True)),
        ("hours=always", Limits()),
    ],
)
def test_a_limit_is_written_as_a_person_says_it(typed, limits):
    assert with_overrides(Limits(hours="22:00-23:00" if "hours" in typed else ""), [typed]) == limits


def test_when_the_hours_begin_again():
    assert [next_begin(parse_hours("9-12, 13:00-17:30"), hour * 60) // 60 for hour in (8, 12, 18, 23)] == [9, 13, 9, 9]
    assert next_begin(parse_hours("24:00-07:00"), 60 * 8) == 0


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("upload", "NAME=VALUE"),
        ("uplod_mbit_s=5", "NAME is one of compute_share"),
        ("upload_mbit_s=fast", "upload_mbit_s is a number, not 'fast'"),
        ("upload_mbit_s=0.001", "at least 0.1"),
        ("upload_mbit_s=inf", "must be a number"),
        ("relay_mbit_s=0.01", "at least 0.1"),
        ("compute_share=0", "more than 0"),
        ("compute_share=1.5", "at most 1"),
        ("only_when_idle=perhaps", "true or false"),
        ("nice=20", "at most 19"),
        ("hours=at night", "22:00-07:00"),
        ("hours=25:00-26:00", "22:00-07:00"),
        ("hours=22:00-07:60", "22:00-07:00"),
    ],
)
def test_a_limit_that_cannot_be_is_said_in_a_sentence(override, complaint):
    with pytest.raises(LocalError) as found:
        with_overrides(Limits(), [override])
    assert complaint in str(found.value)


def test_hours_over_midnight_and_several():
    night, day = parse_hours("22:00-07:00"), parse_hours("9-12, 13:00-17:30")
    assert [is_within(night, 60 * hour) for hour in (21, 22, 0, 6, 7)] == [False, True, True, True, False]
    assert [is_within(day, minute) for minute in (540, 719, 720, 780, 1049, 1050)] == [True, True, False] * 1 + [
        True,
        True,
        False,
    ]
    assert is_within(parse_hours(""), 0)
    assert all(is_within(parse_hours("00:00-24:00"), minute) for minute in range(1440))


@given(begin=st.integers(0, 1439), end=st.integers(0, 1439))
def test_a_span_and_its_opposite_make_a_day(begin, end):
    there, back = (parse_hours(f"{a // 60}:{a % 60:02}-{b // 60}:{b % 60:02}") for a, b in ((begin, end), (end, begin)))
    for minute in (0, begin, end, (begin + end) // 2, 1439):
        assert is_within(there, minute) + is_within(back, minute) == (2 if begin == end else 1)
