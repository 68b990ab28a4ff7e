"""A device works its share of the time, and what it was idle for counts as rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.duty import BESIDE_MAX_S, BURST_S, Duty


def worked(duty: Duty, jobs: list[tuple[float, float]], now_s: float = 0.0) -> tuple[float, float]:
    """Args: jobs: (idle before it, seconds it takes). Returns: (seconds worked, when the next may begin)."""
    total_s = 0.0
    for idle_s, job_s in jobs:
        now_s += idle_s
        now_s += duty.rest_s(now_s)
        now_s += job_s
        duty.spend(job_s)
        total_s += job_s
    return total_s, now_s + duty.rest_s(now_s)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 1.0])
def test_with_work_all_the_time_it_works_its_share(share):
    total_s, now_s = worked(Duty(share), [(0.0, 0.05)] * 1000)
    assert total_s / now_s == pytest.approx(share, rel=1e-6)


def test_a_device_that_waits_for_others_half_of_the_time_does_not_rest_as_well():
    total_s, now_s = worked(Duty(0.5), [(0.05, 0.05)] * 1000)
    assert total_s / now_s == pytest.approx(0.5, rel=1e-3)


@given(share=st.floats(0.05, 1.0), jobs=st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 5.0)), max_size=50))
def test_it_never_works_more_than_its_share_and_what_it_may_make_up_for(share, jobs):
    total_s, now_s = worked(Duty(share), jobs)
    assert total_s <= share * (now_s + BURST_S) + 1e-6


def test_work_beside_its_jobs_makes_a_device_slower_and_never_makes_it_stand_still():
    duty = Duty(0.25)
    duty.spend_beside(18.0)
    assert duty.rest_s(0.0) == 0.0
    total_s, now_s = worked(duty, [(0.0, 0.5)] * 18)
    assert total_s / now_s == pytest.approx(0.125, rel=1e-6), "half of what comes in"
    total_s, now_s = worked(duty, [(0.0, 0.5)] * 18, now_s)
    assert (total_s + 9.0) / now_s < 0.25
    after_s, then_s = worked(duty, [(0.0, 0.5)] * 1000, now_s + 8.0)
    assert after_s / (then_s - now_s) == pytest.approx(0.25, rel=0.02), "all of it is repaid"


@given(share=st.floats(0.05, 1.0), every=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.05, 5.0)), min_size=1))
def test_with_all_its_work_a_program_never_has_more_than_its_share_and_what_is_yet_to_be_repaid(share, every):
    duty, now_s, total_s, longest_s = Duty(share), 0.0, 0.0, 0.0
    for beside_s, job_s in every * 10:
        duty.spend_beside(beside_s)
        now_s += duty.rest_s(now_s)
        assert duty.rest_s(now_s) == pytest.approx(0.0, abs=1e-6)
        duty.spend(job_s)
        now_s += job_s
        total_s += beside_s + job_s
        longest_s = max(longest_s, beside_s + job_s)
    assert total_s <= share * (now_s + BURST_S) + BESIDE_MAX_S + 2 * longest_s + 1e-6


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1])
def test_a_share_that_cannot_be_is_refused(share):
    with pytest.raises(ValueError, match="must be in"):
        Duty(share)
