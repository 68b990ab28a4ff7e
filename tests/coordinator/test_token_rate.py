import math

import pytest

from shoal.coordinator.token_rate import AGE_S_MAX, LATE_S, MARKS_MAX, WINDOW_S, TokenRate
from shoal.protocol.messages import PaceMark

TOKENS = 1000


def pace_of(times_s, *, era=0, first=0):
    pace = TokenRate(tokens_per_step=TOKENS)
    for step, at_s in enumerate(times_s, first):
        pace.committed(era, step, TOKENS, at_s)
    return pace


def counted(times_s, now_s, length_s=WINDOW_S):
    """Tokens a second of the window that ends at `now_s`, by counting."""
    return TOKENS * sum(now_s - length_s < at_s <= now_s for at_s in times_s) / length_s


def every(step_s, *, until_s, since_s=0.0):
    return [since_s + step_s * n for n in range(int((until_s - since_s) / step_s) + 1)]


@pytest.mark.parametrize("step_s", [0.1, 0.7, 2.0, 4.9, 7.0, 13.0, 45.0, 200.0])
def test_a_steady_run_has_its_rate_at_any_moment(step_s):
    times = every(step_s, until_s=max(300.0, 12 * step_s))
    pace = pace_of(times)
    for share in (0.0, 0.3, 0.99):
        assert pace.tokens_per_s(times[-1] + share * step_s) == pytest.approx(TOKENS / step_s, rel=1e-6)


@pytest.mark.parametrize("step_s", [0.2, 1.0, 2.0, 3.0])
def test_during_and_after_a_standstill_it_is_what_was_committed_in_the_last_minute(step_s):
    before, after = every(step_s, until_s=120.0), every(step_s, since_s=180.0 + step_s, until_s=300.0)
    pace = pace_of(before)
    for now_s in range(121, 181):
        off = pace.tokens_per_s(float(now_s)) - counted(before, now_s)
        assert abs(off) <= 1.01 * TOKENS / WINDOW_S, "at most a step"
    assert pace.tokens_per_s(120.0 + WINDOW_S + step_s) == 0.0
    for step, at_s in enumerate(after, len(before)):
        pace.committed(0, step, TOKENS, at_s)
        assert abs(pace.tokens_per_s(at_s) - counted(before + after, at_s)) <= 1.01 * TOKENS / WINDOW_S


def test_a_slow_run_is_measured_over_some_of_its_steps():
    pace = pace_of(every(100.0, until_s=1000.0))
    assert pace.tokens_per_s(1150.0) == pytest.approx(TOKENS / 100.0 * (400 - 50) / 400)
    assert pace.tokens_per_s(1500.0) == 0.0


def test_nothing_is_known_before_the_second_step():
    assert TokenRate(tokens_per_step=TOKENS).tokens_per_s(5.0) == 0.0
    assert TokenRate(tokens_per_step=TOKENS).stands_s(500.0) == 0.0
    pace = pace_of([1.0])
    assert pace.tokens_per_s(9.0) == 0.0
    assert pace.stands_s(1.0 + LATE_S) == 0.0
    assert pace.stands_s(9.0) == 8.0, "the second step is late, whatever a step takes"


def test_it_stands_once_a_step_takes_three_times_the_usual():
    pace = pace_of(every(4.0, until_s=100.0))
    assert pace.stands_s(111.9) == 0.0
    assert pace.stands_s(112.1) == pytest.approx(12.1)


def test_whoever_takes_over_says_the_same():
    times = [*every(1.3, until_s=90.0), *every(1.3, since_s=120.0, until_s=131.0)]
    one, other = pace_of(times), TokenRate(tokens_per_step=1)
    other.take_over(one.tell(135.0), 5035.0)
    for after_s in (0.0, 3.0, 20.0, 59.0):
        assert other.tokens_per_s(5035.0 + after_s) == pytest.approx(one.tokens_per_s(135.0 + after_s), rel=1e-3)
        assert other.stands_s(5035.0 + after_s) == pytest.approx(one.stands_s(135.0 + after_s), abs=0.01)


def test_it_takes_no_more_room_however_long_the_run():
    assert len(pace_of(every(0.05, until_s=600.0)).tell(600.0)) <= MARKS_MAX


def test_a_step_whose_report_went_to_the_dead_counts_with_the_next_one():
    pace = pace_of(every(2.0, until_s=100.0))
    pace.committed(0, 60, TOKENS, 120.0)  # 51 to 59 are missing
    pace.committed(0, 55, TOKENS, 121.0)
    assert pace.tokens_per_s(120.0) == pytest.approx(TOKENS / 2.0)


