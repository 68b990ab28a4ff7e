import pytest

from shoal.coordinator.adaptive_timeout import Arrivals, RoundTrip


@pytest.fixture
def arrivals():
    """Of something that comes every second."""
    return Arrivals(interval_s=1.0, last_s=0.0, floor_s=1.2, memory_s=60.0)


def come(arrivals, gaps_s):
    now_s = arrivals.last_s
    for gap_s in gaps_s:
        now_s += gap_s
        arrivals.arrived(now_s)
    return now_s


def test_mean_and_deviation_are_measured(arrivals):
    come(arrivals, [2.0] * 200)
    assert arrivals.mean_s == pytest.approx(2.0)
    assert arrivals.deviation_s == pytest.approx(0.0, abs=1e-6)


def test_regular_arrivals_are_missed_soon_after_the_floor(arrivals):
    come(arrivals, [0.25] * 100)
    assert arrivals.patience_s == 1.2


def test_jitter_makes_patient(arrivals):
    come(arrivals, [0.5, 1.5] * 50)
    assert arrivals.patience_s > 2.5


def test_a_rare_stall_is_remembered_longer_than_the_deviations_do(arrivals):
    come(arrivals, [0.25] * 40)
    stalled_s = arrivals.patience_s
    come(arrivals, [stalled_s])
    come(arrivals, [0.25] * 20)
    assert arrivals.usual_s < 0.5, "else this tests nothing"
    assert arrivals.patience_s > 1.3 * stalled_s
    come(arrivals, [0.25] * 400)
    assert arrivals.patience_s == 1.2


def test_stalls_that_come_back_are_borne(arrivals):
    """A machine that stands still for three heartbeats, twice a minute: suspected at first, then no more."""
    suspicions = []
    for _ in range(20):
        now_s = come(arrivals, [0.25] * 120)
        suspicions.append(now_s + 3.0 >= arrivals.suspect_at_s)
        come(arrivals, [3.0])
    assert suspicions[0]
    assert not any(suspicions[5:])


def test_one_endless_silence_does_not_make_patient_without_end(arrivals):
    come(arrivals, [1.0] * 20)
    before_s = arrivals.patience_s
    come(arrivals, [1000.0])
    assert arrivals.patience_s <= 3 * before_s


def test_an_excuse_is_not_learned_from(arrivals):
    come(arrivals, [1.0] * 20)
    before_s = arrivals.patience_s
    arrivals.excuse(500.0)
    assert arrivals.suspect_at_s == 500.0 + before_s


def test_a_sign_of_life_counts_and_is_no_part_of_the_rhythm(arrivals):
    come(arrivals, [1.0] * 20)
    mean_s = arrivals.mean_s
    arrivals.signed(20.9)
    assert arrivals.suspect_at_s == pytest.approx(20.9 + arrivals.patience_s)
    come(arrivals, [1.0])
    assert arrivals.mean_s == pytest.approx(mean_s)


def test_a_silence_can_be_counted_as_longer(arrivals):
    arrivals.age(1.0, 100.0)
    assert arrivals.suspect_at_s == pytest.approx(99.0 + arrivals.patience_s)


def test_a_round_trip_is_unknown_before_it_is_measured():
    round_trip = RoundTrip(1.0)
    assert round_trip.patience_s == 1.0
    for _ in range(100):
        round_trip.took(0.04)
    assert round_trip.patience_s == pytest.approx(0.04, abs=1e-3)
    for took_s in (0.04, 0.2) * 50:
        round_trip.took(took_s)
    assert 0.2 < round_trip.patience_s < 1.0
