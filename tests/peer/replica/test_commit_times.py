import pytest

from shoal.peer.replica.flow import STEPS, TOLD, CommitTimes


def test_a_commit_lasts_from_the_last_contribution_to_the_version() -> None:
    made = CommitTimes()
    made.stepped(1, now_s=10.0)
    made.contributed(1, now_s=12.0)
    made.contributed(1, now_s=14.0)
    made.contributed(2, now_s=15.0)  # one of the step after it, ahead
    assert made.longest_s == 0.0
    made.stepped(2, now_s=17.0)
    assert made.longest_s == 3.0


def test_a_step_that_is_done_before_its_version_is_there_waits_for_the_round_before_it() -> None:
    made = CommitTimes()
    made.stepped(1, now_s=10.0)
    made.contributed(1, now_s=11.0)
    made.contributed(2, now_s=12.0)
    made.stepped(2, now_s=20.0)
    made.stepped(3, now_s=28.0)
    assert made.longest_s == pytest.approx((9.0 + 8.0) / 2)


def test_one_commit_that_takes_forever_does_not_count_for_all() -> None:
    made = CommitTimes()
    now_s = 0.0
    for version in range(1, STEPS + 2):
        made.contributed(version - 1, now_s=now_s)
        now_s += 500.0 if version == 3 else 2.0
        made.stepped(version, now_s=now_s)
    assert made.longest_s == 2.0


def test_a_state_from_elsewhere_begins_a_new_count() -> None:
    made = CommitTimes()
    made.stepped(1, now_s=10.0)
    made.contributed(1, now_s=11.0)
    made.loaded(7)
    made.contributed(7, now_s=90.0)
    made.stepped(8, now_s=95.0)
    assert made.longest_s == 0.0, "when version 7 came about nobody here has seen"
    made.contributed(8, now_s=96.0)
    made.stepped(9, now_s=97.0)
    assert made.longest_s == 1.0


def test_the_longest_of_all_later_stages_counts_and_who_is_silent_is_forgotten() -> None:
    made = CommitTimes()
    made.told(4.0)
    made.told(1.0)
    assert made.longest_s == 4.0
    for _ in range(TOLD - 1):
        made.told(1.0)
    assert made.longest_s == 1.0
