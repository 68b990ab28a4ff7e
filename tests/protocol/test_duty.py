"""A device works its share of the time, and what it was idle for counts as rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.duty import BURST_S, Duty


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


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1])
def test_a_share_that_cannot_be_is_refused(share):
    with pytest.raises(ValueError, match="cannot be"):
        Duty(share)