def test_what_is_committed_again_in_another_era_is_work_too():
    pace = pace_of(every(2.0, until_s=100.0))
    pace.begin_era(1, 40)
    for step, at_s in enumerate(every(2.0, since_s=102.0, until_s=130.0), 40):
        pace.committed(1, step, TOKENS, at_s)
    assert pace.tokens_per_s(130.0) == pytest.approx(TOKENS / 2.0)


def test_a_coordinator_that_knows_less_takes_nothing_away():
    pace = pace_of(every(2.0, until_s=100.0))
    before = pace.tell(100.0)
    pace.take_over((), 100.0)
    pace.take_over(before[:-1], 100.0)
    assert pace.tell(100.0) == before


@pytest.mark.parametrize(
    "lie",
    [
        {"age_s": math.nan},
        {"age_s": math.inf},
        {"age_s": -1.0},
        {"age_s": 2 * AGE_S_MAX},
        {"tokens": -5},
        {"num_steps": 0},
        {"step": 1},
    ],
)
def test_marks_that_cannot_be_are_not_believed(lie):
    honest = {"era": 0, "step": 900, "age_s": 1.0, "num_steps": 1, "tokens": 5}
    pace = TokenRate(tokens_per_step=TOKENS)
    pace.take_over((PaceMark(**honest | {"step": 899, "age_s": 3.0}), PaceMark(**honest | lie)), 100.0)
    assert pace.tell(100.0) == ()


def test_a_layouts_rate_is_that_of_its_own_steps_without_their_standstills():
    pace = pace_of(every(20.0, until_s=200.0))
    quick = [200.0 + 10.0 * n + (500.0 if n > 5 else 0.0) for n in range(1, 10)]
    for step, at_s in enumerate(quick, 11):
        pace.committed(0, step, TOKENS, at_s)
    assert pace.seen(0, 11) == (TOKENS / 10.0, 5)
    assert pace.seen(0, 17) == (TOKENS / 10.0, 3), "steps 17 to 19 came under it"
    assert pace.seen(0, 18) == (0.0, 0), "two are too few"
    assert pace.seen(1, 0) == (0.0, 0)


def test_a_layout_that_has_become_slow_is_seen_to_be_so_after_three_steps():
    pace = pace_of(every(20.0, until_s=200.0))
    rates = []
    for step, at_s in enumerate((280.0, 360.0, 440.0), 11):
        pace.committed(0, step, TOKENS, at_s)
        rates.append(pace.seen(0, 0)[0])
    assert rates == [TOKENS / 20.0, TOKENS / 20.0, TOKENS / 80.0]


def test_of_short_steps_a_layouts_rate_counts_all():
    rate, num_steps = pace_of(every(0.5, until_s=300.0)).seen(0, 0)
    assert rate == pytest.approx(TOKENS / 0.5)
    assert num_steps > 60


def test_the_newest_step_counts_as_soon_as_it_is_late():
    pace = pace_of(every(10.0, until_s=100.0))
    assert pace.newest(114.0) == pytest.approx(TOKENS / 10.0)
    assert pace.newest(116.0) == pytest.approx(TOKENS / 16.0)
    pace.committed(0, 11, TOKENS, 140.0)
    assert pace.newest(141.0) == pytest.approx(TOKENS / 40.0)
    assert TokenRate(tokens_per_step=TOKENS).newest(9.0) == pace_of([1.0]).newest(9.0) == 0.0


def test_commits_are_expected_as_the_last_steps_came():
    pace = pace_of(every(10.0, until_s=100.0))
    assert pace.commits_within(6.0, 103.0) == (0, pytest.approx(0.9))
    assert pace.commits_within(6.0, 105.0) == (1, pytest.approx(0.1))
    pace.committed(0, 11, TOKENS, 140.0)
    assert pace.commits_within(6.0, 160.0) == (0, pytest.approx(26.0 / 40.0))
    assert pace_of([1.0]).commits_within(6.0, 9.0) is None


def test_a_step_that_is_late_takes_what_is_believed_of_it_or_has_taken_longer():
    pace = pace_of(every(10.0, until_s=100.0))
    assert pace.commits_within(6.0, 130.0, believed_s=40.0) == (0, pytest.approx(36.0 / 40.0))
    assert pace.commits_within(6.0, 130.0, believed_s=20.0) == (1, pytest.approx(6.0 / 30.0))
    assert pace.commits_within(6.0, 103.0, believed_s=40.0) == (0, pytest.approx(0.9)), "it is not late"
    assert pace.commits_within(-6.0, 130.0) == (0, pytest.approx(24.0 / 30.0))
    assert pace.commits_within(-6.0, 103.0) == (0, 0.0)
